"""A cluster with something changed: what if its devices had less memory, or its links another bandwidth?

Where hosts differ, those of all groups are changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cost_models.cluster import Cluster
from cost_models.errors import ClusterError
from cost_models.hardware import Device
from cost_models.link import Link


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """The cluster if programs could use `memory_bytes` of each device.

    Raises:
        ClusterError: a number that is not above 0.
    """

    return _with_devices(cluster, lambda device: replace(device, memory_bytes=float(memory_bytes)))


def with_memory_limit(cluster: Cluster, memory_bytes: float) -> Cluster:
    """The cluster if programs could use no more than `memory_bytes` of any device.

    Raises:
        ClusterError: a number that is not above 0.
    """
    limit = float(memory_bytes)
    return _with_devices(cluster, lambda device: replace(device, memory_bytes=min(limit, device.memory_bytes)))


def with_times_the_hosts(cluster: Cluster, times: int) -> Cluster:
    """The cluster with `times` as many hosts."""
    groups = tuple(replace(group, num_hosts=times * group.num_hosts) for group in cluster.groups)
    return replace(cluster, num_hosts=times * cluster.num_hosts, groups=groups)


def with_bandwidth(cluster: Cluster, scale: float) -> Cluster:
    """The cluster if all of its links had `scale` times their bandwidth; latencies stay.

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
    groups = tuple(replace(group, device=changed(group.device)) for group in cluster.groups)
    return replace(cluster, device=changed(cluster.device), groups=groups)
