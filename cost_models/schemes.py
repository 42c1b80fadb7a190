"""Derive the link levels of a group of devices, and enumerate the schemes by which a library runs a collective on them.

Levels: inside a host, inside a domain of hosts, between domains.

    members inside a host      k devices, each at its own rate R(k, stride)                  (_bottom)
    members between hosts      h hosts (or domains), each at                                 (rate_of_host)
        min( B / num_concurrent                    what the sibling groups leave,
             B * min(1, k * max(1, cards/D)/cards) the cards of its members, D devices on a host,
             k * R(k) )                            what its members can feed
    a domain of d hosts leaves at d times that

Hosts of a domain without a link of their own (`intra_domain`) talk as if they were one host: the switch of an NVLink
domain or the torus of a TPU slice does not know where hosts end.

A scheme is messages m and bytes B for each level; units of a level that take part for the whole group are U (devices,
hosts, domains), those that meet within one unit of the next level u.

    seconds = sum of m * latency + max of move(B)           levels stream, the slowest sets the rate  (Scheme.seconds)

    through all devices ("ring")                                                                   (_ring)
        m = p (U - U of the next level), B = p (n-1)/n M    p = 2 all_reduce, 1 all_gather and reduce_scatter
        broadcast: m as with p = 1, B = M
    level by level ("hierarchical")                                                                (_by_level)
        all_reduce, all_gather, reduce_scatter, broadcast: each level moves M among its u units, since the members of
        a host act as one and each carries its slice between the hosts (reduce-scatter inside, all-reduce between,
        all-gather inside); all_to_all: a host carries the buffers of all its members
    chains inside, double trees between ("double_tree")                                            (_trees)
        bottom: m = 2 (k-1) + 2 log2 (u/k), k members on a host, B = 4 M: sums and results pass each device up to twice
        above: m = 2 log2 u, B = 2 (u-1)/u M
    in the network, where the bottom level can                                                     (_in_network)
        bottom: m as in a tree, B = (u+1)/u M at 0.85 of the rate; above: rings or double trees
    direct                                                                                         (_direct)
        all_to_all: each device sends each other one its slice, peers on other hosts at once

The 4 M of a tree's chains and the 0.85 are measured: two hosts of 8 A100 with 200 GB/s between them run rings (about
200 GB/s of bus bandwidth, NVIDIA/nccl-tests issue 59), not trees, and NCCL's tuner holds trees on A100 at 110 to 130
GB/s of bus bandwidth (NVIDIA/nccl src/graph/tuning.cc), half of what rings reach; 8 H100 reduce in the network at 479
GB/s of bus bandwidth (NVIDIA/nccl-tests issue 347), 0.85 of what their all_gather's rate allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2

from cost_models import traffic
from cost_models.checks import CostModelError
from cost_models.cluster import Cluster
from cost_models.hardware import Link, moving_seconds
from cost_models.traffic import Algorithm, Traffic
from cost_models.work import CollectiveKind, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One link level of one group.

    Attributes:
        name: display name.
        num_members: number of units that communicate on this level within one unit of the next level.
        num_units: number of units of this level in the whole group.
        link: link that joins the units.
        bytes_per_second: rate of one unit for this group.
        latency_seconds: latency of one message, in seconds.
        members_per_host: number of members on one host where the members are devices; 0 where they are hosts or
            domains.
        single_round: whether all members exchange data in one round, through memory that they share.
    """

    name: str
    num_members: int
    num_units: int
    link: Link
    bytes_per_second: float
    latency_seconds: float
    members_per_host: int = 0
    single_round: bool = False

    @property
    def is_inside(self) -> bool:
        """True if the members are devices of one host (or of one domain without a link of its own)."""
        return self.members_per_host > 0

    def moving_seconds(self, bytes: float) -> float:
        """Return the seconds for which `bytes` of one unit occupy this level."""
        return moving_seconds(bytes, self.bytes_per_second, self.link.ramp_seconds)


