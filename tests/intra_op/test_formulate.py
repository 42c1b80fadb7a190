"""Problems of models with repeated layers: each kind of layer is built once."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.models.decoders import Llama
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.intra_op.formulate import Builder, Builders, CollectiveWeights
from alpa_lite.intra_op.problem import evaluate
from alpa_lite.intra_op.solve import solve_stage
from alpa_lite.intra_op.stage import Placed, PlacedBodies, StageSolution, StageView
from alpa_lite.intra_op.strategies import BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers
from cost_models.composed import ComposedCostModel

TINY = Llama(vocab_size=64, num_heads=4, num_kv_heads=2, hidden=16, inner=32, seq_len=8)


def built(num_layers: int) -> Builder:
    model = replace(TINY, num_layers=num_layers)
    optimizer = make_optimizer(max_grad_norm=1.0)
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    tokens = jax.ShapeDtypeStruct((8, model.seq_len), jnp.int32)
    traced = al.parallelize(make_train_step(model.loss_fn, optimizer)).trace(
        state, {"tokens": tokens, "targets": tokens}
    )
    step = traced.step().step
    return built_view(StageView(step=step, layers=make_layers(step, 1), first=0, last=0))


def built_view(view: StageView) -> Builder:
    pricer = Pricer(
        cost_model=ComposedCostModel(al.cluster("p3.16xlarge")),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
        mesh=LogicalMesh(axis_names=("x", "y"), shape=(2, 4)),
    )
    return Builder(view, Catalogue(pricer, Restriction(optimizer=BatchSplit.MAY, parameters=BatchSplit.MAY)))


@pytest.fixture(scope="module")
def builders() -> tuple[Builder, Builder]:
    return built(3), built(6)


def test_more_layers_make_more_nodes_and_edges_but_no_other_ones(builders: tuple[Builder, Builder]) -> None:
    few, many = builders
    assert len(many.edges) > 1.7 * len(few.edges)
    assert len({id(costs) for costs in many.edges.values()}) == len({id(costs) for costs in few.edges.values()})
    # The node of what has no choice adds up over all layers.
    assert len({id(costs) for costs in many.costs}) == len({id(costs) for costs in few.costs})


def test_equal_arrays_are_one_array(builders: tuple[Builder, Builder]) -> None:
    _, many = builders
    matrices = {id(costs): costs for costs in many.edges.values()}.values()
    assert len({(m.shape, m.tobytes()) for m in matrices}) >= 0.9 * len(matrices)


class AsOnSeveral(Catalogue):
    """Has it that there are choices on one device too."""

    is_one_device = False


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_one_device_has_nothing_to_choose(num_microbatches: int) -> None:
    """What the shorter way says of a stage is what the search for choices says."""
    optimizer = make_optimizer(max_grad_norm=1.0)
    state = jax.eval_shape(lambda: init_state(TINY.init(jax.random.key(0)), optimizer))
    tokens = jax.ShapeDtypeStruct((8, TINY.seq_len), jnp.int32)
    traced = al.parallelize(make_train_step(TINY.loss_fn, optimizer)).trace(
        state, {"tokens": tokens, "targets": tokens}
    )
    step = traced.step(num_microbatches).step
    view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
    pricer = Pricer(
        cost_model=ComposedCostModel(al.cluster("p3.16xlarge")),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=1),
        mesh=LogicalMesh(axis_names=("x",), shape=(1,)),
    )
    short, long = (
        solve_stage(Builder(view, kind(pricer, Restriction())), limit_bytes=None) for kind in (Catalogue, AsOnSeveral)
    )
    assert Catalogue(pricer, Restriction()).is_one_device
    for field in fields(StageSolution):
        one, other = getattr(short, field.name), getattr(long, field.name)
        assert one == (pytest.approx(other, rel=1e-12) if isinstance(other, float) else other), field.name


def test_a_stage_is_laid_out_once_for_all_limits(builders: tuple[Builder, Builder]) -> None:
    few, _ = builders
    on_mesh = Builders(few.catalogue)
    one = on_mesh.of(few.view)
    assert on_mesh.of(few.view) is one
    problems = [one.problem(limit_bytes=limit, in_flight=n) for limit, n in [(1e9, 1), (1e9, 2), (None, 1), (1e9, 1)]]
    anew = Builder(few.view, few.catalogue).problem(limit_bytes=1e9, in_flight=1)
    assert [p.limit_bytes for p in problems] == [1e9, 1e9, None, 1e9]
    for name in ("node_costs", "edge_costs", "usage_bytes"):
        np.testing.assert_array_equal(getattr(problems[-1], name).values, getattr(anew, name).values)
    assert problems[1].usage_bytes.values.sum() > problems[0].usage_bytes.values.sum()


def test_activations_decide_for_the_contractions_of_their_own_stage() -> None:
    def step(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)
        return h @ u + h @ v

    sizes = [(16, 8), (8, 32), (32, 8), (32, 8)]
    args = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    traced = al.parallelize(step, batch_argnums=(0,)).trace(*args).step(1).step
    layers = Layers(num_layers=2, of_op=(0, 0, 1, 1, 1), of_input=(0, 0, 1, 1))

    def leads(last: int) -> bool:
        placed = built_view(StageView(step=traced, layers=layers, first=0, last=last)).placed
        first, second = placed[(0, 0)], placed[(0, 1)]
        assert isinstance(first, Placed) and isinstance(second, Placed)
        return first.node != second.node

    assert leads(1)
    assert not leads(0)


def test_weights_count_what_is_gathered_of_state_apart_from_what_ops_exchange() -> None:
    """One product whose weight is split over all devices, or whole on each of them."""
    step = al.parallelize(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    traced = step.trace(*[jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2)
    cut = traced.step(2).step
    builder = built_view(StageView(step=cut, layers=make_layers(cut, 1), first=0, last=0))
    (weight, _), sizes = cut.graph.inputs, [len(costs) for costs in builder.costs]
    offer = builder.offers[(0, weight)]
    rng = np.random.default_rng(0)

    def cost(choices: list[int], values: float, state: float) -> float:
        weights = CollectiveWeights(values=values, state=state)
        return evaluate(builder.problem(limit_bytes=None, in_flight=1, weights=weights), choices).cost

    finite = 0
    for _ in range(200):
        choices = [int(rng.integers(size)) for size in sizes]
        # Another place of the weight changes what is gathered of it, and nothing that ops exchange.
        other = [*choices]
        other[offer.node] = (choices[offer.node] + 1) % len(offer.specs)
        whole, moved = cost(choices, 1.0, 1.0), cost(other, 1.0, 1.0)
        if np.isfinite(whole) and np.isfinite(moved):
            finite += 1
            values, state = cost(choices, 2.0, 1.0) - whole, cost(choices, 1.0, 2.0) - whole
            assert whole == evaluate(builder.problem(limit_bytes=None, in_flight=1), choices).cost
            assert cost(choices, 0.6, 0.3) == pytest.approx(whole - 0.4 * values - 0.7 * state)
            assert cost(other, 2.0, 1.0) - moved == pytest.approx(values, abs=1e-12)
    assert finite > 20


def scanned(layers: int) -> Builder:
    """A perceptron in a loop over layers, whose weights are updated."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, 64, 64), (4096, 64))]
    traced = al.parallelize(lambda w, x: w - 0.1 * jax.grad(loss)(w, x)).trace(*shapes)
    step = traced.step(1).step
    return built_view(StageView(step=step, layers=make_layers(step, 1), first=0, last=0))


