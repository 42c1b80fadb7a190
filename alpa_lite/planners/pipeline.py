"""Pipeline parallelism: equal stages on equal submeshes, data parallel inside each (GPipe, PipeDream-Flush).

Huang et al., GPipe (NeurIPS 2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021).

`TorchGPipe` balances its stages by block partition, by time or by size. They are runs of layers (`layers.natural_cut`),
cut by `block_partition`; values that skip stages are sent once, from the stage that makes them to the stage that reads
them. Kim et al., torchgpipe (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.work_floor import pipeline_slowdown
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, marked, renamed_options
from alpa_lite.schedule import GPipe, OneFOneB, Schedule, splits_backward


@renamed_options(num_stages="pipeline")
@dataclass(frozen=True, kw_only=True)
class Pipeline(Planner):
    """Equal stages on equal groups of devices; inside a stage, tensor and data parallelism.

    Attributes:
        pipeline: number of stages.
        tensor: devices of a stage that share each layer; the rest is data parallel.
        schedule: order in which stages run micro-batches.
    """

    obeys_user_shardings = True

    pipeline: int = 2
    tensor: int = 1
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """Name for tables."""
        name = f"{self.pipeline}-stage pipeline" + (f" × tp{self.tensor}" if self.tensor > 1 else "")
        return marked(name, self.schedule)

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
            # torchgpipe runs the forward passes of all micro-batches before the first backward pass.
            schedule=GPipe(),
            equal="layer_flops" if self.balance == "time" else "layer_bytes",
            # GPipe holds the activations of all micro-batches, which mostly fit only if they are recomputed.
            remat="full" if self.checkpoint else "none",
        )
        return replace(hybrid.plan(request), name=self.name)
