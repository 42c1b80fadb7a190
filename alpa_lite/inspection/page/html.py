"""A plan as one self-contained HTML page, and its view in a notebook. Light, dark and printed; no network access.

summary       the key numbers                                                                          `sections`
timeline      drawn by `timeline.js`, which zooms it together with the memory over time                `page_data`
tables        devices, stages, parameters as blocks, communication by axis, plans considered           `sections`
foot          version, date, hardware, fingerprint, and how to repeat it                               `provenance`

`page.js`, `timeline.js` and `page.css` are the scripts and the style of the page. Notebooks remove scripts, so they
get the static drawings.

The script reads compact data: times are whole ticks, a million to the longest step, and starts are differences to the
previous start. Thus a task takes about a dozen characters, and the page of a plan with ten thousand tasks stays small.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from alpa_lite.inspection.page.argument_table import parameter_table
from alpa_lite.inspection.page.drawings import cluster_svg, kind_class, layers_svg, timeline_svg
from alpa_lite.inspection.page.elements import KINDS, STYLE, fragment_html, page_html, table_html
from alpa_lite.inspection.page.provenance import provenance_html
from alpa_lite.inspection.page.sections import (
    KEYS,
    Section,
    alternatives_section,
    communication_section,
    devices_section,
    memory_section,
    notes_sections,
    stages_section,
    summary_section,
    timeline_section,
)
from alpa_lite.inspection.text.tables import headline, plan_tables
from alpa_lite.inspection.text.timeline import Bar, MemoryTrack, memory_over_time, predicted_timeline, row_name
from alpa_lite.inspection.why.op_spans import OpLabel, OpSpan, OpTracks, op_spans
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.text import show_seconds

TICKS = 1_000_000
_LEVELS = 100_000
"""The number of levels of memory between zero and the capacity."""

MAX_POINTS = 4000
"""The greatest number of points of a memory line; a longer line is reduced to the extremes of as many parts."""

PARTS = 100_000
"""The number of parts of a task in which the times of its ops are given."""

MAX_OPS = 500
"""The greatest number of ops of a task that are drawn: the longest ones."""

_KINDS = tuple(KINDS)


def page_data(
    plan: Plan,
    *,
    simulated: Sequence[SpanLike] | None = None,
    measured: Sequence[SpanLike] | None = None,
    tracks: OpTracks | None = None,
) -> dict[str, object]:
    """Return the data of a plan's page: `lanes` of tasks, one per timeline, and `memory` over the same time.

    tracks    the ops of the tasks, for the predicted lane; None: those of `op_spans`
    """
    predicted = predicted_timeline(plan)
    listed = {"predicted": (*predicted.bars, *predicted.transfers), "simulated": simulated, "measured": measured}
    shown = {name: _shown(found or ()) for name, found in listed.items()}
    # Simulated and measured spans are optional, and a plan may predict none.
    spans: dict[str, Sequence[SpanLike]] = {name: found for name, found in shown.items() if found}
    # Never zero, since it is the divisor of all times.
    ends = {name: max(span.end_seconds for span in found) for name, found in spans.items()}
    longest = max([*ends.values(), predicted.step_seconds]) or 1e-12
    # The title of a lane says how long its step is, of which the predicted one does not end with its last task.
    ends["predicted"] = predicted.step_seconds
    # One tick for all lanes, so that they share the axis of time.
    tick = longest / TICKS
    inside = _Tracks.of(op_spans(plan) if tracks is None else tracks)
    return {
        "tick_seconds": tick,
        "kinds": list(_KINDS),
        "lanes": [
            {
                **_lane(name, found, plan, tick, inside),
                "end": round(ends[name] / tick),
                "seconds": show_seconds(ends[name]),
            }
            for name, found in spans.items()
        ],
        "tracks": inside.flat,
        "labels": inside.labels,
        "memory": [_memory(track, tick) for track in memory_over_time(plan)],
        "end": round(predicted.makespan_seconds / tick),
    }


@dataclass(frozen=True, kw_only=True)
class _Tracks:
    """The ops of tasks in the form of the page.

    flat       for each track its ops: number of the label, start minus the previous start, length, in parts of a task
    labels     for each label: what, source line, array, 1 for collectives
    number     for each stage and kind of bar the numbers of the tracks of its tasks
    """

    flat: list[list[int]] = field(default_factory=list[list[int]])
    labels: list[tuple[str, str, str, int]] = field(default_factory=list[tuple[str, str, str, int]])
    number: dict[tuple[int, str], list[int]] = field(default_factory=dict[tuple[int, str], list[int]])

    @staticmethod
    def of(tracks: OpTracks) -> _Tracks:
        """Return the tracks; equal ones, as equal stages have, once."""
        made, labels, known = _Tracks(), dict[OpLabel, int](), dict[tuple[int, ...], int]()
        for key, listed in tracks.items():
            for spans in listed:
                flat = tuple(_flat_track(spans, labels))
                if flat not in known:
                    known[flat] = len(made.flat)
                    made.flat.append(list(flat))
                made.number.setdefault(key, []).append(known[flat])
        made.labels.extend((each.what, each.source, each.array, int(each.collective)) for each in labels)
        return made


def _flat_track(spans: Sequence[OpSpan], labels: dict[OpLabel, int]) -> Iterator[int]:
    longest = sorted(spans, key=lambda span: span.start - span.end)[:MAX_OPS]
    before = 0
    for span in sorted(longest, key=lambda span: span.start):
        start, end = round(span.start * PARTS), round(span.end * PARTS)
        # What is shorter than a part of a task cannot be seen at any zoom that the page allows.
        if end > start:
            yield from (labels.setdefault(span.label, len(labels)), start - before, end - start)
            before = start


def safe_json(data: object) -> str:
    """Return JSON that is safe inside a `<script>` element: names of the user cannot end it or begin a comment."""
    # The HTML parser ends a script at `</script`, even inside of a string of JSON.
    # NaN and infinity, which JavaScript's parser refuses, raise an error here.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _shown(spans: Iterable[SpanLike]) -> list[SpanLike]:
    """Return the spans that take time."""
    return [span for span in spans if span.end_seconds > span.start_seconds]


def _lane(title: str, spans: Sequence[SpanLike], plan: Plan, tick: float, tracks: _Tracks) -> dict[str, object]:
    """Return one timeline: a row per submesh, and below it a row for the transfers to it if there are any."""
    row_of = {stage: row for row, stages in enumerate(plan.stages_together) for stage in stages}
    rows: dict[tuple[int, bool], list[SpanLike]] = {}
    for span in spans:
        rows.setdefault((row_of[span.stage], span.kind == "SEND"), []).append(span)
    listed = [
        {
            "name": ("to stage " if receives else "stage ") + row_name(plan.stages_together[row]),
            "receives": receives,
            "stages": list(plan.stages_together[row]),
            "inside": _inside(found, tracks),
            "tasks": _tasks(found, tick),
        }
        for (row, receives), found in sorted(rows.items(), key=lambda item: item[0])
    ]
    return {"title": title, "rows": listed}


def _inside(spans: Sequence[SpanLike], tracks: _Tracks) -> list[list[object]]:
    """Return what the tasks of each kind and stage contain: kind, stage, share of collectives, numbers of tracks."""
    found: dict[tuple[int, int], list[object]] = {}
    for span in spans:
        # Of a stage, all tasks of a kind spend the same share of their time on collectives.
        if isinstance(span, Bar):
            key = _KINDS.index(kind_class(span.kind)), span.stage
            share = round(span.communication_seconds / span.seconds, 4) if span.communication_seconds else 0
            found[key] = [*key, share, tracks.number.get((span.stage, span.kind), [])]
    return [each for each in found.values() if any(each[2:])]


def _tasks(spans: Sequence[SpanLike], tick: float) -> list[int]:
    """Return the tasks as one list: kind, stage, micro-batch (-1: whole step), start minus previous start, length."""
    flat: list[int] = []
    before = 0
    for span in sorted(spans, key=lambda span: span.start_seconds):
        start, end = round(span.start_seconds / tick), round(span.end_seconds / tick)
        microbatch = getattr(span, "microbatch", None)
        kind = _KINDS.index(kind_class(_words(span)))
        # A task that is shorter than a tick must still be seen and found.
        flat += [kind, span.stage, -1 if microbatch is None else microbatch, start - before, max(1, end - start)]
        before = start
    return flat


def _words(span: SpanLike) -> str:
    """Return the words that say what a span does; an instruction's are in the name of its task."""
    kind = span.kind.value if isinstance(span.kind, enum.Enum) else str(span.kind)
    return str(getattr(span, "name", kind)) if kind == "RUN" else kind


