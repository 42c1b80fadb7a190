"""The sections of a plan's page, each a heading with an anchor and a body; sections without a body are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from alpa_lite.inspection.page.drawings import cluster_svg, layers_svg, stage_names
from alpa_lite.inspection.page.elements import KINDS, kind_name, table_html
from alpa_lite.inspection.text.groups import AxisUse, axis_uses
from alpa_lite.inspection.text.tables import (
    Table,
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
from alpa_lite.plan.plan import Plan
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

KEYS = (
    "Keys: <kbd>/</kbd> search, <kbd>Esc</kbd> all rows again; in the timeline <kbd>+</kbd> <kbd>−</kbd> zoom, "
    "<kbd>←</kbd> <kbd>→</kbd> move, <kbd>0</kbd> the whole step, <kbd>↑</kbd> <kbd>↓</kbd> choose a row, "
    "<kbd>,</kbd> <kbd>.</kbd> the task before and after, <kbd>[</kbd> <kbd>]</kbd> the op before and after in it, "
    "<kbd>Enter</kbd> zoom to what is chosen."
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
    """Return the summary: the name of the plan and its key numbers."""
    # The second line repeats the cards below as text, for print.
    first, second, *more = headline(plan)
    batch = "".join(f"<p>{escape(line)}</p>" for line in more)
    body = (
        f'<h1>{escape(plan.function)}: {escape(plan.name)}</h1><p class="lead">{escape(first)}</p>'
        f'<p class="print">{escape(second)}</p>{batch}<div class="cards">{"".join(_cards(plan))}</div>'
    )
    return Section(id="summary", title="Summary", body=body)


def devices_section(plan: Plan) -> Section:
    """Return the devices and the layers of each stage, with a button for each stage."""
    legend = "".join(_legend(plan))
    # A few hosts leave room for the stages to their right.
    wide = " wide" if plan.cluster.num_hosts > _MANY_HOSTS else ""
    body = (
        f'<div class="where{wide}"><figure>{cluster_svg(plan)}</figure>'
        f'<div class="legend" role="group" aria-label="Show one stage">{legend}</div></div>'
        f"<figure>{layers_svg(plan)}</figure>"
    )
    return Section(id="devices", title="Devices", body=body)


def _cards(plan: Plan) -> list[str]:
    prediction, solver = plan.prediction, plan.solver
    step, fullest = prediction.step_seconds, plan.fullest_stage
    peak, capacity = prediction.peak_bytes[fullest], plan.capacity_bytes(fullest)
    usable = show_usable(capacity, plan.reserved_bytes(fullest))
    devices, found_in = used_devices(plan), show_seconds(solver.seconds)
    moved = sum(use.bytes * use.count for use in prediction.collectives)
    rate = _rate(prediction.flops_per_device, step)
    transfers = prediction.transfer_seconds
    ends = [show_seconds(end) for end in plan.likely_seconds or ()]
    likely = f"{' to '.join(ends)} in four of five cases; " if ends else ""
    cards = [
        _card(
            "step, predicted",
            show_seconds(step),
            f"{likely}no plan below {show_seconds(solver.bound)}, gap {show_percent(solver.gap)}; {solver.status}, "
            f"found in {found_in}",
        ),
        # Plans of earlier versions have no utilisation.
        _card(
            "MFU",
            show_percent(prediction.mfu),
            f"HFU {show_percent(prediction.hfu)}; the busiest of {devices}: {rate}",
            share=prediction.mfu,
        )
        if prediction.mfu
        else _card("work of a device", rate, f"of the busiest of {devices}"),
        _card(
            "bubble",
            show_percent(prediction.bubble_fraction),
            f"{plan.schedule}, {show_count(plan.num_microbatches, 'micro-batch')}"
            + (f", {plan.semantics}" if plan.num_updates > 1 else ""),
        ),
        _card(
            "peak memory",
            show_bytes(peak),
            f"{show_percent(peak / capacity)} of {usable}, stage {fullest}",
            share=peak / capacity,
        ),
        _card(
            "communication",
            show_seconds(prediction.collective_seconds + transfers),
            f"collectives {show_seconds(prediction.collective_seconds)}, {show_bytes(moved)}"
            + (f"; transfers {show_seconds(transfers)}" if transfers > 0 else "")
            + "; all stages, hidden ones too",
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
    body = chart_html(" and ".join(names))
    if note := predicted_timeline(plan).note:
        body += f"<p>{note}</p>"
    # Simulated and not predicted spans: they come from the same instructions as measured ones.
    if simulated and measured:
        body += table_html(comparison_table(compared(simulated, measured)), heading="h3")
    return Section(id="step", title="One step", body=body)


def chart_html(names: str) -> str:
    """Return the place of the timeline with its buttons and its legend; `names` says what it shows."""
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
    hint = (
        "Click it, then turn the wheel to zoom and drag to move (or hold Ctrl); with the keyboard + − ← → 0. The "
        "numbers are micro-batches. Click a task or a collective to keep what is said about it; Enter zooms to it, and "
        "to its ops. Where tasks are narrower than a pixel, the height of a colour is its share of the time."
    )
    return (
        f'<div class="tools" role="toolbar" aria-label="Timeline">{buttons}<span class="kinds">{legend}</span></div>'
        f'<div id="timeline" class="chart" tabindex="0" role="group" aria-describedby="hint" '
        f'aria-label="Timeline, {names}"><noscript>The timeline needs JavaScript.</noscript></div>'
        f'<p id="task" role="status" aria-live="polite"></p><p id="hint">{hint}</p>'
    )


def memory_section(plan: Plan, allocated_bytes: Sequence[float] | None = None) -> Section:
    """Return the place where the script draws memory over time, and the bytes that XLA allocates if they are given."""
    peaks = ", ".join(
        f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}: "
        f"{show_bytes(plan.prediction.peak_bytes[stages[0]])}"
        for stages in plan.stages_together
    )
    body = memory_chart_html(f" Peaks: {peaks}.")
    if allocated_bytes is not None:
        body += table_html(allocated_table(plan, allocated_bytes), heading="h3")
    return Section(id="memory-over-time", title="Memory", body=body)


def memory_chart_html(more: str) -> str:
    """Return the place of the memory over time, with more words below it."""
    return (
        '<div id="memory" class="chart" tabindex="0" role="group" aria-describedby="peaks" '
        'aria-label="Predicted memory over time"></div>'
        f'<p id="peaks">Bytes per device, on the clock of the timeline. <span id="scale"></span>{escape(more)}</p>'
    )


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


_LONGEST_BAR = 3.0
"""The times of the chosen plan up to which the bars of other plans are drawn to scale; longer ones are cut off."""


def alternatives_section(plan: Plan) -> Section:
    """Return the other plans that were priced, the fastest first, and those that do not work with the reasons."""
    step = plan.prediction.step_seconds
    works = [(seconds, name) for name, seconds in plan.alternatives if math.isfinite(seconds)]
    # The chosen plan stays before those that are as fast.
    ordered = [(step, ""), *works]
    ordered.sort(key=lambda pair: pair[0])
    longest = min(ordered[-1][0], _LONGEST_BAR * step) or 1.0
    rows = "\n".join(_alternative_row(plan, name, seconds, longest) for seconds, name in ordered)
    head = '<th>plan</th><th class="number">predicted ms per step</th><th class="number">against the chosen one</th>'
    table = (
        '<div class="scroll"><table data-search aria-label="Plans considered"><thead><tr>'
        f"{head}<th></th></tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )
    body = (table if works else "") + _refused(plan)
    return Section(id="alternatives", title="Plans considered", body=body if plan.alternatives else "")


def _alternative_row(plan: Plan, name: str, seconds: float, longest: float) -> str:
    step, shown = plan.prediction.step_seconds, name or f"{plan.name} (chosen)"
    # One plan that takes many times as long must not make all others look alike.
    cut = " cut" if seconds > longest else ""
    bar = f'<span class="level-bar{cut}" style="width:{100 * min(1.0, seconds / longest):.1f}%"></span>'
    ratio = show_ratio(seconds / step) if step > 0 else ""
    return (
        f'<tr{"" if name else " class=chosen"}><th scope="row">{escape(shown)}</th>'
        f'<td class="number">{show_milliseconds(seconds)}</td><td class="number">{ratio}</td>'
        f'<td class="bars">{bar}</td></tr>'
    )


def _refused(plan: Plan) -> str:
    """Return the plans that do not work, with the reasons."""
    reasons = dict(plan.refusals)
    rows = tuple((name, reasons.get(name, "")) for name, seconds in plan.alternatives if not math.isfinite(seconds))
    table = Table(title="Does not work", columns=("plan", "why not"), rows=rows)
    return f'<div class="reasons">{table_html(table, heading="h3", search=True)}</div>' if rows else ""


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
