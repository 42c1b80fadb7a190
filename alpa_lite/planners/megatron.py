"""Megatron tensor parallelism: weights split over a "model" axis inside each layer, the batch over a "data" axis.

The integer program chooses the split dims from the graph, under the rule that "model" never splits the batch; for a
transformer that gives the column/row pattern of the paper. Per layer and pass there are two sums over `t` devices, each
of b·s·h elements, so that each device sends and receives

    8 · b · s · h · (t - 1) / t       elements per layer and micro-batch, as all_reduces, or with sequence
                                      parallelism as reduce_scatters and all_gathers

Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner
from alpa_lite.schedule import OneFOneB, Schedule


@dataclass(frozen=True, kw_only=True)
class Megatron(Planner):
    """Tensor parallelism inside layers; the rest is data parallel.

    Attributes:
        tensor: devices that share each layer; None: all that `pipeline` and `data` leave.
        pipeline: number of stages, under `schedule`.
        data: data-parallel replicas; None: as many as the others leave devices for.
        schedule: schedule of the pipeline.
        sequence_parallel: whether sums may stay scattered between products, along positions where norms and dropout
            work, if that is faster. The bytes are the same. Without it arrays between products are whole wherever they
            can be, and sums are all_reduces.
        vocab_parallel: whether tables that tokens look up must be split by rows over the tensor-parallel devices, and
            with them look-ups and logits. Without it they are split if that is faster.
    """

    tensor: int | None = None
    pipeline: int = 1
    data: int | None = None
    sequence_parallel: bool = True
    vocab_parallel: bool = False
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """Name for tables."""
        degrees = {"tp": self.tensor, "pp": self.pipeline if self.pipeline > 1 else None, "dp": self.data}
        shown = [f"{name}{degree}" for name, degree in degrees.items() if degree]
        return "Megatron tensor parallel" + (f" ({' × '.join(shown)})" if shown else "")

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the degrees do not divide the cluster, or tables cannot be split."""
        left = max(1, request.cluster.num_devices // (self.pipeline * (self.data or 1)))
        hybrid = Hybrid(
            pipeline=self.pipeline,
            data=self.data,
            tensor=self.tensor or left,
            sequence_parallel=self.sequence_parallel,
            split={"vocab": "model"} if self.vocab_parallel else {},
            schedule=self.schedule,
        )
        return replace(hybrid.plan(request), name=self.name)
