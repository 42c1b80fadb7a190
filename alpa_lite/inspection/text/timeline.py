"""Timelines of one step, predicted and measured: tasks, also for chrome://tracing and Perfetto, and memory.

predicted    the tasks and transfers of the plan's prediction, as its program was simulated   (`predicted_timeline`)
simulated    spans of plan.simulation, one per instruction of a program                       (`chrome_trace`)
measured     the same spans from runtime.execute; or any with stage, kind, start_seconds, end_seconds
both         in one trace, and side by side, task by task                                      (`overlaid`, `compared`)

The memory of the devices of each submesh is the most that they hold from the start of each task to the start of the
next one (`memory_over_time`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import median
from typing import TypedDict

from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.plan.parts import StageCost, TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import Timeline
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.text import show_milliseconds, show_percent, show_seconds

_CLOSE = 0.02
"""The relative difference between the predicted step and the end of its tasks up to which nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A predicted span: the forward, backward or update of a stage, or (kind SEND) a transfer to it.

    stage, row               the stage, and the number of its submesh in the plan
    communication_seconds    of its collectives, overlapped ones included, but at most its own length
    """

    stage: int
    row: int
    kind: str
    microbatch: int | None
    start_seconds: float
    end_seconds: float
    communication_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTimeline:
    """A predicted step.

    bars               the tasks of all stages, in seconds from the start of the step
    transfers          the transfers between stages, by receiving stage
    step_seconds       the step that the plan predicts, which includes what hosts wait for each other
    makespan_seconds   the end of the last span, updates included
    bubble_fraction    the share of the devices' time spent waiting for other stages
    busy_seconds       per stage, the seconds of its spans
    update_seconds     per stage, the seconds of its update
    rows               the stages on each submesh, which run one after the other
    """

    bars: tuple[Bar, ...]
    transfers: tuple[Bar, ...]
    step_seconds: float
    makespan_seconds: float
    bubble_fraction: float
    busy_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    rows: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        columns = ("stage", "tasks", "busy ms", "of the step", "update ms")
        rows = tuple(
            (
                row_name(stages),
                str(sum(bar.stage in stages for bar in self.bars)),
                show_milliseconds(busy),
                show_percent(busy / self.step_seconds if self.step_seconds > 0 else 0.0),
                show_milliseconds(sum(self.update_seconds[stage] for stage in stages)),
            )
            for stages in self.rows
            for busy in [sum(self.busy_seconds[stage] for stage in stages)]
        )
        table = Table(title="Stages", columns=columns, rows=rows, numeric=frozenset(columns[1:]))
        step, bubble = show_seconds(self.step_seconds), show_percent(self.bubble_fraction)
        return render([f"predicted step {step}, bubble {bubble}", *([self.note] if self.note else []), ""], [table])

    @property
    def note(self) -> str:
        """A sentence on the part of the step after its last task; empty if that is short."""
        # A reader would compare the end of the drawing with the predicted step.
        if abs(self.makespan_seconds - self.step_seconds) <= _CLOSE * self.step_seconds:
            return ""
        return (
            f"The predicted step of {show_seconds(self.step_seconds)} also includes the time of hosts to start programs"
            f" and wait for each other; its tasks alone end after {show_seconds(self.makespan_seconds)}."
        )

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


def predicted_timeline(plan: Plan) -> PredictedTimeline:
    """Return the tasks of a plan's prediction as bars; a task of several passes as one bar for each."""
    rows, runs = plan.stages_together, plan.prediction.tasks
    row_of = {stage: row for row, numbers in enumerate(rows) for stage in numbers}
    passes = [
        (stage, kind, microbatch, begin, end)
        for stage, role, microbatch, start, stop in zip(*runs.columns[:5], strict=True)
        for kind, begin, end in _passes(role, plan.stages[stage].cost, start, stop)
        if end > begin
    ]
    seconds: dict[tuple[int, str], float] = {}
    for stage, kind, _, begin, end in passes:
        seconds[stage, kind] = seconds.get((stage, kind), 0.0) + end - begin
    shares = _communication_shares(plan, seconds)
    stages, update = range(len(plan.stages)), TaskRole.UPDATE.value
    sent = zip(*plan.prediction.transfers.columns[1:5], strict=True)
    return PredictedTimeline(
        bars=tuple(
            Bar(
                stage=stage,
                row=row_of[stage],
                kind=kind,
                microbatch=microbatch,
                start_seconds=begin,
                end_seconds=end,
                communication_seconds=shares[stage, kind] * (end - begin),
            )
            for stage, kind, microbatch, begin, end in passes
        ),
        transfers=tuple(
            Bar(stage=to, row=row_of[to], kind="SEND", microbatch=number, start_seconds=begin, end_seconds=end)
            for to, number, begin, end in sent
        ),
        step_seconds=plan.prediction.step_seconds,
        makespan_seconds=max((end for *_, end in passes), default=0.0),
        bubble_fraction=plan.prediction.bubble_fraction,
        busy_seconds=tuple(sum(s for (where, _), s in seconds.items() if where == stage) for stage in stages),
        update_seconds=tuple(seconds.get((stage, update), 0.0) for stage in stages),
        rows=rows,
    )


