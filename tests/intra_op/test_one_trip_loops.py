"""Loops of one trip: XLA removes them, and so does the account of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.intra_op.liveness import Lives, lives_of
from alpa_lite.intra_op.one_trip_loops import without_one_trip_loops
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.planners import DataParallel, Planner
from alpa_lite.program.ir import Graph, verify
from alpa_lite.step.clustering import make_layers
from benchmarks import memory

ROWS, COLUMNS, WIDE = 256, 64, 128
CPU = KernelModel(fuses_siblings=False, breadth_first=True)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(h: Any, w: Any) -> tuple[Any, None]:
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None


def steps_of(trips: int, *, unrolled: bool = False) -> Callable[..., Any]:
    """A train step through loops of so many layers; or the same ops without loops."""

    def forward(h: Any, weights: Any) -> Any:
        if not unrolled:
            return lax.scan(layer, h, weights)[0]
        for number in range(trips):
            h, _ = layer(h, {name: w[number] for name, w in weights.items()})
        return h

    def loss(weights: Any, batch: Any) -> Any:
        h = batch["x"]
        for each in weights:
            h = forward(h, each)
        return jnp.mean((h - batch["y"]) ** 2)

    def step(weights: Any, batch: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, batch))

    return step


def arguments(trips: int, times: int) -> tuple[Any, Any]:
    weights = {"up": f32(trips, COLUMNS, WIDE), "down": f32(trips, WIDE, COLUMNS)}
    return [weights] * times, {"x": f32(ROWS, COLUMNS), "y": f32(ROWS, COLUMNS)}


def row(step: Callable[..., Any], given: tuple[Any, Any], planner: Planner) -> memory.Row:
    """Predicted and allocated memory of a step on the virtual devices."""
    (found,) = memory.run(
        [memory.Case(name="step", step=step, arguments=given)], {"plan": (planner, 1)}, lambda _: None
    )
    return found


def test_a_loop_of_one_trip_takes_the_memory_that_xla_allocates(devices: Any) -> None:
    found = row(steps_of(1), arguments(1, 3), DataParallel())
    # As a loop it was 1.11: its stacked arrays hold what is computed again, and its sums were there once.
    assert found.ratio == pytest.approx(1.0, abs=0.02), found


def test_a_model_whose_layers_are_loops_of_one_trip(devices: Any) -> None:
    (found,) = memory.run(memory.cases(["gpt-tiny"], []), {"plan": (DataParallel(), 1)}, lambda _: None)
    # It was 1.37.
    assert found.ratio == pytest.approx(1.0, abs=0.08), found


def view_of(function: Callable[..., Any], *given: Any) -> StageView:
    step = al.parallelize(function, batch_argnums=(1,)).trace(*given).step(1).step
    return StageView(step=step, layers=make_layers(step, 1), first=0, last=0)


def peak(view: StageView, kernels: KernelModel) -> float:
    """The most bytes that are alive at a time, of values of the whole batch."""
    lives: Lives = lives_of(view, kernels)
    changes = [0.0] * (lives.end + 1)
    for life in lives.lives:
        graph: Graph = view.graph
        for op, number in life.path:
            graph = graph.ops[op].bodies[number]
        for time in range(life.start, life.end):
            changes[time] += graph.values[life.value].bytes
    return max(changes)


@pytest.mark.parametrize("kernels", [CPU, KernelModel()])
def test_a_loop_of_one_trip_is_like_its_body_written_out(kernels: KernelModel) -> None:
    given = arguments(1, 2)
    looped, unrolled = (view_of(steps_of(1, unrolled=each), *given) for each in (False, True))
    assert peak(looped, kernels) == pytest.approx(peak(unrolled, kernels), rel=0.02)
    # Stacked arrays and the elements that they are made of are different arrays in other loops.
    two = view_of(steps_of(2), *arguments(2, 1))
    assert peak(two, kernels) > 1.2 * peak(looped, kernels)


def test_every_op_and_value_has_its_place_in_the_program_as_traced() -> None:
    def outer(h: Any, w: Any) -> tuple[Any, Any]:
        h, _ = lax.scan(layer, h, w["inner"])
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), h), h, w["long"])[0], h.sum(0)

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            h, sums = lax.scan(outer, batch["x"], weights)
            return jnp.mean((h - batch["y"]) ** 2) + sums.sum()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    inner = {"up": f32(1, 1, COLUMNS, WIDE), "down": f32(1, 1, WIDE, COLUMNS)}
    _, batch = arguments(1, 1)
    view = view_of(step, {"inner": inner, "long": f32(1, 3, COLUMNS, COLUMNS)}, batch)
    found = without_one_trip_loops(view.part)
    assert found is not None
    stage, flattened = found
    verify(stage.graph)
    assert not any(op.primitive == "scan" and op.params["length"] == 1 for _, op in stage.graph.walk())
    assert {len(path) for path, _ in flattened.ops} == {0, 1, 2}
    lives = lives_of(view, CPU)
    # The problem asks for the time of each op, at any depth, and for the array of each life.
    places = [((), view.graph)]
    while places:
        path, graph = places.pop()
        for op in graph.ops:
            assert (path, op.id) in lives.spans
            places += [((*path, (op.id, number)), body) for number, body in enumerate(op.bodies)]
    for life in lives.lives:
        assert life.start < life.end <= lives.end
    assert all(lives.running_at(time) is not None for time in range(lives.end - 1))
    assert lives.running_at(lives.end - 1) is None


def test_steps_without_such_loops_stay_as_they_are() -> None:
    view = view_of(steps_of(2), *arguments(2, 2))
    assert without_one_trip_loops(view.part) is None
