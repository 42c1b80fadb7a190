"""A bar chart per model in the style of Alpa's evaluation (Zheng et al., OSDI 2022, figure 7): throughput by planner.

A planner without a plan is a cross. Where plans were measured, a dotted line is the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

from alpa_lite.cli.bench.report import by_time, title_of
from alpa_lite.cli.bench.row import Row
from alpa_lite.errors import AlpaLiteError

MAX_BARS = 16
COLOURS = {"auto": "#1a7f5a", "search": "#5fb49c", "manual": "#8c96a3"}


class ChartError(AlpaLiteError):
    """Charts cannot be drawn."""


def check_matplotlib() -> None:
    """Raise `ChartError` if charts cannot be drawn."""
    if util.find_spec("matplotlib") is None:
        raise ChartError("Charts (PNG) are drawn by matplotlib, which is not installed: pip install 'alpa_lite[viz]'.")


def bars(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to draw: the fastest plans, every search, then those without a plan, while there is room."""
    found = by_time(rows)
    kept = [row for number, row in enumerate(found) if row.searched or number < MAX_BARS - 4]
    return [*kept, *[row for row in rows if row.reason]][:MAX_BARS]


def rate(row: Row, seconds: float | None) -> float:
    """Return samples per second; steps per second if there is no batch."""
    return 0.0 if not seconds else (row.batch_size or 1) / seconds


def kind(row: Row) -> str:
    """Return the kind of bar."""
    return "auto" if row.auto else "search" if row.searched else "manual"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the chart of the rows of one model as PNG. Raises `ChartError` without matplotlib."""
    check_matplotlib()
    from matplotlib.figure import Figure  # an optional extra

    shown = bars(rows)
    figure: Any = Figure(figsize=(max(5.0, 1.1 + 0.62 * len(shown)), 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(shown):
        colour = COLOURS[kind(row)]
        if row.reason:
            axes.text(number, 0.0, "×", ha="center", va="bottom", fontsize=16, color="#c0392b")
            continue
        height = rate(row, row.step_seconds)
        spread = None
        if row.measured_quartiles is not None:
            low, high = (rate(row, seconds) for seconds in reversed(row.measured_quartiles))
            spread = [[max(0.0, height - low)], [max(0.0, high - height)]]
        axes.bar(number, height, width=0.72, color=colour, yerr=spread, ecolor="#333333", capsize=2)
        if row.measured_step_seconds is not None:
            predicted = rate(row, row.predicted_step_seconds)
            axes.hlines(predicted, number - 0.36, number + 0.36, colors="#222222", linestyles="dotted")
    axes.set_xticks(range(len(shown)), [row.planner for row in shown], rotation=40, ha="right", fontsize=8)
    measured = any(row.measured_step_seconds is not None for row in shown)
    unit = "samples / s" if rows[0].batch_size else "steps / s"
    axes.set_ylabel(f"{unit} ({'measured; dotted: predicted' if measured else 'predicted'})", fontsize=9)
    axes.set_title(title_of(rows[0]), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0.0)
    figure.savefig(path, dpi=150)
