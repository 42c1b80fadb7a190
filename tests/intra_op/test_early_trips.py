"""What XLA:GPU runs earlier and later than it stands: first trips of loops, and gradients of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.liveness import Life, lives_of
from alpa_lite.intra_op.problem import Problem, Ragged, Solution, Status
from alpa_lite.intra_op.solve import best_choices
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.solvers.solver import Control, Solver
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.intra_op.strategies import FREE_CHOICE, AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.program.phases import Phase
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from cost_models.composed import ComposedCostModel

LAYERS, SAMPLES, WIDTH = 4, 1024, 64
GPU = KernelModel(takes_trips_out=True)
SHARDED = Restriction(roles={"x": AxisRole.BATCH}, optimizer=BatchSplit.MUST, parameters=BatchSplit.MUST)


def view_of(*, recomputes: bool, trips: int = LAYERS, trains_head: bool = False) -> StageView:
    """Layers of two products in a loop, whose first product is saved or computed again, before a wide head."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w) @ w.T, None

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden, _ = lax.scan(jax.checkpoint(layer) if recomputes else layer, x, params[0])
            head = params[1] if trains_head else jnp.ones((WIDTH, 20 * WIDTH))
            return jnp.mean(jnp.tanh(hidden @ head) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    ws, head, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((trips, WIDTH, 4 * WIDTH), (WIDTH, 20 * WIDTH), (SAMPLES, WIDTH))
    )
    traced = al.parallelize(step, batch_argnums=(1,)).trace((ws, head), x).step(1).step
    return StageView(step=traced, layers=make_layers(traced, 1), first=0, last=0)


def builder_of(view: StageView, restriction: Restriction, cluster: str = "dgx-h100") -> Builder:
    pricer = Pricer(
        cost_model=ComposedCostModel(replace(al.cluster(cluster), num_hosts=1)),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
        mesh=LogicalMesh(axis_names=("x",), shape=(8,)),
    )
    return Builder(view, Catalogue(pricer, restriction))


def peak_bytes(builder: Builder, choices: Sequence[int], *, early: bool) -> float:
    """The most bytes at any time, summed up usage by usage."""
    usages = [usage for usage in builder.usages(1, scatters=True) if early or not usage.early]
    return max(
        sum(ceil(u.sizes[choices[u.node]]) for u in usages if u.start <= time < u.end)
        for time in {usage.start for usage in usages}
    )


def early(view: StageView, kernels: KernelModel = GPU) -> list[Life]:
    return [life for life in lives_of(view, kernels).lives if life.early]


def test_what_is_recomputed_lies_beside_the_rest_from_the_forward_pass_to_its_loop():
    view = view_of(recomputes=True)
    lives, graph = lives_of(view, GPU), view.graph
    first, last = (lives.spans[(), op.id] for op in graph.ops if op.bodies)
    (loop,) = (op for op in graph.ops if op.bodies and view.step.phases[op.id] is Phase.BACKWARD)
    # The product or its tanh, of which the gradients of both products are made.
    found = early(view)
    assert {life.path for life in found} == {((loop.id, 0),)}
    assert {loop.bodies[0].values[life.value].shape for life in found} == {(SAMPLES, 4 * WIDTH)}
    assert {(life.start, life.end) for life in found} == {(first.end, last.start)}
    # Each is in memory during the loop, too.
    inside = {(life.path, life.value) for life in lives.lives if not life.early}
    assert inside.issuperset((life.path, life.value) for life in found)


def test_gradients_of_weights_are_made_at_the_end_of_the_backward_pass():
    view = view_of(recomputes=True, trains_head=True)
    graph, phases = view.graph, view.step.phases
    backward = [op for op in graph.ops if phases[op.id] is Phase.BACKWARD]
    (loop,) = (op for op in backward if op.bodies)
    (gradient,) = (op for op in backward if graph.values[op.results[0]].shape == (20 * WIDTH, WIDTH))
    for late in (False, True):
        lives = lives_of(view, replace(GPU, puts_off_gradients=late))
        spans = {op.id: lives.spans[(), op.id] for op in graph.ops}
        assert (spans[gradient.id].start >= spans[loop.id].end) is late
        # What reads something runs after what makes it, the update of the head too.
        makers = ((op, graph.producer[v]) for op in graph.ops for v in op.operands)
        assert all(spans[maker].end <= spans[op.id].start for op, maker in makers if maker is not None)
        # What it reads is in memory until then: the last hidden state, and the gradient of the logits.
        read = [life for life in lives.lives if life.value in gradient.operands and not life.path]
        until = {graph.values[life.value].shape: life.end for life in read}
        assert not late or until == dict.fromkeys([(SAMPLES, WIDTH), (SAMPLES, 20 * WIDTH)], spans[gradient.id].end)


