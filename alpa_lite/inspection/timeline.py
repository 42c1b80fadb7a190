"""Timelines of one step, predicted and measured, and their form for chrome://tracing and Perfetto.

predicted    schedule.simulate on the plan's stage times, then the update of each stage     (`predicted_timeline`)
measured     any spans with stage, kind, start_seconds, end_seconds                         (`chrome_trace`)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from alpa_lite.inspection.tables import Table, render
from alpa_lite.inspection.units import show_milliseconds, show_percent, show_seconds
from alpa_lite.plan import Plan
from alpa_lite.schedule import Timeline, simulate


class SpanLike(Protocol):
    """What `chrome_trace` reads; `name` and `microbatch` are used where they exist."""

    @property
    def stage(self) -> int:
        """Stage number."""
        ...

    @property
    def kind(self) -> Any:
        """A word, or an enum whose value is one."""
        ...

    @property
    def start_seconds(self) -> float:
        """Since the step began."""
        ...

    @property
    def end_seconds(self) -> float:
        """Since the step began."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A predicted span: forward, backward or update of a stage."""

    stage: int
    kind: str
    microbatch: int | None
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTimeline:
    """A predicted step. `busy_seconds` and `update_seconds` are per stage; the makespan includes the update."""

    bars: tuple[Bar, ...]
    makespan_seconds: float
    bubble_fraction: float
    busy_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]

    def __str__(self) -> str:
        columns = ("stage", "tasks", "busy ms", "of the step", "update ms")
        rows = tuple(
            (
                str(stage),
                str(sum(bar.stage == stage for bar in self.bars)),
                show_milliseconds(busy),
                show_percent(busy / self.makespan_seconds if self.makespan_seconds > 0 else 0.0),
                show_milliseconds(update),
            )
            for stage, (busy, update) in enumerate(zip(self.busy_seconds, self.update_seconds, strict=True))
        )
        table = Table(title="Stages", columns=columns, rows=rows, numeric=frozenset(columns[1:]))
        end, bubble = show_seconds(self.makespan_seconds), show_percent(self.bubble_fraction)
        return render([f"predicted step {end}, bubble {bubble}", ""], [table])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def predicted_timeline(plan: Plan) -> PredictedTimeline:
    """The step on a clock, from the times in the plan.

    Every task pays one dispatch, as in the plan's own prediction. A plan keeps the sum of its transfers, so each
    boundary between stages gets an equal share: with three stages or more the makespan can differ a little from
    `plan.prediction.step_seconds`.
    """
    stages, count = plan.stages, plan.num_microbatches
    dispatch = plan.cluster.device.dispatch_seconds
    whole = len(stages) == 1 and count == 1
    each = dispatch / 2 if whole else dispatch
    boundaries = len(stages) - 1
    transfer = plan.prediction.transfer_seconds / (2 * count * boundaries) if boundaries else 0.0
    timeline = simulate(
        plan.schedule.tasks(len(stages), count),
        [stage.forward_seconds + each for stage in stages],
        [stage.backward_seconds + each for stage in stages],
        transfer_seconds=[transfer] * boundaries,
        serialized=plan.cluster.shared_processor,
    )
    updates = tuple(stage.update_seconds + (0.0 if whole else dispatch) for stage in stages)
    bars = (*_bars(timeline), *_updates(updates, timeline.makespan_seconds, serialized=plan.cluster.shared_processor))
    busy = [sum(bar.end_seconds - bar.start_seconds for bar in bars if bar.stage == s) for s in range(len(stages))]
    return PredictedTimeline(
        bars=bars,
        makespan_seconds=max((bar.end_seconds for bar in bars), default=0.0),
        bubble_fraction=timeline.bubble_fraction,
        busy_seconds=tuple(busy),
        update_seconds=updates,
    )


def chrome_trace(spans: Iterable[SpanLike] | Timeline | PredictedTimeline, process: str = "step") -> dict[str, Any]:
    """Spans in the JSON format of chrome://tracing and https://ui.perfetto.dev: a row per stage, microseconds.

    `process` names the group of rows; traces are joined by joining their `traceEvents`.
    """
    listed: Sequence[Any] = tuple(_spans(spans))
    stages = sorted({span.stage for span in listed})
    events: list[dict[str, Any]] = [_meta(process, "process_name", process)]
    events += [_meta(process, "thread_name", f"stage {stage}", stage) for stage in stages]
    events += [_event(process, span) for span in listed]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(spans: Iterable[SpanLike] | Timeline | PredictedTimeline) -> Iterable[Any]:
    if isinstance(spans, Timeline):
        return spans.spans
    return spans.bars if isinstance(spans, PredictedTimeline) else spans


def _event(process: str, span: Any) -> dict[str, Any]:
    kind = span.kind.value if isinstance(span.kind, enum.Enum) else str(span.kind)
    microbatch = getattr(span, "microbatch", None)
    label = getattr(span, "name", "") or kind
    return {
        "name": label if microbatch is None else f"{label} {microbatch}",
        "cat": kind,
        "ph": "X",
        "pid": process,
        "tid": span.stage,
        "ts": span.start_seconds * 1e6,
        "dur": (span.end_seconds - span.start_seconds) * 1e6,
        "args": {"stage": span.stage, "microbatch": microbatch},
    }


def _meta(process: str, kind: str, name: str, stage: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": stage, "args": {"name": name}}


def _bars(timeline: Timeline) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            stage=span.stage,
            kind=span.kind.value,
            microbatch=span.microbatch,
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
        )
        for span in timeline.spans
    )


def _updates(seconds: Sequence[float], start: float, *, serialized: bool) -> Iterable[Bar]:
    """The updates after the last task: side by side, or in turn on a shared processor."""
    for stage, duration in enumerate(seconds):
        if duration > 0:
            yield Bar(stage=stage, kind="update", microbatch=None, start_seconds=start, end_seconds=start + duration)
        start += duration if serialized else 0.0
