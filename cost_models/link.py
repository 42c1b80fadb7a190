"""Describe one link: the latency and the rate at which a device (or a host) sends data to the others.

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
from dataclasses import dataclass
from typing import Any, cast

from cost_models.errors import ClusterError, require_amount, require_count

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
            _check_part(f"Link.{key}", part)
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

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values that omits optional fields at their defaults."""
        data: dict[str, Any] = {
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
        rings, rest = list[int](), num_members
        for size in sorted(self.torus, reverse=True):
            if size <= rest:
                rings.append(size)
                rest = math.ceil(rest / size)
        return rings, rest


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
    if not members.isdecimal() or not (stride or "1").isdecimal():
        raise ClusterError(
            f"Link.{name} has the key {key!r}, but a number of members is needed, "
            'or "4/2": four that are every second device.'
        )
    return int(members), int(stride or 1)


def _check_part(what: str, part: object) -> None:
    advice = "give a measured fraction, or leave it at 1"
    require_amount(what, part, advice=advice, positive=True, error=ClusterError)
    if isinstance(part, (int, float)) and part > 1:
        raise ClusterError(f"{what} is {part!r}, but it is a fraction of at most 1: {advice}.")
