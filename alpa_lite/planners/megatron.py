"""Megatron tensor parallelism: weights split over a "model" axis inside each layer, the batch over a "data" axis.

The split dims are found from the graph by the integer program under the rule that "model" never splits the batch; for
a transformer that is the column/row pattern of the paper, with one all_reduce per block and direction.
Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, PlanRequest


@dataclass(frozen=True, kw_only=True)
class Megatron(Planner):
    """`tensor` devices per model replica (default: all of them); the rest is data parallel."""

    tensor: int | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return "Megatron tensor parallel" + (f" (tp{self.tensor})" if self.tensor else "")

    def plan(self, request: PlanRequest) -> Plan:
        """The plan; raises `PlanError` when the degrees do not divide the cluster."""
        return renamed(Hybrid(model=self.tensor or request.cluster.num_devices).plan(request), self.name)
