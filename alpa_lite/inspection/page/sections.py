"""The sections of a plan's page, each a heading with an anchor and a body; sections without a body are left out.

The table of arguments has one row per group of arrays: their shapes, a drawing of the blocks, the sharding in words,
and the bytes on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from alpa_lite.inspection.page.drawings import (
    block_svg,
    cluster_svg,
    layers_svg,
    sharding_kind,
    sharding_words,
    stage_names,
)
from alpa_lite.inspection.page.elements import KINDS, kind_name, table_html
from alpa_lite.inspection.text.groups import (
    Argument,
    ArgumentGroup,
    AxisUse,
    arguments_of,
    axis_uses,
    group_arguments,
    is_optimizer_state,
)
from alpa_lite.inspection.text.tables import (
    alternatives_table,
    collectives_table,
    headline,
    opaque_table,
    stages_table,
    undivided_table,
    used_devices,
    user_shardings_table,
)
from alpa_lite.inspection.text.timeline import compared, comparison_table, predicted_timeline
from alpa_lite.inspection.why.memory_use import allocated_table
from alpa_lite.plan.plan import ArrayShape, Plan
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.text import (
    show_bytes,
    show_count,
    show_layers,
    show_milliseconds,
    show_number,
    show_percent,
    show_ratio,
    show_seconds,
    show_usable,
)

_COLUMNS = ("path", "whole", "each device", "bytes of a device", "blocks", "cut", "stages")
_MARKS = {
    "whole": " data-numeric",
    "each device": " data-numeric",
    "bytes of a device": " class=number",
}
"""The columns that are sorted by numbers, shapes by their bytes."""


def parameter_table(plan: Plan) -> str:
    """Return the table of arguments with its controls; "" if the plan names no arguments."""
    arguments = arguments_of(plan)
    # Optimizer state last: the page hides its rows until the reader asks for them.
    groups = [*group_arguments(arguments.plain), *group_arguments(arguments.optimizer)]
    # Only kinds of sharding that occur, so that no choice empties the table.
    kinds = "".join(f"<option>{kind}</option>" for kind in sorted({sharding_kind(group.spec) for group in groups}))
    head = "".join(f"<th{_MARKS.get(column, '')}>{column}</th>" for column in _COLUMNS)
    rows = "\n".join(_row(plan, group) for group in groups)
    table = (
        '<div class="tools"><label>cut <select id="kind">'
        f'<option value="">any sharding</option>{kinds}</select></label>'
        f'<label><input type="checkbox" id="open"> name every array</label>'
        f"{_optimizer_switch(len(arguments.optimizer), len(arguments.unlike_parameter))}</div>"
        f'<div class="scroll"><table id="arrays" data-search aria-label="Parameters and inputs">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
        "<p>A drawing is the whole array, its first dim downwards; the block of the stage's first device is filled. "
        "A spec names the mesh axes of each dim, - where it is whole. The bytes are those of all arrays of a row that "
        "one device holds, on the stage with the most of them.</p>"
    )
    # An empty body leaves the section out of the page.
    return table if groups else ""


def _optimizer_switch(count: int, unlike: int) -> str:
    if not count:
        return ""
    otherwise = f", {unlike} of them sharded differently from their parameter" if unlike else ""
    words = f"{show_count(count, 'array')} of optimizer state{otherwise}"
    return f'<label><input type="checkbox" id="optimizer"> {words}</label>'


def _row(plan: Plan, group: ArgumentGroup) -> str:
    optimizer = ' data-optimizer=""' if is_optimizer_state(group.members[0].name) else ""
    meshes = {str(mesh): mesh.axis_sizes for stage in group.stages for mesh in [plan.stages[stage].mesh_shape]}
    # Stages with equal meshes have equal drawings, of which one is enough.
    blocks = "".join(dict.fromkeys(block_svg(group.spec, sizes) for sizes in meshes.values()))
    words = "<br>".join(dict.fromkeys(escape(sharding_words(group.spec, sizes)) for sizes in meshes.values()))
    kind = sharding_kind(group.spec)
    cells = (
        _shape_cell([member.shape for member in group.members], named=True),
        _shape_cell([member.block for member in group.members], named=False),
        _bytes_cell(group),
        f"<td>{blocks}</td><td><b>{kind}</b> <code>{escape(str(group.spec))}</code><br><small>{words}</small></td>",
        f"<td>{stage_names(group.stages)}</td>",
    )
    return (
        f'<tr data-kind="{kind}"{optimizer}><th scope="row"><code>{escape(group.pattern)}</code>{_members(group)}</th>'
        f"{''.join(cells)}</tr>"
    )


def _shape_cell(shapes: Sequence[ArrayShape | None], *, named: bool) -> str:
    """Return the shape that all arrays share; of several shapes the largest, and the number of others."""
    known = sorted({shape for shape in shapes if shape is not None}, key=lambda shape: -shape.bytes)
    if not known:
        return "<td></td>"
    largest = known[0]
    notes = [largest.dtype] if named else []
    notes += [f"and {show_count(len(known) - 1, 'other')}"] if len(known) > 1 else []
    return f'<td data-value="{largest.bytes}">{_dims(largest)}<br><small>{escape(", ".join(notes))}</small></td>'


def _dims(shape: ArrayShape) -> str:
    return " × ".join(map(str, shape.dims)) or "scalar"


def _bytes_cell(group: ArgumentGroup) -> str:
    """Return the bytes of a group on one device, and the share of each array."""
    shares = sorted({member.num_shards for member in group.members})
    share = " or ".join("all" if number == 1 else f"1/{number}" for number in shares)
    held = {stage: sum(_held(member) for member in group.members if member.stage == stage) for stage in group.stages}
    # The fullest stage is what must fit; the sum over stages is nobody's memory.
    most = max(held.values())
    # Plans of earlier versions have no shapes: without all of them the sum would be too small.
    known = all(member.block is not None for member in group.members)
    size = f"{show_bytes(most)}<br>" if known else ""
    # The page sorts by this value, not by the text with its unit.
    return f'<td class="number" data-value="{most}">{size}<small>{share}</small></td>'


def _held(member: Argument) -> int:
    return 0 if member.block is None else member.block.bytes


def _members(group: ArgumentGroup) -> str:
    if len(group.members) == 1:
        return ""
    listed = "\n".join(
        f'<li data-stage="{each.stage}">{escape(each.name)} <small>stage {each.stage}{_shape(each)}</small></li>'
        for each in group.members
    )
    return f"<details><summary>{len(group.members)} arrays</summary><ul>{listed}</ul></details>"


def _shape(member: Argument) -> str:
    return "" if member.shape is None else f", {_dims(member.shape)}"


KEYS = (
    "Keys: <kbd>/</kbd> search, <kbd>Esc</kbd> all rows again; in the timeline <kbd>+</kbd> <kbd>−</kbd> zoom, "
    "<kbd>←</kbd> <kbd>→</kbd> move, <kbd>0</kbd> the whole step, <kbd>↑</kbd> <kbd>↓</kbd> choose a row, "
    "<kbd>,</kbd> <kbd>.</kbd> the task before and after."
)

MAX_COLLECTIVES = 500
_MANY_HOSTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page; `title` is also the text of the link to it."""

    id: str
    title: str
    body: str

    def __str__(self) -> str:
        name = f"{self.id}-title"
        return (
            f'<section id="{self.id}" aria-labelledby="{name}"><h2 id="{name}">{escape(self.title)}</h2>\n'
            f"{self.body}</section>"
        )


