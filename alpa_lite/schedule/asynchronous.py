"""Asynchronous pipelines: the weights of each stage are updated several times per step, without waiting for the others.

`schedule.PipeDream` and `schedule.PipeDream2BW` are the names of these classes outside of this package.

A call of the step is one pass over its batch. Every group of g micro-batches is a mini-batch with an update of its
own: stage s runs its part of update u right after its backward pass of the last micro-batch of group u, and version v
of its weights is the result of v updates. With p stages, s = 0..p-1, micro-batch b is in group u = b // g, and runs
both of its passes with version `version(s, p, b)`:

    PipeDream       g = 1, version max(0, u - (p-1-s)): the newest when its forward pass starts; p-s versions in use
                    vertical sync: version max(0, u - (p-1)) on all stages              (Narayanan et al., SOSP'19)
    PipeDream-2BW   g >= p, version max(0, u - 1); W(u+1) = W(u) - f(gradient at W(max(0, u-1))), two versions in use
                                                                                        (Narayanan et al., ICML'21)

Forward and backward pass of a micro-batch see the same version (weight stashing). Update u changes version u, the
newest. The order of tasks is that of 1F1B, and every step ends with all updates done, so what a call takes and returns
is a complete state. Within a call of m micro-batches the pipeline fills and drains once:

    utilisation     m / (m + p - 1), which tends to 1; synchronous 1F1B with an update per g micro-batches: g / (g+p-1)

PipeDream may run a part of the model on r equal stages, its replicas, which take whole micro-batches in turn: replica
k runs both passes of the micro-batches b with b mod r = k. Its update u is that of round u of r micro-batches, one on
each replica, by the mean of their gradients, so that all replicas have the same weights. With R stages from the first
replica of a part to the last stage of all:

    warm-up         w = (R - 1) // r forward passes on each replica; p-1-s if no stage has replicas
    version         max(0, b // r - w), the newest when the forward pass of b starts; w + 1 versions in use
"""

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import final

