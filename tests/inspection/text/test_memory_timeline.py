"""What devices hold over time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inspection.text.timeline import memory_over_time
from alpa_lite.plan.parts import TaskRuns
from alpa_lite.planners import Hybrid
from alpa_lite.schedule import GPipe, OneFOneB


def test_the_peak_is_the_predicted_one(tensor_plan, pipeline_plan):
    for plan in (tensor_plan, pipeline_plan):
        peaks = [track.peak_bytes for track in memory_over_time(plan)]
        assert peaks == pytest.approx(list(plan.prediction.peak_bytes))


def test_stages_on_the_same_devices_share_a_track(interleaved_plan):
    tracks = memory_over_time(interleaved_plan)
    assert [track.stages for track in tracks] == [(0, 2), (1, 3)]
    for track in tracks:
        predicted = interleaved_plan.prediction.peak_bytes[track.stages[0]]
        assert track.peak_bytes == pytest.approx(predicted)


def tracks_of(planner, **options):
    def step(ws, x):
        def loss(ws):
            h = x
            for up, down in ws:
                h = h + jnp.tanh(h @ up) @ down
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    layer = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    arguments = [layer] * 4, jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = al.plan(step, *arguments, cluster=al.cluster("p3.16xlarge"), planner=planner, **options)
    return plan, memory_over_time(plan)


def test_micro_batches_pile_up():
    plan, (first, _) = tracks_of(Hybrid(pipeline=2, data=4, schedule=GPipe()), num_microbatches=4)
    assert first.kept_bytes == plan.stages[0].cost.state_bytes
    # Four forwards, each with what it saves; four backwards, which give it back one by one; then the update.
    saved = plan.stages[0].cost.activation_bytes
    steps = np.diff(first.bytes[:8])
    # A result stays until its transfer is launched, which may be after the next forward pass.
    assert list(steps[1:3]) == [saved] * 2
    assert saved <= steps[0] <= 1.2 * saved
    assert all(step <= 0 for step in steps[4:])
    assert sum(steps[4:]) <= -3 * saved + first.bytes[3] / 4
    assert first.bytes[-1] == first.kept_bytes
    assert list(first.seconds) == sorted(set(first.seconds))


def test_the_memory_of_a_step_is_bounded_by_its_schedule():
    """Under 1F1B two micro-batches are in flight on the first of two stages, under GPipe all eight."""
    peaks = []
    for schedule in (OneFOneB(), GPipe()):
        plan, (first, _) = tracks_of(Hybrid(pipeline=2, data=4, schedule=schedule), num_microbatches=8)
        peaks.append(first.peak_bytes)
    saved = plan.stages[0].cost.activation_bytes
    assert peaks[1] - peaks[0] == pytest.approx(6 * saved, rel=0.2)


def test_a_peak_between_two_steps_is_drawn_at_the_end(pipeline_plan):
    """Stacked arrays may lie elsewhere then, and take more than any task."""
    peak = 2 * max(pipeline_plan.prediction.peak_bytes)
    rest = replace(pipeline_plan, prediction=replace(pipeline_plan.prediction, peak_bytes=(peak, peak)))
    for track, usual in zip(memory_over_time(rest), memory_over_time(pipeline_plan), strict=True):
        assert track.peak_bytes == track.bytes[-1] == peak and track.bytes[:-1] == usual.bytes[:-1]


def test_a_plan_of_an_earlier_version_has_no_tasks(pipeline_plan):
    old = replace(pipeline_plan, prediction=replace(pipeline_plan.prediction, tasks=TaskRuns()))
    assert [track.peak_bytes for track in memory_over_time(old)] == [s.cost.state_bytes for s in old.stages]
