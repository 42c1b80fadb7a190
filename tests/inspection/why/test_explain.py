"""Explanations of parameters, stages, ops and source lines."""

import json

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.inspection.why.explain import explain, explanation


def split_parameter(plan):
    """Path and spec of a parameter that the "model" axis splits."""
    return next((n, s) for n, s in plan.stages[0].specs.items() if "/params/" in n and "model" in s.axes)


def test_stage(pipeline_plan):
    text = pipeline_plan.explain("stage 1")
    assert "devices 4..7" in text and "Peak memory per device" in text and "in flight" in text


def test_parameter_by_path_and_by_tail(tensor_plan):
    name, spec = split_parameter(tensor_plan)
    found = explanation(tensor_plan, name)
    assert found.kind == "parameter"
    assert str(spec) in found.sentences[0] and "model" in found.sentences[0]
    assert any("1/4 of the bytes" in sentence for sentence in found.sentences)
    assert any("Optimizer state" in sentence for sentence in found.sentences)
    tail = "/".join(name.split("/")[1:])
    assert explanation(tensor_plan, tail).subject == found.subject


def test_replicated_parameter(pipeline_plan):
    name = next(n for n in pipeline_plan.stages[0].specs if "/params/" in n)
    text = explain(pipeline_plan, name)
    assert "holds all of it" in text and "all bytes" in text


def test_pattern_names_repeated_layers(pipeline_plan):
    found = explanation(pipeline_plan, "params/*/w")
    assert "4 arrays" in found.subject


def test_op(tensor_plan):
    number = next(iter(tensor_plan.stages[0].ops))
    assert "layer" in explain(tensor_plan, f"op {number}")


def test_source_line(tensor_plan):
    use = next(u for u in tensor_plan.prediction.collectives if "sequential_networks.py" in u.source)
    line = use.source.split("/")[-1].split(" ")[0].rsplit(":", 1)[0]
    found = explanation(tensor_plan, line)
    assert found.kind == "source"
    mine = [u for u in tensor_plan.prediction.collectives if line in u.source]
    assert sum(g.count for g in found.collectives) == sum(u.count for u in mine)
    assert json.loads(json.dumps(found.to_json()))["collectives"][0]["source"].startswith(
        "models/sequential_networks.py:"
    )


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("stage 9", "has stage 0"),
        ("op 999999", "its ops are"),
        ("nothing like this", "stage 0"),
        ("batch/inptus", "batch/inputs"),
        ("sequential_networks.py:9999", "sequential_networks.py:"),
        ("", "For example"),
    ],
)
def test_unknown_subjects_get_a_sentence_with_close_matches(tensor_plan, subject, words):
    with pytest.raises(PlanError, match=words):
        explain(tensor_plan, subject)


def test_ambiguous_subject_lists_what_it_could_be(tensor_plan):
    with pytest.raises(PlanError, match="names several arrays"):
        explain(tensor_plan, "params")


def test_memory_of_stages_on_the_same_devices(interleaved_plan, pipeline_plan):
    assert "The peak counts what its devices hold of stage 0 too." in interleaved_plan.explain("stage 2")
    assert "what its devices hold of" not in pipeline_plan.explain("stage 1")
