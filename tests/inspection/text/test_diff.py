"""Differences of plans."""

import json
from dataclasses import replace

import alpa_lite as al
from alpa_lite.inspection.text.diff import compare, diff


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
    text = tensor_plan.diff(pipeline_plan)
    assert "per step (predicted)" in text and "Peak memory per device" in text
    assert json.loads(json.dumps(found.to_json()))["seconds"][0] == tensor_plan.prediction.step_seconds


def test_it_says_what_it_buys(tensor_plan):
    prediction = replace(tensor_plan.prediction, step_seconds=tensor_plan.prediction.step_seconds / 2)
    better = replace(tensor_plan, prediction=prediction)
    assert "2.00× faster" in diff(tensor_plan, better)
    assert "2.00× slower" in diff(better, tensor_plan)


def test_other_code_is_said(tensor_plan):
    assert "different steps" in diff(tensor_plan, replace(tensor_plan, fingerprint="0" * 64))


def test_the_options_of_schedules_count(interleaved_plan):
    other = replace(interleaved_plan, schedule=al.schedule.Interleaved1F1B(num_chunks=4))
    assert "interleaved-1f1b(num_chunks=4)" in interleaved_plan.diff(other)
