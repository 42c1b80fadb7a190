"""Define the cost model protocol of planners and simulator, and the analytic model that implements it.

The protocol speaks of Work, Collective, Cluster and seconds. The analytic model composes the formulas of `compute` and
`communication` on a described cluster.

n virtual devices that share one processor take max(n, 1/share) times as long as one device that could use all of it;
share = the fraction of the processor that one device can use                 (ComposedCostModel.compute_seconds)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from cost_models import communication, compute
from cost_models.cluster import Cluster
from cost_models.errors import require_count
from cost_models.hardware import Backend
from cost_models.work import Collective, Work


class CostModel(Protocol):
    """Price work, collectives, transfers and launches on one cluster, in seconds. Implementations are immutable."""

    @property
    def cluster(self) -> Cluster:
        """Cluster on which this model prices."""
        ...

    @property
    def backend(self) -> Backend:
        """Execution properties of the software on the devices."""
        ...

    def compute_seconds(self, work: Work, *, num_active_devices: int = 1) -> float:
        """Return the seconds in which `num_active_devices` devices, started together, each complete `work`."""
        ...

    def collective_seconds(self, collective: Collective) -> float:
        """Return the seconds of one collective, its concurrent siblings (`Group.num_concurrent`) included."""
        ...

    def transfer_seconds(self, bytes: float, *, crosses_hosts: bool, num_links: int = 1) -> float:
        """Return the seconds to move a total of `bytes` between submeshes over `num_links` parallel device pairs."""
        ...

    def launch_seconds(self) -> float:
        """Return the host seconds to launch one compiled program."""
        ...


@dataclass(frozen=True, slots=True)
class ComposedCostModel:
    """A `CostModel` for `cluster`; nothing is measured, so it needs no device.

    cluster: the cluster on which everything is priced.
    backend: execution properties of the software on the devices.
    """

    cluster: Cluster
    backend: Backend = field(default_factory=Backend)

    def compute_seconds(self, work: Work, *, num_active_devices: int = 1) -> float:
        """Return the seconds in which all active devices complete `work`; they add up on a shared processor."""
        require_count("num_active_devices", num_active_devices, advice="count the devices that work at the same time")
        # One device cannot use the whole processor, so that fewer devices than 1/share leave a part of it idle.
        turns = max(num_active_devices, 1 / self.cluster.device_share) if self.cluster.shared_processor else 1
        device = self.cluster.device
        if self.backend.ported_attention and work.kind == "attention":
            device = device.with_ported_attention
        return turns * compute.compute_seconds(work, device)

    def collective_seconds(self, collective: Collective) -> float:
        """Return the seconds of one collective (`communication.collective_seconds`)."""
        return communication.collective_seconds(collective, self.cluster)

    def transfer_seconds(self, bytes: float, *, crosses_hosts: bool, num_links: int = 1) -> float:
        """Return the seconds to move `bytes` between submeshes (`communication.transfer_seconds`)."""
        return communication.transfer_seconds(bytes, self.cluster, crosses_hosts=crosses_hosts, num_links=num_links)

    def launch_seconds(self) -> float:
        """Return the host seconds to launch one compiled program, `Device.dispatch_seconds`."""
        return self.cluster.device.dispatch_seconds
