"""Tasks of a pipeline, task lists per processor, and the peak number of micro-batches that a list holds.

A stage runs the backward pass of a micro-batch as one task or as two: the gradients of its inputs, on which the
previous stage depends, and the gradients of its weights, on which no other stage depends. A pipeline for inference has
no backward tasks.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

MOST_MICROBATCHES = 2**17
"""The largest number of stages × micro-batches in a step: each task is listed, simulated, drawn and run individually,
so time and memory grow with their number."""


# Properties, as the attributes of a protocol would have to be writable, which fields of frozen dataclasses are not.
class SpanLike(Protocol):
    """The interface of timed tasks and instructions that timelines draw; `name` and `microbatch` are optional."""

    @property
    def stage(self) -> int:
        """Stage number."""
        ...

    @property
    def kind(self) -> str | enum.Enum:
        """The kind of task or instruction: a string, or an enum whose value is a string."""
        ...

    @property
    def start_seconds(self) -> float:
        """Start time in seconds since the beginning of the step."""
        ...

    @property
    def end_seconds(self) -> float:
        """End time in seconds since the beginning of the step."""
        ...


class TaskKind(enum.Enum):
    """The part of the work on one micro-batch that a stage does in one task."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"

    # Members are compared by identity. The hash of enums is a function in Python, and tasks are keys of many mappings.
    __hash__ = object.__hash__

    @property
    def sends_back(self) -> bool:
        """Whether the task computes the gradients on which the previous stage depends."""
        return self in (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)

    @property
    def is_last(self) -> bool:
        """Whether the task is the last one of its stage for a micro-batch, in a pipeline with a backward pass."""
        return self in (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One part of the work of one stage on one micro-batch."""

    stage: int
    microbatch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.microbatch} on stage {self.stage}"


TaskLists = tuple[tuple[Task, ...], ...]
"""The ordered tasks of each processor."""


def kinds_of(tasks: Sequence[Task]) -> dict[int, frozenset[TaskKind]]:
    """Return the kinds of task that a list contains for each stage, by stage number."""
    by_stage: dict[int, set[TaskKind]] = {}
    for task in tasks:
        by_stage.setdefault(task.stage, set()).add(task.kind)
    return {stage: frozenset(kinds) for stage, kinds in by_stage.items()}


def processors_of(lists: Sequence[Sequence[Task]]) -> dict[int, int]:
    """Return the number of the list that holds the tasks of each stage, by stage number.

    A stage that several lists hold, which no valid schedule has, counts for the last of them.
    """
    return {task.stage: number for number, tasks in enumerate(lists) for task in tasks}


def peak_in_flight(tasks: Sequence[Task]) -> int:
    """Return the peak number of micro-batches in flight on one processor; a micro-batch counts once per stage."""
    # With sizes of 1 the peak is a count.
    return int(peak_held(tasks, [1.0] * (1 + max((task.stage for task in tasks), default=0))))


def splits_backward(tasks: Sequence[Task]) -> bool:
    """Return whether a list splits backward passes into input and weight gradients."""
    return any(task.kind is TaskKind.WEIGHT_GRADIENT for task in tasks)


def in_groups(replicas: Sequence[range], num_stages: int) -> tuple[range, ...]:
    """Return all stages in order, those that take micro-batches in turn as one range, each other one by itself."""
    first = {group.start: group for group in replicas}
    in_turn = {stage for group in replicas for stage in group}
    alone = (range(stage, stage + 1) for stage in range(num_stages) if stage not in in_turn)
    return tuple(sorted([*first.values(), *alone], key=lambda group: group.start))


def passes_of(tasks: Sequence[Task]) -> tuple[Literal["forward", "backward"], ...]:
    """Return the passes in which stages send values to each other: forward only if no task sends gradients back."""
    return ("forward", "backward") if any(task.kind.sends_back for task in tasks) else ("forward",)


def peak_held(tasks: Sequence[Task], sizes: Sequence[float], handed: Sequence[float] = ()) -> float:
    """Return the peak over one list of the summed sizes of the micro-batches in flight.

    A stage holds `sizes[stage]` for a micro-batch from its forward to the end of its backward or, without a backward,
    while the forward runs. Between the input and the weight gradient it holds `handed[stage]` instead (empty: the same
    as `sizes`). The result has the unit of `sizes`.
    """
    # Without other sizes the weight gradient needs all that the input gradient does.
    rest = handed or sizes
    # Without a backward pass nothing is stored after the forward.
    ends = {stage for stage, kinds in kinds_of(tasks).items() if any(kind.is_last for kind in kinds)}
    changes: list[float] = []
    for task in tasks:
        size, left = sizes[task.stage], rest[task.stage]
        if task.kind is TaskKind.FORWARD:
            changes += [size] if task.stage in ends else [size, -size]
        elif task.kind is TaskKind.INPUT_GRADIENT:
            # The previous stage has its gradients: what only they needed is freed.
            changes.append(left - size)
        else:
            changes.append(-left if task.kind is TaskKind.WEIGHT_GRADIENT else -size)
    # Tasks of one list run one after the other, so that the peak is the largest partial sum of the changes.
    return max(accumulate(changes), default=0.0)
