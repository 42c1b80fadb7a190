"""The tables of pages are those that the kept results give, and charts draw the numbers that stand on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alpa_lite.cli.models.alpa_cases import CASES, PUBLISHED
from benchmarks import megatron_scaling, statements, tutorial
from benchmarks.alpa.fixed_plans import fixed_plans
from benchmarks.alpa.price import Desk
from benchmarks.charts import Series, bars_svg, lines_svg, shares_svg

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("accelerators", statements.gpu_table),
        ("lecture", statements.megatron_table),
        ("lecture", statements.experts_table),
        ("lecture", statements.alpa_table),
    ],
)
def test_tables_are_those_of_the_kept_results(page: str, table) -> None:
    assert table() in (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_charts_draw_the_numbers_of_the_page() -> None:
    text = statements.PAGE.read_text(encoding="utf-8")
    assert statements.printed("[120.0") == [[120.0, 31.4, 16.6, 1.9], [1000, 800, 20], [2000, 1600, 20]]
    heights = _heights(statements.zero_svg())
    assert [round(h / heights[0], 2) for h in heights] == [1.0, 0.26, 0.14, 0.02]
    for row in statements.printed("m =  1"):
        assert all(str(value) in text for value in row[1:])


def test_the_kept_evaluation_of_alpa_has_all_models_and_the_published_figures() -> None:
    rows = statements.alpa_rows()
    assert [row.case for row in rows] == [case.id for case in PUBLISHED]
    for row, case in zip(rows, PUBLISHED, strict=True):
        own, *others = fixed_plans(case)
        assert own.measured_tflops == row.alpa[1], case.id
        rivals = [plan.measured_tflops for plan in others if plan.system in ("Megatron-LM", "DeepSpeed", "PP-DP")]
        assert row.rival[1] in rivals or row.rival == (None, None), case.id
        assert row.ours >= row.alpa[0], case.id


@pytest.mark.slow
def test_a_plan_of_alpa_is_predicted_as_kept() -> None:
    kept = next(row for row in statements.alpa_rows() if row.case == "wrn-1B")
    price = Desk().price(next(iter(fixed_plans(CASES["wrn-1B"]))))
    assert price.as_run_tflops is not None and abs(price.as_run_tflops / kept.alpa[0] - 1) < 0.01


def _heights(svg: str) -> list[float]:
    """The heights of the bars of the first series, without its key in the legend."""
    return [float(h) for h in re.findall(r'class="stage-0"[^>]*height="([\d.]+)"', svg)][1:]


def test_bars_are_as_high_as_their_values_and_missing_ones_are_marked() -> None:
    svg = bars_svg(["one", "two", "three"], [Series(name="a", values=(4.0, 2.0, None))], unit="u")
    high, low = _heights(svg)
    assert abs(high / low - 2) < 0.01 and "–" in svg


def test_shares_fill_their_row_and_lines_pass_through_their_values() -> None:
    widths = [
        float(w) for w in re.findall(r'width="([\d.]+)" height="20', shares_svg([("row", (0.25, 0.75))], ("a", "b")))
    ]
    assert abs((widths[0] + 1) / (widths[1] + 1) - 1 / 3) < 0.01
    (points,) = re.findall(
        r'points="([^"]+)"', lines_svg([1, 10, 100], [Series(name="a", values=(1, 2, 4))], axis="x", unit="y")
    )
    xs, ys = zip(*(map(float, point.split(",")) for point in points.split()), strict=True)
    assert abs((xs[1] - xs[0]) - (xs[2] - xs[1])) < 0.2 and abs((ys[0] - ys[2]) / (ys[0] - ys[1]) - 3) < 0.02


def test_the_tutorial_says_how_far_the_loss_fell() -> None:
    kept = tutorial.kept()
    first, last = re.search(
        r"The loss falls from ([\d.]+) to about ([\d.]+)", tutorial.PAGE.read_text(encoding="utf-8")
    ).groups()
    assert [f"{loss:.1f}" for loss in kept["losses"]] == [first, last]


@pytest.mark.slow
def test_one_bar_of_megatrons_figure_is_predicted_as_kept() -> None:
    kept = statements.megatron_rows()[0]
    row = megatron_scaling.row(1, 1, 100)
    assert kept[0] == "1 GPUs" and f"| {row.billions:.1f}B | 1 × 1 | 100 % | 100 % |" in statements.megatron_table()
    assert abs(row.tflops / statements.megatron_tflops()[0] - 1) < 0.01
