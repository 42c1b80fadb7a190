"""Data parallelism: every device holds all parameters and a part of the batch; gradients are summed once per step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from alpa_lite.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, PlanRequest


@dataclass(frozen=True, kw_only=True)
class DataParallel(Planner):
    """All devices on one "data" axis."""

    @property
    def name(self) -> str:
        """For tables."""
        return "data parallel"

    def plan(self, request: PlanRequest) -> Plan:
        """The plan; raises `PlanError` when the batch does not divide."""
        return renamed(Hybrid(data=request.cluster.num_devices).plan(request), self.name)


def renamed(plan: Plan, name: str) -> Plan:
    """The same plan under another name."""
    return replace(plan, name=name)
