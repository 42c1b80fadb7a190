"""Time of collectives and transfers on a cluster: latency and bandwidth of each algorithm of `traffic`, cheapest taken.

    on equal links      seconds = min over algorithms of (messages * latency + bytes / rate)       (all_reduce_seconds)
    over several hosts  seconds = min over pairs of algorithms (inside, between) of                (collective_seconds)
                                  latency inside + latency between
                                  + max(bytes / rate inside, bytes / rate between)
    rate between hosts  min(rate of the host's link / num_concurrent, members * rate inside)       (_between_hosts)
    shared processor    rate / (members * num_concurrent), latency * (members * num_concurrent)    (_inside_host)
                        and one round, since all members meet in shared memory
    transfer            seconds = latency + bytes / min(num_links * rate inside, hosts * rate between)
                                                                                                   (transfer_seconds)

A group that spans hosts works in two levels: inside each host, and between the hosts, which exchange the buffer as
wholes while each member carries its slice. Both levels stream, so the slower one sets the rate; between hosts that is
the link which the members of the group and the num_concurrent groups share. Each term is increasing and affine in
bytes, so minima and maxima of them are increasing and continuous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Literal

from cost_models.checks import require_amount, require_choice, require_count
from cost_models.cluster import Cluster
from cost_models.collective import Collective, CollectiveKind, Group
from cost_models.errors import CostModelError
from cost_models.hardware import Link
from cost_models.traffic import Traffic as Traffic
from cost_models.traffic import bruck_all_to_all as bruck_all_to_all
from cost_models.traffic import butterfly_all_reduce as butterfly_all_reduce
from cost_models.traffic import halving_doubling_all_reduce as halving_doubling_all_reduce
from cost_models.traffic import naive_all_reduce as naive_all_reduce
from cost_models.traffic import pairwise_all_to_all as pairwise_all_to_all
from cost_models.traffic import parameter_server as parameter_server
from cost_models.traffic import point_to_point as point_to_point
from cost_models.traffic import recursive_all_gather as recursive_all_gather
from cost_models.traffic import ring_all_reduce as ring_all_reduce
from cost_models.traffic import scatter_gather_broadcast as scatter_gather_broadcast
from cost_models.traffic import tree_all_reduce as tree_all_reduce
from cost_models.traffic import tree_broadcast as tree_broadcast

AllReduceAlgorithm = Literal["auto", "ring", "halving_doubling", "tree", "butterfly", "naive", "parameter_server"]
_Algorithm = Callable[[float, int], Traffic]

ALL_REDUCE_ALGORITHMS: Mapping[AllReduceAlgorithm, tuple[_Algorithm, ...]] = {
    "auto": (ring_all_reduce, halving_doubling_all_reduce, tree_all_reduce),
    "ring": (ring_all_reduce,),
    "halving_doubling": (halving_doubling_all_reduce,),
    "tree": (tree_all_reduce,),
    "butterfly": (butterfly_all_reduce,),
    "naive": (naive_all_reduce,),
    "parameter_server": (parameter_server,),
}
ALGORITHMS: Mapping[CollectiveKind, tuple[_Algorithm, ...]] = {
    "all_reduce": ALL_REDUCE_ALGORITHMS["auto"],
    "all_gather": (recursive_all_gather,),
    "reduce_scatter": (recursive_all_gather,),
    "all_to_all": (pairwise_all_to_all, bruck_all_to_all),
    "broadcast": (tree_broadcast, scatter_gather_broadcast),
    "permute": (point_to_point,),
    "send": (point_to_point,),
}


def all_reduce_seconds(bytes: float, num_devices: int, link: Link, algorithm: AllReduceAlgorithm = "auto") -> float:
    """Seconds to sum a buffer of `bytes` over devices with equal links.

    Args:
        bytes: of the buffer on one device.
        num_devices: that take part.
        link: of each device.
        algorithm: a row of the table in `traffic`; "auto" takes the cheapest of ring, halving-doubling and tree.

    Raises:
        CostModelError: a negative size, no device, an unknown algorithm.
    """
    require_amount("The size of an all_reduce", bytes, advice="give the bytes of the buffer on one device")
    require_count("The size of a group", num_devices, advice="count the devices that take part")
    require_choice("The all_reduce algorithm", algorithm, ALL_REDUCE_ALGORITHMS)
    return min(send(bytes, num_devices).seconds(link) for send in ALL_REDUCE_ALGORITHMS[algorithm])


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Seconds of `collective` on `cluster`, with its num_concurrent siblings under way.

    Raises:
        CostModelError: the group does not fit the cluster.
    """
    group, size = collective.group, collective.bytes
    _check_fits(group, cluster)
    if group.num_devices == 1 or size == 0:
        return 0.0
    inside, between = _inside_host(group, cluster), _between_hosts(group, cluster)
    if collective.kind in ("permute", "send"):
        return _point_to_point_seconds(size, group, inside, between)
    # Between hosts, the members of a host act as one: an all_to_all then carries all their buffers.
    size_between = size * group.devices_per_host if collective.kind == "all_to_all" else size
    algorithms = ALGORITHMS[collective.kind]
    return min(
        (_one_round(first) if cluster.shared_processor else first).latency_seconds(inside)
        + second.latency_seconds(between)
        + max(first.bandwidth_seconds(inside), second.bandwidth_seconds(between))
        for first, second in product(
            [send(size, group.devices_per_host) for send in algorithms],
            [send(size_between, group.num_hosts) for send in algorithms],
        )
    )


