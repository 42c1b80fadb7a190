"""A cost model of nothing but communication: each mesh dim has a latency α and a time per byte β.

On a logical mesh (n0, n1) over n0 hosts of n1 devices, dim 0 connects the hosts and dim 1 the devices of a host. With
n devices along a dim and B the bytes of the whole buffer (of the array that is put together or taken apart), a
collective costs

    all_gather       α + β (n-1)/n B + 0.1                       (`AlphaBeta.all_gather`)
    all_reduce       α + 2 β (n-1)/n B + 0.01                    (`AlphaBeta.all_reduce`)
    reduce_scatter   α + β (n-1)/n B + 0.001                     (`AlphaBeta.reduce_scatter`)
    all_to_all       α + β (n-1)/n² B (n/2) + 0.001              (`AlphaBeta.all_to_all`)

These are the cost functions of Alpa (Zheng et al., OSDI 2022; class `LogicalDeviceMesh`), the constants included. Over
both dims at once, n is the number of all devices, α the larger and β the smaller one. Alpa has no permute; one costs
α + β B here, B being what each device sends, and β over both dims the larger one. A kind can be forbidden.

Alpa's search never leaves a contraction whole on every device. A price per FLOP says the same: with it as high as
here, a contraction that is not split over all devices costs more than any communication that this would save.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from math import prod
from typing import Any

import alpa_lite as al
from cost_models.cluster import Cluster
from cost_models.hardware import Backend
from cost_models.work import Collective, Work

#: The dim that stands for both dims at once.
BOTH = 2


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Prices of collectives on a mesh (n0, n1) by dim, in seconds; `seconds_per_flop` is that of contractions."""

    shape: tuple[int, int]
    alpha: tuple[float, float] = (1.0, 1.0)
    beta: tuple[float, float] = (1.0, 1.0)
    forbidden: tuple[str, ...] = ()
    seconds_per_flop: float = 1.0

    @property
    def backend(self) -> Backend:
        """The default one: Alpa prices nothing that depends on it."""
        return Backend()

    @property
    def cluster(self) -> Cluster:
        """As many hosts and devices per host as the mesh has rows and columns."""
        host = al.cluster("p3.16xlarge")
        return dataclasses.replace(host, name="α-β", num_hosts=self.shape[0], devices_per_host=self.shape[1])

    def all_gather(self, num_bytes: float, dim: int) -> float:
        """Seconds to put an array of `num_bytes` together from its parts."""
        return self._latency(dim) + self._sent(num_bytes, dim) + 0.1

    def all_reduce(self, num_bytes: float, dim: int) -> float:
        """Seconds to add up a buffer of `num_bytes`."""
        return self._latency(dim) + 2 * self._sent(num_bytes, dim) + 0.01

    def reduce_scatter(self, num_bytes: float, dim: int) -> float:
        """Seconds to add up a buffer of `num_bytes`, each device keeping a part."""
        return self._latency(dim) + self._sent(num_bytes, dim) + 0.001

    def all_to_all(self, num_bytes: float, dim: int) -> float:
        """Seconds to split an array, whose parts on the devices are `num_bytes` together, along another dim."""
        return self._latency(dim) + self._sent(num_bytes, dim) / 2 + 0.001

    def permute(self, num_bytes: float, dim: int) -> float:
        """Seconds for each device to send `num_bytes` to another one."""
        return self._latency(dim) + (*self.beta, max(self.beta))[dim] * num_bytes

    def _latency(self, dim: int) -> float:
        return (*self.alpha, max(self.alpha))[dim]

    def _sent(self, num_bytes: float, dim: int) -> float:
        n = (*self.shape, prod(self.shape))[dim]
        return (*self.beta, min(self.beta))[dim] * (n - 1) / n * num_bytes

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds of one collective, by the dim that its group lies along."""
        group, kind = collective.group, collective.kind
        if group.num_devices == 1:
            return 0.0
        if kind in self.forbidden:
            return math.inf
        dim = BOTH if group.num_hosts > 1 and group.devices_per_host > 1 else 0 if group.num_hosts > 1 else 1
        # A cost model is told the part on one device, the formula counts the parts of all.
        size = collective.bytes * (group.num_devices if kind == "all_to_all" else 1)
        prices = {
            "all_gather": self.all_gather,
            "all_reduce": self.all_reduce,
            "reduce_scatter": self.reduce_scatter,
            "all_to_all": self.all_to_all,
            "permute": self.permute,
        }
        return prices[kind](size, dim)

    def compute_seconds(self, work: Work, *, num_active_devices: int = 1) -> float:
        """Contractions by their FLOPs; all else is free."""
        return 0.0 if work.kind == "elementwise" else self.seconds_per_flop * work.flops

    def transfer_seconds(self, bytes: float, *, crosses_hosts: bool, num_links: int = 1) -> float:
        """There is one stage: nothing moves between stages."""
        return 0.0

    def launch_seconds(self) -> float:
        """Launching is free."""
        return 0.0


#: Four devices in a row, along either dim.
ONE_DIM = [(4, 1), (1, 4)]


def line(shape: tuple[int, int], **options: Any) -> tuple[AlphaBeta, int]:
    """The cost model of a mesh with one dim of several devices, and that dim."""
    return AlphaBeta(shape=shape, **options), 0 if shape[0] > 1 else 1
