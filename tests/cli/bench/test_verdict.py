"""Auto against the best manual plan."""

import pytest

from alpa_lite.cli.bench.verdict import Ratio, best, verdict


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
