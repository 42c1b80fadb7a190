"""A plan on one screen."""

import json
from dataclasses import replace

from alpa_lite.inspection.text.groups import group_collectives
from alpa_lite.inspection.text.tables import (
    MAX_COLLECTIVE_ROWS,
    WIDTH,
    alternatives_table,
    collectives_table,
    parameters_table,
    plan_summary,
    plan_text,
    stages_table,
)


def test_plan_text_is_plain_and_fits(tensor_plan, pipeline_plan):
    for plan in (tensor_plan, pipeline_plan):
        text = plan_text(plan)
        assert str(plan) == text
        assert "\033" not in text
        assert max(map(len, text.splitlines())) <= WIDTH
        assert "p3.16xlarge" in text and plan.name in text and "predicted step" in text
        assert "\n\n\n" not in text


def test_specs_are_no_markup(tensor_plan):
    assert "[data, -]" in plan_text(tensor_plan)
    assert "model]" in plan_text(tensor_plan) or "[model" in plan_text(tensor_plan)


def test_a_row_per_stage(tensor_plan, pipeline_plan):
    assert len(stages_table(tensor_plan).rows) == 1
    rows = stages_table(pipeline_plan).rows
    assert [row[2] for row in rows] == ["0–3", "4–7"]
    assert all("data=4" in row[3] for row in rows)


def test_parameters_are_grouped_and_cut(tensor_plan):
    rows = parameters_table(tensor_plan).rows
    paths = [row[0] for row in rows]
    assert "batch/inputs" in paths
    assert len(rows) < len(tensor_plan.stages[0].specs) / 2
    assert not any("opt_state" in path for path in paths)
    cut = parameters_table(tensor_plan, max_rows=2).rows
    assert len(cut) == 3 and cut[-1][0] == f"… and {len(rows) - 2} more"


def test_optimizer_state_shows_where_it_differs(tensor_plan, zero_plan):
    assert "lie like their parameter" in parameters_table(tensor_plan).note
    assert any("/first/" in row[0] for row in parameters_table(zero_plan).rows)


def test_collective_groups_add_up(tensor_plan):
    uses = tensor_plan.prediction.collectives
    groups = group_collectives(uses)
    assert sum(group.count for group in groups) == sum(use.count for use in uses)
    assert abs(sum(g.seconds for g in groups) - sum(u.seconds * u.count for u in uses)) < 1e-12
    assert [g.seconds for g in groups] == sorted((g.seconds for g in groups), reverse=True)
    assert any("sequential_networks.py:" in group.source for group in groups)
    assert len(collectives_table(tensor_plan).rows) <= MAX_COLLECTIVE_ROWS
    assert "more" in collectives_table(tensor_plan, max_rows=1).note


def test_alternatives_only_where_there_are_some(tensor_plan):
    assert not alternatives_table(tensor_plan).rows
    step = tensor_plan.prediction.step_seconds
    searched = replace(tensor_plan, alternatives=(("data parallel", 2 * step),))
    assert alternatives_table(searched).rows[1][0] == "data parallel"
    assert alternatives_table(searched).rows[1][2] == "2.00×"
    assert "Plans considered" in plan_text(searched)


def test_summary_is_json(pipeline_plan):
    summary = json.loads(json.dumps(plan_summary(pipeline_plan)))
    assert summary["step_seconds"] == pipeline_plan.prediction.step_seconds
    assert [stage["mesh"] for stage in summary["stages"]] == [{"data": 4}, {"data": 4}]


def test_stages_on_the_same_devices(interleaved_plan, pipeline_plan):
    text = str(interleaved_plan)
    assert "schedule interleaved-1f1b(num_chunks=2)" in " ".join(text.split())
    assert "with that of all stages on the device" in " ".join(text.split())
    assert "with that of all stages on the device" not in str(pipeline_plan)
    rows = stages_table(interleaved_plan).rows
    assert [row[2] for row in rows] == ["0–3", "4–7", "0–3", "4–7"]
