"""Describe one device (memory, rates, efficiencies), the software on it, the memory of its host, and one link.

    peak(dtype) of a matrix kernel = the first rate that the device has in the dtype's row of fallbacks  (Device.peak)

A link has a latency, and a rate at which a device (or a host) sends data to the others:

    R(n)    = efficiency(n) * share(n) * bandwidth          rate of each of n members              (Link.rate)
    move(b) = b/R + ramp * b / (b + ramp R / 3)             seconds that a link is busy with b bytes  (moving_seconds)
    message = latency + move(b)                                                                    (Link.seconds)

Short messages move at a quarter of the rate, R/4: they are sent in a form that needs no handshake but carries little
(the low-latency protocol of NCCL is priced at a quarter in its tuner, NVIDIA/nccl src/graph/tuning.cc). Long ones
lose `ramp` seconds until they run at the full rate. `move` is increasing, concave and smooth in b, and falls as R
rises, so nothing that is built from it by sums and maxima jumps, or gains by more bytes or a slower link.

Share of a torus: members along w whole rings use both directions of their links, a remainder one direction more;
fewer members than the shortest ring sit in a compact block, with one direction in up to log2 n dims,

    share(n) = (2 w + [remainder > 1]) / (2 dims),   share(block) = min(dims, floor(log2 n)) / (2 dims)

(jax-ml/scaling-book, sharding.md: an axis that is not a whole ring has no wrap-around and half of the bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, cast

from cost_models.checks import ClusterError, JsonObject, require_amount, require_count

# JAX lets matrix kernels read float32 operands as TF32 on NVIDIA GPUs that have it (docs.jax.dev, "Matmul precision").
_MATRIX_FALLBACKS: dict[str, tuple[str, ...]] = {
    "float32": ("tensorfloat32",),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "float8": ("float8", "bfloat16", "float16"),
    "float4": ("float4", "float8", "bfloat16", "float16"),
}

PeakFlops = Mapping[str, float] | tuple[tuple[str, float], ...]

# The devices that ship state their own. Alpa gave XLA this much of a GPU (global_env.py, xla_client_mem_fraction=0.9).
MEMORY_RESERVE = 0.1
"""Fraction of a device's memory that is kept for the allocator where a description states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as JAX exposes it (a TPU v3 chip is two devices), or the processor behind virtual devices.

    Attributes:
        name: display name.
        memory_bytes: capacity of this device (its share, on a shared processor).
        memory_bandwidth: bytes per second between memory and compute units, data-sheet value.
        peak_flops: dense FLOP/s by dtype name, data-sheet values. "float32" is needed (the last fallback, and the rate
            of elementwise work); "tensorfloat32", "float8" and "float4" stand for those formats. Give
            a mapping; it is stored as pairs sorted by name, so that a device can be hashed.
        launch_seconds: seconds before a kernel reaches its full rate, per kernel.
        dispatch_seconds: host seconds to launch one compiled program.
        num_units: number of units that process blocks of a matrix product in parallel (streaming multiprocessors,
            matrix units).
        tiles: (rows, columns) of the blocks that one unit can process; the best one is used for each product.
        fill_depth: depth of a product at which a unit reaches half of its rate, as if so many steps were lost.
        lanes: numbers that a row of a vector register holds; kernels of attention pad heads to a multiple of it. 1
            where they pad none.
        fuses_into_products: whether the compiler computes operands of a product inside its kernel, as XLA does on TPUs.
            What only products read is then not stored.
        matrix_efficiency: fraction of the peak rate that large products sustain in training, by dtype name (as in
            `peak_flops`) or one number for all; includes the drop of clock rates under load.
        convolution_efficiency: fraction of the sustained matrix rate that convolutions reach.
        attention_efficiency: fraction of the sustained matrix rate that fused attention kernels reach with wide heads.
        ported_attention_efficiency: the same for a kernel that was written for an earlier generation; None if equal.
        memory_efficiency: fraction of the memory bandwidth that large kernels sustain.
        contention: relative slowdown of kernels and collectives while both run.
        memory_reserve: fraction of the memory that no plan uses, of at least 0 and below 1: what the allocator of the
            backend does not give to programs, and what it loses to fragmentation.
        default_memory_fraction: fraction of the memory that the backend gives to programs unless the process is started
            with a setting for more; plans may use more than that, and then say which setting they need.

    Raises:
        ClusterError: a rate that is not above 0, a time below 0, an efficiency outside (0, 1], a reserve outside
            [0, 1), a default fraction of memory outside (0, 1], or no float32 rate.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: PeakFlops
    launch_seconds: float
    dispatch_seconds: float
    num_units: int = 1
    tiles: tuple[tuple[int, int], ...] = ((128, 128),)
    fill_depth: float = 0.0
    lanes: int = 1
    fuses_into_products: bool = False
    matrix_efficiency: PeakFlops | float = 0.8
    convolution_efficiency: float = 0.75
    attention_efficiency: float = 0.7
    ported_attention_efficiency: float | None = None
    memory_efficiency: float = 0.8
    contention: float = 0.0
    memory_reserve: float = MEMORY_RESERVE
    default_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        label = f"The device {self.name!r}:"
        # Mappings are stored as sorted pairs, so that a device is hashable: prices are cached by device.
        pairs = tuple(sorted(dict(self.peak_flops).items()))
        object.__setattr__(self, "peak_flops", pairs)
        object.__setattr__(self, "tiles", tuple((int(rows), int(columns)) for rows, columns in self.tiles))
        if not isinstance(self.matrix_efficiency, (int, float)):
            object.__setattr__(self, "matrix_efficiency", tuple(sorted(dict(self.matrix_efficiency).items())))
        self._check_kernels(label)
        for what, unit in (("memory_bytes", "bytes"), ("memory_bandwidth", "bytes per second")):
            value = getattr(self, what)
            require_amount(f"{label} {what}", value, advice=f"give it in {unit}", positive=True, error=ClusterError)
        advice, reserve = "give the part of the memory that plans leave free, 0 for none", self.memory_reserve
        require_amount(f"{label} memory_reserve", reserve, advice=advice, error=ClusterError)
        if reserve >= 1:
            raise ClusterError(f"{label} memory_reserve is {reserve!r}, but it is a part below 1: {advice}.")
        advice = "give the part of the memory that the backend gives to programs by itself, 1 for all"
        _check_part(f"{label} default_memory_fraction", self.default_memory_fraction, advice)
        for what in ("launch_seconds", "dispatch_seconds"):
            require_amount(f"{label} {what}", getattr(self, what), advice="give it in seconds", error=ClusterError)
        for dtype, rate in pairs:
            what = f"{label} peak_flops[{dtype!r}]"
            require_amount(what, rate, advice="give it in FLOP per second", positive=True, error=ClusterError)
        if "float32" not in self.peaks:
            raise ClusterError(
                f"{label} peak_flops has rates for {sorted(self.peaks)}, but 'float32' is needed because every other "
                "type falls back to it: add it (on a device without float32 units, the rate of what runs instead)."
            )

    def _check_kernels(self, label: str) -> None:
        require_count(f"{label} num_units", self.num_units, advice="count the units of one device", error=ClusterError)
        if not self.tiles or any(rows < 1 or columns < 1 for rows, columns in self.tiles):
            raise ClusterError(f"{label} tiles is {self.tiles!r}, but pairs of at least 1 row and column are needed.")
        if self.fuses_into_products not in (True, False):
            raise ClusterError(
                f"{label} fuses_into_products is {self.fuses_into_products!r}, but true or false is needed: true where "
                "the compiler computes operands of a product inside its kernel."
            )
        require_count(f"{label} lanes", self.lanes, advice="count those of a vector register", error=ClusterError)
        require_amount(f"{label} fill_depth", self.fill_depth, advice="give it in steps of depth", error=ClusterError)
        require_amount(f"{label} contention", self.contention, advice="give a part, 0 for none", error=ClusterError)
        parts = {f"matrix_efficiency[{dtype!r}]": part for dtype, part in self.efficiencies.items()}
        parts |= {
            name: getattr(self, name)
            for name in ("convolution_efficiency", "attention_efficiency", "memory_efficiency")
        }
        if self.ported_attention_efficiency is not None:
            parts["ported_attention_efficiency"] = self.ported_attention_efficiency
        for what, part in parts.items():
            _check_part(f"{label} {what}", part, "give the part of the rate that is reached")

    @property
    def usable_bytes(self) -> float:
        """Bytes of the memory that a plan may use: all but the reserve."""
        return float(self.memory_bytes) * (1 - self.memory_reserve)

    @property
    def reserved_bytes(self) -> float:
        """Bytes of the memory that are kept for the allocator."""
        return float(self.memory_bytes) * self.memory_reserve

    @property
    def default_bytes(self) -> float:
        """Bytes of the memory that a program gets from the backend without any setting."""
        return float(self.memory_bytes) * self.default_memory_fraction

    @property
    def words(self) -> str:
        """The name, the memory and the highest rate, in words."""
        dtype, rate = max(self.peaks.items(), key=lambda peak: peak[1])
        return (
            f"{self.name}, {self.memory_bytes / 2**30:.3g} GiB at {self.memory_bandwidth / 1e9:.4g} GB/s, "
            f"{rate / 1e12:.4g} TFLOP/s in {dtype}"
        )

    @property
    def peaks(self) -> dict[str, float]:
        """Peak FLOP/s by dtype name."""
        return dict(self.peak_flops)

    @property
    def with_ported_attention(self) -> Device:
        """This device running fused attention that was written for an earlier generation."""
        return _with_ported_attention(self)

    @property
    def efficiencies(self) -> dict[str, float]:
        """Fraction of the peak rate that large products sustain, for each dtype of `peaks`."""
        given = self.matrix_efficiency
        if isinstance(given, (int, float)):
            return dict.fromkeys(self.peaks, float(given))
        stated = dict(given)
        # The lowest stated efficiency is the cautious guess for a dtype that was not measured.
        return {dtype: stated.get(dtype, min(stated.values())) for dtype in self.peaks}

    def format(self, dtype: str, *, matrix: bool = True) -> str:
        """Return the number format, a key of `peaks`, in which kernels run on operands of `dtype`.

        A missing 16-bit type uses the other one; float8 uses the 16-bit types, float4 float8; everything else float32.
        Vector units (`matrix=False`) run at the float32 rate, except for float64 where the device states it.
        """
        # The variants of float8 (e4m3fn, e5m2, …) run at one rate, and so do those of float4.
        family = dtype[:6] if dtype.startswith(("float8", "float4")) else dtype
        names = _MATRIX_FALLBACKS.get(family, (family,)) if matrix or family == "float64" else ()
        return next((name for name in names if name in self.peaks), "float32")

    def peak(self, dtype: str, *, matrix: bool = True) -> float:
        """Return the peak FLOP/s for operands of `dtype` on the matrix units, or (`matrix=False`) the vector units."""
        return self.peaks[self.format(dtype, matrix=matrix)]


