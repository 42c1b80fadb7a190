"""A pipeline without a fixed order: each stage computes whatever has arrived.

Stage s has two inboxes, one for results of stage s - 1 and one for gradients of stage s + 1, in which messages arrive
in the order of micro-batches. A stage that is free takes a gradient if there is one, else a result; the first stage
begins a micro-batch while fewer than `limit` are under way. On devices, what has arrived is seen as it happens
(`Inboxes`); plans and simulations have the order in which messages arrive if all stages are equal.

It never deadlocks, in whatever order messages arrive: the oldest micro-batch under way is always a message that no
stage has to wait with, and only the first stage waits for the number under way, which falls when it comes back. Each
stage adds up gradients in the order of micro-batches, so that results are those of any other synchronous schedule.

    makespan for equal stages, limit >= p:    (m + p - 1)(tf + tb), as 1F1B, of which it is the generalisation
    micro-batches in flight on stage s        at most min(limit, m)

Singh and Bhatele, AxoNN: An asynchronous, message-driven parallel framework for extreme-scale deep learning (IPDPS
2022), section 4.
"""

from dataclasses import dataclass, field
from typing import final

from alpa_lite.errors import PlanError
from alpa_lite.schedule.tasks import Task, TaskKind
from alpa_lite.schedule.waves import ListSchedule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDriven(ListSchedule):
    """Stages that compute whatever has arrived, with at most `limit` micro-batches under way.

    limit: the largest number of micro-batches that have begun and not come back; 0: as many as stages.
    """

    limit: int = 0

    @property
    def name(self) -> str:
        return "message-driven"

    @property
    def splits_backward(self) -> bool:
        return False

    def most_under_way(self, num_stages: int) -> int:
        """Return the largest number of micro-batches under way. Raises `PlanError` for a limit below 0."""
        if self.limit < 0:
            raise PlanError(f"{self.name} was given limit={self.limit}. Give 1 or more, or 0 for as many as stages.")
        return self.limit or num_stages

    def most_held(self, processor: int, num_processors: int) -> int:
        del processor
        return self.most_under_way(num_processors)


@dataclass(slots=True, kw_only=True)
class Inboxes:
    """What has arrived at each stage of a message-driven pipeline, and what it has begun.

    Attributes:
        num_stages: number of stages.
        num_microbatches: number of micro-batches.
        limit: the largest number of micro-batches under way.
    """

    num_stages: int
    num_microbatches: int
    limit: int
    # Per stage and pass, the number of micro-batches that have begun and ended; both go in order.
    _begun: dict[tuple[int, TaskKind], int] = field(default_factory=dict[tuple[int, TaskKind], int])
    _ended: dict[tuple[int, TaskKind], int] = field(default_factory=dict[tuple[int, TaskKind], int])

    def begun(self, stage: int, kind: TaskKind) -> int:
        """Return how many micro-batches have begun a pass on a stage."""
        return self._begun.get((stage, kind), 0)

    @property
    def under_way(self) -> int:
        """The number of micro-batches that the first stage has begun and not begun to take back."""
        return self.begun(0, TaskKind.FORWARD) - self.begun(0, TaskKind.BACKWARD)

    @property
    def is_done(self) -> bool:
        """Whether all tasks have begun."""
        return all(self.begun(stage, TaskKind.BACKWARD) == self.num_microbatches for stage in range(self.num_stages))

    def next_on(self, stage: int) -> Task | None:
        """Return the task that a stage begins next if it is free now; None if nothing for it has arrived."""
        for kind in (TaskKind.BACKWARD, TaskKind.FORWARD):
            microbatch = self.begun(stage, kind)
            if microbatch < self._arrived(stage, kind):
                return Task(stage=stage, microbatch=microbatch, kind=kind)
        return None

    def _arrived(self, stage: int, kind: TaskKind) -> int:
        """Return how many micro-batches have arrived at a pass of a stage."""
        if kind is TaskKind.FORWARD:
            if stage:
                return self._ended.get((stage - 1, kind), 0)
            return self.num_microbatches if self.under_way < self.limit else 0
        # The last stage sends the gradient of the loss to itself.
        own = self._ended.get((stage, TaskKind.FORWARD), 0)
        return own if stage == self.num_stages - 1 else min(own, self._ended.get((stage + 1, kind), 0))

    def begin(self, task: Task) -> None:
        """Take note that a task has begun."""
        self._begun[task.stage, task.kind] = task.microbatch + 1

    def end(self, task: Task) -> None:
        """Take note that a task has ended, and its result has been sent."""
        self._ended[task.stage, task.kind] = task.microbatch + 1