def _memory(track: MemoryTrack, tick: float) -> dict[str, object]:
    # The scale of the drawing: a plan that does not fit goes above the capacity.
    full = max(track.capacity_bytes, track.peak_bytes, 1.0)
    points = _thinned([(round(t / tick), b) for t, b in zip(track.seconds, track.bytes, strict=True)])
    flat: list[int] = []
    before = 0
    # Differences are small numbers, which take few characters.
    for time, held in points:
        flat += [time - before, round(held / full * _LEVELS)]
        before = time
    return {
        "name": f"stage {row_name(track.stages)}",
        "stages": list(track.stages),
        "full_bytes": full,
        "levels": _LEVELS,
        "capacity_bytes": track.capacity_bytes,
        "peak_bytes": track.peak_bytes,
        "kept_bytes": track.kept_bytes,
        "end": round(track.seconds[-1] / tick),
        "points": flat,
    }


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return about `MAX_POINTS` of the points, including the highest and the lowest."""
    if len(points) <= MAX_POINTS:
        return points
    # Every part of the points leaves two of them.
    size = -(-2 * len(points) // MAX_POINTS)
    kept: list[tuple[int, float]] = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        # Both extremes of a part: a mean would hide the peak for which the line is looked at.
        both = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(both)
    # The line begins at time zero, whatever the extremes of its first part are.
    return [points[0], *kept[1:]] if kept[0][0] == points[0][0] else [points[0], *kept]


_BAR = """<header class="bar">
<a class="skip" href="#summary">To the summary</a>
<nav aria-label="Sections">{links}</nav>
<label class="search"><span>Search</span> <input type="search" id="search" placeholder="parameter, line, stage 2 …"
  autocomplete="off" spellcheck="false" aria-describedby="found" aria-keyshortcuts="/"></label>
