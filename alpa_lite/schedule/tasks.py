"""Tasks of a pipeline, in lists by the processor that runs them, and what a list holds at one time.

A stage runs the backward pass of a micro-batch as one task or as two: the gradients of what it received, which the
stage before it waits for, and those of its weights, for which nobody waits. A pipeline for inference has neither.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

MOST_MICROBATCHES = 2**15
"""How many micro-batches all stages together may run in a step: each is listed, simulated, drawn and run by itself."""


class SpanLike(Protocol):
    """When a task or an instruction runs, as timelines read it; `name` and `microbatch` are used where they exist."""

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


class TaskKind(enum.Enum):
    """What a stage does with one micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"

    @property
    def sends_back(self) -> bool:
        """Whether it makes what the stage before it waits for."""
        return self in (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)

    @property
    def is_last(self) -> bool:
        """Whether the stage is done with the micro-batch afterwards, where it has a backward pass."""
        return self in (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One stage's run of one part of one micro-batch."""

    stage: int
    microbatch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.microbatch} on stage {self.stage}"


TaskLists = tuple[tuple[Task, ...], ...]
"""The ordered tasks of each processor."""


def kinds_of(tasks: Sequence[Task]) -> dict[int, frozenset[TaskKind]]:
    """The kinds of task that each stage of a list runs."""
    found: dict[int, set[TaskKind]] = {}
    for task in tasks:
        found.setdefault(task.stage, set()).add(task.kind)
    return {stage: frozenset(kinds) for stage, kinds in found.items()}


def peak_in_flight(tasks: Sequence[Task]) -> int:
    """The largest number of micro-batches that are held at one time, over one list; each counts once per stage."""
    return int(peak_held(tasks, [1.0] * (1 + max((task.stage for task in tasks), default=0))))


def splits_backward(tasks: Sequence[Task]) -> bool:
    """Whether a list has backward passes in two parts."""
    return any(task.kind is TaskKind.WEIGHT_GRADIENT for task in tasks)


def passes_of(tasks: Sequence[Task]) -> tuple[Literal["forward", "backward"], ...]:
    """In which passes stages hand something to each other: in both, or forward alone where nothing is sent back."""
    return ("forward", "backward") if any(task.kind.sends_back for task in tasks) else ("forward",)


def peak_held(tasks: Sequence[Task], sizes: Sequence[float], handed: Sequence[float] = ()) -> float:
    """The largest sum over what is held at one time, over one list; `sizes` are per stage.

    A stage holds a micro-batch from its forward to the end of its backward; without a backward, while it runs.
    From the first part of a backward pass to the second one it holds `handed`, per stage, instead of the size.
    """
    rest = handed or sizes
    ends = {stage for stage, kinds in kinds_of(tasks).items() if any(kind.is_last for kind in kinds)}
    changes: list[float] = []
    for task in tasks:
        size, left = sizes[task.stage], rest[task.stage]
        if task.kind is TaskKind.FORWARD:
            changes += [size] if task.stage in ends else [size, -size]
        elif task.kind is TaskKind.INPUT_GRADIENT:
            changes.append(left - size)
        else:
            changes.append(-left if task.kind is TaskKind.WEIGHT_GRADIENT else -size)
    return max(accumulate(changes), default=0.0)
