"""Rows as lines of JSON, and the verdict over rows."""

import json

import pytest

from alpa_lite.cli.bench.row import Ratio, best, here, json_line, row_of_line, verdict
from tests.cli.bench.conftest import ENVIRONMENT

PROMISED = {
    "planner",
    "model",
    "cluster",
    "predicted_step_seconds",
    "predicted_likely_seconds",
    "measured_step_seconds",
    "measured_quartiles",
    "predicted_peak_bytes",
    "allocated_peak_bytes",
    "planning_seconds",
    "solver_status",
    "solver_gap",
    "num_microbatches",
    "num_stages",
    "communication_seconds",
    "idle_seconds",
    "reason",
    "git",
    "versions",
    "machine",
}


def test_a_line_has_what_is_promised_and_gives_the_row_back(row):
    one = row().measured([3.0, 1.0, 2.0, 10.0])
    line = json_line(one, ENVIRONMENT)
    data = json.loads(line)
    assert data.keys() >= PROMISED and "\n" not in line
    assert (data["git"], data["versions"], data["machine"]) == ("abc", {"jax": "1"}, "a <machine>")
    assert row_of_line(line) == one and one.price.likely_seconds.high == 2.4
    assert row_of_line(json_line(row(reason="no"), ENVIRONMENT)) == row(reason="no")


def test_what_was_measured_is_summed_up(row):
    one = row().measured([3.0, 1.0, 2.0, 10.0, 4.0], same_as="auto")
    assert one.run.step_seconds == 3.0 and one.run.same_as == "auto"
    assert one.run.quartiles == pytest.approx((1.5, 7.0))
    assert row().measured([2.5]).run.quartiles == (2.5, 2.5)


def test_measured_counts_before_predicted(row):
    assert row().step_seconds == 2.0
    assert row().measured([3.0]).step_seconds == 3.0


def test_the_environment_names_versions_and_machine():
    found = here("a device")
    assert found.versions["jax"] and found.machine.endswith("a device")
    assert found.git == "" or len(found.git.rstrip("+")) == 40


def test_the_best_manual_plan_is_the_fastest_as_measured(row, auto_row):
    rows = [
        auto_row(predicted_step_seconds=1.0).measured([2.0, 4.0, 6.0]),
        row(planner="a", predicted_step_seconds=0.5).measured([4.0, 4.0, 4.0]),
        row(planner="b", predicted_step_seconds=0.8).measured([1.0, 2.0, 3.0]),
        row(planner="no plan", reason="it does not fit", predicted_step_seconds=None),
        auto_row(planner="auto, inter-op only", auto=False).measured([0.1, 0.1, 0.1]),
    ]
    found = verdict(rows)
    assert found.auto is rows[0] and found.manual is rows[2]
    assert found.ratio.value == 2.0 and found.predicted == pytest.approx(2.0)
    assert "2.000" in str(found) and "best manual plan, b." in str(found)


def test_ratios_are_taken_round_by_round(row, auto_row):
    ratio = Ratio.of(auto_row().measured([1.0, 20.0, 3.0]), row().measured([2.0, 40.0, 2.0]))
    assert ratio.value == 0.5  # a slow round was slow for both
    assert ratio.quartiles == pytest.approx((0.5, 1.5))


def test_without_measurements_predictions_count(row, auto_row):
    found = verdict([auto_row(predicted_step_seconds=1.0), row(predicted_step_seconds=4.0)])
    assert found.ratio.value == found.predicted == 0.25 and found.ratio.quartiles is None


def test_missing_sides(row, auto_row):
    alone = verdict([auto_row(), row(reason="it does not fit")])
    assert alone.manual is None and alone.ratio is None and "no manual plan" in str(alone)
    none = verdict([auto_row(reason="nothing fits", predicted_step_seconds=None), row()])
    assert none.auto is None and "no plan" in str(none)
    assert best([]) is None


def test_what_was_not_measured_does_not_beat_what_was(row):
    quick, slow = row(predicted_step_seconds=0.1), row(predicted_step_seconds=9.0).measured([5.0])
    assert best([quick, slow]) is slow
