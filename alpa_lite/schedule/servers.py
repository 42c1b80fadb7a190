"""The order in which the workers of a parameter server compute gradients, and its servers apply them.

Stage 0 holds the weights on the servers; stages 1 to N are N equal workers, each with all layers of the model. Worker
w = b mod N runs micro-batch b: it pulls the weights, runs both passes, and pushes its gradients. With T(b) the round
b // N of a micro-batch, an update waits for gradients, and a micro-batch for updates:

    bsp       one update per step, of all micro-batches
    bounded   update T of the N gradients of round T; a micro-batch of round T waits for update T - 1 - delay
    async     update b of the gradient of micro-batch b alone, when it arrives; no micro-batch waits

The staleness of a gradient is the number of updates that its weights lack: those of earlier rounds, or (async) those
that were applied between its pull and its push. It is at most `delay` under bounded delay, and 0 under bsp.

Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014), section 3.4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from alpa_lite.errors import PlanError
from alpa_lite.schedule.ordering import Schedule, check_numbers
from alpa_lite.schedule.tasks import Task, TaskKind, TaskLists
from alpa_lite.text import did_you_mean

CONSISTENCIES = ("bsp", "bounded", "async")


class ServerEvent(NamedTuple):
    """Both passes of a micro-batch on its worker, or an update on the servers, by number."""

    number: int
    is_update: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSchedule(Schedule):
    """Workers that pull weights from servers and push gradients to them; of `planners.ParameterServer`.

    workers: number of workers, the stages from 1 on.
    consistency: "bsp", "bounded" or "async"; see the module.
    delay: with "bounded", the number of updates that the weights of a micro-batch may lack.
    """

    workers: int = 1
    consistency: str = "bsp"
    delay: int = 0

    @property
    def name(self) -> str:
        return "parameter-server"

    @property
    def is_asynchronous(self) -> bool:
        return self.consistency != "bsp"

    def most_stale(self, num_stages: int) -> int | None:
        del num_stages
        return None if self.consistency == "async" else self.delay

    def replicas(self, num_stages: int) -> tuple[range, ...]:
        return (range(1, num_stages),)

    def microbatches_per_update(self, num_stages: int) -> int:
        del num_stages
        if self.workers < 1 or self.delay < 0:
            raise PlanError(f"{self} was asked for. Give at least 1 worker, and a delay of 0 or more updates.")
        if self.consistency not in CONSISTENCIES:
            raise PlanError(
                f"There is no consistency {self.consistency!r}.{did_you_mean(self.consistency, CONSISTENCIES)} Choose "
                f"one of {', '.join(CONSISTENCIES)}."
            )
        return {"bsp": 0, "bounded": self.workers, "async": 1}[self.consistency]

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        self.microbatches_per_update(num_stages)
        if num_stages != self.workers + 1:
            raise PlanError(
                f"{self} runs one stage of servers and {self.workers} workers, and {num_stages} stages are to be run. "
                "It is the schedule of al.planners.ParameterServer: ask for that planner."
            )
        if num_microbatches % self.workers:
            raise PlanError(
                f"{self.name} gives each of {self.workers} workers as many micro-batches, which {num_microbatches} "
                f"cannot be. Use num_microbatches={max(1, num_microbatches // self.workers) * self.workers} or another "
                f"multiple of {self.workers}."
            )
        n, passes = self.workers, (TaskKind.FORWARD, TaskKind.BACKWARD)
        of_workers = (
            tuple(Task(stage=w + 1, microbatch=b, kind=k) for b in range(w, num_microbatches, n) for k in passes)
            for w in range(n)
        )
        # The servers only update.
        return ((), *of_workers)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(stage, 1)

    def may_start(self, microbatch: int, num_updates: int) -> bool:
        """Return whether a micro-batch may pull weights with so many updates of this step."""
        if self.consistency == "bounded":
            return num_updates >= microbatch // self.workers - self.delay
        return True

    def contributions(self, update: int, num_microbatches: int) -> range:
        """Return the micro-batches whose gradients an update reads."""
        size = self.microbatches_per_update(self.workers + 1) or num_microbatches
        return range(update * size, (update + 1) * size)

    def events(self, num_microbatches: int) -> Iterator[ServerEvent]:
        """Yield all events in the order in which they happen if all workers are equally fast, and wait the most."""
        size, updates = self.microbatches_per_update(self.workers + 1) or num_microbatches, 0
        for b in range(num_microbatches):
            # What came in is applied as late as the rule allows: workers do not wait for updates without need.
            while size and not self._has_room(b, updates):
                yield ServerEvent(updates, is_update=True)
                updates += 1
            yield ServerEvent(b, is_update=False)
        for update in range(updates, num_microbatches // size):
            yield ServerEvent(update, is_update=True)

    def _has_room(self, microbatch: int, num_updates: int) -> bool:
        """Return whether a micro-batch starts before the next update, if all workers are equally fast."""
        if self.consistency == "async":
            # The gradient that its worker computed before has arrived, and those of earlier micro-batches.
            return num_updates >= microbatch - self.workers + 1
        return self.may_start(microbatch, num_updates)
