"""Timelines of one step, predicted and measured: tasks, also for chrome://tracing and Perfetto, and memory.

predicted    schedule.simulate on the plan's stage times, then the update of each stage        (`predicted_timeline`)
simulated    spans of plan.simulation, one per instruction of a program                       (`chrome_trace`)
measured     the same spans from runtime.execute; or any with stage, kind, start_seconds, end_seconds
both         in one trace, and side by side, task by task                                      (`overlaid`, `compared`)

The memory of the devices of each submesh during a predicted step:

held(t)  = Σ over the stages of the submesh: state + gradient sums + saved values of the micro-batches in flight
bytes(t) = held(t) + temporaries of the running task                                         (`memory_over_time`)

A micro-batch is in flight from the start of its forward to the end of its backward. Between the two parts of a split
backward pass, only the values passed from one part to the other stay alive. Without a backward pass, saved values live
only while the forward runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import TypedDict

from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.plan.plan import Plan, StagePlan
from alpa_lite.plan.pricing import dispatch_seconds
from alpa_lite.schedule import TaskKind, Timeline, passes_of, simulate
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.text import show_milliseconds, show_percent, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A predicted span: the forward, backward or update of a stage. `row` is the number of its submesh in the plan."""

    stage: int
    row: int
    kind: str
    microbatch: int | None
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTimeline:
    """A predicted step.

    bars               the spans of all stages, in seconds from the start of the step
    makespan_seconds   the end of the last span, updates included
    bubble_fraction    the idle share of the devices before the update
    busy_seconds       per stage, the seconds of its spans
    update_seconds     per stage, the seconds of its update
    rows               the stages on each submesh, which run one after the other
    """

    bars: tuple[Bar, ...]
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
                show_percent(busy / self.makespan_seconds if self.makespan_seconds > 0 else 0.0),
                show_milliseconds(sum(self.update_seconds[stage] for stage in stages)),
            )
            for stages in self.rows
            for busy in [sum(self.busy_seconds[stage] for stage in stages)]
        )
        table = Table(title="Stages", columns=columns, rows=rows, numeric=frozenset(columns[1:]))
        end, bubble = show_seconds(self.makespan_seconds), show_percent(self.bubble_fraction)
        return render([f"predicted step {end}, bubble {bubble}", ""], [table])

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


def predicted_timeline(plan: Plan) -> PredictedTimeline:
    """Simulate the step's schedule with the times of the plan.

    Every task pays one dispatch, as in the plan's own prediction. A plan stores only the sum of its transfers, so each
    boundary between stages gets an equal share. Therefore with three stages or more the makespan can differ a little
    from `plan.prediction.step_seconds`, which also includes the wait for the last host.
    """
    stages, count = plan.stages, plan.num_microbatches
    dispatch = dispatch_seconds(plan.cluster)
    # A step in one stage and one micro-batch is a single program: its tasks share one dispatch.
    whole = len(stages) == 1 and count == 1
    tasks = plan.schedule.tasks(len(stages), count)
    each = dispatch / len(tasks[0]) if whole else dispatch
    # Neighbouring stages on one submesh pass arrays on in place.
    apart = [float(a.submesh != b.submesh) for a, b in pairwise(stages)]
    # A micro-batch crosses each boundary once per pass: forward, and backward if there is one.
    passes = len(passes_of(tasks[0]))
    transfer = plan.prediction.transfer_seconds / (passes * count * sum(apart)) if any(apart) else 0.0
    timeline = simulate(
        tasks,
        [stage.cost.forward_seconds for stage in stages],
        [stage.cost.backward_seconds for stage in stages],
        weight_seconds=[stage.cost.weight_seconds for stage in stages],
        dispatch_seconds=each,
        transfer_seconds=[transfer * each for each in apart],
        # Virtual devices run their tasks one at a time.
        serialized=plan.cluster.shared_processor,
    )
    updates = tuple(stage.cost.update_seconds + (0.0 if whole else dispatch) for stage in stages)
    rows = plan.stages_together
    # On a shared processor all updates follow each other, not only those on the same devices.
    in_turn = [tuple(range(len(stages)))] if plan.cluster.shared_processor else rows
    row_of = {stage: row for row, numbers in enumerate(rows) for stage in numbers}
    bars = (*_bars(timeline, row_of), *_updates(updates, in_turn, timeline.makespan_seconds, row_of))
    busy = [sum(bar.end_seconds - bar.start_seconds for bar in bars if bar.stage == s) for s in range(len(stages))]
    return PredictedTimeline(
        bars=bars,
        makespan_seconds=max((bar.end_seconds for bar in bars), default=0.0),
        bubble_fraction=timeline.bubble_fraction,
        busy_seconds=tuple(busy),
        update_seconds=updates,
        rows=rows,
    )


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
    return spans.bars if isinstance(spans, PredictedTimeline) else spans


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


