"""What planners and the simulator need to know of a cost model: four nouns (Work, Collective, Cluster, seconds)."""

from __future__ import annotations

from typing import Protocol

from cost_models.backend import Backend
from cost_models.cluster import Cluster
from cost_models.collective import Collective
from cost_models.work import Work


class CostModel(Protocol):
    """Seconds for work, collectives, transfers and launches on one cluster. Implementations are immutable."""

    @property
    def cluster(self) -> Cluster:
        """The cluster that is priced."""
        ...

    @property
    def backend(self) -> Backend:
        """What the software on the devices does with a program."""
        ...

    def compute_seconds(self, work: Work, *, num_active_devices: int = 1) -> float:
        """Seconds until each of `num_active_devices` devices has done `work`, all starting together."""
        ...

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds of one collective, its concurrent siblings (`Group.num_concurrent`) included."""
        ...

    def transfer_seconds(self, bytes: float, *, crosses_hosts: bool, num_links: int = 1) -> float:
        """Seconds to move `bytes` in total from submesh to submesh over `num_links` parallel pairs of devices."""
        ...

    def launch_seconds(self) -> float:
        """Host seconds to launch one compiled program."""
        ...
