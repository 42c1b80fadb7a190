"""Where ops run: parts of backward passes, and ops that wait for the task that alone reads them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.api.stages import LoweredFunction
from alpa_lite.plan.op_places import layout_of_plan, places_of, update_tasks
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.slices import Slicer
from alpa_lite.planners import Hybrid
from alpa_lite.program.phases import Phase
from alpa_lite.schedule import GPipe, OneFOneB, Schedule, ZeroBubbleH1

WIDTH = 64


def _train(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = jax.nn.gelu(h @ w)
        return jnp.mean(h * h)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def _lowered(schedule: Schedule, stages: int = 4) -> LoweredFunction:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    traced = al.parallelize(_train, cache=False).trace(params, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32))
    planner = Hybrid(pipeline=stages, schedule=schedule)
    return traced.plan(cluster=al.cluster("p3.16xlarge"), planner=planner, num_microbatches=8).lower()


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe(), ZeroBubbleH1()], ids=str)
def test_ops_run_after_what_they_read(schedule: Schedule) -> None:
    lowered = _lowered(schedule)
    step = lowered.step.step
    places = places_of(layout_of_plan(lowered.planned.last_plan, step), step)
    for op, place in zip(step.graph.ops, places, strict=True):
        for v in op.operands:
            producer = step.graph.producer[v]
            before = places[producer] if producer is not None else None
            if place is not None and before is not None and step.phases[op.id].in_loop:
                assert before.order <= place.order


def test_what_only_derivatives_read_is_not_handed_on() -> None:
    """Of each gelu the input and the tanh are kept, not the polynomials of them that its derivative consists of."""
    lowered = _lowered(GPipe())
    step = lowered.step.step
    places = places_of(layout_of_plan(lowered.planned.last_plan, step), step)
    assert any(
        place is not None and place.kind == "backward" and phase is Phase.FORWARD
        for phase, place in zip(step.phases, places, strict=True)
    )
    handed: dict[int, int] = {}
    for task in lowered.program.tasks:
        if task.kind == "forward":
            handed[task.stage] = sum(step.graph.values[p.value].rank == 2 for p in task.outputs)
    # The input of the product, its result, the tanh, the product of both, and the result for the next stage.
    assert max(handed.values()) <= 5


def test_a_backward_pass_in_two_parts_sends_the_first_and_sums_the_second() -> None:
    lowered = _lowered(ZeroBubbleH1())
    step, tasks = lowered.step.step, {(task.stage, task.kind): task for task in lowered.program.tasks}
    assert {kind for _, kind in tasks} == {
        *("forward", "forward+backward", "input gradient", "weight gradient", "update")
    }
    for stage in range(1, 4):
        first = tasks[stage, "input gradient" if stage < 3 else "forward+backward"]
        assert any(step.batch_dims[port.value] is not None for port in first.outputs)
        weights = [port.value for port in tasks[stage, "weight gradient"].sums]
        assert [step.graph.values[v].shape for v in weights] == [(WIDTH, WIDTH)]
    assert (0, "input gradient") not in tasks  # nobody waits for what the first stage computes


def _clipped(params: Any, x: jax.Array) -> Any:
    """Stages exchange values in the update: each has a part of the norm of all gradients."""

    def loss(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h * h)

    grads = jax.grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return [w - 0.1 * g / (1.0 + norm) for w, g in zip(params, grads, strict=True)], norm


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_tasks_of_an_update_are_counted_as_they_are_made(stages: int) -> None:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    traced = al.parallelize(_clipped, cache=False).trace(params, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32))
    planned = traced.plan(cluster=al.cluster("p3.16xlarge"), planner=Hybrid(pipeline=stages), num_microbatches=4)
    step, plan = planned.lower().step.step, planned.last_plan
    layout = layout_of_plan(plan, step)
    outlines = Slicer(layout, step).outlines()
    made = Counter(each.place.stage for each in outlines if each.place.kind is TaskRole.UPDATE)
    assert update_tasks(step, layout.stage_of_op) == made
    assert (max(made.values()) > 1) == (stages > 1)


def _twice_clipped(params: Any, x: jax.Array) -> Any:
    """Weights in half precision, updates in float32, clipped by the norm of the gradients and by their own."""

    def loss(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    updates = [g.astype(jnp.float32) / 8 + 0.01 * w for w, g in zip(params, jax.grad(loss)(params), strict=True)]
    norm = jnp.sqrt(sum(jnp.sum(u * u) for u in updates))
    updates = [u / (1.0 + norm) for u in updates]
    trust = jnp.sqrt(sum(jnp.sum(u * u) for u in updates))
    return [(w - 0.1 * u / (1.0 + trust)).astype(w.dtype) for w, u in zip(params, updates, strict=True)], norm


def _masked(params: Any, x: jax.Array) -> Any:
    """The first stage and the caller read random numbers, and the last stage reads a mask that is made of them."""
    drawn = jax.random.uniform(jax.random.key(0), (WIDTH,))

    def loss(params: Any) -> jax.Array:
        h = x + drawn
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h * (drawn < 0.9)) ** 2)

    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)], drawn


@pytest.mark.parametrize("step_function", [_clipped, _twice_clipped, _masked])
def test_the_tasks_of_a_stage_do_not_depend_on_what_others_repeat(step_function: Any) -> None:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * 4
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16)
    traced = al.parallelize(step_function, cache=False).trace(params, batch)
    planned = traced.plan(cluster=al.cluster("p3.16xlarge"), planner=Hybrid(pipeline=4), num_microbatches=4)
    step = planned.lower().step.step
    layout = layout_of_plan(planned.last_plan, step)
    whole = Slicer(layout, step)
    for stage in range(4):
        ops = [op for op, of_op in enumerate(layout.stage_of_op) if of_op in (stage, None)]
        assert Slicer(layout, step, ops).outlines(stage) == whole.outlines(stage)


def test_between_waves_of_an_update_gradients_are_kept_and_not_what_is_made_of_them() -> None:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * 4
    traced = al.parallelize(_twice_clipped, cache=False).trace(params, jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16))
    planned = traced.plan(cluster=al.cluster("p3.16xlarge"), planner=Hybrid(pipeline=4), num_microbatches=4)
    lowered = planned.lower()
    graph = lowered.step.step.graph
    updates = [task for task in lowered.program.tasks if task.kind is TaskRole.UPDATE]
    assert len(updates) > 4
    handed = [graph.values[p.value] for task in updates for p in task.outputs if p.value not in graph.outputs]
    # Each stage keeps the gradient of its weight.
    assert [v.dtype for v in handed if v.rank] == ["bfloat16"] * 4
