"""GShard: experts on different devices, all else data parallel. Tokens travel to their experts and back.

Of each layer with experts two all_to_alls in the forward pass and two in the backward pass, of what is dispatched; the
weights of experts are never gathered. Each device holds 1 / `expert` of them.

Lepikhin et al., GShard (ICLR 2021), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner


@dataclass(frozen=True, kw_only=True)
class GShard(Planner):
    """Data parallelism whose devices hold different experts; all other weights are copied.

    Experts are found from the graph: what weights share with all arrays of their products.

    Attributes:
        expert: how many of the data-parallel devices hold different experts; None: all.
        zero: what of the state is split, as in `Hybrid`.
    """

    expert: int | None = None
    zero: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        return "GShard" + (f" (ep{self.expert})" if self.expert else "")

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` when the model has no experts, or not a multiple of `expert`."""
        total = request.cluster.num_devices
        expert = self.expert or total
        split = {"experts": "expert"}
        return renamed(Hybrid(data=total, expert=expert, zero=self.zero, split=split).plan(request), self.name)
