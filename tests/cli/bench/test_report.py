"""Tables: order, columns, reasons, shares of the devices' time."""

import pytest

from alpa_lite.cli.bench.report import activity_table, groups, plans_table, reasons_table, shares, shortened, tables
from alpa_lite.inspection.text.tables import render


def test_plans_stand_in_the_order_of_their_times(row, auto_row):
    slow, fast = row(predicted_step_seconds=3.0), auto_row(predicted_step_seconds=1.5)
    table = plans_table([slow, fast, row(reason="no")])
    assert [cells[0] for cells in table.rows] == ["auto", "data parallel"]
    assert [cells[-1] for cells in table.rows] == ["1.00×", "2.00×"]
    assert "measured" not in table.columns
    measured = plans_table([slow.measured([1.0, 2.0]), fast.measured([3.0, 4.0])])
    assert [cells[0] for cells in measured.rows] == ["data parallel", "auto"] and "quartiles" in measured.columns
    assert all(len(cells) == len(measured.columns) for cells in measured.rows)


def test_a_shared_measurement_is_named(row):
    table = plans_table([row(planner="b").measured([1.0], same_as="a")])
    assert table.rows[0][0] == "b (as a)"


def test_shares_add_up(row):
    assert shares(row()) == pytest.approx((0.625, 0.25, 0.125))
    assert sum(shares(row(communication_seconds=1.0, idle_seconds=0.9))) == pytest.approx(1.0)


def test_activity_is_that_of_searches_and_the_best_manual_plan(row, auto_row):
    rows = [auto_row(), auto_row(planner="auto, inter-op only", auto=False), row(planner="a"), row(planner="b")]
    rows[3] = row(planner="b", predicted_step_seconds=1.0)
    assert [cells[0] for cells in activity_table(rows).rows] == ["auto", "auto, inter-op only", "b"]
    assert activity_table([row(simulated_step_seconds=None)]) is None


def test_reasons_are_shown_and_shortened(row):
    assert reasons_table([row()]) is None
    (cells,) = reasons_table([row(), row(reason="x" * 500)]).rows
    assert len(cells[1]) < 200 and cells[1].endswith("…") and shortened("short") == "short"


def test_models_are_kept_apart(row, auto_row):
    rows = [row(), auto_row(), row(model="other"), row(model="other", cluster="elsewhere")]
    assert [len(some) for some in groups(rows)] == [2, 1, 1]
    text = render([], tables(rows))
    assert "other, batch 32, on elsewhere (8 devices)" in text and text.count("Auto against the best manual plan") == 1


def test_a_model_without_any_plan(row):
    text = render([], tables([row(reason="it does not fit")]))
    assert "No planner found a plan." in text and "none fits" in text
