"""Every view of a plan shows its step and its bubble as the plan predicts them."""

import json
import re

import pytest

import alpa_lite as al
from alpa_lite.cli import main
from alpa_lite.inspection.page.drawings import timeline_svg
from alpa_lite.inspection.page.html import plan_html
from alpa_lite.inspection.page.page_data import page_data
from alpa_lite.inspection.text.diff import compare
from alpa_lite.inspection.text.tables import plan_summary
from alpa_lite.inspection.text.timeline import predicted_timeline
from alpa_lite.inspection.why.time_use import time_use
from alpa_lite.text import show_milliseconds, show_percent, show_seconds
from tests.inspection.conftest import make_plan

CASES = {
    "one stage": (al.planners.Hybrid(data=2, tensor=4), "p3.16xlarge"),
    "pipeline": (al.planners.Pipeline(pipeline=2), "p3.16xlarge"),
    # Four stages, so that transfers differ; two hosts wait for each other.
    "hosts": (al.planners.Pipeline(pipeline=4), "p3.16xlarge:2"),
    "split backward passes": (
        al.planners.Pipeline(pipeline=4, schedule=al.schedule.ZeroBubbleH1()),
        "p3.16xlarge",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def plan(request):
    planner, cluster = CASES[request.param]
    return make_plan(planner, cluster=cluster)


def test_text_json_and_page_show_one_step(plan, tmp_path, capsys):
    step, bubble = plan.prediction.step_seconds, plan.prediction.bubble_fraction
    head = f"predicted step {show_seconds(step)}"
    assert head in str(plan) and f"bubble {show_percent(bubble)}" in str(plan)
    assert plan_summary(plan)["step_seconds"] == step and plan_summary(plan)["bubble_fraction"] == bubble
    assert f"a step takes {show_seconds(step)} (predicted)" in " ".join(plan.explain_time().split())
    assert time_use(plan).step_seconds == step
    assert compare(plan, plan).seconds == (step, step)
    cards = dict(re.findall(r'<div class="card"><span>([^<]*)</span><b>([^<]*)</b>', plan_html(plan)))
    assert cards.get("step, predicted") == show_seconds(step) and cards.get("bubble") == show_percent(bubble)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["simulate", str(path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["step_seconds"], written["bubble_fraction"]) == (step, bubble)


def test_drawings_show_one_step(plan):
    step = plan.prediction.step_seconds
    timeline = predicted_timeline(plan)
    assert (timeline.step_seconds, timeline.bubble_fraction) == (step, plan.prediction.bubble_fraction)
    assert f"predicted step {show_seconds(step)}" in str(timeline)
    assert f"Predicted timeline of {show_seconds(step)}" in timeline_svg(plan)
    data = page_data(plan)
    assert data["lanes"][0]["end"] * data["tick_seconds"] == pytest.approx(step, rel=1e-5)
    busy = [sum(timeline.busy_seconds[stage] for stage in stages) for stages in timeline.rows]
    assert max(busy) <= step * (1 + 1e-9)
    # A drawing that ends earlier says so.
    ends_earlier = timeline.makespan_seconds < 0.98 * step
    assert (
        f"its tasks alone end after {show_seconds(timeline.makespan_seconds)}" in " ".join(str(timeline).split())
    ) == ends_earlier


def test_the_chosen_plan_has_one_price(capsys):
    plan = make_plan(al.planners.Auto())
    step = plan.prediction.step_seconds
    rows = [line for line in str(plan).splitlines() if "(chosen)" in line]
    assert len(rows) == 1 and show_milliseconds(step) in rows[0]
    assert al.Plan.from_json(plan.to_json()).prediction.step_seconds == step
