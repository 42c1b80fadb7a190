"""Derive hypothetical clusters: other memory sizes, bandwidths or numbers of hosts.

Where hosts differ, the change applies to all host groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cost_models.cluster import Cluster
from cost_models.errors import ClusterError
from cost_models.hardware import Device
from cost_models.link import Link


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Return the cluster with `memory_bytes` of usable memory on each device.

    Raises:
        ClusterError: a number that is not above 0.
    """

    return _with_devices(cluster, lambda device: replace(device, memory_bytes=float(memory_bytes)))


def with_memory_limit(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Return the cluster with the usable memory of each device limited to `memory_bytes`.

    Raises:
        ClusterError: a number that is not above 0.
    """
    limit = float(memory_bytes)
    return _with_devices(cluster, lambda device: replace(device, memory_bytes=min(limit, device.memory_bytes)))


def with_times_the_hosts(cluster: Cluster, times: int) -> Cluster:
    """Return the cluster with `times` as many hosts, in each host group."""
    groups = tuple(replace(group, num_hosts=times * group.num_hosts) for group in cluster.groups)
    return replace(cluster, num_hosts=times * cluster.num_hosts, groups=groups)


def with_bandwidth(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with the bandwidth of all links multiplied by `scale`; latencies are unchanged.

    Raises:
        ClusterError: a scale that is not above 0.
    """
    if not scale > 0:
        raise ClusterError(f"A bandwidth scale of {scale!r} was given; it must be above 0: 0.5 for half as fast links.")

    def changed(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_second=scale * link.bandwidth_bytes_per_second)

    groups = tuple(
        replace(
            group,
            intra_host=changed(group.intra_host),
            inter_host=None if group.inter_host is None else changed(group.inter_host),
        )
        for group in cluster.groups
    )
    return replace(
        cluster,
        intra_host=changed(cluster.intra_host),
        inter_host=changed(cluster.inter_host),
        intra_domain=None if cluster.intra_domain is None else changed(cluster.intra_domain),
        groups=groups,
    )


def _with_devices(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    # The device of the cluster stands for the slowest of its groups, so it changes with them.
    groups = tuple(replace(group, device=changed(group.device)) for group in cluster.groups)
    return replace(cluster, device=changed(cluster.device), groups=groups)