def summary_section(plan: Plan) -> Section:
    """Return the summary: the key numbers, the devices and the layers of each stage."""
    # The second line repeats the cards below as text, for print.
    first, second, *more = headline(plan)
    batch = "".join(f"<p>{escape(line)}</p>" for line in more)
    cards = "".join(_cards(plan))
    legend = "".join(_legend(plan))
    # A few hosts leave room for the stages to their right.
    wide = " wide" if plan.cluster.num_hosts > _MANY_HOSTS else ""
    body = (
        f'<h1>{escape(plan.function)}: {escape(plan.name)}</h1><p class="lead">{escape(first)}</p>'
        f'<p class="print">{escape(second)}</p>{batch}'
        f'<div class="cards">{cards}</div>'
        f'<div class="where{wide}"><figure>{cluster_svg(plan)}</figure>'
        f'<div class="legend" role="group" aria-label="Show one stage">{legend}</div></div>'
        f"<figure>{layers_svg(plan)}</figure>"
    )
    return Section(id="summary", title="Summary", body=body)


def _cards(plan: Plan) -> list[str]:
    prediction, solver = plan.prediction, plan.solver
    step, fullest = prediction.step_seconds, plan.fullest_stage
    peak, capacity = prediction.peak_bytes[fullest], plan.capacity_bytes(fullest)
    usable = show_usable(capacity, plan.reserved_bytes(fullest))
    devices, found_in = used_devices(plan), show_seconds(solver.seconds)
    moved = sum(use.bytes * use.count for use in prediction.collectives)
    # Counts may be fractions, since a branch of a condition counts as a part of a run.
    number = sum(use.count for use in prediction.collectives)
    cards = [
        _card("step, predicted", show_seconds(step), f"no plan below {show_seconds(solver.bound)}"),
        _card("gap to the bound", show_percent(solver.gap), f"{solver.status}, found in {found_in}"),
        _card(
            "bubble",
            show_percent(prediction.bubble_fraction),
            f"{plan.schedule}, {show_count(plan.num_microbatches, 'micro-batch')}",
        ),
        _card(
            "peak memory",
            show_bytes(peak),
            f"{show_percent(peak / capacity)} of {usable}, stage {fullest}",
            share=peak / capacity,
        ),
        _card("work of a device", _rate(prediction.flops_per_device, step), f"of the busiest of {devices}"),
        _card(
            "collectives",
            show_bytes(moved),
            f"{show_number(round(number))} per step, {show_seconds(prediction.collective_seconds)} in all",
        ),
    ]
    # Plans that do not fit have an infinite time.
    others = [(seconds, name) for name, seconds in plan.alternatives if math.isfinite(seconds)]
    if others and step > 0:
        seconds, name = min(others)
        cards.append(_card("best other plan", show_ratio(seconds / step), f"{name}, {show_seconds(seconds)}"))
    return cards


