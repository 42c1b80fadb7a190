"""Megatron tensor parallelism: weights split over a "model" axis inside each layer, the batch over a "data" axis.

The split dims come from the graph (`weights.projections`): projections from the residual stream are split by columns,
and those back to it by rows. The integer program chooses the rest, under the rule that "model" never splits the batch.
Per layer and pass there are two sums over `t` devices, each
of b·s·h elements, so that each device sends and receives

    8 · b · s · h · (t - 1) / t       elements per layer and micro-batch, as all_reduces, or with sequence
                                      parallelism as reduce_scatters and all_gathers

Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2 (sequence parallelism).

DeepSpeed's 3D parallelism combines it with a pipeline, and with ZeRO's split of optimizer state over the data axis:

    device of (pipe, data, model) = (pipe · |data| + data) · |model| + model

so that tensor parallelism is between neighbours (links inside a host), and the pipeline between distant devices.
Rasley et al., DeepSpeed (KDD 2020); Microsoft, "DeepSpeed: Extreme-scale model training for everyone" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, marked, renamed_options
from alpa_lite.schedule import OneFOneB, Schedule


@dataclass(frozen=True, kw_only=True)
class Megatron(Planner):
    """Tensor parallelism inside layers; the rest is data parallel.

    The projections of attention are split by heads and those of feed-forward blocks by hidden units. A note of the plan
    says which cannot be split so, and why.

    Attributes:
        relaxed: whether the splits of all weights are chosen by price instead, which may be faster.
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
    relaxed: bool = False
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """Name for tables."""
        degrees = {"tp": self.tensor, "pp": self.pipeline if self.pipeline > 1 else None, "dp": self.data}
        shown = [f"{name}{degree}" for name, degree in degrees.items() if degree]
        degrees_shown = f" ({' × '.join(shown)})" if shown else ""
        return marked(f"Megatron tensor parallel{', relaxed' if self.relaxed else ''}{degrees_shown}", self.schedule)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the degrees do not divide the cluster, or tables cannot be split."""
        # At least 1: degrees that do not divide the cluster are reported by `Hybrid`.
        left = max(1, request.cluster.num_devices // (self.pipeline * (self.data or 1)))
        hybrid = Hybrid(
            pipeline=self.pipeline,
            # Left open where only `tensor` is given: `Hybrid` takes the devices that remain.
            data=self.data,
            tensor=self.tensor or left,
            sequence_parallel=self.sequence_parallel,
            projections=not self.relaxed,
            # "model" is the tensor-parallel axis of `Hybrid`.
            split={"vocab": "model"} if self.vocab_parallel else {},
            schedule=self.schedule,
        )
        return replace(hybrid.plan(request), name=self.name)


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