_PHASE_OF = {TaskRole.FORWARD.value: "forward", TaskRole.UPDATE.value: "update"}
"""The phase of a kind of bar, as collectives name it; all others are parts of the backward pass."""


def _communication_shares(plan: Plan, seconds: Mapping[tuple[int, str], float]) -> dict[tuple[int, str], float]:
    """Return the share of their time that bars spend on collectives, by stage and kind, given the time of all of them.

    The collectives of a phase are shared out by the lengths of its bars.
    """
    moving: dict[tuple[int, str], float] = {}
    for use in plan.prediction.collectives:
        moving[use.stage, use.phase] = moving.get((use.stage, use.phase), 0.0) + use.seconds * use.count
    whole: dict[tuple[int, str], float] = {}
    for (stage, kind), length in seconds.items():
        key = stage, _PHASE_OF.get(kind, "backward")
        whole[key] = whole.get(key, 0.0) + length
    keys = {(stage, kind): (stage, _PHASE_OF.get(kind, "backward")) for stage, kind in seconds}
    # Collectives that run during other tasks may take longer than their own.
    return {bar: min(1.0, moving.get(key, 0.0) / whole[key]) for bar, key in keys.items()}


def _passes(role: TaskRole, cost: StageCost, start: float, end: float) -> Iterator[tuple[str, float, float]]:
    """Yield the passes that a task runs in turn: kind, start and end."""
    parts: dict[str, float] = {role.value: 1.0}
    if role in (TaskRole.STEP, TaskRole.FORWARD_BACKWARD):
        parts = {
            TaskRole.FORWARD.value: cost.forward_seconds,
            TaskRole.BACKWARD.value: cost.backward_seconds - cost.weight_seconds,
        }
    if role is TaskRole.STEP:
        parts[TaskRole.UPDATE.value] = cost.update_seconds
    total = sum(parts.values()) or 1.0
    ends = [start + (end - start) * part / total for part in accumulate(parts.values())]
    yield from zip(parts, [start, *ends[:-1]], [*ends[:-1], end], strict=True)


def row_name(stages: Sequence[int]) -> str:
    """Return the numbers of the stages on one submesh, as text."""
    return ", ".join(map(str, stages))


class ChromeTrace(TypedDict):
    """A trace in the JSON format of chrome://tracing."""

    traceEvents: list[dict[str, object]]
    displayTimeUnit: str


def chrome_trace(
    spans: Iterable[SpanLike] | Timeline | PredictedTimeline, process: str = "step", *, number: int = 1
) -> ChromeTrace:
    """Return spans in the JSON format of chrome://tracing and https://ui.perfetto.dev: a row per stage, microseconds.

    A predicted step has a row per submesh. Spans that overlap, as transfers may, are put on further rows of the same
    name, since viewers read overlapping spans of one row as nested calls.

    process    the name of the group of rows
    number     the id of the group, from 1 on: Perfetto takes 0 for none. Traces with different numbers are joined by
               joining their `traceEvents`.
    """
    # Instructions that only free or name buffers take no time and would clutter the trace.
    listed: Sequence[SpanLike] = [s for s in _spans(spans) if s.kind in _SHOWN or s.end_seconds > s.start_seconds]
    rows: dict[int, list[SpanLike]] = {}
    for span in listed:
        rows.setdefault(_row(span), []).append(span)
    events: list[dict[str, object]] = [_meta(number, "process_name", process)]
    for row, members in sorted(rows.items()):
        # Viewers sort rows by number, so transfers come below all tasks.
        does = " receives" if row >= _RECEIVING else ""
        name = f"stage {row_name(sorted({span.stage for span in members}))}{does}"
        for more, part in enumerate(_apart(members)):
            events.append(_meta(number, "thread_name", name, row + more * _FURTHER))
            events += [_event(number, row + more * _FURTHER, span) for span in part]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def overlaid(predicted: Iterable[SpanLike], measured: Iterable[SpanLike]) -> ChromeTrace:
    """Return one trace with both timelines, one group of rows above the other."""
    traces = (chrome_trace(predicted, "predicted"), chrome_trace(measured, "measured", number=2))
    return {"traceEvents": [event for trace in traces for event in trace["traceEvents"]], "displayTimeUnit": "ms"}


def _apart(spans: Iterable[SpanLike]) -> list[list[SpanLike]]:
    """Distribute spans over lists in which none begins before the previous one has ended."""
    lists: list[list[SpanLike]] = []
    for span in sorted(spans, key=lambda span: (span.start_seconds, span.end_seconds)):
        # The first list that is free takes the span, so that there are as few rows as overlap at any time.
        free = (found for found in lists if found[-1].end_seconds <= span.start_seconds)
        if (found := next(free, None)) is None:
            lists.append([span])
        else:
            found.append(span)
    return lists


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """Median seconds per run of one task (or of all transfers to a stage), predicted and measured."""

    name: str
    runs: int
    predicted_seconds: float
    measured_seconds: float