from alpa_lite.errors import PlanError
from alpa_lite.schedule.ordering import Schedule, check_numbers
from alpa_lite.schedule.orders import warmed_up
from alpa_lite.schedule.tasks import Task, TaskKind, TaskLists


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousSchedule(Schedule):
    """Base class of schedules under which micro-batches run with weights that lack the latest updates.

    Results differ from those of one device: training with stale weights is another optimiser.
    """

    @property
    def is_asynchronous(self) -> bool:
        return True

    def most_stale(self, num_stages: int) -> int:
        return max(self.staleness(stage, num_stages) for stage in range(num_stages))

    @abstractmethod
    def microbatches_per_update(self, num_stages: int) -> int:
        """Return the number of micro-batches whose gradients are averaged for one update."""

    @abstractmethod
    def staleness(self, stage: int, num_stages: int) -> int:
        """Return by how many updates the weights of a micro-batch on `stage` are older than those of its update."""

    def version(self, stage: int, num_stages: int, microbatch: int) -> int:
        """Return the number of updates of this step that are in the weights with which a micro-batch runs."""
        group = self.microbatches_per_update(num_stages) * len(self.replicas_of(stage, num_stages))
        return max(0, microbatch // group - self.staleness(stage, num_stages))

    def num_warmup(self, stage: int, num_stages: int) -> int:
        """Return the number of forward passes that a stage runs before it alternates."""
        # As many micro-batches are under way as there are stages from here on, one in turn on each replica.
        replicas = self.replicas_of(stage, num_stages)
        return (num_stages - replicas.start - 1) // len(replicas)

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        self._check_rounds(num_stages, num_microbatches)
        lists: list[tuple[Task, ...]] = []
        for stage in range(num_stages):
            mine = self._turns(stage, num_stages, num_microbatches)
            forwards, backwards = (
                [Task(stage=stage, microbatch=b, kind=kind) for b in mine]
                for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
            )
            lists.append(warmed_up(forwards, backwards, min(self.num_warmup(stage, num_stages), len(mine))))
        return tuple(lists)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        mine = self._turns(stage, num_stages, num_microbatches)
        return min(self.num_warmup(stage, num_stages) + 1, len(mine))

    def _turns(self, stage: int, num_stages: int, num_microbatches: int) -> range:
        """Return the micro-batches that a stage runs."""
        replicas = self.replicas_of(stage, num_stages)
        return range(stage - replicas.start, num_microbatches, len(replicas))

    def _check_rounds(self, num_stages: int, num_microbatches: int) -> None:
        """Raise `PlanError` for micro-batches of which some update would lack a part."""
        group, numbers = self.microbatches_per_update(num_stages), [*map(len, self.replicas(num_stages))]
        whole = lcm(group, *numbers)
        # One micro-batch is one update, however many there are in a group.
        if num_microbatches % whole == 0 or (num_microbatches == 1 and max(numbers, default=1) == 1):
            return
        problem = (
            f"{self.name} updates the weights of {num_stages} stages every {group} micro-batches"
            if max(numbers, default=1) == 1
            else f"{self.name} lets {'-'.join(map(str, numbers))} replicas take micro-batches in turn, round by round"
        )
        raise PlanError(
            f"{problem}, of which {num_microbatches} are no multiple. Use num_microbatches="
            f"{max(1, num_microbatches // whole) * whole} or another multiple of {whole}."
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamSchedule(AsynchronousSchedule):
    """1F1B in which every micro-batch is a mini-batch with an update of its own; no stage waits for another's update.

    vertical_sync: whether a micro-batch runs with the same version on all stages, the one that it finds on the first.
    replicated: numbers of equal stages, each on devices of its own, that run the parts of the model, from the first
        part on; () for one each. Those of a part take whole micro-batches in turn, and update by the mean of a round.
    """

    vertical_sync: bool = False
    replicated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "pipedream"

    def microbatches_per_update(self, num_stages: int) -> int:
        return 1

    def copies(self, num_parts: int) -> tuple[int, ...]:
        counts = self.replicated or (1,) * num_parts
        if len(counts) != num_parts or any(type(count) is not int or count < 1 for count in counts):
            raise PlanError(
                f"replicated={self.replicated} was asked for, and the model is cut into {num_parts} parts. Give as "
                "many whole numbers of replicas, each at least 1."
            )
        return counts

    def replicas(self, num_stages: int) -> tuple[range, ...]:
        if not self.replicated:
            return ()
        counts = self.copies(len(self.replicated))
        if sum(counts) != num_stages:
            raise PlanError(
                f"replicated={self.replicated} makes {sum(counts)} stages, and {num_stages} are to be run. Ask for "
                f"al.planners.Hybrid(pipeline={len(counts)}, ...), which makes as many stages as there are replicas."
            )
        if self.vertical_sync and len({*counts}) > 1:
            raise PlanError(
                f"vertical_sync gives a micro-batch the same version on all stages, but with replicated="
                f"{self.replicated} stages update differently often. Give all stages equally many replicas, or leave "
                "out vertical_sync."
            )
        return tuple(range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True))

    def staleness(self, stage: int, num_stages: int) -> int:
        # Between its forward pass on a stage and its update, as many other updates end as micro-batches are in flight.
        return self.num_warmup(0 if self.vertical_sync else stage, num_stages)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDream2BWSchedule(AsynchronousSchedule):
    """1F1B with an update for every group of micro-batches, whose weights lack exactly one update on all stages.

    accumulated: micro-batches in a group, at least as many as stages; 0: as many as stages.
    """

    accumulated: int = 0

    @property
    def name(self) -> str:
        return "pipedream-2bw"

    def microbatches_per_update(self, num_stages: int) -> int:
        group = self.accumulated or num_stages
        if group < num_stages:
            # The first stage would start a group before the update that it is to lack only one of has ended.
            raise PlanError(
                f"{self.name} was asked to update every {group} micro-batches, but {num_stages} stages have up to"
                f" {num_stages} in flight. Use accumulated={num_stages} or more."
            )
        return group

    def staleness(self, stage: int, num_stages: int) -> int:
        return 1 if num_stages > 1 else 0