def transfer_seconds(bytes: float, cluster: Cluster, *, crosses_hosts: bool, num_links: int = 1) -> float:
    """Seconds to move `bytes` in total from one submesh to another over `num_links` parallel pairs of devices.

    Between hosts, the sending devices are taken to fill their hosts, and each host's link is shared. On a shared
    processor, parallel pairs bring nothing inside a host.

    Raises:
        CostModelError: a negative size, or no link.
    """
    require_amount("The size of a transfer", bytes, advice="give the bytes that move, all pairs together")
    require_count("The number of links", num_links, advice="count the pairs of devices that send at once")
    if bytes == 0:
        return 0.0
    inside = cluster.intra_host
    num_lanes = 1 if cluster.shared_processor else num_links
    if not crosses_hosts:
        return inside.latency_seconds + bytes / (num_lanes * inside.bytes_per_second)
    between = cluster.inter_host
    num_hosts = -(-num_links // cluster.devices_per_host)
    rate = min(num_lanes * inside.bytes_per_second, num_hosts * between.bytes_per_second)
    return between.latency_seconds + bytes / rate


def _point_to_point_seconds(size: float, group: Group, inside: Link, between: Link) -> float:
    """One neighbour shift: of the members on a host, one sends to the next host, at the same time as the others."""
    on_host = inside.seconds(size) if group.devices_per_host > 1 else 0.0
    across = between.seconds(size) if group.num_hosts > 1 else 0.0
    return max(on_host, across)


def _inside_host(group: Group, cluster: Cluster) -> Link:
    """The link of one member to its neighbours on the host; one processor serves all members in turn."""
    turns = group.devices_per_host * group.num_concurrent if cluster.shared_processor else 1
    link = cluster.intra_host
    return replace(
        link,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / turns,
        latency_seconds=link.latency_seconds * turns,
    )


def _one_round(traffic: Traffic) -> Traffic:
    """The same bytes in one message, if there is any."""
    return replace(traffic, num_serial_messages=min(1, traffic.num_serial_messages))


def _between_hosts(group: Group, cluster: Cluster) -> Link:
    """The group's part of the link of its host, no faster than its members can feed it."""
    feed = group.devices_per_host * _inside_host(group, cluster).bytes_per_second
    rate = min(cluster.inter_host.bytes_per_second / group.num_concurrent, feed)
    return Link(bandwidth_bytes_per_second=rate, latency_seconds=cluster.inter_host.latency_seconds)


def _check_fits(group: Group, cluster: Cluster) -> None:
    if group.num_devices <= cluster.num_devices and group.devices_per_host <= cluster.devices_per_host:
        return
    raise CostModelError(
        f"The group has {group.num_devices} devices, {group.devices_per_host} on one host, but the cluster "
        f"{cluster.name!r} has {cluster.num_devices} devices, {cluster.devices_per_host} on each host: "
        "describe a larger cluster or a smaller group."
    )
