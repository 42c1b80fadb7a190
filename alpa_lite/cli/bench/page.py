"""All rows as one self-contained page: verdicts, and per model its bars, the use of devices, and all figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from alpa_lite.cli.bench.chart import bars, kind, rate
from alpa_lite.cli.bench.report import (
    activity_table,
    environment_lines,
    groups,
    plans_table,
    reasons_table,
    shares,
    shortened,
    title_of,
    verdicts_table,
)
from alpa_lite.cli.bench.row import Environment, Row
from alpa_lite.cli.bench.verdict import verdict
from alpa_lite.inspection.page.elements import STYLE, page_html, table_html
from alpa_lite.text import show_milliseconds

_OWN_STYLE = """
.alpa-lite { --auto: #1a7f5a; --search: #5fb49c; --manual: #8c96a3; --wait: #d9a441; --idle: #d5dae0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { .alpa-lite { --auto: #3fb68b; --search: #2f7d66; --manual: #6b7785;
  --wait: #b8862b; --idle: #30363d; --bad: #ff7b72; } }
.alpa-lite h2.model { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: 1.1rem; }
.alpa-lite .auto { fill: var(--auto); } .alpa-lite .search { fill: var(--search); }
.alpa-lite .manual { fill: var(--manual); } .alpa-lite .work { fill: var(--auto); }
.alpa-lite .wait { fill: var(--wait); }
.alpa-lite .idle { fill: var(--idle); } .alpa-lite text.bad { fill: var(--bad); }
.alpa-lite line { stroke: var(--ink); stroke-width: 1.5; } .alpa-lite line.predicted { stroke-dasharray: 2 2; }
"""
_LEFT, _WIDTH, _RIGHT, _ROW = 250.0, 520.0, 290.0, 22.0


def page(rows: Sequence[Row], environment: Environment) -> str:
    """Return the page; it needs no network, and follows the reader's choice of light or dark."""
    found = groups(rows)
    parts = [
        f"<style>{STYLE}{_OWN_STYLE}</style>",
        "<h1>Planners against each other</h1>",
        *(f"<p>{escape(line)}</p>" for line in environment_lines(environment)),
        table_html(verdicts_table([verdict(some) for some in found])),
        *(_model(some) for some in found),
    ]
    return page_html("Planners against each other", '<div class="alpa-lite">\n' + "\n".join(parts) + "\n</div>")


def _model(rows: Sequence[Row]) -> str:
    more = [table_html(table) for table in (activity_table(rows), plans_table(rows), reasons_table(rows)) if table]
    parts = [f'<h2 class="model">{escape(title_of(rows[0]))}</h2>', f"<p>{escape(str(verdict(rows)))}</p>"]
    return "\n".join([*parts, bars_svg(rows), activity_svg(rows), *more])


def bars_svg(rows: Sequence[Row]) -> str:
    """Draw the throughput of each planner.

    A line marks the quartiles, a dotted line the prediction, and a cross a planner without a plan.
    """
    shown = bars(rows)
    rates = [rate(row, seconds) for row in shown for seconds in (row.step_seconds, row.predicted_step_seconds)]
    scale = _WIDTH / max([*rates, 1e-30])
    unit = "samples per second" if rows[0].batch_size else "steps per second"
    bodies = [_bar(row, number, scale) for number, row in enumerate(shown)]
    return f"<h2>Throughput, {unit}</h2>\n{_svg(bodies, len(shown), f'{unit} of each planner')}"


def _bar(row: Row, number: int, scale: float) -> str:
    y = _ROW * number
    label = f'<text x="{_LEFT - 8:.0f}" y="{y + 15:.1f}" text-anchor="end">{escape(row.planner)}</text>'
    if row.reason:
        why = f"<title>{escape(shortened(row.reason))}</title>"
        return f'{label}<text class="bad" x="{_LEFT:.0f}" y="{y + 15:.1f}">× no plan{why}</text>'
    height, seconds = rate(row, row.step_seconds), row.step_seconds or 0.0
    marks = (
        f'<rect class="{kind(row)}" x="{_LEFT:.1f}" y="{y + 4:.1f}" width="{height * scale:.1f}" height="{_ROW - 8}"/>'
    )
    if row.measured_quartiles is not None:
        low, high = (_LEFT + rate(row, end) * scale for end in reversed(row.measured_quartiles))
        predicted = _LEFT + rate(row, row.predicted_step_seconds) * scale
        middle, top, bottom = y + _ROW / 2, y + 3, y + _ROW - 3
        marks += f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
        marks += f'<line class="predicted" x1="{predicted:.1f}" x2="{predicted:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
    tflops = row.predicted_tflops_per_device
    extra = "" if tflops is None else f", {tflops:.1f} TFLOPS per device"
    value = f"{height:.4g}  ({show_milliseconds(seconds)} ms{extra})"
    end = _LEFT + max(height, rate(row, row.predicted_step_seconds)) * scale
    return f'{label}{marks}<text x="{end + 6:.1f}" y="{y + 15:.1f}">{escape(value)}</text>'


def activity_svg(rows: Sequence[Row]) -> str:
    """Draw shares of a simulated step (computing, communication, idle) for the searches and the best manual plan."""
    best = verdict(rows).manual
    shown = [row for row in rows if (row.searched or row is best) and row.simulated_step_seconds is not None]
    if not shown:
        return ""
    longest = max(row.simulated_step_seconds or 0.0 for row in shown)
    bodies = [_parts(row, number, _WIDTH / max(longest, 1e-30)) for number, row in enumerate(shown)]
    return (
        f"<h2>Where the devices' time goes</h2>\n{_svg(bodies, len(shown), 'work, communication and idle time')}"
        "<p>green: at work, yellow: kept from work by communication, grey: idle; simulated, average over devices</p>"
    )


def _parts(row: Row, number: int, scale: float) -> str:
    y, x, seconds = _ROW * number, _LEFT, row.simulated_step_seconds or 0.0
    drawn = f'<text x="{_LEFT - 8:.0f}" y="{y + 15:.1f}" text-anchor="end">{escape(row.planner)}</text>'
    for name, share in zip(("work", "wait", "idle"), shares(row), strict=True):
        width = share * seconds * scale
        drawn += f'<rect class="{name}" x="{x:.1f}" y="{y + 4:.1f}" width="{width:.1f}" height="{_ROW - 8}"/>'
        x += width
    return f'{drawn}<text x="{x + 6:.1f}" y="{y + 15:.1f}">{show_milliseconds(seconds)} ms</text>'


def _svg(bodies: Sequence[str], count: int, label: str) -> str:
    box = f"0 0 {_LEFT + _WIDTH + _RIGHT:.0f} {_ROW * count + 4:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">\n' + "\n".join(bodies) + "\n</svg>"