<span id="found" role="status" aria-live="polite"></span>
<button type="button" id="theme" aria-live="polite">colours: as the system</button>
</header>"""


def plan_html(
    plan: Plan,
    *,
    simulated: Sequence[SpanLike] | None = None,
    measured: Sequence[SpanLike] | None = None,
    allocated_bytes: Sequence[float] | None = None,
) -> str:
    """Return the page; `Plan.to_html` describes the arguments."""
    sections = [
        summary_section(plan),
        timeline_section(plan, simulated=simulated, measured=measured),
        memory_section(plan, allocated_bytes),
        devices_section(plan),
        stages_section(plan),
        Section(id="parameters", title="Parameters", body=parameter_table(plan)),
        communication_section(plan),
        alternatives_section(plan),
        *notes_sections(plan),
    ]
    shown = [section for section in sections if section.body]
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in shown)
    data = safe_json(page_data(plan, simulated=simulated, measured=measured))
    fragment = fragment_html(
        _BAR.format(links=links),
        "<main>",
        *map(str, shown),
        provenance_html(plan),
        f"<p class='keys'>{KEYS}</p>",
        "</main>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>\n{_file('page.js')}\n{_file('timeline.js')}</script>",
        style=STYLE + _file("page.css"),
    )
    return page_html(f"{plan.function}: {plan.name}", fragment)


def plan_fragment(plan: Plan) -> str:
    """Return the plan as a notebook shows it."""
    return fragment_html(
        f"<h1>{escape(plan.function)}: {escape(plan.name)}</h1>",
        "".join(f"<p>{escape(line)}</p>" for line in headline(plan)),
        cluster_svg(plan),
        layers_svg(plan),
        "<h2>Predicted step</h2>",
        timeline_svg(plan),
        "<p>light: forward, dark: backward, brown: update; one row per stage, or per group of devices that runs several"
        "</p>",
        *(table_html(table) for table in plan_tables(plan)),
    )


def _file(name: str) -> str:
    return (files("alpa_lite.inspection") / "page" / name).read_text(encoding="utf-8")