def _rate(flops: float, seconds: float) -> str:
    rate = flops / seconds if seconds > 0 else 0.0
    # Powers of a thousand, as FLOP rates are given everywhere, unlike bytes.
    scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if rate >= s), (1e3, "k"))
    return f"{rate / scale:.3g} {unit}FLOP/s"


def _card(name: str, value: str, note: str, share: float | None = None) -> str:
    bar = ""
    if share is not None:
        full = " over" if share > 1 else ""
        bar = f'<span class="level{full}"><span style="width:{min(100.0, 100 * share):.1f}%"></span></span>'
    words = f"<span>{escape(name)}</span><b>{escape(value)}</b>{bar}<small>{escape(note)}</small>"
    return f'<div class="card">{words}</div>'


def _legend(plan: Plan) -> list[str]:
    buttons: list[str] = []
    for number, stage in enumerate(plan.stages):
        text = f"{show_layers(*stage.layers)} · {stage.submesh} · {stage.mesh_shape}"
        buttons.append(
            f'<button type="button" data-stage="{number}" aria-pressed="false">{stage_names([number])} '
            f"{escape(text)}</button>"
        )
    return buttons


def timeline_section(
    plan: Plan, *, simulated: Sequence[SpanLike] | None, measured: Sequence[SpanLike] | None
) -> Section:
    """Return the place where the script draws the step; with simulated and measured spans, a comparison too."""
    names = ["predicted", *(["simulated"] if simulated else []), *(["measured"] if measured else [])]
    buttons = "".join(
        f'<button type="button" data-zoom="{key}" aria-label="{label}" title="{label} ({key})">{sign}</button>'
        for key, label, sign in (
            ("+", "zoom in", "+"),
            ("-", "zoom out", "−"),
            ("ArrowLeft", "earlier", "←"),
            ("ArrowRight", "later", "→"),
            ("0", "the whole step", "0"),
        )
    )
    legend = "".join(
        f'<span data-kind="{name}"><svg class="key" viewBox="0 0 10 10" aria-hidden="true">'
        f'<rect class="{name}" width="10" height="10"/></svg> {kind_name(name)}</span>'
        for name in KINDS
    )
    body = (
        f'<div class="tools" role="toolbar" aria-label="Timeline">{buttons}<span class="kinds">{legend}</span></div>'
        f'<div id="timeline" class="chart" tabindex="0" role="group" aria-describedby="hint" '
        f'aria-label="Timeline, {" and ".join(names)}"><noscript>The timeline needs JavaScript.</noscript></div>'
        '<p id="task" role="status" aria-live="polite"></p><p id="hint">Click it, then turn the wheel to zoom and drag '
        "to move (or hold Ctrl); with the keyboard + − ← → 0. The numbers are micro-batches.</p>"
    )
    if note := predicted_timeline(plan).note:
        body += f"<p>{note}</p>"
    # Simulated and not predicted spans: they come from the same instructions as measured ones.
    if simulated and measured:
        body += table_html(comparison_table(compared(simulated, measured)), heading="h3")
    return Section(id="step", title="One step", body=body)


