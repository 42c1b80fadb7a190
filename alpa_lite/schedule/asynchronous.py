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
newest. The order of tasks is that of 1F1B, and every step ends with all stages at the same version, so what a call
takes and returns is a complete state. Within a call of m micro-batches the pipeline fills and drains once:

    utilisation     m / (m + p - 1), which tends to 1; synchronous 1F1B with an update per g micro-batches: g / (g+p-1)
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import final

from alpa_lite.errors import PlanError
from alpa_lite.schedule.ordering import Schedule
from alpa_lite.schedule.orders import OneFOneB
from alpa_lite.schedule.tasks import TaskLists


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
        return max(0, microbatch // self.microbatches_per_update(num_stages) - self.staleness(stage, num_stages))

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        group = self.microbatches_per_update(num_stages)
        if num_microbatches > 1 and num_microbatches % group:
            raise PlanError(
                f"{self.name} updates the weights of {num_stages} stages every {group} micro-batches, of which"
                f" {num_microbatches} are no multiple. Use num_microbatches={max(1, num_microbatches // group) * group}"
                f" or another multiple of {group}."
            )
        return OneFOneB().tasks(num_stages, num_microbatches)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return OneFOneB().in_flight(stage, num_stages, num_microbatches)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamSchedule(AsynchronousSchedule):
    """1F1B in which every micro-batch is a mini-batch with an update of its own; no stage waits for another's update.

    vertical_sync: whether a micro-batch runs with the same version on all stages, the one that it finds on the first.
    """

    vertical_sync: bool = False

    @property
    def name(self) -> str:
        return "pipedream"

    def microbatches_per_update(self, num_stages: int) -> int:
        return 1

    def staleness(self, stage: int, num_stages: int) -> int:
        # Between its forward pass on a stage and its update, as many other updates end as micro-batches are in flight.
        return num_stages - 1 - (0 if self.vertical_sync else stage)


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
