"""Define the cost model protocol of planners and simulator, and the analytic model: a roofline and collectives.

The protocol speaks of Work, Collective, Cluster and seconds. The analytic model prices work by the roofline below, with
a start-up time per kernel and the waste of matrix products in blocks, and collectives by `communication`.

    seconds    = n * launch + max(arithmetic, traffic)                                     (estimate, compute_seconds)
    traffic    = bytes / (memory_efficiency * bandwidth)
    arithmetic = flops / (efficiency * peak)             of work whose shape is unknown, and on the vector units
    arithmetic = n * min over tiles (r, c) of waves * 2 r c (steps + fill) / (rate * reuse(r, c))      (_best_tiling)
    waves      = ceil(blocks / units),   blocks = count * ceil(rows / r) * ceil(columns / c)
    steps      = depth, or depth / (units // blocks), at least min(depth, 256), where blocks leave units idle (split K)
    reuse(r,c) = h / (h + 8), relative to the largest tile,  h = r c / (r + c)
    attention  = flops (p + 32) / (d * efficiency * peak), d the width of a head, p with its padding   (_head_loss)
    fraction of peak = flops / (peak * seconds)                                                   (achieved_fraction)

n is the number of kernels, rate = efficiency * peak / units the rate of one unit, fill the depth that a unit loses
before it is busy. A unit reads r + c numbers for r c multiply-adds, so that large tiles use what they read more often
(h). In a fused attention kernel the exponentials of the scores cost as much as 32 more columns of the products around
them, and heads are padded to whole vector registers (`Device.lanes`). Roofline: Williams, Waterman, Patterson, CACM
52(4), 2009. Tiles, waves and split K: NVIDIA's "Matrix Multiplication Background User's Guide", sections on tile and
wave quantisation.

n virtual devices that share one processor take max(n, 1/share) times as long as one device that could use all of it;
share = the fraction of the processor that one device can use                 (ComposedCostModel.compute_seconds)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Protocol

from cost_models import communication
from cost_models.checks import require_count
from cost_models.cluster import Cluster
from cost_models.hardware import Backend, Device
from cost_models.work import Collective, Product, Work

#: A product is not cut along its depth into parts shorter than this.
SHORTEST_SPLIT = 256
#: Columns of a product that take as long as the softmax of the same scores.
SOFTMAX_COLUMNS = 32.0
#: Half-saturation of the reuse of what a unit reads, in multiply-adds per number read.
REUSE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEstimate:
    """Seconds of some work on a device, with their breakdown.

    Attributes:
        seconds: launch_seconds + max(arithmetic_seconds, traffic_seconds).
        launch_seconds, arithmetic_seconds, traffic_seconds: totals over all kernels.
        tile: rows and columns of the blocks that a matrix product is cut into; None for other work.
        filled: fraction of the arithmetic time that large blocks would need too; the rest is lost to padding, to units
            that idle in the last wave, and to the pipeline fill of each block.
    """

    seconds: float
    launch_seconds: float
    arithmetic_seconds: float
    traffic_seconds: float
    tile: tuple[int, int] | None = None
    filled: float = 1.0

    @property
    def limited_by(self) -> str:
        """Name of the largest part: "launch", "arithmetic" or "memory"."""
        parts = {
            "launch": self.launch_seconds,
            "arithmetic": self.arithmetic_seconds,
            "memory": self.traffic_seconds,
        }
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        tile = f" in blocks of {self.tile[0]} x {self.tile[1]}, {self.filled:.0%} filled" if self.tile else ""
        return (
            f"{self.seconds * 1e6:.3g} us: launch {self.launch_seconds * 1e6:.3g}, arithmetic "
            f"{self.arithmetic_seconds * 1e6:.3g}{tile}, memory {self.traffic_seconds * 1e6:.3g}"
        )


def estimate(work: Work, device: Device) -> ComputeEstimate:
    """Price `work` on one device, with the breakdown of its seconds. Linear in n for `work * n`."""
    launch = work.num_kernels * device.launch_seconds
    traffic = work.bytes / (device.memory_efficiency * device.memory_bandwidth)
    ideal = work.flops / sustained_flops(work, device)
    tile, arithmetic = None, ideal
    if work.kind == "attention":
        arithmetic = ideal * _head_loss(work.product, device.lanes)
    elif work.product is not None and work.flops and work.kind != "elementwise":
        tiling = _best_tiling(work.product, device)
        # The tiling describes one kernel of the product; `work` may total several, for which the same loss holds.
        arithmetic = max(ideal, ideal / tiling.filled)
        tile = tiling.tile
    return ComputeEstimate(
        seconds=launch + max(arithmetic, traffic),
        launch_seconds=launch,
        arithmetic_seconds=arithmetic,
        traffic_seconds=traffic,
        tile=tile,
        filled=ideal / arithmetic if arithmetic else 1.0,
    )


def compute_seconds(work: Work, device: Device) -> float:
    """Return the seconds of `work` on one device, linear in n for `work * n`; an empty kernel costs its launch."""
    return estimate(work, device).seconds


def least_seconds(work: Work, device: Device) -> float:
    """Return a lower bound on the seconds of `work`, however it is cut into parts: of all parts together.

    Each part starts a kernel, moves its bytes, and is a product of at most as many rows, columns and depth (or an
    attention over heads that are no wider), which wastes no less of the units than `_best_filled`.
    """
    launch = work.num_kernels * device.launch_seconds
    traffic = work.bytes / (device.memory_efficiency * device.memory_bandwidth)
    arithmetic = work.flops / sustained_flops(work, device)
    if work.kind == "attention":
        arithmetic *= _head_loss(work.product)
    elif work.product is not None and work.flops and work.kind != "elementwise":
        arithmetic /= min(1.0, _best_filled(work.product, device))
    return launch + max(arithmetic, traffic)


def achieved_fraction(work: Work, device: Device) -> float:
    """Return the fraction of its dtype's peak rate that `work` reaches, between 0 and 1; 0 for no work."""
    seconds = compute_seconds(work, device)
    return work.flops / (device.peak(work.dtype, matrix=work.kind != "elementwise") * seconds) if seconds else 0.0


