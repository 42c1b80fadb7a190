"""The request that a planner answers: a step to plan for a cluster, with the options of the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.inter_op.workers import Workers
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.user_shardings import NO_USER_SHARDINGS, UserShardings
from cost_models.cluster import Cluster
from cost_models.composed import CostModel

OnInterrupt = Literal["raise", "best"]
"""The behaviour of a search when it is interrupted."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A step to plan for a cluster.

    Attributes:
        function: its name.
        step_at: `step_at(num_microbatches, loop_parts)` is the step cut into phases; with `loop_parts` > 0 loops over
            layers and their scanned arrays are cut into about so many parts.
        likely_step_at: a faster `step_at` that may extrapolate from other numbers of micro-batches, or None.
        num_arguments: how many arrays the step takes; the others are captured by the function.
        batch_size: samples of a step; None where no batch was found.
        cluster: what to plan for.
        cost_model_for: `cost_model_for(cluster)` is the cost model to plan with, for this or another cluster.
        arguments: names of the positional arguments, with which the names of their arrays begin.
        results: the path of each returned array, such as `0/params/w`; empty if the function returns a single array.
        num_microbatches: a number, or "auto".
        user_shardings: the shardings of arguments that the user gives, and whether a plan must obey these and others.
        pinned: `pinned()` is the same request for the step with these shardings as demands, or None.
        advise: whether a planner without a plan should look for changes that would allow one.
        on_non_additive: how `step_at` treats several micro-batches of a step that is no sum.
        on_interrupt: the effect of Ctrl-C on a search: "raise" stops it, "best" ends it with the best plan so far.
        progress: receives the work that is done and that is left.
        workers: processes that may solve stages before they are needed.
        measure: `measure(plan)` is seconds of a step of a plan on real devices; None where there are none.
    """

    function: str
    step_at: Callable[[int, int], StepGraph]
    likely_step_at: Callable[[int, int], StepGraph] | None = None
    num_arguments: int
    batch_size: int | None
    cluster: Cluster
    cost_model_for: Callable[[Cluster], CostModel]
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    num_microbatches: int | str = "auto"
    user_shardings: UserShardings = NO_USER_SHARDINGS
    pinned: Callable[[], PlanRequest] | None = None
    advise: bool = True
    on_non_additive: str = "refuse"
    on_interrupt: OnInterrupt = "raise"
    progress: Progress = field(default_factory=Progress)
    workers: Workers = field(default_factory=Workers)
    measure: Callable[[Plan], float] | None = None

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model of the cluster to plan for."""
        return self.cost_model_for(self.cluster)

    def microbatch_choices(self, default: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of micro-batches to consider: the user's, or those of `default` that divide the batch."""
        if self.num_microbatches != "auto":
            return (int(self.num_microbatches),)
        if self.batch_size is None:
            return (1,)
        size = self.batch_size
        return tuple(dict.fromkeys(m for m in default if m >= 1 and size % m == 0)) or (1,)

    def best_step(self, default: Sequence[int], *, loop_parts: int) -> StepGraph:
        """Return the step at the first number of micro-batches that can be traced, at the latest at 1.

        Errors are raised only for a number that the user gave.
        """
        choices = self.microbatch_choices(default)
        for m in choices:
            try:
                return self.step_at(m, loop_parts)
            except (NonAdditiveError, BatchError, TraceError):
                if self.num_microbatches != "auto":
                    raise
        # With one micro-batch nothing has to be cut: whatever this raises concerns the step itself.
        return self.step_at(1, loop_parts)
