"""Who lies in memory when: fused values, values that are made again, memory that is taken over, loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.intra_op.liveness import Life, Lives, lives_of
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.plan.memory_in_use import ADDRESS_BYTES, TOKEN_BYTES
from alpa_lite.planners import DataParallel, Hybrid, Pipeline, Planner
from alpa_lite.program.phases import GATHERED_AHEAD
from alpa_lite.rules.fusion import accesses
from alpa_lite.step.clustering import make_layers
from cost_models.cluster import Cluster

ROWS, COLUMNS, WIDE = 16, 8, 32


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def view_of(function: Callable[..., Any], *args: Any) -> StageView:
    step = al.parallelize(function, batch_argnums=(0,)).trace(*args).step(1).step
    return StageView(step=step, layers=make_layers(step, 1), first=0, last=0)


def lives_by_maker(view: StageView, kernels: KernelModel | None = None) -> dict[str, Life]:
    """The lives of the results of the step's own ops, by primitive; what occurs twice is numbered."""
    found: dict[str, Life] = {}
    for life in lives_of(view, kernels).lives:
        producer = view.graph.producer[life.value]
        if not life.path and producer is not None:
            name = view.graph.ops[producer].primitive
            found[f"{name} {sum(key.startswith(name) for key in found)}"] = life
    return found


WEIGHTS = (f32(COLUMNS, WIDE), f32(WIDE, COLUMNS))


def test_a_fused_value_takes_no_memory_and_the_last_of_its_kernel_takes_over_that_of_the_product() -> None:
    view = view_of(lambda x, w, u: ((x @ w) * 2.0 + 1.0) @ u, f32(ROWS, COLUMNS), *WEIGHTS)
    assert [view.graph.ops[op].primitive for op in view.ops] == ["dot_general", "mul", "add", "dot_general"]
    found = lives_by_maker(view)
    assert set(found) == {"dot_general 0", "add 0", "dot_general 1"}
    assert (found["dot_general 0"].start, found["dot_general 0"].end) == (0, 3)
    assert (found["add 0"].start, found["add 0"].end) == (3, 4)


def test_cheap_values_are_made_again_and_their_source_lives_on_instead() -> None:
    def step(x: Any, w: Any, u: Any, *, keep: Callable[[Any], Any]) -> Any:
        kept = keep(x @ w)
        return (kept * 2.0 @ u) @ w + kept

    def found(keep: Callable[[Any], Any]) -> dict[str, Life]:
        view = view_of(lambda x, w, u: step(x, w, u, keep=keep), f32(ROWS, COLUMNS), *WEIGHTS)
        return lives_by_maker(view, KernelModel(instructions_per_byte=0.0))

    cheap, dear = found(lambda h: h - 1.0), found(jnp.exp)
    assert "sub 0" not in cheap and "exp 0" in dear
    # The addition at the end reads the product itself.
    assert cheap["dot_general 0"].end == max(life.end for life in cheap.values())
    assert dear["dot_general 0"].end == 2 == dear["exp 0"].start


def test_the_mask_of_a_relu_is_computed_again_from_its_input() -> None:
    def loss(w: Any, u: Any, x: Any) -> Any:
        return ((jax.nn.relu(x @ w) @ u) ** 2).sum()

    view = view_of(lambda x, w, u: jax.grad(loss, (0, 1))(w, u, x), f32(ROWS, COLUMNS), *WEIGHTS)
    found = lives_by_maker(view)
    # Both the input and the output of the ReLU are as large as four masks.
    assert "max 0" in found and not any(view.graph.values[life.value].dtype == "bool" for life in found.values())
    (select,) = (op.id for op in view.graph.ops if op.primitive == "select_n")
    assert found["dot_general 0"].end > select


STORES = KernelModel(instructions_per_byte=0.0)
SIBLINGS, LONE = STORES, replace(STORES, fuses_siblings=False)


@pytest.mark.parametrize(("kernels", "stored"), [(SIBLINGS, False), (LONE, True)])
def test_a_costly_value_of_two_kernels_is_stored_unless_they_are_one(kernels: KernelModel, stored: bool) -> None:
    def step(x: Any, w: Any, u: Any) -> Any:
        h = jnp.tanh(x @ w)
        return (h * 2.0) @ u, (h + 1.0) @ u

    found = lives_by_maker(view_of(step, f32(ROWS, COLUMNS), *WEIGHTS), kernels)
    assert ("tanh 0" in found) is stored
    assert {"mul 0", "add 0"} <= set(found)