def sustained_flops(work: Work, device: Device) -> float:
    """Return the FLOP/s that large kernels of this kind and dtype sustain."""
    if work.kind == "elementwise":
        return device.peak(work.dtype, matrix=False) * device.memory_efficiency
    units = device.format(work.dtype)
    parts = {"convolution": device.convolution_efficiency, "attention": device.attention_efficiency}
    return parts.get(work.kind, 1.0) * device.efficiencies[units] * device.peaks[units]


def _head_loss(product: Product | None, lanes: int = 1) -> float:
    """Return the slowdown of a fused attention kernel for heads of this width, relative to wide heads.

    Heads are padded to a multiple of `lanes`; without it, this is the least slowdown of heads that are no wider.
    """
    if product is None:
        return 1.0
    # Of the two products of attention, one contracts over the width of the head and the other has it as its columns;
    # the other size is the number of keys, which is larger.
    width = min(product.depth, product.columns)
    # The width is a quotient of FLOPs, which may be rounded up.
    padded = ceil(width / lanes - 1e-6) * lanes if lanes > 1 else width
    return (padded + SOFTMAX_COLUMNS) / width


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    tile: tuple[int, int]
    filled: float


# A search prices the same few products again and again, since the layers of a model repeat each other.
@lru_cache(maxsize=50_000)
def _best_tiling(product: Product, device: Device) -> _Tiling:
    """Return the tile with the least waste, and the fraction of the units' time that is not wasted."""
    # Relative to the tile with the most reuse, because the efficiencies of a device were measured on large products.
    best_reuse = max(_reuse(tile) for tile in device.tiles)
    found = (
        _Tiling(tile=tile, filled=_filled(product, tile, device) * _reuse(tile) / best_reuse) for tile in device.tiles
    )
    return max(found, key=lambda tiling: tiling.filled)


def _reuse(tile: tuple[int, int]) -> float:
    reads = tile[0] * tile[1] / (tile[0] + tile[1])
    return reads / (reads + REUSE)


def _filled(product: Product, tile: tuple[int, int], device: Device) -> float:
    """Return the product's multiply-adds divided by those that all units could execute in the same time."""
    rows, columns = tile
    blocks = product.count * ceil(product.rows / rows) * ceil(product.columns / columns)
    units = device.num_units
    steps = product.depth
    # Idle units take parts of the depth of other blocks (split K), down to a length below which that costs more.
    if blocks < units:
        steps = max(product.depth / (units // blocks), min(product.depth, SHORTEST_SPLIT))
    # The last wave occupies all units for as long as a full one does, however few blocks it has.
    capacity = ceil(blocks / units) * units * rows * columns * (steps + device.fill_depth)
    return product.flops / 2 / capacity


def _best_filled(product: Product, device: Device) -> float:
    """Return an upper bound of `filled` of all products that are parts of this one."""

    def filled(tile: tuple[int, int]) -> float:
        # No wave is wasted at best; blocks that a small product does not fill, and the fill of each block, are.
        within = min(1.0, product.rows / tile[0]) * min(1.0, product.columns / tile[1])
        return _reuse(tile) * within * product.depth / (product.depth + device.fill_depth)

    return max(map(filled, device.tiles)) / max(map(_reuse, device.tiles))


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

    def least_compute_seconds(self, work: Work, *, num_active_devices: int = 1) -> float:
        """Return a lower bound of `compute_seconds`, and of its sum over parts into which `work` is cut."""
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
        return self._turns(num_active_devices) * compute_seconds(work, self._device_for(work))

    def least_compute_seconds(self, work: Work, *, num_active_devices: int = 1) -> float:
        """Return a lower bound of `compute_seconds`, and of its sum over parts into which `work` is cut."""
        return self._turns(num_active_devices) * least_seconds(work, self._device_for(work))

    def _turns(self, num_active_devices: int) -> float:
        """Return how many times longer work takes while so many devices share one processor."""
        require_count("num_active_devices", num_active_devices, advice="count the devices that work at the same time")
        # One device cannot use the whole processor, so that fewer devices than 1/share leave a part of it idle.
        return max(num_active_devices, 1 / self.cluster.device_share) if self.cluster.shared_processor else 1.0

    def _device_for(self, work: Work) -> Device:
        ported = self.backend.ported_attention and work.kind == "attention"
        return self.cluster.device.with_ported_attention if ported else self.cluster.device

    def collective_seconds(self, collective: Collective) -> float:
        """Return the seconds of one collective (`communication.collective_seconds`)."""
        return communication.collective_seconds(collective, self.cluster)

    def transfer_seconds(self, bytes: float, *, crosses_hosts: bool, num_links: int = 1) -> float:
        """Return the seconds to move `bytes` between submeshes (`communication.transfer_seconds`)."""
        return communication.transfer_seconds(bytes, self.cluster, crosses_hosts=crosses_hosts, num_links=num_links)

    def launch_seconds(self) -> float:
        """Return the host seconds to launch one compiled program, `Device.dispatch_seconds`."""
        return self.cluster.device.dispatch_seconds