def levels_of(group: Group, cluster: Cluster, *, all_to_all: bool = False) -> tuple[Level, ...]:
    """Return the levels on which at least two units of the group communicate, innermost first, with their rates.

    Raises:
        CostModelError: the group does not fit the cluster.
    """
    # First, since the levels of a group that does not fit would be priced without any complaint.
    _check_fits(group, cluster)
    per_domain = min(group.num_devices, group.devices_per_host * cluster.hosts_per_domain)
    if group.devices_per_domain is not None and cluster.hosts_per_domain > 1:
        per_domain = group.devices_per_domain
    hosts_in_domain = -(-per_domain // group.devices_per_host)
    merged = cluster.intra_domain is None
    num_inside = per_domain if merged else group.devices_per_host
    bottom = _bottom(group, cluster, num_inside, all_to_all=all_to_all)
    if bottom.num_members == group.num_devices:
        return (bottom,) if group.num_devices > 1 else ()
    found = [bottom]
    if cluster.intra_domain is not None and hosts_in_domain > 1:
        units = _Units(name="domain", num_hosts=1, num_members=hosts_in_domain, num_units=group.num_hosts)
        found.append(_between(group, cluster, cluster.intra_domain, units))
    num_units = -(-group.num_devices // per_domain)
    name = "between domains" if cluster.hosts_per_domain > 1 else "between hosts"
    units = _Units(name=name, num_hosts=hosts_in_domain, num_members=num_units, num_units=num_units)
    found.append(_between(group, cluster, cluster.inter_host, units))
    # A level on which nothing is sent has no part in a scheme.
    return tuple(level for level in found if level.num_members > 1)


def rate_of_host(link: Link, cluster: Cluster, *, num_senders: int, num_concurrent: int = 1) -> float:
    """Return the bytes per second from a host over `link` for one of `num_concurrent` groups of `num_senders`."""
    cards = max(1.0, link.num_cards / cluster.devices_per_host)
    # A group gets its share of the link at most, and no more than the cards that its senders reach.
    part = min(1.0 / num_concurrent, num_senders * cards / link.num_cards)
    return link.bytes_per_second * min(1.0, part)


def _bottom(group: Group, cluster: Cluster, num_members: int, *, all_to_all: bool = False) -> Level:
    """Return the innermost level: the devices of one host (or domain), which may share one processor.

    Members that share a processor meet at a barrier: they wait for each other as a tree does. Measured on two cores,
    an all_reduce of 1 KB among 2, 4 and 8 of 8 virtual devices takes 50, 100 and 150 us.
    """
    link = cluster.intra_host
    # Members and sibling groups that share a processor take turns on it.
    turns = num_members * group.num_concurrent if cluster.shared_processor else 1
    return Level(
        name="inside a host" if num_members <= group.devices_per_host else "inside a domain",
        num_members=num_members,
        num_units=group.num_devices,
        link=link,
        bytes_per_second=link.rate(num_members, group.stride, all_to_all=all_to_all) / turns,
        latency_seconds=link.latency_seconds * turns * (log2(num_members) if cluster.shared_processor else 1),
        members_per_host=group.devices_per_host,
        single_round=cluster.shared_processor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """The units of a level between hosts: `num_hosts` hosts each; the other fields are those of `Level`."""

    name: str
    num_hosts: int
    num_members: int
    num_units: int


def _between(group: Group, cluster: Cluster, link: Link, units: _Units) -> Level:
    """Return a level whose units communicate over `link`."""
    per_host = group.devices_per_host
    rate = rate_of_host(link, cluster, num_senders=per_host, num_concurrent=group.num_concurrent)
    # Bytes pass the links inside a host before they reach its network cards.
    feed = per_host * _bottom(group, cluster, per_host).bytes_per_second
    return Level(
        name=units.name,
        num_members=units.num_members,
        num_units=units.num_units,
        link=link,
        bytes_per_second=units.num_hosts * min(rate, feed),
        latency_seconds=link.latency_seconds,
    )


def _check_fits(group: Group, cluster: Cluster) -> None:
    if group.num_devices <= cluster.num_devices and group.devices_per_host <= cluster.devices_per_host:
        return
    raise CostModelError(
        f"The group has {group.num_devices} devices, {group.devices_per_host} on one host, but the cluster "
        f"{cluster.name!r} has {cluster.num_devices} devices, {cluster.devices_per_host} on each host: "
        "describe a larger cluster or a smaller group."
    )


# Both are measured, see the module docstring.
TREE_CHAIN_PASSES = 4.0
IN_NETWORK_EFFICIENCY = 0.85

#: What runs on one level, by the name of the algorithm that a library must have for it.
ON_ONE_LEVEL: Mapping[CollectiveKind, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": traffic.ring_all_reduce,
        "halving_doubling": traffic.halving_doubling_all_reduce,
        "tree": traffic.tree_all_reduce,
        "double_tree": traffic.double_tree_all_reduce,
    },
    "all_gather": {"ring": traffic.ring_all_gather, "halving_doubling": traffic.recursive_all_gather},
    "reduce_scatter": {"ring": traffic.ring_all_gather, "halving_doubling": traffic.recursive_all_gather},
    "all_to_all": {"ring": traffic.pairwise_all_to_all, "halving_doubling": traffic.bruck_all_to_all},
    "broadcast": {
        "ring": traffic.chain_broadcast,
        "halving_doubling": traffic.scatter_gather_broadcast,
        "tree": traffic.tree_broadcast,
    },
    "permute": {"ring": traffic.point_to_point},
    "send": {"ring": traffic.point_to_point},
}
#: Passes of a ring through all devices.
_PASSES: Mapping[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True)
class SchemePart:
    """The part of one level in a scheme: its algorithm and its numbers of serial messages and serial bytes."""

    level: Level
    algorithm: str
    num_messages: float
    bytes: float

    @property
    def latency_seconds(self) -> float:
        """Seconds of latency of the messages."""
        return self.num_messages * self.level.latency_seconds

    @property
    def bandwidth_seconds(self) -> float:
        """Seconds for which the bytes occupy the level."""
        return self.level.moving_seconds(self.bytes)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One scheme for a collective: a name and the parts of its levels."""

    name: str
    parts: tuple[SchemePart, ...]

    @property
    def latency_seconds(self) -> float:
        """Seconds of latency of all levels, one after the other."""
        return sum(part.latency_seconds for part in self.parts)

    @property
    def bandwidth_seconds(self) -> float:
        """Seconds of the slowest level, since all levels stream concurrently."""
        return max(part.bandwidth_seconds for part in self.parts)

    @property
    def seconds(self) -> float:
        """Total seconds, latency plus bandwidth."""
        return self.latency_seconds + self.bandwidth_seconds


def schemes(kind: CollectiveKind, bytes: float, levels: Sequence[Level], algorithms: Sequence[str]) -> Iterator[Scheme]:
    """Yield the schemes for `kind` of `bytes` over `levels` (at least one) in a library with `algorithms`."""
    if kind in ("permute", "send"):
        yield _neighbours(bytes, levels)
        return
    if len(levels) == 1 or "hierarchical" in algorithms:
        yield from _by_level(kind, bytes, levels, algorithms)
    if kind == "all_to_all":
        yield _direct(bytes, levels)
    elif len(levels) > 1:
        yield _ring(kind, bytes, levels)
    if kind == "all_reduce":
        if "double_tree" in algorithms and _spans_hosts(levels):
            yield _trees(bytes, levels)
        if levels[0].is_inside and levels[0].link.in_network_reduction:
            yield from _in_network(bytes, levels, algorithms)


def _neighbours(bytes: float, levels: Sequence[Level]) -> Scheme:
    """Price one shift: one member per host sends to the next host, the others inside; the slowest counts."""
    # Each member sends one message, on one level only, so that levels do not add up.
    parts = [SchemePart(level, "one message", 1, bytes) for level in levels]
    return Scheme("one message", (max(parts, key=lambda part: part.latency_seconds + part.bandwidth_seconds),))


def _by_level(
    kind: CollectiveKind, bytes: float, levels: Sequence[Level], algorithms: Sequence[str]
) -> Iterator[Scheme]:
    menus, below = list[list[SchemePart]](), 1
    for level in levels:
        # A unit sends the slices of all devices below it; other kinds are reduced or gathered inside the unit first.
        size = below * bytes if kind == "all_to_all" else bytes
        menus.append(_menu(kind, size, level, algorithms))
        below *= level.num_members
    # At most three levels with at most four algorithms each: all combinations are few enough to compare.
    for parts in product(*menus):
        yield Scheme(parts[0].algorithm if len(parts) == 1 else "level by level", parts)


def _menu(kind: CollectiveKind, bytes: float, level: Level, algorithms: Sequence[str]) -> list[SchemePart]:
    known = ON_ONE_LEVEL[kind]
    if level.link.torus:
        return [_on_torus(kind, bytes, level)]
    # Inside a host a double tree is a chain, which is worse than the ring (`_trees` has it as a part).
    left_out = {"double_tree"} if level.is_inside else set[str]()
    # Every library has rings, even if the given names contain none that implements this kind.
    names = [name for name in known if name in algorithms and name not in left_out] or ["ring"]
    return [_part(level, name, known[name](bytes, level.num_members)) for name in names]


def _part(level: Level, name: str, sent: Traffic) -> SchemePart:
    # Members that share memory meet once; a group of one sends no message at all.
    messages = min(1, sent.num_serial_messages) if level.single_round else sent.num_serial_messages
    return SchemePart(level, name, messages, sent.serial_bytes)


def _on_torus(kind: CollectiveKind, bytes: float, level: Level) -> SchemePart:
    """Price rings in all torus dims at once, in both directions."""
    sent = ON_ONE_LEVEL[kind]["ring"](bytes, level.num_members)
    passes = _PASSES.get(kind, 1)
    moved = sent.serial_bytes
    if kind == "all_to_all":
        moved *= level.link.torus_detour(level.num_members)
    return SchemePart(level, "torus rings", passes * level.link.torus_rounds(level.num_members), moved)


def _ring(kind: CollectiveKind, bytes: float, levels: Sequence[Level]) -> Scheme:
    """Price one ring through all devices; each link between units of a level carries all bytes of the ring."""
    num_devices, passes = levels[0].num_units, _PASSES.get(kind, 1)
    moved = bytes if kind == "broadcast" else passes * (num_devices - 1) / num_devices * bytes
    above = [*(level.num_units for level in levels[1:]), 1]
    parts = [
        # The hops of one level are those that stay within a unit of the next; over all levels they are n - 1.
        SchemePart(level, "ring", passes * (1 if level.single_round else level.num_units - upper), moved)
        for level, upper in zip(levels, above, strict=True)
    ]
    return Scheme("ring", tuple(parts))


def _spans_hosts(levels: Sequence[Level]) -> bool:
    # A domain without a link of its own is one level that spans several hosts.
    return len(levels) > 1 or levels[0].num_members > levels[0].members_per_host


def _trees(bytes: float, levels: Sequence[Level]) -> Scheme:
    """Price chains inside the innermost level and double trees on the levels above."""
    parts = list[SchemePart]()
    for level in levels:
        if level.is_inside:
            parts.append(SchemePart(level, "chain", _tree_messages(level), TREE_CHAIN_PASSES * bytes))
        else:
            parts.append(_part(level, "double tree", traffic.double_tree_all_reduce(bytes, level.num_members)))
    return Scheme("double tree", tuple(parts))


def _tree_messages(level: Level) -> int:
    """Count messages down and up the chain of each host, and over the tree of hosts that share the level."""
    if level.single_round:
        return 2
    per_host = min(level.members_per_host, level.num_members)
    hosts = -(-level.num_members // per_host)
    return 2 * (per_host - 1 + (hosts - 1).bit_length())


def _in_network(bytes: float, levels: Sequence[Level], algorithms: Sequence[str]) -> Iterator[Scheme]:
    bottom = levels[0]
    sent = traffic.in_network_all_reduce(bytes, bottom.num_members)
    part = SchemePart(bottom, "in the network", _tree_messages(bottom), sent.serial_bytes / IN_NETWORK_EFFICIENCY)
    above = [name for name in algorithms if name in ("ring", "double_tree")]
    for parts in product(*(_menu("all_reduce", bytes, level, above) for level in levels[1:])):
        yield Scheme("in the network", (part, *parts))


def _direct(bytes: float, levels: Sequence[Level]) -> Scheme:
    """Price direct messages between all pairs; messages to the peers on one other host are sent at once."""
    num_devices, inner = levels[0].num_units, 1
    parts = list[SchemePart]()
    for level in levels:
        # Devices in one unit of this level, and of the next: the peers that are reached here lie between the two.
        outer = min(inner * level.num_members, num_devices)
        moved = inner * (outer - inner) / num_devices * bytes
        messages = 1 if level.single_round else level.num_members - 1
        if level.link.torus:
            messages = level.link.torus_rounds(level.num_members)
            moved *= level.link.torus_detour(level.num_members)
        parts.append(SchemePart(level, "pairs", messages, moved))
        inner = outer
    return Scheme("pairs", tuple(parts))
