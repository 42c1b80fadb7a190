"""ZeRO: data parallelism with optimizer state (stage 1, 2) or parameters too (stage 3) split over the data axis.

Stages 1 and 2 differ in how gradients are stored between backward pass and update. Here this follows from the costs: a
gradient that is reduce-scattered into split optimizer state is never whole (stage 2). FSDP is stage 3.
Rajbhandari et al., ZeRO (SC 2020), section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner


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
        replicas = cluster.num_hosts if self.hybrid else self.replicas or 1
        hybrid = Hybrid(
            data=cluster.num_devices,
            zero=3,
            replicas=replicas,
            reshard_after_forward=self.reshard_after_forward,
        )
        return replace(hybrid.plan(request), name=self.name)
