"""What pins cost, and clusters side by side."""

import json
from dataclasses import replace

import pytest

from alpa_lite.inspection.why.what_if import Candidate, ClusterComparison, PinsCost, varied


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
