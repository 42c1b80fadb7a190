"""ZeRO: data parallelism with optimizer state (stage 1, 2) or parameters too (stage 3) split over the data axis.

Stages 1 and 2 differ in how gradients are kept between backward and update; here that follows from the costs: a
gradient that is reduce-scattered into split optimizer state is never whole (stage 2). FSDP is stage 3.
Rajbhandari et al., ZeRO (SC 2020), section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.errors import PlanError
from alpa_lite.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, PlanRequest


@dataclass(frozen=True, kw_only=True)
class Zero(Planner):
    """All devices on one "data" axis, state split over it."""

    stage: int = 2

    def __post_init__(self) -> None:
        """Check the stage."""
        if self.stage not in (1, 2, 3):
            raise PlanError(f"ZeRO has stages 1, 2 and 3, but stage={self.stage} was given.")

    @property
    def name(self) -> str:
        """For tables."""
        return f"ZeRO-{self.stage}"

    def plan(self, request: PlanRequest) -> Plan:
        """The plan; raises `PlanError` when the batch does not divide."""
        return renamed(Hybrid(data=request.cluster.num_devices, zero=self.stage).plan(request), self.name)


@dataclass(frozen=True, kw_only=True)
class FSDP(Planner):
    """Fully sharded data parallelism: ZeRO stage 3."""

    @property
    def name(self) -> str:
        """For tables."""
        return "FSDP"

    def plan(self, request: PlanRequest) -> Plan:
        """The plan; raises `PlanError` when the batch does not divide."""
        return renamed(Zero(stage=3).plan(request), self.name)
