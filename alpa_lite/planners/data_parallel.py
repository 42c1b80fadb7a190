"""Data parallelism: every device works on a part of the batch; gradients are summed once per step.

`DataParallel` copies all parameters to each device. With `bucket_bytes` gradients are summed in buckets, as PyTorch's
DistributedDataParallel does, so that the first can be sent while the backward pass continues. In the order in which the
backward pass makes the gradients, for each dtype:

    a bucket takes gradients until it holds `first_bucket_bytes` or more; later ones until `bucket_bytes`   (buckets)

Li et al., PyTorch Distributed (VLDB 2020), section 4.2.

`Zero` splits optimizer state (stage 1, 2) or parameters too (stage 3) over the devices. Stages 1 and 2 differ in how
gradients are stored between backward pass and update. Here this follows from the costs: a gradient that is
reduce-scattered into split optimizer state is never whole (stage 2). FSDP is stage 3.
Rajbhandari et al., ZeRO (SC 2020), section 5.

`GShard` puts experts on different devices, and tokens travel to their experts and back. Each layer with experts has two
all_to_alls of the dispatched tokens in the forward pass and two in the backward pass; the weights of experts are never
gathered. Each device holds 1 / `expert` of them. Lepikhin et al., GShard (ICLR 2021), section 3.
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
        step = request.step_of(plan)
        # The default of the first bucket may exceed a small bucket size that the user gives.
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
    # Ops are numbered in the order in which they run.
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
            # Only the first bucket of a dtype is small.
            held[value.dtype], limits[value.dtype] = 0, bucket_bytes
    # The gradients that are left form buckets that are not full.
    return tuple(map(tuple, [*done, *filling.values()]))


@dataclass(frozen=True, kw_only=True)
class Zero(Planner):
    """All devices on one "data" axis, state split over it.

    Attributes:
        stage: 1 splits the optimizer state, 2 gradient sums too, 3 parameters too.
    """

    stage: int = 2

    def __post_init__(self) -> None:
        """Check the stage."""
        if self.stage not in (1, 2, 3):
            raise PlanError(f"ZeRO has stages 1, 2 and 3, but stage={self.stage} was given.")

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"ZeRO-{self.stage}"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the batch does not divide."""
        return replace(Hybrid(data=request.cluster.num_devices, zero=self.stage).plan(request), name=self.name)


@dataclass(frozen=True, kw_only=True)
class FSDP(Planner):
    """Fully sharded data parallelism: ZeRO stage 3.

    A unit, which is gathered at once, is one array of parameters as one op reads it: inside a loop over layers that of
    one layer. It is gathered before its first reader in each pass and freed after its last, so that parameters are
    gathered twice per step and micro-batch, and gathered parameters never pile up. With `reshard_after_forward=False`
    it is gathered once for both passes, and a loop's whole stack of layers is one unit.

    Attributes:
        replicas: groups of devices that each hold one whole copy (hybrid sharding): inside a group gradients are
            reduce-scattered, and each device's part is summed over the groups. None: one group.
        reshard_after_forward: whether gathered parameters are freed after the forward pass. If not, each is gathered
            once per step and micro-batch, and all that the backward pass reads are held whole until then.
        hybrid: as many replicas as hosts, so that weights are gathered within a host.
    """

    replicas: int | None = None
    hybrid: bool = False
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        """Check that the replicas are given once."""
        if self.hybrid and self.replicas is not None:
            raise PlanError(
                f"hybrid=True means one replica per host, but replicas={self.replicas} was given. Give one."
            )

    @property
    def name(self) -> str:
        """Name for tables."""
        replicas = ", one replica per host" if self.hybrid else f", {self.replicas} replicas" * bool(self.replicas)
        return f"FSDP{replicas}{'' if self.reshard_after_forward else ', kept gathered'}"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the batch or the devices do not divide."""
        cluster = request.cluster
        # The axis of replicas is outermost (`Hybrid._mesh`), so that it lies across hosts.
        replicas = cluster.num_hosts if self.hybrid else self.replicas or 1
        hybrid = Hybrid(
            data=cluster.num_devices,
            zero=3,
            replicas=replicas,
            reshard_after_forward=self.reshard_after_forward,
        )
        return replace(hybrid.plan(request), name=self.name)


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
        # Without it the solver might gather the weights of experts, where that is cheaper than moving tokens.
        split = {"experts": "expert"}
        return replace(Hybrid(data=total, expert=expert, zero=self.zero, split=split).plan(request), name=self.name)
