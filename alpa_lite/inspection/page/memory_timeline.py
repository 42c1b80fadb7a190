"""The memory of the devices of each submesh during a predicted step.

held(t)  = Σ over the stages of the submesh: state + gradient sums + saved values of the micro-batches in flight
bytes(t) = held(t) + temporaries of the running task                                         `memory_over_time`

A micro-batch is in flight from the start of its forward to the end of its backward. Between the two parts of a split
backward pass, only the values passed from one part to the other stay alive. Without a backward pass, saved values live
only while the forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from alpa_lite.inspection.text.timeline import Bar, PredictedTimeline, predicted_timeline
from alpa_lite.plan.plan import Plan, StagePlan
from alpa_lite.schedule import TaskKind


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
    with_backward = {bar.stage for bar in bars if bar.kind in _BACKWARD}
    changes = [(0.0, sum(plan.stages[s].state_bytes + plan.stages[s].accumulator_bytes for s in stages))]
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
    yield start, stage.temporary_bytes
    yield end, -stage.temporary_bytes
    if bar.kind == TaskKind.FORWARD.value:
        yield start, stage.activation_bytes
        if not with_backward:
            yield end, -stage.activation_bytes
    elif bar.kind == TaskKind.BACKWARD.value:
        yield end, -stage.activation_bytes
    elif bar.kind == TaskKind.INPUT_GRADIENT.value:
        yield end, stage.handed_bytes - stage.activation_bytes
    elif bar.kind == TaskKind.WEIGHT_GRADIENT.value:
        yield end, -stage.handed_bytes


def _steps(changes: Iterable[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return times and sums, one per time: memory released at a time is available to what starts then."""
    ordered = sorted(changes)
    sums = list(accumulate(change for _, change in ordered))
    last = {seconds: number for number, (seconds, _) in enumerate(ordered)}
    return tuple(last), tuple(max(0.0, sums[number]) for number in last.values())