def _bars(timeline: Timeline, row_of: Mapping[int, int]) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            stage=span.stage,
            row=row_of[span.stage],
            kind=span.kind.value,
            microbatch=span.microbatch,
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
        )
        for span in timeline.spans
    )


def _updates(
    seconds: Sequence[float], in_turn: Iterable[Sequence[int]], start: float, row_of: Mapping[int, int]
) -> Iterable[Bar]:
    """Yield the updates after the last task: in parallel, but one after the other for stages on the same devices."""
    for stages in in_turn:
        end = start
        for stage in stages:
            begin, end = end, end + seconds[stage]
            if seconds[stage] > 0:
                span = {"start_seconds": begin, "end_seconds": end}
                yield Bar(stage=stage, row=row_of[stage], kind="update", microbatch=None, **span)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrack:
    """Memory per device of one submesh over time.

    stages            the stages of the submesh
    seconds, bytes    `bytes[i]` are in use from `seconds[i]` to `seconds[i + 1]`
    kept_bytes        the part in use all the time
    capacity_bytes    the memory of a device
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


def memory_over_time(plan: Plan, timeline: PredictedTimeline | None = None) -> tuple[MemoryTrack, ...]:
    """Return one track per submesh, in the order of `plan.stages_together`.

    timeline: the predicted timeline of this plan, if it has been computed already.

    The peak of a submesh that runs one stage is `plan.prediction.peak_bytes`. With several stages it can be below that,
    as the plan adds the largest temporaries of any of its tasks to the fullest moment.
    """
    shown = predicted_timeline(plan) if timeline is None else timeline
    return tuple(_track(plan, row, stages, shown) for row, stages in enumerate(plan.stages_together))


def _track(plan: Plan, row: int, stages: tuple[int, ...], timeline: PredictedTimeline) -> MemoryTrack:
    bars = [bar for bar in timeline.bars if bar.row == row]
    # Without a backward pass nothing is saved beyond the task itself, as in inference.
    with_backward = {bar.stage for bar in bars if bar.kind in _BACKWARD}
    changes = [(0.0, sum(plan.stages[s].cost.resident_bytes for s in stages))]
    for bar in bars:
        changes += _changes(bar, plan.stages[bar.stage], with_backward=bar.stage in with_backward)
    seconds, held = _steps(changes)
    capacity = plan.capacity_bytes(stages[0])
    return MemoryTrack(stages=stages, seconds=seconds, bytes=held, kept_bytes=changes[0][1], capacity_bytes=capacity)


_BACKWARD = (TaskKind.BACKWARD.value, TaskKind.WEIGHT_GRADIENT.value)


def _changes(bar: Bar, stage: StagePlan, *, with_backward: bool) -> Iterator[tuple[float, float]]:
    """Yield the allocations and releases of a task as (seconds, bytes)."""
    start, end = bar.start_seconds, bar.end_seconds
    if bar.kind == "update":
        return
    # The largest temporaries of any task of the stage: a plan does not say which task needs them.
    yield start, stage.cost.temporary_bytes
    yield end, -stage.cost.temporary_bytes
    if bar.kind == TaskKind.FORWARD.value:
        yield start, stage.cost.activation_bytes
        if not with_backward:
            yield end, -stage.cost.activation_bytes
    elif bar.kind == TaskKind.BACKWARD.value:
        yield end, -stage.cost.activation_bytes
    elif bar.kind == TaskKind.INPUT_GRADIENT.value:
        # The saved values end here, except for those that the second part of the backward pass still reads.
        yield end, stage.cost.handed_bytes - stage.cost.activation_bytes
    elif bar.kind == TaskKind.WEIGHT_GRADIENT.value:
        yield end, -stage.cost.handed_bytes


def _steps(changes: Iterable[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return times and sums, one per time: memory released at a time is available to what starts then."""
    # Releases sort before allocations of the same time, since they are negative.
    ordered = sorted(changes)
    sums = list(accumulate(change for _, change in ordered))
    last = {seconds: number for number, (seconds, _) in enumerate(ordered)}
    # Rounding may leave a sum a little below zero.
    return tuple(last), tuple(max(0.0, sums[number]) for number in last.values())
