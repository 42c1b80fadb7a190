from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import (
    Cluster,
    Collective,
    CollectiveKind,
    CostModelError,
    Group,
    Link,
    all_reduce_seconds,
    load_cluster,
)
from cost_models.collective import COLLECTIVE_KINDS
from cost_models.communication import (
    ALGORITHMS,
    ALL_REDUCE_ALGORITHMS,
    AllReduceAlgorithm,
    collective_seconds,
    transfer_seconds,
)

MB = 1e6
kinds = st.sampled_from(COLLECTIVE_KINDS)
sizes = st.floats(1, 1e12)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Groups that fit on four hosts of eight devices."""
    per_host = draw(st.integers(1, 8))
    members = draw(st.integers(per_host, per_host * draw(st.integers(1, 4))))
    return Group(num_devices=members, devices_per_host=per_host, num_concurrent=draw(st.integers(1, 8 // per_host)))


def seconds(cluster: Cluster, kind: CollectiveKind, bytes: float, *counts: int) -> float:
    num_devices, devices_per_host, num_concurrent = (*counts, 1)[:3]
    group = Group(num_devices=num_devices, devices_per_host=devices_per_host, num_concurrent=num_concurrent)
    return collective_seconds(Collective(kind=kind, bytes=bytes, group=group), cluster)


def test_every_kind_and_every_algorithm_is_priced():
    assert set(ALGORITHMS) == set(COLLECTIVE_KINDS)
    assert set(ALL_REDUCE_ALGORITHMS) == set(get_args(AllReduceAlgorithm))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 6 * 1e-6 + 1.75e-3),
        ("all_gather", 3 * 1e-6 + 0.875e-3),
        ("reduce_scatter", 3 * 1e-6 + 0.875e-3),
        ("all_to_all", 7 * 1e-6 + 0.875e-3),
        ("broadcast", 6 * 1e-6 + 1.75e-3),
        ("permute", 1e-6 + 1e-3),
        ("send", 1e-6 + 1e-3),
    ],
)
def test_on_one_host(cluster: Cluster, kind: CollectiveKind, expected: float):
    assert seconds(cluster, kind, 100 * MB, 8, 8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # two levels: latencies inside (1 us) and between (10 us) add; 100 MB over 10 GB/s is 10 ms and sets the rate
        ("all_reduce", 6e-6 + 20e-6 + 2 * (1 / 2) * 10e-3),
        ("all_gather", 3e-6 + 10e-6 + (1 / 2) * 10e-3),
        ("reduce_scatter", 3e-6 + 10e-6 + (1 / 2) * 10e-3),
        ("all_to_all", 3e-6 + 10e-6 + (1 / 2) * 8 * 10e-3),  # eight buffers leave the host; few messages, as bytes hide
        ("broadcast", 3e-6 + 10e-6 + 10e-3),
        ("permute", 10e-6 + 10e-3),
        ("send", 10e-6 + 10e-3),
    ],
)
def test_over_two_hosts(cluster: Cluster, kind: CollectiveKind, expected: float):
    assert seconds(cluster, kind, 100 * MB, 16, 8) == pytest.approx(expected)


def test_concurrent_groups_share_the_link_of_their_host(cluster: Cluster):
    alone = seconds(cluster, "all_reduce", 100 * MB, 4, 1, 1)
    together = seconds(cluster, "all_reduce", 100 * MB, 4, 1, 8)
    assert alone == pytest.approx(4 * 10e-6 + 1.5 * 10e-3)
    assert together == pytest.approx(4 * 10e-6 + 1.5 * 80e-3)
    assert seconds(cluster, "all_reduce", 100 * MB, 2, 2, 4) == seconds(cluster, "all_reduce", 100 * MB, 2, 2, 1)


def test_a_host_is_no_faster_than_its_members_feed_it(cluster: Cluster):
    fast = replace(cluster, inter_host=Link(bandwidth_bytes_per_second=1e15, latency_seconds=0))
    assert seconds(fast, "permute", 100 * MB, 4, 1) == pytest.approx(1e-3)


def test_only_the_efficient_part_of_a_link_is_used(cluster: Cluster):
    inside, between = (replace(link, efficiency=0.5) for link in (cluster.intra_host, cluster.inter_host))
    halved = replace(cluster, intra_host=inside, inter_host=between)
    assert seconds(halved, "all_gather", 100 * MB, 8, 8) == pytest.approx(3e-6 + 2 * 0.875e-3)
    assert seconds(halved, "all_gather", 100 * MB, 16, 8) == pytest.approx(3e-6 + 10e-6 + 2 * 5e-3)
    assert transfer_seconds(100 * MB, halved, crosses_hosts=False) == pytest.approx(1e-6 + 2e-3)
    assert transfer_seconds(100 * MB, halved, crosses_hosts=True) == pytest.approx(10e-6 + 20e-3)


@pytest.mark.parametrize(
    ("name", "num_hosts", "bus_gigabytes_per_second"),
    [
        ("dgx-a100", 1, 229.4),  # VIA-Research/vTrain trace LUT
        ("dgx-1", 1, 134.5),  # VIA-Research/vTrain trace LUT
        ("p4d.24xlarge", 2, 57.2),  # NVIDIA/nccl issue 527
        ("p4d.24xlarge", 4, 29.6),  # NVIDIA/nccl issue 527
        ("p4de.24xlarge", 2, 78.3),  # awsome-distributed-training nccl-tests README
        ("p5.48xlarge", 2, 487.1),  # awsome-distributed-training nccl-tests README
        ("p3dn.24xlarge", 32, 7.0),  # NVIDIA/nccl issue 235
    ],
)
def test_published_bus_bandwidths_of_large_all_reduces(name: str, num_hosts: int, bus_gigabytes_per_second: float):
    """Within a factor 1.35: the model has one efficiency per link and knows no in-network reduction."""
    cluster = load_cluster(name, num_hosts=num_hosts)
    n, size = cluster.num_devices, 2.0**30
    measured = 2 * (n - 1) / n * size / (bus_gigabytes_per_second * 1e9)
    assert 1 / 1.35 < seconds(cluster, "all_reduce", size, n, 8) / measured < 1.35


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
def test_auto_is_the_cheapest_of_the_three(algorithm: AllReduceAlgorithm):
    link = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5)
    auto = all_reduce_seconds(1 * MB, 8, link)
    if algorithm in ("ring", "halving_doubling", "tree"):
        assert auto <= all_reduce_seconds(1 * MB, 8, link, algorithm)
    three: tuple[AllReduceAlgorithm, ...] = ("ring", "halving_doubling", "tree")
    assert auto == min(all_reduce_seconds(1 * MB, 8, link, each) for each in three)


@given(kind=kinds, group=groups(), size=sizes, more=st.floats(1, 100))
def test_more_bytes_never_take_less_time(
    cluster: Cluster, kind: CollectiveKind, group: Group, size: float, more: float
):
    small, large = (
        collective_seconds(Collective(kind=kind, bytes=each, group=group), cluster) for each in (size, size * more)
    )
    assert small <= large


@given(kind=kinds, group=groups(), size=sizes)
def test_time_is_continuous_in_bytes(cluster: Cluster, kind: CollectiveKind, group: Group, size: float):
    """A relative step of 1e-6 in bytes moves time by no more than the same relative step (latencies do not jump)."""
    step = 1e-6
    before, after = (
        collective_seconds(Collective(kind=kind, bytes=each, group=group), cluster)
        for each in (size, size * (1 + step))
    )
    assert after - before <= step * before * (1 + 1e-3)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_latency_grows_with_the_group(cluster: Cluster, kind: CollectiveKind):
    large = replace(cluster, num_hosts=64)
    on_host = [seconds(large, kind, 1, n, n) for n in range(1, 9)]
    over_hosts = [seconds(large, kind, 1, n, 8) for n in range(9, 513)]
    assert on_host + over_hosts == sorted(on_host + over_hosts)


@given(size=sizes)
def test_time_of_an_all_reduce_grows_with_the_group(cluster: Cluster, size: float):
    times = [seconds(cluster, "all_reduce", size, n, n) for n in range(1, 9)]
    times += [seconds(cluster, "all_reduce", size, n, 8) for n in range(9, 33)]
    assert times == sorted(times)


@given(kind=kinds, group=groups(), size=sizes)
def test_siblings_never_help(cluster: Cluster, kind: CollectiveKind, group: Group, size: float):
    alone = replace(group, num_concurrent=1)
    times = [collective_seconds(Collective(kind=kind, bytes=size, group=each), cluster) for each in (alone, group)]
    assert times == sorted(times)


@given(group=groups(), size=sizes)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(cluster: Cluster, group: Group, size: float):
    whole, scatter, gather = (
        collective_seconds(Collective(kind=kind, bytes=size, group=group), cluster)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole <= (scatter + gather) * (1 + 1e-9)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_nothing_to_send_takes_no_time(cluster: Cluster, kind: CollectiveKind):
    assert seconds(cluster, kind, 1 * MB, 1, 1) == 0
    assert seconds(cluster, kind, 0, 16, 8) == 0


def test_a_shared_processor_moves_the_bytes_of_all_members(shared_cluster: Cluster):
    """Eight members send 1.75 buffers each through one memory, in one round of eight turns."""
    assert seconds(shared_cluster, "all_reduce", 100 * MB, 8, 8) == pytest.approx(8 * (1e-6 + 1.75e-3))
    assert seconds(shared_cluster, "all_reduce", 100 * MB, 2, 2, 4) == pytest.approx(8 * (1e-6 + 1e-3))


def test_a_shared_processor_adds_nothing_where_one_device_of_each_host_takes_part(shared_cluster: Cluster):
    hosts = replace(shared_cluster, num_hosts=2)
    across = seconds(replace(hosts, shared_processor=False), "all_reduce", 1 * MB, 2, 1)
    assert seconds(hosts, "all_reduce", 1 * MB, 2, 1) == pytest.approx(across)


def test_a_group_larger_than_the_cluster_is_refused(cluster: Cluster):
    for counts in ((33, 8), (9, 9)):
        with pytest.raises(CostModelError, match="has 32 devices, 8 on each host: describe a larger cluster"):
            seconds(cluster, "all_reduce", 1, *counts)


@pytest.mark.parametrize(
    ("crosses_hosts", "num_links", "expected"),
    [
        (False, 1, 1e-6 + 1e-3),
        (False, 4, 1e-6 + 0.25e-3),
        (True, 1, 10e-6 + 10e-3),
        (True, 8, 10e-6 + 10e-3),  # eight devices share the link of one host
        (True, 16, 10e-6 + 5e-3),
    ],
)
def test_transfers(cluster: Cluster, crosses_hosts: bool, num_links: int, expected: float):
    found = transfer_seconds(100 * MB, cluster, crosses_hosts=crosses_hosts, num_links=num_links)
    assert found == pytest.approx(expected)


def test_transfers_on_a_shared_processor_do_not_overlap(shared_cluster: Cluster):
    times = [transfer_seconds(100 * MB, shared_cluster, crosses_hosts=False, num_links=n) for n in (1, 2, 8)]
    assert times == pytest.approx([1e-6 + 1e-3] * 3)


def test_impossible_transfers_and_all_reduces_are_refused(cluster: Cluster):
    assert transfer_seconds(0, cluster, crosses_hosts=True) == 0
    with pytest.raises(CostModelError, match="The size of a transfer is -1"):
        transfer_seconds(-1, cluster, crosses_hosts=True)
    with pytest.raises(CostModelError, match="The number of links is 0"):
        transfer_seconds(1, cluster, crosses_hosts=True, num_links=0)
    with pytest.raises(CostModelError, match="'gossip', but only these are priced: auto, ring"):
        all_reduce_seconds(1, 2, cluster.intra_host, "gossip")  # pyright: ignore[reportArgumentType]
