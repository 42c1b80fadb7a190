"""Data parallelism: every device holds all parameters and a part of the batch; gradients are summed once per step.

With `bucket_bytes` they are summed in buckets, as PyTorch's DistributedDataParallel does, so that the first can be sent
while the backward pass continues. In the order in which the backward pass makes the gradients, for each dtype:

    a bucket takes gradients until it holds `first_bucket_bytes` or more; later ones until `bucket_bytes`   (buckets)

Li et al., PyTorch Distributed (VLDB 2020), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import Phase, StepGraph


@dataclass(frozen=True, kw_only=True)
class DataParallel(Planner):
    """All devices on one "data" axis.

    Buckets change when gradients are sent, and in how many messages; plans list and price each gradient by itself.

    Attributes:
        bucket_bytes: approximate size of a bucket of gradients; PyTorch's default is 25 MiB. None: gradients are
            reduced one by one, and XLA decides which of them it combines.
        first_bucket_bytes: approximate size of the first bucket, which should start early.
    """

    bucket_bytes: int | None = None
    first_bucket_bytes: int = 2**20

    def __post_init__(self) -> None:
        """Check the sizes."""
        for size in (self.bucket_bytes, self.first_bucket_bytes):
            if size is not None and size < 1:
                raise PlanError(
                    f"Buckets of {size} bytes were asked for. Give a number above 0, or None for no buckets."
                )

    @property
    def name(self) -> str:
        """Name for tables."""
        return "data parallel" + (f", buckets of {self.bucket_bytes / 2**20:.3g} MiB" if self.bucket_bytes else "")

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the batch does not divide."""
        plan = replace(Hybrid(data=request.cluster.num_devices).plan(request), name=self.name)
        if self.bucket_bytes is None:
            return plan
        step = request.step_at(plan.num_microbatches, plan.loop_parts)
        first = min(self.first_bucket_bytes, self.bucket_bytes)
        return replace(plan, buckets=buckets(_gradients(step, plan), first, self.bucket_bytes))


def _gradients(step: StepGraph, plan: Plan) -> list[Value]:
    """Return the sums over the batch that the backward pass makes, in the order of their ops."""
    made = {
        v: producer
        for stage in plan.stages
        for v, sums in stage.accumulators.items()
        # Only gradients that are summed over devices before the update reads them have anything to send.
        if sums.stored.partial and not sums.resolved.partial
        if (producer := step.graph.producer[v]) is not None and step.phases[producer] is Phase.BACKWARD
    }
    return [step.graph.values[v] for v in sorted(made, key=made.__getitem__)]


def buckets(gradients: Iterable[Value], first_bytes: int, bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Return the value ids of the gradients of each bucket; a bucket is closed when it holds its bytes or more."""
    # Arrays of different dtypes cannot share a message.
    done, filling = list[list[int]](), dict[str, list[int]]()
    held, limits = dict[str, int](), dict[str, int]()
    for value in gradients:
        bucket = filling.setdefault(value.dtype, [])
        bucket.append(value.id)
        held[value.dtype] = held.get(value.dtype, 0) + value.bytes
        if held[value.dtype] >= limits.setdefault(value.dtype, first_bytes):
            done.append(filling.pop(value.dtype))
            held[value.dtype], limits[value.dtype] = 0, bucket_bytes
    return tuple(map(tuple, [*done, *filling.values()]))
