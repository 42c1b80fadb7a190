"""The simulated program against the plan's own prediction, and its memory against a replay of the instructions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.api.stages import LoweredFunction
from alpa_lite.plan.instructions import SUM, Buffer
from alpa_lite.plan.parts import WorkBytes
from alpa_lite.plan.simulation import SimulatedStep
from alpa_lite.planners import DataParallel, Hybrid, Pipeline, Planner
from alpa_lite.schedule import GPipe, Inference, Interleaved1F1B, ZeroBubbleH1
from cost_models.cluster import Cluster

WIDTH, LAYERS, BATCH = 256, 8, 64


def _loss(params, x, y):
    for p in params:
        x = x + jax.nn.gelu((x * p["scale"]) @ p["into"]) @ p["back"]
    return jnp.mean((x - y) ** 2)


def train_step(state, batch):
    params, momentum = state
    loss, grads = jax.value_and_grad(_loss)(params, *batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss


def _shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = [
    {"into": _shape(WIDTH, 4 * WIDTH), "back": _shape(4 * WIDTH, WIDTH), "scale": _shape(WIDTH)} for _ in range(LAYERS)
]
ARGS = ((PARAMS, PARAMS), (_shape(BATCH, WIDTH, WIDTH), _shape(BATCH, WIDTH, WIDTH)))

PLANS: dict[str, tuple[Planner, int]] = {
    "data parallel": (DataParallel(), 1),
    "tensor": (Hybrid(tensor=8), 2),
    "pipeline": (Pipeline(pipeline=4), 8),
    "gpipe": (Hybrid(pipeline=4, schedule=GPipe()), 8),
    "zero bubble": (Hybrid(pipeline=4, schedule=ZeroBubbleH1()), 8),
    "interleaved": (Hybrid(pipeline=2, schedule=Interleaved1F1B(num_chunks=2)), 8),
    "hybrid": (Hybrid(pipeline=2, tensor=2, data=2), 8),
    "zero": (Hybrid(pipeline=2, zero=3), 4),
    "remat": (Hybrid(pipeline=4, remat="full"), 8),
}


def cluster() -> Cluster:
    return al.cluster("p3.16xlarge")


@pytest.fixture(scope="module", params=PLANS)
def lowered(request: pytest.FixtureRequest) -> LoweredFunction:
    planner, num_microbatches = PLANS[request.param]
    traced = al.parallelize(train_step, cache=False).trace(*ARGS)
    return traced.plan(cluster=cluster(), planner=planner, num_microbatches=num_microbatches).lower()


def test_the_program_takes_as_long_as_the_plan_says(lowered: LoweredFunction) -> None:
    plan, simulated = lowered.planned.last_plan, lowered.simulate()
    # The plan moves all that crosses a border at once, by its bytes; the program value by value, and the global norm as
    # well. Where receivers gather what several of them want, the plan leaves that out.
    gathers = any(i.transfer is not None and i.transfer.gathers for i in lowered.program.instructions)
    assert simulated.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=0.05 if gathers else 0.02)
    waiting = simulated.bubble_fraction + sum(use.exposed_seconds for use in simulated.submeshes) / (
        simulated.step_seconds * len(simulated.submeshes)
    )
    assert waiting >= plan.prediction.bubble_fraction - 0.02


def test_devices_hold_what_the_plan_says(lowered: LoweredFunction) -> None:
    plan, simulated = lowered.planned.last_plan, lowered.simulate()
    for use in simulated.submeshes:
        assert use.peak_bytes == pytest.approx(plan.prediction.peak_bytes[use.stages[0]], rel=0.08)


def test_every_instruction_has_a_span_after_what_it_reads(lowered: LoweredFunction) -> None:
    program, simulated, plan = lowered.program, lowered.simulate(), lowered.planned.last_plan
    instructions = [instruction for instruction in program.instructions if instruction.kind != "FREE"]
    assert [time.kind for time in simulated.times] == [instruction.kind for instruction in instructions]
    written: dict[Buffer, float] = {}
    for instruction, time in zip(instructions, simulated.times, strict=True):
        assert time.end_seconds >= time.start_seconds >= 0
        if instruction.kind in ("RUN", "SEND"):
            assert all(time.start_seconds >= written[b] for b in instruction.reads)
        written.update(dict.fromkeys(instruction.writes, time.end_seconds))
    for stages in plan.stages_together:
        runs = [time for time in simulated.times if time.kind == "RUN" and time.stage in stages]
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(runs))


def test_time_is_work_or_waiting(lowered: LoweredFunction) -> None:
    simulated = lowered.simulate()
    for use in simulated.submeshes:
        runs = [time for time in simulated.times if time.kind == "RUN" and time.stage in use.stages]
        assert use.busy_seconds == pytest.approx(sum(time.end_seconds - time.start_seconds for time in runs))
        assert 0 <= use.exposed_seconds <= simulated.step_seconds
        assert use.busy_seconds + use.bubble_seconds <= simulated.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("forward_alone", [False, True])
def test_a_step_that_is_one_program_is_dispatched_once(forward_alone: bool) -> None:
    """On virtual devices, whose work adds up and where dispatching takes their time."""
    shared = replace(cluster(), shared_processor=True)
    step, args = ((lambda state, batch: _loss(state[0], *batch)), ARGS) if forward_alone else (train_step, ARGS)
    traced = al.parallelize(step, cache=False, batch_argnums=1).trace(*args)
    planned = traced.plan(cluster=shared, planner=DataParallel(), num_microbatches=1)
    prediction = planned.last_plan.prediction
    assert shared.device.dispatch_seconds > 0
    assert planned.lower().simulate().step_seconds == pytest.approx(prediction.step_seconds, rel=1e-9)


def test_two_parts_of_a_backward_pass_take_as_long_as_one() -> None:
    traced = al.parallelize(train_step, cache=False).trace(*ARGS)

    def busy(planner: Planner) -> list[float]:
        lowered = traced.plan(cluster=cluster(), planner=planner, num_microbatches=8).lower()
        return [use.busy_seconds for use in lowered.simulate().submeshes]

    whole, in_two = busy(Hybrid(pipeline=4)), busy(PLANS["zero bubble"][0])
    assert in_two == pytest.approx(whole, rel=0.02)


def test_rematerialisation_shows_in_the_simulated_memory() -> None:
    traced = al.parallelize(train_step, cache=False).trace(*ARGS)

    def simulated(planner: Planner) -> SimulatedStep:
        return traced.plan(cluster=cluster(), planner=planner, num_microbatches=8).lower().simulate()

    kept, again = simulated(PLANS["gpipe"][0]), simulated(Hybrid(pipeline=4, schedule=GPipe(), remat="full"))
    assert again.submeshes[0].peak_bytes < 0.6 * kept.submeshes[0].peak_bytes
    assert again.step_seconds > kept.step_seconds


def test_a_pipeline_for_inference_keeps_nothing_for_later() -> None:
    def forward(params, x):
        for p in params:
            x = x + jax.nn.gelu((x * p["scale"]) @ p["into"]) @ p["back"]
        return {"y": x}

    traced = al.parallelize(forward, cache=False).trace(PARAMS, ARGS[1][0])
    planned = traced.plan(cluster=cluster(), planner=Pipeline(pipeline=4), num_microbatches=8)
    assert planned.last_plan.schedule == Inference()
    simulated = planned.lower().simulate()
    assert simulated.step_seconds == pytest.approx(planned.last_plan.prediction.step_seconds, rel=0.01)
    sample = 4 * BATCH / 8 * WIDTH * WIDTH / 2  # a micro-batch of activations on one of two devices
    assert simulated.submeshes[1].peak_bytes < planned.last_plan.stages[1].cost.state_bytes + 14 * sample


def test_memory_counts_accumulators_once_and_transfers_where_they_arrive() -> None:
    planner, m = PLANS["pipeline"]
    traced = al.parallelize(train_step, cache=False).trace(*ARGS)
    lowered = traced.plan(cluster=cluster(), planner=planner, num_microbatches=m).lower()
    program, plan = lowered.program, lowered.planned.last_plan
    sums = {b for i in program.instructions for b in i.writes if b.microbatch == SUM}
    assert sums
    base = lowered.simulate()
    work = WorkBytes(forward=2.0**30, backward=2.0**30, loop=2.0**30, update=2.0**30)
    heavier = replace(plan, stages=tuple(replace(s, cost=replace(s.cost, work=work)) for s in plan.stages))
    again = replace(lowered, planned=replace(lowered.planned, last_plan=heavier)).simulate()
    for before, after in zip(base.submeshes, again.submeshes, strict=True):
        assert after.peak_bytes == pytest.approx(before.peak_bytes + 2.0**30, rel=0.05)
    received = [use.received_bytes for use in base.submeshes]
    boundary = 4.0 * BATCH * WIDTH * WIDTH  # of all micro-batches, in each direction
    assert received[0] == pytest.approx(boundary, rel=1e-3)
    assert received[1:3] == pytest.approx([2 * boundary, 2 * boundary], rel=1e-3)
    assert received[3] == pytest.approx(boundary, rel=1e-3)
