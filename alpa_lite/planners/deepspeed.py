"""DeepSpeed's 3D parallelism: pipeline × data × tensor, with ZeRO's split of optimizer state over the data axis.

    device of (pipe, data, model) = (pipe · |data| + data) · |model| + model

so that tensor parallelism is between neighbours (links inside a host), and the pipeline between what is furthest
apart. Rasley et al., DeepSpeed (KDD 2020); Microsoft, "DeepSpeed: Extreme-scale model training for everyone" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner
from alpa_lite.schedule import OneFOneB, Schedule


@dataclass(frozen=True, kw_only=True)
class DeepSpeed3D(Planner):
    """Pipeline × data × tensor parallelism, with ZeRO over the data axis.

    Attributes:
        pipeline: stages.
        data: replicas of each; None: what the others leave.
        model: devices of a replica that share each layer.
        zero: what of the state is split over the replicas, as in `Hybrid`.
        schedule: of the pipeline.
    """

    pipeline: int = 1
    data: int | None = None
    model: int = 1
    zero: int = 1
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """For tables."""
        return f"DeepSpeed 3D ({self._hybrid.name})"

    @property
    def _hybrid(self) -> Hybrid:
        return Hybrid(pipeline=self.pipeline, data=self.data, model=self.model, zero=self.zero, schedule=self.schedule)

    def plan(self, request: PlanRequest) -> Plan:
        """The plan; raises `PlanError` when the degrees do not divide the cluster."""
        return renamed(self._hybrid.plan(request), self.name)
