"""GShard: experts on different devices, everything else data parallel. Tokens travel to their experts and back.

Each layer with experts has two all_to_alls of the dispatched tokens in the forward pass and two in the backward pass;
the weights of experts are never gathered. Each device holds 1 / `expert` of them.

Lepikhin et al., GShard (ICLR 2021), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner


@dataclass(frozen=True, kw_only=True)
class GShard(Planner):
    """Data parallelism whose devices hold different experts; all other weights are copied.

    The graph tells the dim of experts: weights share it with all arrays of their products.

    Attributes:
        expert: number of the data-parallel devices that hold different experts; None: all.
        zero: the parts of the state that are split, as in `Hybrid`.
    """

    expert: int | None = None
    zero: int = 0

    @property
    def name(self) -> str:
        """Name for tables."""
        return "GShard" + (f" (ep{self.expert})" if self.expert else "")

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the number of experts is 0 or no multiple of `expert`."""
        total = request.cluster.num_devices
        expert = self.expert or total
        split = {"experts": "expert"}
        return replace(Hybrid(data=total, expert=expert, zero=self.zero, split=split).plan(request), name=self.name)