def test_what_only_products_read_is_not_stored_where_their_kernels_compute_it() -> None:
    view = view_of(lambda x, w, u: ((x @ w) * 2.0 + 1.0) @ u, f32(ROWS, COLUMNS), *WEIGHTS)
    found = lives_by_maker(view, KernelModel(fuses_into_products=True))
    assert set(found) == {"dot_general 0", "dot_general 1"}
    assert found["dot_general 0"].end == 4


@pytest.mark.parametrize("behind", [False, True])
def test_a_sum_of_two_arrays_is_stored_if_a_reader_reads_also_what_comes_of_it(behind: bool) -> None:
    def step(x: Any, w: Any, u: Any) -> Any:
        total = x @ w + jnp.exp(x) @ w
        first = (total * 2.0) @ u
        return total * (first @ w if behind else 3.0)

    found = lives_by_maker(view_of(step, f32(ROWS, COLUMNS), *WEIGHTS))
    assert ("add 0" in found) is behind


def test_a_kernel_that_searches_windows_does_not_overwrite_what_it_reads() -> None:
    def step(x: Any, w: Any, u: Any) -> Any:
        rows = jnp.exp(x @ w)
        return lax.reduce_window(rows, -jnp.inf, lax.max, (3, 3), (1, 1), "SAME") @ u

    found = lives_by_maker(view_of(step, f32(ROWS, COLUMNS), *WEIGHTS))
    assert found["reduce_window_max 0"].start < found["exp 0"].end


def test_without_fusion_everything_is_kept() -> None:
    view = view_of(lambda x, w, u: ((x @ w) * 2.0 + 1.0) @ u, f32(ROWS, COLUMNS), *WEIGHTS)
    kept = {life.value for life in lives_of(view, KernelModel(fusion="none")).lives}
    assert {op.results[0] for op in view.graph.ops} <= kept
    assert not {op.results[0] for op in view.graph.ops if op.primitive == "mul"} & {
        life.value for life in lives_of(view).lives
    }


def test_long_chains_of_fused_values_are_followed_to_their_end() -> None:
    def chain(x: Any, w: Any, u: Any) -> Any:
        h = first = x @ w
        for _ in range(1500):
            h = h * 0.5
        return h @ u, jnp.sum(first @ u)

    found = lives_by_maker(view_of(chain, f32(ROWS, COLUMNS), *WEIGHTS))
    kept = [name for name in found if name.startswith("mul")]
    assert len(kept) == 1 and found[kept[0]].start == 1500