def memory_section(plan: Plan, allocated_bytes: Sequence[float] | None = None) -> Section:
    """Return the place where the script draws memory over time, and the bytes that XLA allocates if they are given."""
    peaks = ", ".join(
        f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}: "
        f"{show_bytes(plan.prediction.peak_bytes[stages[0]])}"
        for stages in plan.stages_together
    )
    body = (
        '<div id="memory" class="chart" tabindex="0" role="group" aria-describedby="peaks" '
        'aria-label="Predicted memory over time"></div>'
        f'<p id="peaks">Bytes per device, on the clock of the timeline. <span id="scale"></span> Peaks: '
        f"{escape(peaks)}.</p>"
    )
    if allocated_bytes is not None:
        body += table_html(allocated_table(plan, allocated_bytes), heading="h3")
    return Section(id="memory-over-time", title="Memory", body=body)


def stages_section(plan: Plan) -> Section:
    """Return the table of stages."""
    table = stages_table(plan)
    # The number of a stage is drawn in its colour, as in all other sections.
    cells = {"stage": lambda text: stage_names([int(text)])}
    return Section(id="stages", title="Stages", body=table_html(table, heading="", cells=cells, search=True))


def communication_section(plan: Plan) -> Section:
    """Return bytes and seconds by mesh axis, then all collectives by source line."""
    uses = axis_uses(plan)
    most = max((use.bytes for use in uses), default=0.0)
    rows = "".join(_axis_row(use, most) for use in uses)
    transfers = plan.prediction.transfer_seconds
    between = f"<p>Transfers between stages: {show_seconds(transfers)} per step in all.</p>" if transfers > 0 else ""
    axes = (
        '<div class="scroll"><table aria-label="Collectives by axis"><thead><tr><th>axis</th><th>devices</th>'
        '<th>links</th><th>kind</th><th class="number">count</th><th class="number">bytes</th>'
        '<th class="number">ms</th><th></th></tr>'
        f"</thead><tbody>\n{rows}</tbody></table></div>"
        "<p>Per step, summed over the stages; bytes are the input of each device to the collective.</p>"
    )
    # Far more rows than a screen has: the page can be searched.
    listed = table_html(collectives_table(plan, MAX_COLLECTIVES), heading="h3", search=True)
    body = (axes if uses else "") + between + (listed if uses else "")
    return Section(id="communication", title="Communication", body=body)


def _axis_row(use: AxisUse, most: float) -> str:
    # Relative to the largest, so that the bars compare axes.
    share = 100 * use.bytes / most if most > 0 else 0.0
    return (
        f'<tr><th scope="row">{escape(use.axis)}</th><td>{escape(use.devices)}</td><td>{escape(use.links)}</td>'
        f'<td>{escape(use.kind)}</td><td class="number">{show_number(round(use.count, 2))}</td>'
        f'<td class="number">{show_bytes(use.bytes)}</td><td class="number">{show_milliseconds(use.seconds)}</td>'
        f'<td class="bars"><span style="width:{share:.1f}%"></span></td></tr>\n'
    )


def alternatives_section(plan: Plan) -> Section:
    """Return the other plans that were priced, the fastest first."""
    table = alternatives_table(plan)
    # In the order of the table's rows, to which they are joined below.
    seconds = (plan.prediction.step_seconds, *(found for _, found in plan.alternatives))
    worst = max((found for found in seconds if math.isfinite(found)), default=0.0)
    # The chosen plan is the first of the table, and stays before those that are as fast.
    # Not strict: without alternatives the table has no rows, not even the chosen plan's.
    ordered = sorted(zip(table.rows, seconds, strict=False), key=lambda pair: pair[1])
    rows = "\n".join(
        f'<tr{" class=chosen" if row is table.rows[0] else ""}><th scope="row">{escape(row[0])}</th>'
        f'<td class="number">{escape(row[1])}</td><td class="number">{escape(row[2])}</td><td class="bars">'
        + (f'<span style="width:{100 * found / worst:.1f}%"></span>' if math.isfinite(found) and worst > 0 else "")
        + "</td></tr>"
        for row, found in ordered
    )
    head = "".join(f"<th{' class=number' if c in table.numeric else ''}>{c}</th>" for c in table.columns)
    body = (
        f'<div class="scroll"><table data-search aria-label="{escape(table.title)}"><thead><tr>{head}<th></th></tr>'
        f"</thead><tbody>\n{rows}\n</tbody></table></div>"
    )
    return Section(id="alternatives", title=table.title, body=body if ordered else "")


def notes_sections(plan: Plan) -> list[Section]:
    """Return the sections on ops without a rule, dims that axes do not divide, and shardings of the user."""
    tables = {
        "opaque": opaque_table(plan),
        "undivided": undivided_table(plan),
        "user-shardings": user_shardings_table(plan),
    }
    return [
        Section(id=name, title=table.title, body=table_html(table, heading="", search=True) if table.rows else "")
        for name, table in tables.items()
    ]
