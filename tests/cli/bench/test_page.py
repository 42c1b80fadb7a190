"""The page is whole, self-contained, light and dark."""

from alpa_lite.cli.bench.page import activity_svg, bars_svg, page
from tests.cli.bench.conftest import ENVIRONMENT
from tests.inspection.page.test_html import parse


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