def layers_step(*, remat: bool = True) -> Callable[..., Any]:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)[0] ** 2)

    def step(x: Any, weights: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    return step


def stack(num_layers: int) -> tuple[Any, Any]:
    return f32(num_layers, COLUMNS, WIDE), f32(num_layers, WIDE, COLUMNS)


def test_values_inside_a_loop_live_within_one_trip() -> None:
    view = view_of(layers_step(), f32(ROWS, COLUMNS), stack(4))
    lives: Lives = lives_of(view)
    inner = [life for life in lives.lives if life.path]
    assert inner
    for life in inner:
        span = lives.spans[life.path[:-1], life.path[-1][0]]
        assert span.start < life.start < life.end <= span.end
    starts = [span.start for span in lives.spans.values()]
    assert len(set(starts)) == len(starts)


def test_what_is_never_written_never_lives() -> None:
    view = view_of(layers_step(remat=False), f32(ROWS, COLUMNS), stack(4))
    written = {
        (graph, op.results[slot.number])
        for graph in {view.graph, *(body for op in view.graph.ops for body in op.bodies)}
        for op, access in zip(graph.ops, accesses(graph), strict=True)
        for slot in access.writes
        if slot.is_result
    }
    for life in lives_of(view).lives:
        graph = view.graph
        for op_id, body in life.path:
            graph = graph.ops[op_id].bodies[body]
        producer = graph.producer[life.value]
        if producer is not None and not graph.ops[producer].bodies:
            assert (graph, life.value) in written


def host(num_devices: int) -> Cluster:
    return replace(al.cluster("p3.16xlarge", num_hosts=1), devices_per_host=num_devices)


def predicted_peak(num_layers: int, *, remat: bool) -> float:
    cluster = host(1)
    args = (f32(ROWS, COLUMNS), stack(num_layers))
    plan = al.plan(layers_step(remat=remat), *args, cluster=cluster, planner=DataParallel(), num_microbatches=1)
    return plan.prediction.peak_bytes[0]


@pytest.mark.parametrize("remat", [True, False])
def test_a_layer_more_adds_its_weights_their_gradients_and_what_it_saves(remat: bool) -> None:
    """Saved per layer: its input, and without recomputation the result of the nonlinearity and of its derivative."""
    weights, carried, inner = 2 * COLUMNS * WIDE, ROWS * COLUMNS, ROWS * WIDE
    found = (predicted_peak(12, remat=remat) - predicted_peak(8, remat=remat)) / 4 / 4
    if remat:
        assert found == 2 * weights + carried
    else:
        assert 2 * weights + carried + inner <= found <= 2 * weights + carried + 2 * inner


def test_a_pipeline_holds_saved_values_of_the_micro_batches_in_flight_and_what_other_stages_sent() -> None:
    def step(x: Any, weights: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for up, down in weights:
                h = jnp.tanh(h @ up) @ down
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [(f32(COLUMNS, WIDE), f32(WIDE, COLUMNS)) for _ in range(4)]
    args = (f32(64, COLUMNS), weights)

    def plan(planner: Planner) -> al.Plan:
        return al.plan(step, *args, cluster=host(4), planner=planner, num_microbatches=4, batch_argnums=(0,))

    piped = plan(Hybrid(pipeline=2, data=2))
    first, second = piped.stages
    boundary, per_device = 64 // 4 * COLUMNS * 4, 2
    assert second.cost.activation_bytes >= (boundary + 2 * 64 // 4 * WIDE * 4) / per_device
    kept = first.cost.state_bytes + first.cost.accumulator_bytes + 2 * first.cost.activation_bytes
    # The result that is being sent, and the gradient that has arrived for the next task.
    on_the_way = 2 * boundary / per_device
    assert first.cost.work is not None
    # Four results and the token.
    table = TOKEN_BYTES + 5 * ADDRESS_BYTES
    assert piped.prediction.peak_bytes[0] == kept + first.cost.work.backward + on_the_way + table
    assert plan(Pipeline(pipeline=2)).prediction.peak_bytes[0] > 0


CPU = KernelModel(fuses_siblings=False, breadth_first=True, num_devices=8, gathers=True)


def test_reversed_kernels_are_gathered_for_the_convolutions_that_read_them_and_not_before() -> None:
    numbers = ("NHWC", "HWIO", "NHWC")

    def step(images: Any, kernels: Any) -> Any:
        def loss(kernels: Any) -> Any:
            h = images
            for w in kernels:
                h = jnp.tanh(lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=numbers))
            return jnp.mean(h)

        return jax.tree.map(lambda w, g: w - g, kernels, jax.grad(loss)(kernels))

    view = view_of(step, f32(ROWS, 8, 8, COLUMNS), [f32(3, 3, COLUMNS, COLUMNS)] * 6)
    lives, graph = lives_of(view, CPU), view.graph
    reversals = [op for op in graph.ops if op.primitive == "rev"]
    assert len(reversals) == 5
    for op in reversals:
        (reader,) = graph.consumers[op.results[0]]
        gathered, start = lives.gathered[(), op.id], lives.spans[(), reader].start
        assert gathered == lives.gathered[(), reader] and gathered.start > lives.spans[(), op.id].end
        # At most as many as are gathered ahead are read in between.
        between = [o for _, o in lives.gathered if gathered.start < lives.spans[(), o].start < start]
        assert sum(graph.ops[o].primitive == "conv_general_dilated" for o in between) <= GATHERED_AHEAD


def test_gradients_of_an_embedding_are_zeros_from_the_start_of_the_program() -> None:
    def step(words: Any, table: Any) -> Any:
        return table - jax.grad(lambda table: jnp.mean(jnp.tanh(table[words])))(table)

    view = view_of(step, jax.ShapeDtypeStruct((ROWS,), jnp.int32), f32(WIDE, COLUMNS))
    lives, graph = lives_of(view, CPU), view.graph
    (scatter,) = (op for op in graph.ops if op.primitive == "scatter-add")
    assert lives.filled[(), scatter.id] == 0 < lives.spans[(), scatter.id].start
