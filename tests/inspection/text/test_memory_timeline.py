"""What devices hold over time."""

from dataclasses import replace

import pytest

from alpa_lite.inspection.text.timeline import memory_over_time
from alpa_lite.plan.parts import StageCost
from alpa_lite.schedule import GPipe, Inference, ZeroBubbleH1


def test_the_peak_is_the_predicted_one(tensor_plan, pipeline_plan):
    for plan in (tensor_plan, pipeline_plan):
        peaks = [track.peak_bytes for track in memory_over_time(plan)]
        assert peaks == pytest.approx(list(plan.prediction.peak_bytes))


def test_stages_on_the_same_devices_share_a_track(interleaved_plan):
    tracks = memory_over_time(interleaved_plan)
    assert [track.stages for track in tracks] == [(0, 2), (1, 3)]
    for track in tracks:
        predicted = interleaved_plan.prediction.peak_bytes[track.stages[0]]
        assert 0.8 * predicted <= track.peak_bytes <= predicted * (1 + 1e-9)


def by_hand(plan, schedule, *, num_microbatches=4):
    """One stage, ten bytes of state, two of sums, three saved per micro-batch, five while at work, one handed on."""
    stage = replace(
        plan.stages[0],
        cost=StageCost(
            forward_seconds=1.0,
            backward_seconds=2.0,
            update_seconds=plan.stages[0].cost.update_seconds,
            state_bytes=10.0,
            accumulator_bytes=2.0,
            activation_bytes=3.0,
            temporary_bytes=5.0,
            weight_seconds=1.0,
            handed_bytes=1.0,
        ),
    )
    return memory_over_time(replace(plan, stages=(stage,), schedule=schedule, num_microbatches=num_microbatches))[0]


def test_micro_batches_pile_up(tensor_plan):
    track = by_hand(tensor_plan, GPipe())
    assert track.kept_bytes == 12
    # Four forwards, each with what it saves; four backwards, which give it back one by one; then the update.
    assert [round(held) for held in track.bytes[:8]] == [20, 23, 26, 29, 29, 26, 23, 20]
    assert track.bytes[-1] == pytest.approx(12)
    assert list(track.seconds) == sorted(set(track.seconds))


def test_of_a_backward_in_two_parts_less_is_kept_between_them(tensor_plan):
    one = by_hand(tensor_plan, ZeroBubbleH1(), num_microbatches=1)
    # Forward, gradients of what it received, gradients of weights.
    assert [round(held) for held in one.bytes[:3]] == [20, 20, 18]


def test_inference_keeps_nothing(tensor_plan):
    track = by_hand(tensor_plan, Inference())
    assert track.peak_bytes == pytest.approx(20) and track.bytes[-1] == pytest.approx(12)
