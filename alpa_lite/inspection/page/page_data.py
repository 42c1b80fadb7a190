"""The data from which a page's script draws its timelines, and the memory below them.

The script reads compact data: times are whole ticks, a million to the longest step, and starts are differences to the
previous start. Thus a task takes about a dozen characters, and the page of a plan with ten thousand tasks stays small.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alpa_lite.inspection.page.drawings import kind_class
from alpa_lite.inspection.page.elements import KINDS
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


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One timeline: its title, its spans, the seconds of the step, the plan, and the ops of its tasks."""

    title: str
    spans: Sequence[SpanLike]
    seconds: float
    plan: Plan
    tracks: OpTracks = field(default_factory=dict[tuple[int, str], "tuple[tuple[OpSpan, ...], ...]"])


def page_data(
    plan: Plan, *, simulated: Sequence[SpanLike] | None = None, measured: Sequence[SpanLike] | None = None
) -> dict[str, object]:
    """Return the data of a plan's page: `lanes` of tasks, one per timeline, and `memory` over the same time."""
    sources = [_predicted_source("predicted", plan)]
    for title, spans in (("simulated", simulated), ("measured", measured)):
        shown = _shown(spans or ())
        # Simulated and measured spans are optional.
        if shown:
            seconds = max(span.end_seconds for span in shown)
            sources.append(_Source(title=title, spans=shown, seconds=seconds, plan=plan))
    return _data(sources, [("", plan)])


def pair_data(before: Plan, after: Plan) -> dict[str, object]:
    """Return the data of a page on two plans: a lane for each, on one clock, and the memory of both."""
    named = (("before", before), ("after", after))
    sources = [_predicted_source(f"{when}: {plan.name}", plan) for when, plan in named]
    return _data(sources, [(f"{when}, ", plan) for when, plan in named])


def _predicted_source(title: str, plan: Plan) -> _Source:
    predicted = predicted_timeline(plan)
    spans = _shown((*predicted.bars, *predicted.transfers))
    # The title of a lane says how long its step is; the predicted one does not end with its last task.
    return _Source(title=title, spans=spans, seconds=predicted.step_seconds, plan=plan, tracks=op_spans(plan))


def _data(sources: Sequence[_Source], plans: Sequence[tuple[str, Plan]]) -> dict[str, object]:
    """Return the data of some timelines, and of the memory of some plans, each with what stands before its stages."""
    ends = [span.end_seconds for source in sources for span in source.spans]
    # Never zero, since it is the divisor of all times. One tick for all lanes, so that they share the axis of time.
    tick = (max([*ends, *(source.seconds for source in sources)]) or 1e-12) / TICKS
    inside, lanes = _Tracks(), list[dict[str, object]]()
    for source in sources:
        lane = _lane(source, tick, inside.added(source.tracks))
        lanes.append({**lane, "end": round(source.seconds / tick), "seconds": show_seconds(source.seconds)})
    # After its last task a device holds its state until the next step begins.
    memory = [
        _memory(prefix, track, max(track.seconds[-1], plan.prediction.step_seconds), tick)
        for prefix, plan in plans
        for track in memory_over_time(plan)
    ]
    return {
        "tick_seconds": tick,
        "kinds": list(_KINDS),
        "lanes": [lane for lane, source in zip(lanes, sources, strict=True) if source.spans],
        "tracks": inside.flat,
        "labels": [(each.what, each.source, each.array, int(each.collective)) for each in inside.labels],
        "memory": memory,
    }


@dataclass(frozen=True, kw_only=True)
class _Tracks:
    """The ops of tasks in the form of the page.

    flat       for each track its ops: number of the label, start minus the previous start, length, in parts of a task
    labels     the number of each label
    known      the number of each track, by its content: equal stages have equal ones
    """

    flat: list[list[int]] = field(default_factory=list[list[int]])
    labels: dict[OpLabel, int] = field(default_factory=dict[OpLabel, int])
    known: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def added(self, tracks: OpTracks) -> dict[tuple[int, str], list[int]]:
        """Add tracks; return for each stage and kind of bar the numbers of the tracks of its tasks."""
        numbers: dict[tuple[int, str], list[int]] = {}
        for key, listed in tracks.items():
            for spans in listed:
                flat = tuple(_flat_track(spans, self.labels))
                if flat not in self.known:
                    self.known[flat] = len(self.flat)
                    self.flat.append(list(flat))
                numbers.setdefault(key, []).append(self.known[flat])
        return numbers


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


def _lane(source: _Source, tick: float, tracks: Mapping[tuple[int, str], Sequence[int]]) -> dict[str, object]:
    """Return one timeline: a row per submesh, and below it a row for the transfers to it if there are any."""
    plan = source.plan
    row_of = {stage: row for row, stages in enumerate(plan.stages_together) for stage in stages}
    rows: dict[tuple[int, bool], list[SpanLike]] = {}
    for span in source.spans:
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
    return {"title": source.title, "rows": listed}


def _inside(spans: Sequence[SpanLike], tracks: Mapping[tuple[int, str], Sequence[int]]) -> list[list[object]]:
    """Return what the tasks of each kind and stage contain: kind, stage, share of collectives, numbers of tracks."""
    found: dict[tuple[int, int], list[object]] = {}
    for span in spans:
        # Of a stage, all tasks of a kind spend the same share of their time on collectives.
        if isinstance(span, Bar):
            key = _KINDS.index(kind_class(span.kind)), span.stage
            share = round(span.communication_seconds / span.seconds, 4) if span.communication_seconds else 0
            found[key] = [*key, share, list(tracks.get((span.stage, span.kind), ()))]
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


def _memory(prefix: str, track: MemoryTrack, end: float, tick: float) -> dict[str, object]:
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
        "name": f"{prefix}stage {row_name(track.stages)}",
        "stages": list(track.stages),
        "full_bytes": full,
        "levels": _LEVELS,
        "capacity_bytes": track.capacity_bytes,
        "peak_bytes": track.peak_bytes,
        "kept_bytes": track.kept_bytes,
        "end": round(end / tick),
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