# Cached because `replace` validates all fields again, and this is read for every attention kernel that is priced.
@lru_cache(maxsize=256)
def _with_ported_attention(device: Device) -> Device:
    ported = device.ported_attention_efficiency
    return device if ported is None else replace(device, attention_efficiency=ported)


Fusion = Literal["all", "calls", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Execution properties of the software stack. The defaults describe XLA on plain array code.

    Attributes:
        fused_attention: whether attention runs as one kernel that never writes the scores to memory (XLA does not
            generate one by itself).
        ported_attention: whether that kernel was written for an earlier generation of devices
            (`Device.ported_attention_efficiency`).
        fusion: element-wise ops that run inside the kernels of their neighbours: "all" possible ones, as compilers do;
            "calls", those of one named scope or source line, as frameworks do that run one library call after another;
            or "none".
        overlap: whether collectives run concurrently with kernels that do not depend on them.
        overlap_gradients: whether gradients are reduced during the last backward pass, and state that was updated in
            parts is gathered during the next forward pass, instead of between the two.
        overlap_products: whether products consume the results of collectives in parts, and collectives scatter the
            sums of products in parts, so that the two overlap.
        flat_parameters: whether the parameters of a layer, which is a trip of a loop, are one array for collectives:
            gathered as one message, as their gradients are scattered.
        call_seconds: host seconds to issue one kernel or collective, where the host issues each individually; devices
            wait for it when their kernels are shorter. 0 for compiled programs, which are issued as a whole.
    """

    fused_attention: bool = False
    ported_attention: bool = False
    fusion: Fusion = "all"
    overlap: bool = True
    overlap_gradients: bool = False
    overlap_products: bool = False
    flat_parameters: bool = False
    call_seconds: float = 0.0


#: Loss factor of short messages, which move at 1 / (1 + loss) of the rate.
_SHORT_MESSAGE_LOSS = 3.0

_BY_MEMBERS = ("efficiency_by_members", "all_to_all_efficiency_by_members")

MemberEfficiency = (
    Mapping[int, float] | Mapping[str, float] | Mapping[int | str, float] | tuple[tuple[tuple[int, int], float], ...]
)


def moving_seconds(bytes: float, bytes_per_second: float, ramp_seconds: float = 0.0) -> float:
    """Return the seconds for which `bytes` occupy a link of the given rate, excluding latency."""
    seconds = bytes / bytes_per_second
    if not ramp_seconds or not bytes:
        return seconds
    # From (1 + loss) times the seconds, for short messages, to the whole ramp in addition, for long ones.
    return seconds + ramp_seconds * bytes / (bytes + ramp_seconds * bytes_per_second / _SHORT_MESSAGE_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that leaves a device or a host.

    Attributes:
        bandwidth_bytes_per_second: one direction, data-sheet value. Inside a host: of one device, all its links
            together. Between hosts: of one host, all its cards together, shared by its devices.
        latency_seconds: latency of one message in seconds, including software.
        efficiency: fraction of the bandwidth that large transfers reach, above 0 and at most 1.
        ramp_seconds: seconds that a large transfer loses before it runs at that rate.
        skew_seconds: seconds by which the connected hosts finish a step apart, per doubling of their number
            (`Cluster.skew_seconds`).
        num_cards: number of network cards of a host, each with an equal part of its bandwidth. A single device
            reaches its share of them: one of 8 cards for 8 devices; the only card where 8 devices share one.
        efficiency_by_members: efficiency by number of group members, where the links between devices are not equal
            (a hybrid cube mesh). The key "4/2" means four members with stride 2 (every second device), where that
            differs from neighbours. Pass a mapping; it is stored as sorted pairs ((members, stride), efficiency).
        all_to_all_efficiency_by_members: the same for all_to_all, which also uses pairs of devices that rings avoid;
            `efficiency_by_members` applies where it has no entry.
        torus: number of devices along each ring of a torus (TPU); empty for a switch.
        in_network_reduction: whether the switch can sum the buffers that the members send (NVLink SHARP).

    Raises:
        ClusterError: a bandwidth that is not above 0, a latency below 0, an efficiency outside (0, 1].
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    efficiency: float = 1.0
    ramp_seconds: float = 0.0
    skew_seconds: float = 0.0
    num_cards: int = 1
    efficiency_by_members: MemberEfficiency = ()
    all_to_all_efficiency_by_members: MemberEfficiency = ()
    torus: tuple[int, ...] = ()
    in_network_reduction: bool = False

    @property
    def words(self) -> str:
        """The bandwidth and the latency, in words."""
        return f"{self.bandwidth_bytes_per_second / 1e9:.4g} GB/s each way, latency {self.latency_seconds * 1e6:.3g} µs"

    def __post_init__(self) -> None:
        bandwidth, advice = self.bandwidth_bytes_per_second, "give it in bytes (not bits) per second and direction"
        what = "Link.bandwidth_bytes_per_second"
        require_amount(what, bandwidth, advice=advice, positive=True, error=ClusterError)
        for key in ("latency_seconds", "ramp_seconds", "skew_seconds"):
            require_amount(f"Link.{key}", getattr(self, key), advice="give it in seconds", error=ClusterError)
        require_count("Link.num_cards", self.num_cards, advice="count the cards of a host", error=ClusterError)
        object.__setattr__(self, "torus", tuple(self.torus))
        parts = {"efficiency": self.efficiency}
        for name in _BY_MEMBERS:
            known = {_lie(name, key): part for key, part in dict(getattr(self, name)).items()}
            # Sorted pairs make links hashable, and equal if their descriptions list the same entries in another order.
            object.__setattr__(self, name, tuple(sorted(known.items())))
            parts |= {f"{name}[{key}]": part for key, part in _written(known).items()}
        for key, part in parts.items():
            _check_part(f"Link.{key}", part, "give a measured fraction, or leave it at 1")
        for size in self.torus:
            require_count("Link.torus", size, advice="count the devices along each ring", error=ClusterError)
        # The value may come from a file, where a text such as "false" would count as true.
        if self.in_network_reduction not in (True, False):
            given = repr(self.in_network_reduction)
            raise ClusterError(f"Link.in_network_reduction is {given}, but true or false is needed.")

    @property
    def bytes_per_second(self) -> float:
        """Rate of large transfers in bytes per second, efficiency * bandwidth_bytes_per_second."""
        return self.efficiency * self.bandwidth_bytes_per_second

    def rate(self, num_members: int, stride: int = 1, *, all_to_all: bool = False) -> float:
        """Return the bytes per second that each of `num_members` group members reaches, `stride` devices apart."""
        known = _by_lie(self.efficiency_by_members)
        if all_to_all:
            known |= _by_lie(self.all_to_all_efficiency_by_members)
        # A stride without an entry of its own is taken to be as fast as neighbours.
        part = known.get((num_members, stride), known.get((num_members, 1), self.efficiency))
        return part * self.torus_share(num_members) * self.bandwidth_bytes_per_second

    def torus_share(self, num_members: int) -> float:
        """Return the fraction of a device's links that a group of `num_members` uses; 1 without a torus."""
        if not self.torus or num_members < 2:
            return 1.0
        rings, rest = self._rings(num_members)
        dims = len(self.torus)
        # Fewer members than the shortest ring form a compact block, whose lines have no wrap-around link.
        if not rings:
            return min(dims, num_members.bit_length() - 1) / (2 * dims)
        return min(1.0, (2 * len(rings) + (rest > 1)) / (2 * dims))

    def torus_rounds(self, num_members: int) -> int:
        """Return the steps until the data of each member reached all others: rings go both ways, lines one way."""
        rings, rest = self._rings(num_members)
        return sum(size // 2 for size in rings) + rest - 1

    def torus_detour(self, num_members: int) -> float:
        """Return all_to_all link bytes over the bytes that each member sends: dims * longest ring / 4, at least 1."""
        rings, rest = self._rings(num_members)
        sides = [*rings, rest] if rest > 1 else [*rings]
        return max(1.0, len(sides) * max(sides, default=1) / 4)

    def seconds(self, bytes: float) -> float:
        """Return the seconds of one message of `bytes`, latency included."""
        return self.latency_seconds + moving_seconds(bytes, self.bytes_per_second, self.ramp_seconds)

    def to_json(self) -> JsonObject:
        """Return a dict of JSON values that omits optional fields at their defaults."""
        data: JsonObject = {
            "bandwidth_bytes_per_second": self.bandwidth_bytes_per_second,
            "latency_seconds": self.latency_seconds,
            "efficiency": self.efficiency,
        }
        if self.ramp_seconds:
            data["ramp_seconds"] = self.ramp_seconds
        if self.skew_seconds:
            data["skew_seconds"] = self.skew_seconds
        if self.num_cards > 1:
            data["num_cards"] = self.num_cards
        for name in _BY_MEMBERS:
            if known := _by_lie(getattr(self, name)):
                data[name] = _written(known)
        if self.torus:
            data["torus"] = list(self.torus)
        if self.in_network_reduction:
            data["in_network_reduction"] = True
        return data

    def _rings(self, num_members: int) -> tuple[list[int], int]:
        """Return the sizes of the whole rings that the members fill, longest first, and the number of ring sets."""
        # Greedy, the longest ring first; `rest` counts the sets of rings that the next ring has to join.
        rings, rest = list[int](), num_members
        for size in sorted(self.torus, reverse=True):
            if size <= rest:
                rings.append(size)
                rest = math.ceil(rest / size)
        return rings, rest


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The memory of a host that its devices can use for arrays, and the link of each device to it.

    Attributes:
        memory_bytes: memory of one host in bytes, which its devices share.
        link: link between one device and the memory; its bandwidth is per device and direction, and both directions
            work at the same time.

    Raises:
        ClusterError: a memory that is not above 0 (the link checks itself).
    """

    memory_bytes: float
    link: Link

    def __post_init__(self) -> None:
        advice = "give it in bytes of one host"
        require_amount("HostMemory.memory_bytes", self.memory_bytes, advice=advice, positive=True, error=ClusterError)

    @property
    def usable_bytes(self) -> float:
        """Bytes that plans may use: all but the same reserve that devices have, for the system and the program."""
        return (1 - MEMORY_RESERVE) * float(self.memory_bytes)

    @property
    def words(self) -> str:
        """The size and the link, in words."""
        return f"{self.memory_bytes / 2**30:.4g} GiB, of each device {self.link.words}"


def _by_lie(efficiencies: MemberEfficiency) -> dict[tuple[int, int], float]:
    """Return efficiency by (number of members, stride), the form in which a link stores it."""
    return cast(dict[tuple[int, int], float], dict(efficiencies))


def _written(known: Mapping[tuple[int, int], float]) -> dict[str, float]:
    """Return the efficiencies with the string keys of the JSON form, "4" or "4/2"."""
    return {f"{n}/{stride}" if stride > 1 else str(n): part for (n, stride), part in known.items()}


def _lie(name: str, key: int | str | tuple[int, int]) -> tuple[int, int]:
    """Parse 4, "4" or "4/2" into (number of members, stride)."""
    if isinstance(key, tuple):
        return key
    members, _, stride = str(key).partition("/")
    # `int` would also accept signs, blanks and underscores.
    if not members.isdecimal() or not (stride or "1").isdecimal():
        raise ClusterError(
            f"Link.{name} has the key {key!r}, but a number of members is needed, "
            'or "4/2": four that are every second device.'
        )
    return int(members), int(stride or 1)


def _check_part(what: str, part: object, advice: str) -> None:
    require_amount(what, part, advice=advice, positive=True, error=ClusterError)
    if isinstance(part, (int, float)) and part > 1:
        raise ClusterError(f"{what} is {part!r}, but it is a fraction of at most 1: {advice}.")