def test_gradients_are_made_before_the_recomputation_that_waits_for_them():
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for w in ws:
                h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w)
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    arrays = (
        [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 5,
        jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32),
    )
    traced = al.parallelize(step, batch_argnums=(1,)).trace(*arrays).step(1).step
    view = StageView(step=traced, layers=make_layers(traced, 1), first=0, last=0)
    graph, spans = view.graph, lives_of(view, replace(GPU, puts_off_gradients=True)).spans
    backward = [op for op in graph.ops if traced.phases[op.id] is Phase.BACKWARD]
    weights = [op.id for op in backward if graph.values[op.results[0]].shape == (WIDTH, WIDTH)]
    gradients = [spans[(), op_id] for op_id in weights if graph.ops[op_id].primitive == "dot_general"]
    again = [spans[(), op.id] for op in backward if op.primitive == "tanh"]
    assert len(gradients) == len(again) == 5
    # The first one waits until the layer after the next one is computed again, the last two until the end.
    for number, gradient in enumerate(gradients):
        assert number > 2 or again[number + 1].end <= gradient.start < gradient.end <= again[number + 2].start
        assert number <= 2 or gradient.start >= again[-1].end


@pytest.mark.parametrize(
    ("cluster", "num_devices", "expected"), [("dgx-h100", 8, True), ("dgx-h100", 1, False), ("tpu-v3", 8, False)]
)
def test_one_device_has_no_collectives_to_hide(cluster: str, num_devices: int, expected: bool):
    kernels = KernelModel.of(ComposedCostModel(al.cluster(cluster)), num_devices)
    assert kernels.puts_off_gradients is expected


def test_nothing_is_early_where_it_is_saved_or_no_trip_is_taken_out():
    assert not early(view_of(recomputes=False))
    assert not early(view_of(recomputes=True), replace(GPU, takes_trips_out=False))
    # Loops of one trip are none.
    assert not early(view_of(recomputes=True, trips=1))


@pytest.mark.parametrize(("cluster", "expected"), [("dgx-h100", True), ("tpu-v3", False)])
def test_early_values_count_where_gradients_are_scattered(cluster: str, expected: bool):
    view = view_of(recomputes=True)
    sharded, whole = (builder_of(view, each, cluster) for each in (SHARDED, Restriction(roles={"x": AxisRole.BATCH})))
    assert (sharded.always_computes_early, whole.always_computes_early) == (expected, False)
    assert any(usage.early for usage in sharded.usages(1)) is expected
    assert not any(usage.early for usage in whole.usages(1))


@dataclass(frozen=True)
class Scattering(Solver):
    """A solver of the problem in which the sum of both gradients has to be scattered in the trips of the loop."""

    builder: Builder

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        costs, starts = problem.node_costs.values.copy(), problem.node_costs.starts
        node, scatters = max(self.builder.scattering.items())
        costs[starts[node] : starts[node + 1]][~scatters] = np.inf
        only = replace(problem, node_costs=Ragged(values=costs, starts=starts))
        return Portfolio().solve(only, time_limit_seconds=time_limit_seconds, control=control)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
def test_choices_that_scatter_have_room_for_what_they_compute_early(share: float):
    builder = builder_of(view_of(recomputes=True), FREE_CHOICE)

    def found(limit_bytes: float | None) -> Solution:
        def problem(scatters: bool) -> Problem:
            return builder.problem(limit_bytes=limit_bytes, in_flight=1, scatters=scatters)

        return best_choices(builder, problem, Scattering(builder), 10.0)

    free = found(None)
    assert free.choices is not None and builder.computes_early(free.choices) and not builder.always_computes_early
    assert free.peak_bytes == peak_bytes(builder, free.choices, early=True)
    assert free.peak_bytes > peak_bytes(builder, free.choices, early=False)
    limited = found(share * free.peak_bytes)
    if limited.choices is None:
        assert limited.status is Status.INFEASIBLE and share <= 0.6
        return
    assert limited.peak_bytes == peak_bytes(builder, limited.choices, early=True) <= share * free.peak_bytes
