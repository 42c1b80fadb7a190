"""Grid search: every way to write the devices as pipeline × data × tensor, each with growing micro-batches.

    degrees         pipeline · data · model = devices, model within a host                         (factorisations)
    micro-batches   from the smallest on, until one does not fit or takes longer than the last     (microbatch_sizes)
    best            the least predicted time; the others are `plan.alternatives`, with infinite seconds where nothing
                    fits or divides

A user of Megatron-LM or DeepSpeed would do this by hand: the baseline of Zheng et al., Alpa (OSDI 2022), section 8.1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, NamedTuple

from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import with_microbatches
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, check_synchronous, renamed_options
from alpa_lite.schedule import OneFOneB, Schedule


class Degrees(NamedTuple):
    """Degrees of pipeline, data and tensor parallelism."""

    pipeline: int
    data: int
    tensor: int


def factorisations(
    num_devices: int, *, max_pipeline: int | None = None, max_tensor: int | None = None
) -> list[Degrees]:
    """Return all degrees whose product is `num_devices`, with pipeline and tensor degrees up to the given limits."""
    return [
        Degrees(pipeline=pipeline, data=num_devices // pipeline // model, tensor=model)
        for pipeline in divisors(num_devices)
        for model in divisors(num_devices // pipeline)
        if pipeline <= (max_pipeline or num_devices) and model <= (max_tensor or num_devices)
    ]


def microbatch_sizes(num_samples: int, data: int, largest: int) -> Iterator[int]:
    """Yield the numbers of samples per replica and micro-batch to try, ascending and at least 1.5 times the last."""
    if num_samples % data:
        return
    last = 0.0
    for size in divisors(num_samples // data):
        # Sizes closer together differ little in time, and each takes a plan of its own.
        if 1.5 * last <= size <= largest:
            last = size
            yield size


@renamed_options(max_model="max_tensor")
@dataclass(frozen=True, kw_only=True)
class GridSearch(Planner):
    """The fastest of all factorisations, as `Hybrid`s.

    Attributes:
        max_pipeline: the largest number of stages to try; None: the number of devices.
        max_tensor: the largest degree of tensor parallelism to try; None: the devices of a host.
        zero: the parts of the state that are split, as in `Hybrid`.
        schedule: schedule of pipelines.
        largest_microbatch: the largest number of samples per replica and micro-batch to try.
        remat: policies of recomputation to try, as in `Hybrid`.
    """

    max_pipeline: int | None = None
    max_tensor: int | None = None
    zero: int = 0
    schedule: Schedule = field(default_factory=OneFOneB)
    largest_microbatch: int = 64
    remat: tuple[Literal["none", "selective", "full"], ...] = ("none",)

    @property
    def name(self) -> str:
        """Name for tables."""
        return "grid search" + (f", zero{self.zero}" if self.zero else "")

    def plan(self, request: PlanRequest) -> Plan:
        """Return the fastest plan. Raises `InfeasibleError` of the first that does not fit, else `PlanError`."""
        check_synchronous(self.name, self)
        started = time.perf_counter()
        found, failed = list[Plan](), dict[str, AlpaLiteError]()
        # Advice for each point of the grid would take many more plans, and nobody would read it.
        quiet = replace(request, advise=False)
        cluster = request.cluster
        most = self.max_tensor or cluster.devices_per_host
        grid = factorisations(cluster.num_devices, max_pipeline=self.max_pipeline, max_tensor=most)
        for degrees, remat in product(grid, self.remat):
            planner = Hybrid(**degrees._asdict(), zero=self.zero, schedule=self.schedule, remat=remat)
            try:
                found += self._plans(planner, quiet)
            except AlpaLiteError as error:
                failed[planner.name] = error
        if not found:
            problems = [*failed.values()]
            # The user can act on a lack of memory, rather than on degrees that do not divide something.
            telling = next((error for error in problems if isinstance(error, InfeasibleError)), problems[0])
            kind = InfeasibleError if isinstance(telling, InfeasibleError) else PlanError
            raise kind(f"Of {len(failed)} grids none works. {telling}")
        found.sort(key=lambda plan: plan.prediction.step_seconds)
        best = found[0]
        return replace(
            best,
            name=f"{self.name} ({best.name})",
            alternatives=(
                *((with_microbatches(plan), plan.prediction.step_seconds) for plan in found[1:]),
                *((name, math.inf) for name in failed),
            ),
            refusals=tuple((name, str(error)) for name, error in failed.items()),
            solver=replace(best.solver, seconds=time.perf_counter() - started),
        )

    def _plans(self, planner: Hybrid, request: PlanRequest) -> list[Plan]:
        """Return the plans of some degrees, at least one. Raises the error of the first if there is none."""
        if request.num_microbatches != "auto" or request.batch_size is None:
            return [planner.plan(request)]
        found, shortest, first = list[Plan](), math.inf, None
        # Without a pipeline micro-batches only save memory, and cost time.
        if planner.pipeline == 1:
            try:
                return [planner.plan(replace(request, num_microbatches=1))]
            except InfeasibleError as error:
                first = error  # smaller micro-batches may fit
        for size in microbatch_sizes(request.batch_size, planner.data or 1, self.largest_microbatch):
            count = request.batch_size // (planner.data or 1) // size
            try:
                plan = planner.plan(replace(request, num_microbatches=count))
            except AlpaLiteError as error:
                # The next micro-batches are larger, and need more memory.
                first = first or error
                break
            found.append(plan)
            # Larger micro-batches have longer bubbles: once a step takes longer, it mostly goes on to do so.
            if plan.prediction.step_seconds > shortest:
                break
            shortest = plan.prediction.step_seconds
        if not found:
            raise first or PlanError(f"{planner.name} does not divide the batch of {request.batch_size}.")
        return found
