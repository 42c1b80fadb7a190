"""Rows as tables, chart and page."""

from importlib import util

import pytest

from alpa_lite.cli.bench import report
from alpa_lite.cli.bench.report import (
    MAX_BARS,
    ChartError,
    activity_svg,
    activity_table,
    bars,
    bars_svg,
    draw,
    groups,
    page,
    plans_table,
    rate,
    reasons_table,
    shares,
    shortened,
    tables,
)
from alpa_lite.inspection.text.tables import render
from tests.cli.bench.conftest import ENVIRONMENT
from tests.inspection.page.test_html import parse


def test_plans_stand_in_the_order_of_their_times(row, auto_row):
    slow, fast = row(predicted_step_seconds=3.0), auto_row(predicted_step_seconds=1.5)
    table = plans_table([slow, fast, row(reason="no")])
    assert [cells[0] for cells in table.rows] == ["auto", "data parallel"]
    assert [cells[-1] for cells in table.rows] == ["1.00×", "2.00×"]
    assert "measured" not in table.columns
    measured = plans_table([slow.measured([1.0, 2.0]), fast.measured([3.0, 4.0])])
    assert [cells[0] for cells in measured.rows] == ["data parallel", "auto"] and "quartiles" in measured.columns
    assert all(len(cells) == len(measured.columns) for cells in measured.rows)


def test_plans_that_predictions_cannot_tell_from_the_first_are_named(row, auto_row):
    # The step of 2.3 s lies in the range of the first, but that not in its own.
    first = auto_row(predicted_step_seconds=1.9, predicted_likely_seconds=[1.7, 2.3])
    near, far = row(planner="near"), row(planner="far", predicted_step_seconds=2.3, predicted_likely_seconds=[2.0, 2.7])
    unknown = row(planner="unknown", predicted_likely_seconds=None)
    note = plans_table([far, near, first, unknown]).note
    assert note.endswith("range of the other: near.")
    assert "Indistinguishable" not in plans_table([far, first]).note
    assert "Indistinguishable" not in plans_table([near.measured([1.0]), first.measured([1.0])]).note


def test_a_shared_measurement_is_named(row):
    table = plans_table([row(planner="b").measured([1.0], same_as="a")])
    assert table.rows[0][0] == "b (as a)"


def test_shares_add_up(row):
    assert shares(row().simulation) == pytest.approx((0.625, 0.25, 0.125))
    assert sum(shares(row(communication_seconds=1.0, idle_seconds=0.9).simulation)) == pytest.approx(1.0)


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


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.skipif(util.find_spec("matplotlib") is None, reason="matplotlib is an extra")
@pytest.mark.parametrize("measured", [True, False])
def test_a_chart_is_drawn(row, auto_row, tmp_path, measured):
    rows = [auto_row(), row(), row(planner="no plan", reason="it does not fit")]
    rows = [each.measured([1.0, 2.0, 3.0]) if measured and not each.reason else each for each in rows]
    draw(rows, tmp_path / "chart.png")
    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(PNG) and len(data) > 5000


def test_searches_and_missing_plans_have_a_place(row, auto_row):
    many = [row(planner=f"plan {i}", predicted_step_seconds=1.0 + i) for i in range(30)]
    slow = auto_row(predicted_step_seconds=99.0)
    found = bars([*many, slow, row(planner="none", reason="no")])
    assert len(found) <= MAX_BARS and slow in found and found[-1].planner == "none" and found[0].planner == "plan 0"


def test_rates_are_samples_per_second(row):
    assert rate(row(), 4.0) == 8.0 and rate(row(batch_size=None), 4.0) == 0.25 and rate(row(), None) == 0.0


def test_without_matplotlib_it_is_a_sentence(row, tmp_path, monkeypatch):
    monkeypatch.setattr(report.util, "find_spec", lambda name: None)
    with pytest.raises(ChartError, match=r"pip install 'alpa_lite\[viz\]'"):
        draw([row()], tmp_path / "chart.png")


def test_the_page_is_whole_and_needs_no_network(row, auto_row):
    rows = [auto_row().measured([1.0, 2.0]), row().measured([2.0, 3.0]), row(planner="<none>", reason="a & b")]
    text = page([*rows, row(model="other <model>")], ENVIRONMENT)
    found = parse(text)
    assert not found.addresses and "url(" not in text and "@import" not in text and "script" not in found.tags
    assert text.count("prefers-color-scheme: dark") == 1 and "light-dark(" in text
    assert found.tags.count("svg") == 4
    assert "other &lt;model&gt;" in text and "&lt;none&gt;" in text and "a &lt;machine&gt;" in text


def test_a_bar_per_plan_a_line_per_quartiles_a_cross_without_plan(row, auto_row):
    rows = [auto_row().measured([1.0, 2.0]), row(), row(planner="none", reason="no")]
    text = bars_svg(rows)
    found = parse(text)
    assert found.tags.count("rect") == 2 and found.tags.count("line") == 2 and text.count("×") == 1
    assert 'class="auto"' in text and 'class="manual"' in text


def test_bars_are_as_long_as_plans_are_fast(row):
    text = bars_svg([row(predicted_step_seconds=1.0), row(planner="b", predicted_step_seconds=4.0)])
    widths = [float(part.split('"')[0]) for part in text.split('width="')[1:] if part[0].isdigit()]
    assert widths[0] == 4 * widths[1]


def test_parts_of_the_devices_time_add_up(auto_row):
    text = activity_svg([auto_row()])
    widths = [float(part.split('"')[0]) for part in text.split('width="')[1:] if part[0].isdigit()]
    assert len(widths) == 3 and abs(sum(widths) - 520.0) < 0.2
    assert activity_svg([auto_row(simulated_step_seconds=None)]) == ""
