"""Differences between plans, clusters compared, and the cost of pins."""

import json
from dataclasses import replace

import pytest

import alpa_lite as al
from alpa_lite.inspection.text.diff import Candidate, ClusterComparison, PinsCost, compare, diff, varied


def test_a_plan_does_not_differ_from_itself(tensor_plan):
    found = compare(tensor_plan, tensor_plan)
    assert not (found.decisions or found.specs or found.collectives or found.different_steps)
    assert "decide the same" in diff(tensor_plan, tensor_plan)
    assert "the same" in found.summary()[1]


def test_stages_micro_batches_and_specs(tensor_plan, pipeline_plan):
    found = compare(tensor_plan, pipeline_plan)
    assert {"micro-batches", "stages", "stage 0", "stage 1"} <= {change.what for change in found.decisions}
    assert any(change.before != change.after and "model" in change.before for change in found.specs)
    assert not any("/mu/" in change.what for change in found.specs)
    assert {change.what for change in found.collectives} <= {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute",
    }  # fmt: skip
    text = str(tensor_plan.diff(pipeline_plan))
    assert "per step (predicted)" in text and "Peak memory per device" in text
    assert json.loads(json.dumps(found.to_json()))["seconds"][0] == tensor_plan.prediction.step_seconds


def test_it_says_what_it_buys(tensor_plan):
    prediction = replace(tensor_plan.prediction, step_seconds=tensor_plan.prediction.step_seconds / 2)
    better = replace(tensor_plan, prediction=prediction)
    assert "2.00× faster" in diff(tensor_plan, better)
    assert "2.00× slower" in diff(better, tensor_plan)


def test_plans_that_the_prediction_cannot_tell_apart_are_said(tensor_plan):
    def slower(factor):
        prediction = tensor_plan.prediction
        changed = replace(prediction, step_seconds=factor * prediction.step_seconds)
        return replace(tensor_plan, prediction=changed, num_microbatches=2)

    low, high = tensor_plan.likely_seconds
    assert low < tensor_plan.prediction.step_seconds < high
    near, far = compare(tensor_plan, slower(1.01)), compare(tensor_plan, slower(3.0))
    assert near.indistinguishable and "cannot tell which is faster" in str(near)
    assert not far.indistinguishable and "cannot tell" not in str(far)
    shared = replace(tensor_plan, cluster=replace(tensor_plan.cluster, shared_processor=True))
    assert shared.likely_seconds is None and not compare(shared, shared).indistinguishable


def test_other_code_is_said(tensor_plan):
    assert "different steps" in diff(tensor_plan, replace(tensor_plan, fingerprint="0" * 64))


def test_the_options_of_schedules_count(interleaved_plan):
    other = replace(interleaved_plan, schedule=al.schedule.Interleaved1F1B(num_chunks=4))
    assert "interleaved-1f1b(num_chunks=4)" in str(interleaved_plan.diff(other))


def at(plan, seconds):
    return replace(plan, prediction=replace(plan.prediction, step_seconds=seconds))


@pytest.mark.parametrize(
    ("free", "pinned", "words"),
    [
        (1.0, 1.07, "Your pin costs 7.00 %: 1.00 s per step without, 1.07 s with."),
        (1.0, 1.0, "Your pin costs nothing"),
        (1.0, 0.88, "made the search find a plan that is 12.0 % faster"),
    ],
)
def test_what_a_pin_costs(tensor_plan, free, pinned, words):
    found = PinsCost(pins=("w",), free=at(tensor_plan, free), pinned=at(tensor_plan, pinned))
    assert words in found.sentence and words in " ".join(str(found).split())
    assert found.fraction == pytest.approx(pinned / free - 1)
    assert json.loads(json.dumps(found.to_json()))["pins"] == ["w"]


def test_several_pins(tensor_plan):
    found = PinsCost(pins=("v", "w"), free=at(tensor_plan, 1.0), pinned=at(tensor_plan, 1.5))
    assert found.sentence.startswith("Your 2 pins cost 50.0 %")


def test_the_fastest_is_the_measure(tensor_plan, pipeline_plan):
    candidates = [
        Candidate(cluster=tensor_plan.cluster, plan=at(tensor_plan, 2.0)),
        Candidate(cluster=varied(tensor_plan.cluster, memory_bytes=1e6), plan=None, problem="Nothing fits."),
        Candidate(cluster=varied(tensor_plan.cluster, bandwidth_scale=2.0), plan=at(pipeline_plan, 1.0)),
    ]
    found = ClusterComparison(candidates=tuple(candidates))
    assert found.fastest == candidates[2].plan
    text = str(found)
    assert "2.00×" in text and "none" in text and "Nothing fits." in text and max(map(len, text.splitlines())) <= 120
    assert [row["problem"] for row in found.to_json()["clusters"]] == [None, "Nothing fits.", None]
    assert ClusterComparison(candidates=tuple(candidates[1:2])).fastest is None