def compared(predicted: Sequence[SpanLike], measured: Sequence[SpanLike]) -> tuple[TaskComparison, ...]:
    """Compare the predicted and the measured spans of the same instructions, task by task."""
    groups: dict[str, list[tuple[float, float]]] = {}
    # Both lists follow the same instructions, in the same order.
    for a, b in zip(predicted, measured, strict=True):
        if a.kind in ("RUN", "SEND"):
            name = f"stage {a.stage} receives" if a.kind == "SEND" else str(getattr(a, "name", a.kind))
            seconds = a.end_seconds - a.start_seconds, b.end_seconds - b.start_seconds
            groups.setdefault(name, []).append(seconds)
    return tuple(
        TaskComparison(
            name=name,
            runs=len(pairs),
            predicted_seconds=median(a for a, _ in pairs),
            measured_seconds=median(b for _, b in pairs),
        )
        for name, pairs in groups.items()
    )


def comparison_text(rows: Sequence[TaskComparison]) -> str:
    """Return the comparison as text."""
    return render(["median of the runs in one step", ""], [comparison_table(rows)])


def comparison_table(rows: Sequence[TaskComparison]) -> Table:
    """Return the comparison as a table."""
    columns = ("task", "runs", "predicted ms", "measured ms", "measured / predicted")
    cells = tuple(
        (
            row.name,
            str(row.runs),
            show_milliseconds(row.predicted_seconds),
            show_milliseconds(row.measured_seconds),
            f"{row.measured_seconds / row.predicted_seconds:.2f}" if row.predicted_seconds > 0 else "-",
        )
        for row in rows
    )
    return Table(title="Tasks", columns=columns, rows=cells, numeric=frozenset(columns[1:]))


def _spans(spans: Iterable[SpanLike] | Timeline | PredictedTimeline) -> Iterable[SpanLike]:
    if isinstance(spans, Timeline):
        return spans.spans
    return (*spans.bars, *spans.transfers) if isinstance(spans, PredictedTimeline) else spans


def _event(number: int, row: int, span: SpanLike) -> dict[str, object]:
    kind = span.kind.value if isinstance(span.kind, enum.Enum) else str(span.kind)
    microbatch = getattr(span, "microbatch", None)
    label = getattr(span, "name", "") or kind
    return {
        "name": label if microbatch is None else f"{label} {microbatch}",
        "cat": kind,
        "ph": "X",
        "pid": number,
        "tid": row,
        # The format counts in microseconds.
        "ts": span.start_seconds * 1e6,
        "dur": (span.end_seconds - span.start_seconds) * 1e6,
        "args": {"stage": span.stage, "microbatch": microbatch},
    }


_SHOWN = ("RUN", "SEND")
"""The kinds of instructions that predicted and measured traces share."""

_RECEIVING = 10_000
"""The offset of the row for transfers to a stage, which run at the same time as its tasks."""

_FURTHER = 1_000_000
"""The distance between the numbers of rows that share a name."""


def _row(span: SpanLike) -> int:
    """Return the number of a span's row, from 1 on: viewers take thread 0 for none, or for the first one."""
    return 1 + getattr(span, "row", span.stage) + (_RECEIVING if span.kind == "SEND" else 0)


def _meta(number: int, kind: str, name: str, row: int = 1) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": number, "tid": row, "args": {"name": name}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrack:
    """Memory per device of one submesh over time.

    stages            the stages of the submesh
    seconds, bytes    `bytes[i]` are in use from `seconds[i]` to `seconds[i + 1]`
    kept_bytes        the part in use all the time: arguments that live here
    capacity_bytes    the memory of a device that a plan may use
    """

    stages: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    kept_bytes: float
    capacity_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The greatest number of bytes at any time."""
        return max(self.bytes)


def memory_over_time(plan: Plan) -> tuple[MemoryTrack, ...]:
    """Return one track per submesh, in the order of `plan.stages_together`."""
    return tuple(_track(plan, stages) for stages in plan.stages_together)


def _track(plan: Plan, stages: tuple[int, ...]) -> MemoryTrack:
    runs, kept = plan.prediction.tasks, sum(plan.stages[s].cost.state_bytes for s in stages)
    held, end = {0.0: kept}, 0.0
    for stage, start, stop, most in zip(runs.stages, *runs.columns[3:], strict=True):
        if stage in stages:
            held[start], end = most, max(end, stop)
    # A peak above that of all tasks is that of stacked arrays, which lie elsewhere between two steps.
    peak = max(plan.prediction.peak_bytes[stage] for stage in stages)
    held[end] = peak if runs.stages and peak > max(held.values()) else kept
    capacity = plan.capacity_bytes(stages[0])
    return MemoryTrack(
        stages=stages, seconds=tuple(held), bytes=tuple(held.values()), kept_bytes=kept, capacity_bytes=capacity
    )
