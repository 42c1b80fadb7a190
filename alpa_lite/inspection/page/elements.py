"""The parts that all pages share: the style, the frame of a page, tables, and the colours of stages and tasks.

Each colour is a pair, for light and for dark paper; white text is readable on all of them. Neighbouring stages differ
in hue and in lightness, so that they can be distinguished with impaired colour vision and in black and white.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from alpa_lite.inspection.text.tables import Table

STAGES = (
    ("#2f6fc4", "#4a86d8"),
    ("#b35c00", "#c9731a"),
    ("#1f7f5c", "#2f9a73"),
    ("#8a4fb8", "#9f6bcb"),
    ("#a8324a", "#c44f66"),
    ("#4a6572", "#67848f"),
    ("#7a6a00", "#8f7f1a"),
    ("#0f7c8c", "#2492a3"),
    ("#a0458f", "#b862a8"),
    ("#5a57b8", "#7774d0"),
)
"""The colours of stages, (light, dark); they repeat if there are more stages."""

KINDS = {
    "forward": ("#6b7f94", "#7488a0"),
    "backward": ("#36485c", "#50667f"),
    "weight": ("#a3b2c1", "#2f4053"),
    "update": ("#84745c", "#94856b"),
    "collective": ("#d6246e", "#f0569a"),
    "receive": ("#e59500", "#f2b33d"),
    "other": ("#c9ced4", "#4a525c"),
}
"""The colours of what devices do: greys for computation, which no stage has, and two bright ones for communication.

`weight` is the computation of weight gradients where it is a task of its own.
"""


def kind_name(kind: str) -> str:
    """Return the name of a kind of tasks in a legend."""
    names = {"weight": "weight gradients", "receive": "transfers", "collective": "collectives"}
    return names.get(kind, kind)


def stage_class(stage: int) -> str:
    """Return the CSS class of a stage, as `stage-3`."""
    # There are as many classes as colours, whatever the number of stages.
    return f"stage-{stage % len(STAGES)}"


def stage_colour(stage: int) -> str:
    """Return the colour of a stage on light paper."""
    return STAGES[stage % len(STAGES)][0]


def colour_rules() -> str:
    """Return the CSS variables and classes; a drawing fills with `var(--c)`."""
    # `light-dark()` follows the reader's choice without a script, which notebooks remove.
    kinds = "".join(f"  --{kind}: light-dark({light}, {dark});\n" for kind, (light, dark) in KINDS.items())
    stages = "\n".join(
        f".alpa-lite .stage-{number} {{ --c: light-dark({light}, {dark}); }}"
        for number, (light, dark) in enumerate(STAGES)
    )
    fills = "\n".join(f".alpa-lite .{kind} {{ fill: var(--{kind}); }}" for kind in KINDS)
    return f".alpa-lite {{\n{kinds}}}\n{stages}\n{fills}\n"


STYLE = """
.alpa-lite { color-scheme: light dark;
  --ink: light-dark(#1f2328, #e6edf3); --soft: light-dark(#59636e, #9ba4ae); --line: light-dark(#d1d9e0, #3d444d);
  --page: light-dark(#ffffff, #0d1117); --raised: light-dark(#f6f8fa, #161b22); --good: light-dark(#1a7f5a, #3fb68b);
  --bad: light-dark(#b3261e, #ff7b72); --block: light-dark(#dbe7f6, #22344d); --own: light-dark(#2f6fc4, #6aa3ec);
  color: var(--ink); background: var(--page); padding: .5rem; font: 14px/1.45 system-ui, sans-serif; }
.alpa-lite h1 { font-size: 1.25rem; margin: 0 0 .25rem; } .alpa-lite h2 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
.alpa-lite p { margin: .25rem 0; color: var(--soft); }
.alpa-lite .scroll { overflow-x: auto; }
.alpa-lite table { border-collapse: collapse; color: inherit; font-size: inherit; font-variant-numeric: tabular-nums; }
.alpa-lite th, .alpa-lite td { padding: .2rem .9rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.alpa-lite thead th { color: var(--soft); font-weight: 600; } .alpa-lite tbody th { font-weight: 400; }
.alpa-lite th.number, .alpa-lite td.number { text-align: right; }
.alpa-lite svg { width: 100%; max-width: 70rem; height: auto; } .alpa-lite text { fill: var(--ink); font-size: 11px; }
.alpa-lite svg.block { width: 50px; height: 34px; vertical-align: middle; }
.alpa-lite .host { fill: var(--raised); stroke: var(--line); }
.alpa-lite text.small { fill: var(--soft); font-size: 9px; }
.alpa-lite text.on { fill: #ffffff; font-size: 9px; text-anchor: middle; pointer-events: none; }
.alpa-lite .device, .alpa-lite .layer { fill: var(--c); } .alpa-lite .device.unused { fill: var(--line); }
.alpa-lite .block .all { fill: var(--block); stroke: var(--own); } .alpa-lite .block .own { fill: var(--own); }
.alpa-lite .block path { stroke: var(--own); fill: none; stroke-width: .8; }
.alpa-lite .chip { background: var(--c); color: #ffffff; border-radius: .6em; padding: 0 .5em; font-size: .9em; }
.alpa-lite pre { font-size: 12px; line-height: 1.35; overflow: auto; max-height: 30rem; margin: .5rem 0; }
""" + colour_rules()
"""The style of everything in a `<div class="alpa-lite">`, in a page or in a notebook."""

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


def page_html(title: str, fragment: str) -> str:
    """Return a whole page from its title and a `<div class="alpa-lite">` with its style."""
    # The fragment may hold braces: only the template's own are replaced.
    return _PAGE.format(title=escape(title), fragment=fragment)


def fragment_html(*parts: str, style: str = STYLE) -> str:
    """Return parts of a page in a `<div class="alpa-lite">` with its style."""
    return f'<div class="alpa-lite">\n<style>{style}</style>\n' + "\n".join(filter(None, parts)) + "\n</div>"


Cell = Callable[[str], str]


def table_html(
    table: Table, *, heading: str = "h2", cells: Mapping[str, Cell] | None = None, search: bool = False
) -> str:
    """Return a table with its title and its note as HTML.

    heading    the element of the title; "" shows none
    cells      functions that render the cells of a column, by column; default: escaped text
    search     whether the page's search hides rows of the table
    """
    title = f"<{heading}>{escape(table.title)}</{heading}>" if heading else ""
    head = "".join(_cell("th", column, column in table.numeric, escape) for column in table.columns)
    # Only these functions may return markup: all other cells are escaped.
    draw = cells or {}
    rows = "\n".join(
        "<tr>"
        + "".join(
            _cell("td", text, column in table.numeric, draw.get(column, escape))
            for column, text in zip(table.columns, row, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    # The script finds the tables by this attribute.
    search_in = " data-search" if search else ""
    return (
        f'{title}<div class="scroll"><table aria-label="{escape(table.title)}"{search_in}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>{note}"
    )


def _cell(tag: str, text: str, numeric: bool, draw: Cell) -> str:
    kind = ' class="number"' if numeric else ""
    return f"<{tag}{kind}>{draw(text)}</{tag}>"
