"""What the first trip of a loop computes before the loop, where XLA:GPU takes that trip out."""

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


def view_of(*, recomputes: bool, trips: int = LAYERS) -> StageView:
    """Layers of two products in a loop, whose first product is saved or computed again, before a wide head."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.sin(x @ w) @ w.T, None

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            hidden, _ = lax.scan(jax.checkpoint(layer) if recomputes else layer, x, ws)
            return jnp.mean(jnp.tanh(hidden @ jnp.ones((WIDTH, 16 * WIDTH))) ** 2)

        return ws - 0.1 * jax.grad(loss)(ws)

    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((trips, WIDTH, 4 * WIDTH), (SAMPLES, WIDTH)))
    traced = al.parallelize(step, batch_argnums=(1,)).trace(*arrays).step(1).step
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
    # The product, of which the gradients of both products are made: its cosine is not written.
    found = early(view)
    assert {life.path for life in found} == {((loop.id, 0),)}
    assert {loop.bodies[0].values[life.value].shape for life in found} == {(SAMPLES, 4 * WIDTH)}
    assert {(life.start, life.end) for life in found} == {(first.end, last.start)}
    # Each is in memory during the loop, too.
    inside = {(life.path, life.value) for life in lives.lives if not life.early}
    assert inside.issuperset((life.path, life.value) for life in found)


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
