"""torchgpipe: GPipe whose stages are balanced by block partition, by time or by size.

Stages are runs of layers (`layers.natural_cut`), cut by `block_partition`; values that skip stages are sent once, from
where they are made to where they are read. Kim et al., torchgpipe (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner
from alpa_lite.schedule import GPipe


@dataclass(frozen=True, kw_only=True)
class TorchGPipe(Planner):
    """`num_stages` stages under GPipe, whose layers compute again in the backward pass; data parallel inside each.

    Attributes:
        num_stages: how many.
        balance: what stages have about equally much of: "time" (floating-point operations) or "size" (bytes of
            parameters and optimizer state).
        checkpoint: whether activations inside stages are computed again.
    """

    num_stages: int = 2
    balance: Literal["time", "size"] = "time"
    checkpoint: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        return f"torchgpipe ({self.num_stages} stages by {self.balance})"

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` when there are more stages than layers, or the devices do not divide."""
        hybrid = Hybrid(
            pipeline=self.num_stages,
            schedule=GPipe(),
            equal="layer_flops" if self.balance == "time" else "layer_bytes",
            remat="full" if self.checkpoint else "none",
        )
        return renamed(hybrid.plan(request), self.name)
