"""Requests to planners with a chosen backend; `al.plan` plans for XLA as it is today."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from alpa_lite.api.stages import TracedFunction

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.program.phases import StepGraph
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel
from cost_models.hardware import Backend


def request_of(
    traced: TracedFunction,
    cluster: Cluster,
    *,
    backend: Backend | None = None,
    num_microbatches: int | str = "auto",
    step_at: Callable[[int, int], StepGraph] | None = None,
    name: str | None = None,
    advise: bool = False,
) -> PlanRequest:
    """Return a request to plan a traced step; `step_at` replaces the step's own function, for example to time it."""

    def cut(num_microbatches: int, loop_parts: int) -> StepGraph:
        return traced.step(num_microbatches, loop_parts=loop_parts).step

    def likely(num_microbatches: int, loop_parts: int) -> StepGraph:
        return traced.step(num_microbatches, loop_parts=loop_parts, exact=False).step

    return PlanRequest(
        function=name or traced.traced.name,
        step_at=step_at or cut,
        likely_step_at=None if step_at else likely,
        num_arguments=len(traced.traced.leaves),
        arguments=traced.traced.arguments,
        results=traced.traced.out_names,
        batch_size=traced.traced.batch_size,
        cluster=cluster,
        cost_model_for=partial(ComposedCostModel, backend=backend or Backend()),
        num_microbatches=num_microbatches,
        advise=advise,
        progress=traced.options.progress,
    )
