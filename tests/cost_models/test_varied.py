"""Clusters with something changed."""

from dataclasses import replace

import pytest

from cost_models.cluster import Cluster, HostGroup, load_cluster
from cost_models.errors import ClusterError
from cost_models.varied import with_bandwidth, with_memory, with_memory_limit, with_times_the_hosts

NODES = load_cluster("gb200-nvl72")


def mixed(cluster: Cluster) -> Cluster:
    """The same hosts in two groups."""
    group = HostGroup(num_hosts=1, device=cluster.device, intra_host=cluster.intra_host, inter_host=cluster.inter_host)
    return replace(cluster, num_hosts=2, groups=(group, group))


@pytest.mark.parametrize("cluster", [NODES, mixed(load_cluster("p3.16xlarge"))], ids=["domains", "groups"])
def test_memory_alone_changes(cluster: Cluster) -> None:
    found = with_memory(cluster, 8e9)
    assert found.device.memory_bytes == 8e9
    assert all(group.device.memory_bytes == 8e9 for group in found.groups)
    assert with_memory(found, cluster.device.memory_bytes) == cluster


@pytest.mark.parametrize("cluster", [NODES, mixed(load_cluster("p3.16xlarge"))], ids=["domains", "groups"])
def test_every_link_is_scaled(cluster: Cluster) -> None:
    found = with_bandwidth(cluster, 0.5)
    pairs = [(found.intra_host, cluster.intra_host), (found.inter_host, cluster.inter_host)]
    pairs += [(found.intra_domain, cluster.intra_domain)] if cluster.intra_domain else []
    pairs += [(a.intra_host, b.intra_host) for a, b in zip(found.groups, cluster.groups, strict=True)]
    pairs += [(a.inter_host, b.inter_host) for a, b in zip(found.groups, cluster.groups, strict=True)]
    for after, before in pairs:
        assert after.bandwidth_bytes_per_second == 0.5 * before.bandwidth_bytes_per_second
        assert after.latency_seconds == before.latency_seconds
    assert with_bandwidth(found, 2.0) == cluster


def test_a_limit_is_one_of_every_group() -> None:
    few, many = (replace(NODES.device, memory_bytes=size) for size in (16e9, 80e9))
    groups = tuple(HostGroup(num_hosts=1, device=device, intra_host=NODES.intra_host) for device in (few, many))
    found = with_memory_limit(replace(mixed(NODES), device=few, groups=groups), 40e9)
    assert [group.device.memory_bytes for group in found.groups] == [16e9, 40e9]
    assert found.device.memory_bytes == 16e9


@pytest.mark.parametrize("cluster", [NODES, mixed(load_cluster("p3.16xlarge"))], ids=["domains", "groups"])
def test_more_hosts_are_more_of_each_group(cluster: Cluster) -> None:
    found = with_times_the_hosts(cluster, 4)
    assert found.num_hosts == 4 * cluster.num_hosts
    assert [group.num_hosts for group in found.groups] == [4 * group.num_hosts for group in cluster.groups]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_cannot_be(scale: float) -> None:
    with pytest.raises(ClusterError, match="must be above 0"):
        with_bandwidth(NODES, scale)


def test_no_memory_cannot_be() -> None:
    with pytest.raises(ClusterError, match="memory_bytes"):
        with_memory(NODES, 0)
