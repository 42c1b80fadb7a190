"""torchgpipe: GPipe whose stages are balanced by block partition, by time or by size.

Stages are runs of layers (`layers.natural_cut`), cut by `block_partition`; values that skip stages are sent once, from
the stage that makes them to the stage that reads them. Kim et al., torchgpipe (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, renamed_options
from alpa_lite.schedule import GPipe


@renamed_options(num_stages="pipeline")
@dataclass(frozen=True, kw_only=True)
class TorchGPipe(Planner):
    """Stages under GPipe that recompute their activations in the backward pass; data parallel inside each stage.

    Attributes:
        pipeline: number of stages.
        balance: the quantity that stages share about equally: "time" (floating-point operations) or "size" (bytes of
            parameters and optimizer state).
        checkpoint: whether activations inside stages are recomputed.
    """

    pipeline: int = 2
    balance: Literal["time", "size"] = "time"
    checkpoint: bool = True

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"torchgpipe ({self.pipeline} stages by {self.balance})"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if there are more stages than layers, or devices cannot be divided."""
        hybrid = Hybrid(
            pipeline=self.pipeline,
            schedule=GPipe(),
            equal="layer_flops" if self.balance == "time" else "layer_bytes",
            remat="full" if self.checkpoint else "none",
        )
        return replace(hybrid.plan(request), name=self.name)
