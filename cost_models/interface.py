"""Define the cost model protocol of planners and simulator, in terms of Work, Collective, Cluster and seconds."""

from __future__ import annotations

from typing import Protocol

from cost_models.backend import Backend
from cost_models.cluster import Cluster
from cost_models.collective import Collective
from cost_models.work import Work


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
