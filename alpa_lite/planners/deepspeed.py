"""DeepSpeed's 3D parallelism: pipeline × data × tensor, with ZeRO's split of optimizer state over the data axis.

    device of (pipe, data, model) = (pipe · |data| + data) · |model| + model

so that tensor parallelism is between neighbours (links inside a host), and the pipeline between distant devices.

Rasley et al., DeepSpeed (KDD 2020); Microsoft, "DeepSpeed: Extreme-scale model training for everyone" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, renamed_options
from alpa_lite.schedule import OneFOneB, Schedule


@renamed_options(model="tensor")
@dataclass(frozen=True, kw_only=True)
class DeepSpeed3D(Planner):
    """Pipeline × data × tensor parallelism, with ZeRO over the data axis.

    Attributes:
        pipeline: number of stages.
        data: replicas of each stage; None: as many as the others leave devices for.
        tensor: devices of a replica that share each layer.
        zero: the parts of the state that are split over the replicas, as in `Hybrid`.
        schedule: schedule of the pipeline.
    """

    pipeline: int = 1
    data: int | None = None
    tensor: int = 1
    zero: int = 1
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"DeepSpeed 3D ({self._hybrid.name})"

    @property
    def _hybrid(self) -> Hybrid:
        return Hybrid(
            pipeline=self.pipeline, data=self.data, tensor=self.tensor, zero=self.zero, schedule=self.schedule
        )

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the degrees do not divide the cluster."""
        return replace(self._hybrid.plan(request), name=self.name)
