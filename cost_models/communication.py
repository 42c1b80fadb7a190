"""Price collectives and transfers on a cluster: the cheapest scheme by its latency and bandwidth.

    on equal links      seconds = min over algorithms of messages * latency + move(bytes)      (all_reduce_seconds)
    on a cluster        seconds = min over the schemes that the cluster's library has of       (collective_seconds)
                                  sum of latencies + time of the slowest level
    transfer            seconds = latency + move(bytes) at                                     (transfer_seconds)
                                  min(num_links * rate inside, hosts * rate that leaves a host)

`schemes` derives the levels with their rates and the schemes, `traffic` the bytes and messages of one algorithm,
and `hardware` the time move(b) of b bytes. On a shared processor all members exchange data through shared memory, at
one barrier, and the processor serves them one after another. Each term is increasing and continuous in bytes, and so
are sums, minima and maxima of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cost_models.checks import require_amount, require_choice, require_count
from cost_models.cluster import Cluster
from cost_models.hardware import Link, moving_seconds
from cost_models.schemes import Scheme, levels_of, rate_of_host, schemes
from cost_models.traffic import (
    Algorithm,
    butterfly_all_reduce,
    double_tree_all_reduce,
    halving_doubling_all_reduce,
    naive_all_reduce,
    parameter_server,
    ring_all_reduce,
    tree_all_reduce,
)
from cost_models.work import Collective

AllReduceAlgorithm = Literal[
    "auto", "ring", "halving_doubling", "tree", "double_tree", "butterfly", "naive", "parameter_server"
]

ALL_REDUCE_ALGORITHMS: Mapping[AllReduceAlgorithm, Algorithm] = {
    "ring": ring_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "tree": tree_all_reduce,
    "double_tree": double_tree_all_reduce,
    "butterfly": butterfly_all_reduce,
    "naive": naive_all_reduce,
    "parameter_server": parameter_server,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCost:
    """Cost of one level of a collective.

    Attributes:
        level: name of the level.
        num_members: number of units (devices, hosts, domains) that communicate on the level.
        algorithm: name of the algorithm that they run.
        num_messages: number of messages on the critical path.
        latency_seconds: seconds of latency of these messages.
        bytes: bytes that one unit sends on the critical path.
        bytes_per_second: rate of one unit for this group.
        bandwidth_seconds: seconds for which the bytes occupy the level, including the ramp of its link.
    """

    level: str
    num_members: int
    algorithm: str
    num_messages: float
    latency_seconds: float
    bytes: float
    bytes_per_second: float
    bandwidth_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.level}: {self.algorithm} over {self.num_members}, "
            f"{self.num_messages:g} messages {self.latency_seconds * 1e6:.1f} us, {self.bytes / 1e6:.3f} MB at "
            f"{self.bytes_per_second / 1e9:.1f} GB/s {self.bandwidth_seconds * 1e6:.1f} us"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Seconds of a collective with their breakdown by level.

    Attributes:
        seconds: latency_seconds + bandwidth_seconds.
        latency_seconds: seconds of latency of the messages on all levels.
        bandwidth_seconds: seconds of the bytes on the slowest level; the other levels stream meanwhile.
        algorithm: name of the cheapest scheme that the cluster's library implements; "" where nothing is sent.
        limiting_level: name of the slowest level; "" where nothing is sent.
        levels: cost of each level, innermost first.
    """

    seconds: float = 0.0
    latency_seconds: float = 0.0
    bandwidth_seconds: float = 0.0
    algorithm: str = ""
    limiting_level: str = ""
    levels: tuple[LevelCost, ...] = ()

    def __str__(self) -> str:
        if not self.levels:
            return "nothing to send"
        head = (
            f"{self.seconds * 1e6:.1f} us: {self.algorithm}, latency {self.latency_seconds * 1e6:.1f} us, "
            f"bandwidth {self.bandwidth_seconds * 1e6:.1f} us (limited {self.limiting_level})"
        )
        return "\n".join([head, *(f"  {level}" for level in self.levels)])


