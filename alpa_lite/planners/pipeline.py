"""Pipeline parallelism: equal stages on equal submeshes, data parallel inside each (GPipe, PipeDream-Flush).

Huang et al., GPipe (NeurIPS 2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.work_floor import pipeline_slowdown
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, renamed_options
from alpa_lite.schedule import OneFOneB, Schedule, splits_backward


@renamed_options(num_stages="pipeline")
@dataclass(frozen=True, kw_only=True)
class Pipeline(Planner):
    """Equal stages on equal groups of devices; inside a stage, tensor and data parallelism.

    Attributes:
        pipeline: number of stages.
        tensor: devices of a stage that share each layer; the rest is data parallel.
        schedule: order in which stages run micro-batches.
    """

    pipeline: int = 2
    tensor: int = 1
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.pipeline}-stage pipeline" + (f" × tp{self.tensor}" if self.tensor > 1 else "")

    def slowdown(self, num_microbatches: int) -> float:
        """Return the least slowdown by the waiting at the beginning and at the end of the pipeline."""
        # The bound needs stages on devices of their own, and whole backward passes: split ones fill part of the wait.
        in_one_go = not any(map(splits_backward, self.schedule.tasks(self.pipeline, num_microbatches)))
        waits = in_one_go and self.schedule.stages_per_processor == 1
        return pipeline_slowdown(self.pipeline, num_microbatches) if waits else 1.0

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if there are more stages than layers or the degrees do not divide."""
        hybrid = Hybrid(pipeline=self.pipeline, tensor=self.tensor, schedule=self.schedule)
        return replace(hybrid.plan(request), name=self.name)
