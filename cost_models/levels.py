"""Derive the link levels of a group of devices: inside a host, inside a domain of hosts, between domains.

    members inside a host      k devices, each at its own rate R(k, stride)                  (_bottom)
    members between hosts      h hosts (or domains), each at                                 (rate_of_host)
        min( B / num_concurrent                    what the sibling groups leave,
             B * min(1, k * max(1, cards/D)/cards) the cards of its members, D devices on a host,
             k * R(k) )                            what its members can feed
    a domain of d hosts leaves at d times that

Hosts of a domain without a link of their own (`intra_domain`) talk as if they were one host: the switch of an NVLink
domain or the torus of a TPU slice does not know where hosts end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from cost_models.cluster import Cluster
from cost_models.collective import Group
from cost_models.errors import CostModelError
from cost_models.link import Link, moving_seconds


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
        """Whether the members are devices of one host (or of one domain without a link of its own)."""
        return self.members_per_host > 0

    def moving_seconds(self, bytes: float) -> float:
        """Return the seconds for which `bytes` of one unit occupy this level."""
        return moving_seconds(bytes, self.bytes_per_second, self.link.ramp_seconds)


def levels_of(group: Group, cluster: Cluster, *, all_to_all: bool = False) -> tuple[Level, ...]:
    """Return the levels on which at least two units of the group communicate, innermost first, with their rates.

    Raises:
        CostModelError: the group does not fit the cluster.
    """
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
        found.append(_between(group, cluster, cluster.intra_domain, 1, hosts_in_domain, group.num_hosts, "domain"))
    num_units = -(-group.num_devices // per_domain)
    name = "between domains" if cluster.hosts_per_domain > 1 else "between hosts"
    found.append(_between(group, cluster, cluster.inter_host, hosts_in_domain, num_units, num_units, name))
    return tuple(level for level in found if level.num_members > 1)


def rate_of_host(link: Link, cluster: Cluster, *, num_senders: int, num_concurrent: int = 1) -> float:
    """Return the bytes per second from a host over `link` for one of `num_concurrent` groups of `num_senders`."""
    cards = max(1.0, link.num_cards / cluster.devices_per_host)
    part = min(1.0 / num_concurrent, num_senders * cards / link.num_cards)
    return link.bytes_per_second * min(1.0, part)


def _bottom(group: Group, cluster: Cluster, num_members: int, *, all_to_all: bool = False) -> Level:
    """Return the innermost level: the devices of one host (or domain), which may share one processor.

    Members that share a processor meet at a barrier: they wait for each other as a tree does. Measured on two cores,
    an all_reduce of 1 KB among 2, 4 and 8 of 8 virtual devices takes 50, 100 and 150 us.
    """
    link = cluster.intra_host
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


def _between(
    group: Group, cluster: Cluster, link: Link, num_hosts: int, num_members: int, num_units: int, name: str
) -> Level:
    """Return a level whose units of `num_hosts` hosts each communicate over `link`."""
    per_host = group.devices_per_host
    rate = rate_of_host(link, cluster, num_senders=per_host, num_concurrent=group.num_concurrent)
    feed = per_host * _bottom(group, cluster, per_host).bytes_per_second
    return Level(
        name=name,
        num_members=num_members,
        num_units=num_units,
        link=link,
        bytes_per_second=num_hosts * min(rate, feed),
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