def all_reduce_seconds(bytes: float, num_devices: int, link: Link, algorithm: AllReduceAlgorithm = "auto") -> float:
    """Return the seconds of an all_reduce of `bytes` over devices with equal links.

    Args:
        bytes: size of the buffer on one device.
        num_devices: number of devices in the group.
        link: link of each device.
        algorithm: a row of the table in `traffic`; "auto" takes the cheapest of all.

    Raises:
        CostModelError: a negative size, no device, an unknown algorithm.
    """
    require_amount("The size of an all_reduce", bytes, advice="give the bytes of the buffer on one device")
    require_count("The size of a group", num_devices, advice="count the devices that take part")
    require_choice("The all_reduce algorithm", algorithm, ("auto", *ALL_REDUCE_ALGORITHMS))
    # Nothing is sent: the formulas would still charge the latency of their rounds.
    if num_devices == 1 or bytes == 0:
        return 0.0
    chosen = ALL_REDUCE_ALGORITHMS.values() if algorithm == "auto" else (ALL_REDUCE_ALGORITHMS[algorithm],)
    return min(send(bytes, num_devices).seconds(link) for send in chosen)


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the seconds of `collective` on `cluster`, while its `num_concurrent` siblings run.

    Raises:
        CostModelError: the group does not fit the cluster.
    """
    scheme = _cheapest(collective, cluster)
    return scheme.seconds if scheme else 0.0


def explain_collective(collective: Collective, cluster: Cluster) -> CollectiveCost:
    """Return the cost of `collective` with its breakdown: scheme, levels, messages, bytes and limiting level.

    Raises:
        CostModelError: the group does not fit the cluster.
    """
    scheme = _cheapest(collective, cluster)
    if scheme is None:
        return CollectiveCost()
    # Levels stream at the same time, so that the slowest one alone sets the time of the bytes.
    limiting = max(scheme.parts, key=lambda part: part.bandwidth_seconds)
    return CollectiveCost(
        seconds=scheme.seconds,
        latency_seconds=scheme.latency_seconds,
        bandwidth_seconds=scheme.bandwidth_seconds,
        algorithm=scheme.name,
        limiting_level=limiting.level.name,
        levels=tuple(
            LevelCost(
                level=part.level.name,
                num_members=part.level.num_members,
                algorithm=part.algorithm,
                num_messages=part.num_messages,
                latency_seconds=part.latency_seconds,
                bytes=part.bytes,
                bytes_per_second=part.level.bytes_per_second,
                bandwidth_seconds=part.bandwidth_seconds,
            )
            for part in scheme.parts
        ),
    )


def transfer_seconds(
    bytes: float, cluster: Cluster, *, crosses_hosts: bool, num_links: int = 1, crosses_domains: bool | None = None
) -> float:
    """Return the seconds to move a total of `bytes` between submeshes over `num_links` parallel pairs of devices.

    Between hosts, the sending devices are taken to fill their hosts, and each host's link is shared. On a shared
    processor, parallel pairs are no faster than one pair inside a host.

    Args:
        bytes: total number of bytes over all pairs.
        cluster: cluster that holds both submeshes.
        crosses_hosts: whether sender and receiver sit on different hosts.
        num_links: number of device pairs that send at once.
        crosses_domains: whether they sit in different domains of hosts; None: they do where they cross hosts and the
            cluster has more than one domain.

    Raises:
        CostModelError: a negative size, or no link.
    """
    require_amount("The size of a transfer", bytes, advice="give the bytes that move, all pairs together")
    require_count("The number of links", num_links, advice="count the pairs of devices that send at once")
    if bytes == 0:
        return 0.0
    inside = cluster.intra_host
    # Virtual devices copy through one memory: more pairs share its bandwidth and add none.
    num_lanes = 1 if cluster.shared_processor else num_links
    # Each pair of devices communicates as a group of two.
    rate = num_lanes * inside.rate(2)
    link = _link_between(cluster, crosses_domains) if crosses_hosts else None
    # The link inside a host also joins the hosts of a domain that has no link of its own.
    if link is None:
        return inside.latency_seconds + moving_seconds(bytes, rate, inside.ramp_seconds)
    num_hosts = -(-num_links // cluster.devices_per_host)
    per_host = rate_of_host(link, cluster, num_senders=min(num_links, cluster.devices_per_host))
    # The bytes pass the links of the devices and of their hosts, and the slower of the two sets the rate.
    return link.latency_seconds + moving_seconds(bytes, min(rate, num_hosts * per_host), link.ramp_seconds)


def _link_between(cluster: Cluster, crosses_domains: bool | None) -> Link | None:
    """Return the link between two hosts; None if the link inside a host spans both."""
    if crosses_domains is None:
        crosses_domains = cluster.num_hosts > cluster.hosts_per_domain
    return cluster.inter_host if crosses_domains else cluster.intra_domain


def _cheapest(collective: Collective, cluster: Cluster) -> Scheme | None:
    """Return the cheapest scheme of `collective`; None where nothing is sent."""
    levels = levels_of(collective.group, cluster, all_to_all=collective.kind == "all_to_all")
    if not levels or collective.bytes == 0:
        return None
    # Libraries choose their algorithm by size, too; the model assumes that they choose the fastest one.
    found = schemes(collective.kind, collective.bytes, levels, cluster.algorithms)
    return min(found, key=lambda scheme: scheme.seconds)