def test_loops_that_stack_no_partial_sums_reduce_them_in_each_trip() -> None:
    builder = scanned(4)
    graph = builder.view.graph
    for stacks in (True, False):
        solution = solve_stage(builder, limit_bytes=None, weights=CollectiveWeights(stacks=stacks))
        assert solution.choice is not None
        loops = [op for op in builder.view.ops if graph.ops[op].primitive == "scan"]
        partial = [spec for op in loops for spec in solution.choice.ops[op].results if spec.partial]
        sums = [use for use in solution.collectives if use.kind.value in ("all_reduce", "reduce_scatter")]
        # The samples are split, so that each device has a part of each gradient.
        assert bool(partial) is stacks
        assert any(use.count == 4 for use in sums) is not stacks


def test_sums_are_weighed_where_they_are_made_and_not_where_the_update_reads_them() -> None:
    builder = scanned(4)
    graph, ((crossing, (node, _)),) = builder.view.graph, builder.crossings.items()
    # The gradient of the weights leaves a loop as the body made it.
    loop = graph.ops[graph.producer[crossing] or 0]
    placed = builder.placed[(0, loop.id)]
    assert isinstance(placed, PlacedBodies)
    made = placed.results[loop.results.index(crossing)].node
    into_sum = builder.edges[(made, node)]
    sizes, rng = [len(costs) for costs in builder.costs], np.random.default_rng(0)

    def cost(choices: list[int], at_once: float) -> float:
        weights = CollectiveWeights(at_once=at_once)
        return evaluate(builder.problem(limit_bytes=None, in_flight=1, weights=weights), choices).cost

    added = list[float]()
    for _ in range(400):
        choices = [int(rng.integers(size)) for size in sizes]
        if np.isfinite(whole := cost(choices, 1.0)):
            added.append(cost(choices, 3.0) - whole)
            assert added[-1] == pytest.approx(2 * into_sum[choices[made], choices[node]], rel=1e-6, abs=1e-12)
    assert min(added) == 0 < max(added)
