"""A plan as one self-contained HTML page: the tables of `tables` and the predicted timeline as SVG, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from alpa_lite.inspection.tables import Table, headline, plan_tables
from alpa_lite.inspection.timeline import Bar, predicted_timeline, row_name
from alpa_lite.inspection.units import show_seconds
from alpa_lite.plan import Plan

STYLE = """
.alpa-lite { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --page: #ffffff;
  --forward: #3b7dd8; --backward: #2da07a; --update: #c77d1a;
  color: var(--ink); background: var(--page); font: 14px/1.45 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .alpa-lite { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117; } }
.alpa-lite h1 { font-size: 1.25rem; margin: 0 0 .25rem; } .alpa-lite h2 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
.alpa-lite p { margin: .25rem 0; color: var(--soft); }
.alpa-lite .scroll { overflow-x: auto; }
.alpa-lite table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.alpa-lite th, .alpa-lite td { padding: .2rem .9rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.alpa-lite th { color: var(--soft); font-weight: 600; } .alpa-lite .number { text-align: right; }
.alpa-lite svg { width: 100%; max-width: 70rem; height: auto; } .alpa-lite text { fill: var(--ink); font-size: 11px; }
.alpa-lite .forward { fill: var(--forward); } .alpa-lite .backward { fill: var(--backward); }
.alpa-lite .update { fill: var(--update); }
"""
"""Of everything in a `<div class="alpa-lite">`."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>body {{ margin: 0; }} body > .alpa-lite {{ min-height: 100vh; box-sizing: border-box; padding: 1.5rem; }}</style>
</head>
<body>
{fragment}
</body>
</html>
"""

_LEFT, _WIDTH, _ROW = 64.0, 900.0, 26.0


def plan_html(plan: Plan) -> str:
    """The page."""
    return page_html(f"{plan.function}: {plan.name}", plan_fragment(plan))


def page_html(title: str, fragment: str) -> str:
    """A whole page from its title and a `<div class="alpa-lite">` with its style."""
    return _PAGE.format(title=escape(title), fragment=fragment)


def plan_fragment(plan: Plan) -> str:
    """The page's content with its style, for notebooks."""
    first, second = headline(plan)
    parts = [
        f"<style>{STYLE}</style>",
        f"<h1>{escape(plan.function)}: {escape(plan.name)}</h1>",
        f"<p>{escape(first)}</p><p>{escape(second)}</p>",
        timeline_svg(plan),
        *(table_html(table) for table in plan_tables(plan)),
    ]
    return '<div class="alpa-lite">\n' + "\n".join(parts) + "\n</div>"


def table_html(table: Table) -> str:
    """A table under its title, with its note."""
    head = "".join(_cell("th", column, column in table.numeric) for column in table.columns)
    rows = "\n".join(
        f"<tr>{''.join(_cell('td', text, c in table.numeric) for c, text in zip(table.columns, row, strict=True))}</tr>"
        for row in table.rows
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>{note}"
    )


def _cell(tag: str, text: str, numeric: bool) -> str:
    kind = ' class="number"' if numeric else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def timeline_svg(plan: Plan) -> str:
    """The predicted step as SVG: a row per submesh, a bar per task; hovering a bar tells what it is."""
    timeline = predicted_timeline(plan)
    scale = _WIDTH / max(timeline.makespan_seconds, 1e-12)
    height = _ROW * len(timeline.rows) + 18
    labels = "".join(
        f'<text x="0" y="{_ROW * number + 16:.0f}">{_label(stages)}</text>'
        for number, stages in enumerate(timeline.rows)
    )
    bars = "\n".join(_bar(bar, scale) for bar in timeline.bars)
    end = show_seconds(timeline.makespan_seconds)
    return (
        "<h2>Predicted step</h2>\n"
        f'<svg viewBox="0 0 {_LEFT + _WIDTH:.0f} {height:.0f}" role="img" aria-label="Predicted timeline of {end}">\n'
        f'{labels}\n{bars}\n<text x="{_LEFT:.0f}" y="{height - 4:.0f}">0</text>'
        f'<text x="{_LEFT + _WIDTH:.0f}" y="{height - 4:.0f}" text-anchor="end">{end}</text>\n</svg>\n'
        "<p>blue: forward, green: backward, orange: update; one row per stage, or per "
        "group of devices that runs several</p>"
    )


def _label(stages: Sequence[int]) -> str:
    """What fits in front of a row; all of it when the pointer rests there."""
    if len(stages) <= 2:
        return f"stage {row_name(stages)}"
    return f"stage {stages[0]}, …<title>stages {row_name(stages)}</title>"


def _bar(bar: Bar, scale: float) -> str:
    x, width = _LEFT + bar.start_seconds * scale, (bar.end_seconds - bar.start_seconds) * scale
    which = "" if bar.microbatch is None else f" of micro-batch {bar.microbatch}"
    title = f"{bar.kind}{which}, stage {bar.stage}: {show_seconds(bar.end_seconds - bar.start_seconds)}"
    return (
        f'<rect class="{escape(bar.kind)}" x="{x:.2f}" y="{_ROW * bar.row + 3:.1f}" '
        f'width="{max(width - 0.5, 0.3):.2f}" height="{_ROW - 6:.1f}" rx="2"><title>{escape(title)}</title></rect>'
    )
