"""Tasks of a pipeline, in lists by the processor that runs them, and what a list holds at one time."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


class TaskKind(enum.Enum):
    """What a stage does with one micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One stage's forward or backward run of one micro-batch."""

    stage: int
    microbatch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.microbatch} on stage {self.stage}"


TaskLists = tuple[tuple[Task, ...], ...]
"""The ordered tasks of each processor."""


def peak_in_flight(tasks: Sequence[Task]) -> int:
    """The largest number of micro-batches between forward and backward, over one list; each counts once per stage."""
    return int(peak_held(tasks, [1.0] * (1 + max((task.stage for task in tasks), default=0))))


def peak_held(tasks: Sequence[Task], sizes: Sequence[float]) -> float:
    """The largest sum over what is between forward and backward at one time, over one list; `sizes` are per stage."""
    signs = ((1 if task.kind is TaskKind.FORWARD else -1, sizes[task.stage]) for task in tasks)
    return max(accumulate(sign * size for sign, size in signs), default=0.0)
