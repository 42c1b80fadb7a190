from dataclasses import replace
from itertools import pairwise
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
from cost_models.cluster import ALGORITHMS
from cost_models.communication import (
    ALL_REDUCE_ALGORITHMS,
    AllReduceAlgorithm,
    collective_seconds,
    explain_collective,
    transfer_seconds,
)
from cost_models.schemes import ON_ONE_LEVEL, levels_of, schemes
from cost_models.work import COLLECTIVE_KINDS

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


def test_every_second_device_of_a_cube_mesh_has_fewer_rings():
    cluster = load_cluster("p3.16xlarge")

    def taken(members: int, stride: int) -> float:
        group = Group(num_devices=members, devices_per_host=members, num_concurrent=8 // members, stride=stride)
        return explain_collective(Collective(kind="all_reduce", bytes=1e9, group=group), cluster).bandwidth_seconds

    assert 1.8 < taken(4, 2) / taken(4, 1) < 2.0
    assert taken(2, 4) == taken(2, 1)


def test_an_all_to_all_of_a_cube_mesh_takes_its_pairs_and_a_ring_its_ring():
    """Eight of p3.16xlarge send 7/8 of the bytes: at 0.35 and 0.9 of 150 GB/s; on two hosts the slow link counts."""
    cluster = load_cluster("p3.16xlarge", num_hosts=2)

    def taken(kind: CollectiveKind, members: int) -> float:
        group = Group(num_devices=members, devices_per_host=8)
        return explain_collective(Collective(kind=kind, bytes=8e9, group=group), cluster).bandwidth_seconds

    assert taken("all_to_all", 8) == pytest.approx(7e9 / (0.35 * 150e9), rel=1e-3)
    assert taken("all_gather", 8) == pytest.approx(7e9 / (0.9 * 150e9), rel=1e-3)
    assert taken("all_to_all", 16) > 10 * taken("all_to_all", 8)


def test_every_kind_and_every_algorithm_is_priced():
    assert set(ON_ONE_LEVEL) == set(COLLECTIVE_KINDS)
    assert {"auto", *ALL_REDUCE_ALGORITHMS} == set(get_args(AllReduceAlgorithm))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 6 * 1e-6 + 1.75e-3),
        ("all_gather", 3 * 1e-6 + 0.875e-3),
        ("reduce_scatter", 3 * 1e-6 + 0.875e-3),
        ("all_to_all", 7 * 1e-6 + 0.875e-3),
        ("broadcast", 7 * 1e-6 + 1e-3),
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
    ("name", "num_hosts", "per_host", "megabytes", "microseconds"),
    [
        ("dgx-a100", 1, 8, 1073.741824, 8193.0),  # VIA-Research/vTrain trace LUT
        ("dgx-a100", 1, 8, 8589.934592, 64074.0),  # stas00/ml-engineering network README
        ("dgx-a100", 1, 2, 134.217728, 763.6),  # VIA-Research/vTrain trace LUT
        ("dgx-1", 1, 2, 134.217728, 5968.0),  # VIA-Research/vTrain trace LUT: two neighbours share one link
        ("dgx-1", 1, 4, 134.217728, 2364.8),  # VIA-Research/vTrain trace LUT
        ("dgx-1", 1, 8, 134.217728, 1777.1),  # VIA-Research/vTrain trace LUT
        ("dgx-h100", 1, 8, 8589.934592, 31356.0),  # NVIDIA/nccl-tests issue 347, 479.41 GB/s
        ("dgx-h100", 2, 1, 33.554432, 812.3),  # NVIDIA/nccl-tests issue 232: each host with one of its cards
        ("dgx-h100", 2, 1, 2.097152, 113.2),  # NVIDIA/nccl-tests issue 232
        ("dgx-a100", 2, 8, 8000.0, 75000.0),  # NVIDIA/nccl-tests issue 59: about 200 GB/s
        ("p4de.24xlarge", 2, 8, 0.001024, 165.0),  # awsome-distributed-training nccl-tests README
        ("p4de.24xlarge", 2, 8, 33.554432, 1540.2),  # awsome-distributed-training nccl-tests README
        ("p4de.24xlarge", 2, 8, 2147.483648, 51406.0),  # awsome-distributed-training nccl-tests README
        ("p5.48xlarge", 2, 8, 0.001024, 69.24),  # awsome-distributed-training nccl-tests README
        ("p5.48xlarge", 2, 8, 17179.869184, 66132.0),  # awsome-distributed-training nccl-tests README
    ],
)
def test_published_times_of_all_reduces(
    name: str, num_hosts: int, per_host: int, megabytes: float, microseconds: float
):
    cluster = load_cluster(name, num_hosts=num_hosts)
    predicted = seconds(cluster, "all_reduce", megabytes * MB, num_hosts * per_host, per_host)
    assert 1 / 1.2 < predicted / (microseconds * 1e-6) < 1.2


@pytest.mark.parametrize(("num_devices", "bus_share", "microseconds"), [(2, 537, 8), (4, 434, 17), (8, 394, 30)])
def test_published_gathers_of_hopper_devices(num_devices: int, bus_share: float, microseconds: float):
    """Algorithm bandwidth at 1 GB and latency (meta-pytorch/autoparallel, cost_models/nccl_cost_model.py)."""
    cluster = load_cluster("dgx-h100")
    large, small = (seconds(cluster, "all_gather", size, num_devices, num_devices) for size in (1e9, 1))
    assert large == pytest.approx(1 / bus_share, rel=0.12)
    assert small == pytest.approx(microseconds * 1e-6, rel=0.6)


def test_a_slice_of_256_tpus_sums_at_the_published_rate():
    """235.8 GB/s of bus bandwidth for 606 MB on v6e (AI-Hypercomputer/tpu-recipes microbenchmarks)."""
    cluster = load_cluster("tpu-v6e", num_hosts=32)
    expected = 2 * 255 / 256 * 606.076928e6 / 235.76e9
    assert seconds(cluster, "all_reduce", 606.076928e6, 256, 8) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
@pytest.mark.parametrize("num_devices", [2, 3, 8, 64])
@pytest.mark.parametrize("size", [1.0, 1 * MB, 1000 * MB])
def test_auto_is_the_cheapest(algorithm: AllReduceAlgorithm, num_devices: int, size: float):
    link = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5)
    auto = all_reduce_seconds(size, num_devices, link)
    assert auto <= all_reduce_seconds(size, num_devices, link, algorithm)
    assert auto in [all_reduce_seconds(size, num_devices, link, each) for each in ALL_REDUCE_ALGORITHMS]


def test_one_device_has_nothing_to_reduce(cluster: Cluster):
    link = cluster.intra_host
    assert [all_reduce_seconds(1, 1, link, each) for each in ALL_REDUCE_ALGORITHMS] == [0] * len(ALL_REDUCE_ALGORITHMS)


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


@pytest.mark.parametrize("name", ["p3.16xlarge", "dgx-h100", "p5.48xlarge", "gb200-nvl72", "tpu-v5e", "mi300x-8"])
@given(data=st.data(), size=sizes)
def test_shipped_clusters_reduce_no_slower_than_they_scatter_and_gather(name: str, data: st.DataObject, size: float):
    cluster = load_cluster(name, num_hosts=64)
    per_host = data.draw(st.integers(1, cluster.devices_per_host))
    group = Group(num_devices=per_host * data.draw(st.integers(1, 64)), devices_per_host=per_host)
    whole, scatter, gather = (
        collective_seconds(Collective(kind=kind, bytes=size, group=group), cluster)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole <= (scatter + gather) * (1 + 1e-9)
    assert gather == scatter


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_nothing_to_send_takes_no_time(cluster: Cluster, kind: CollectiveKind):
    assert seconds(cluster, kind, 1 * MB, 1, 1) == 0
    assert seconds(cluster, kind, 0, 16, 8) == 0


def test_a_shared_processor_moves_the_bytes_of_all_members(shared_cluster: Cluster):
    """Eight members send 1.75 buffers each through one memory, in eight turns, and meet in three rounds of as many."""
    assert seconds(shared_cluster, "all_reduce", 100 * MB, 8, 8) == pytest.approx(8 * (3e-6 + 1.75e-3))
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


def test_levels_beat_rings_through_all_devices_where_the_library_has_them(cluster: Cluster):
    """Two hosts of eight over 10 GB/s: by level 1/2 of the buffer leaves a host once, a ring carries 15/16 past it."""
    rings = replace(cluster, algorithms=("ring",))
    assert seconds(rings, "all_gather", 100 * MB, 16, 8) == pytest.approx(14e-6 + 10e-6 + 15 / 16 * 10e-3)
    assert seconds(rings, "all_reduce", 100 * MB, 16, 8) == pytest.approx(28e-6 + 20e-6 + 2 * 15 / 16 * 10e-3)
    assert seconds(rings, "broadcast", 100 * MB, 16, 8) == pytest.approx(14e-6 + 10e-6 + 10e-3)
    # NCCL's trees: a chain inside (14 messages, 4 times the buffer), two messages and half of it twice between.
    trees = replace(cluster, algorithms=("ring", "double_tree"))
    assert seconds(trees, "all_reduce", 100 * MB, 16, 8) == pytest.approx(14e-6 + 20e-6 + 2 * (1 / 2) * 10e-3)
    fast = replace(trees, inter_host=replace(trees.inter_host, bandwidth_bytes_per_second=1e12))
    assert seconds(fast, "all_reduce", 100 * MB, 16, 8) == pytest.approx(28e-6 + 20e-6 + 2 * 15 / 16 * 1e-3)


@given(kind=kinds, group=groups(), size=sizes)
def test_levels_are_never_slower_than_rings_alone(cluster: Cluster, kind: CollectiveKind, group: Group, size: float):
    collective = Collective(kind=kind, bytes=size, group=group)
    assert collective_seconds(collective, cluster) <= collective_seconds(
        collective, replace(cluster, algorithms=("ring",))
    )


@given(group=groups(), size=sizes, names=st.sets(st.sampled_from(ALGORITHMS), min_size=1))
def test_another_algorithm_never_harms(cluster: Cluster, group: Group, size: float, names: set[str]):
    collective = Collective(kind="all_reduce", bytes=size, group=group)
    fewer = replace(cluster, algorithms=tuple(names | {"ring"}))
    assert collective_seconds(collective, cluster) <= collective_seconds(collective, fewer)


def test_the_switch_adds_up(cluster: Cluster):
    """(n+1)/n of the buffer at 0.85 of the rate instead of 2(n-1)/n, with the messages of a ring."""
    summing = replace(cluster, intra_host=replace(cluster.intra_host, in_network_reduction=True))
    assert seconds(summing, "all_reduce", 100 * MB, 8, 8) == pytest.approx(14e-6 + 9 / 8 / 0.85 * 1e-3)
    assert seconds(summing, "all_reduce", 100 * MB, 2, 2) == pytest.approx(2e-6 + 1e-3)  # no gain for two
    assert seconds(summing, "all_gather", 100 * MB, 8, 8) == seconds(cluster, "all_gather", 100 * MB, 8, 8)
    assert (
        explain_collective(
            Collective(kind="all_reduce", bytes=100 * MB, group=Group(num_devices=8, devices_per_host=8)), summing
        ).algorithm
        == "in the network"
    )


@pytest.mark.parametrize(
    ("num_cards", "per_host", "rate"),
    [
        (1, 1, 10e9),  # one card, all of it for one device
        (1, 8, 10e9),
        (8, 1, 10e9 / 8),  # a card each
        (8, 4, 10e9 / 2),
        (32, 1, 10e9 / 8),  # four cards each
        (4, 1, 10e9 / 4),  # two devices share a card, but one uses it alone
        (4, 8, 10e9),
    ],
)
def test_a_group_uses_the_cards_of_its_members(cluster: Cluster, num_cards: int, per_host: int, rate: float):
    carded = replace(cluster, inter_host=replace(cluster.inter_host, num_cards=num_cards, latency_seconds=0))
    quick = replace(carded, intra_host=replace(carded.intra_host, latency_seconds=0))
    found = seconds(quick, "all_gather", 100 * MB, 2 * per_host, per_host)
    assert found == pytest.approx(0.5 * 100 * MB / rate)


def test_all_members_of_eight_groups_share_the_cards(cluster: Cluster):
    """Eight groups of one member per host on eight cards: the same eighth as one group alone."""
    carded = replace(cluster, inter_host=replace(cluster.inter_host, num_cards=8))
    assert seconds(carded, "all_gather", 100 * MB, 4, 1, 8) == seconds(carded, "all_gather", 100 * MB, 4, 1, 1)


def test_hosts_of_a_domain_talk_as_one(cluster: Cluster):
    """Domains of two hosts: 16 devices at the inside rate; 32 devices over two domains, 20 GB/s from each."""
    domains = replace(cluster, hosts_per_domain=2)
    assert seconds(domains, "all_gather", 100 * MB, 16, 8) == pytest.approx(4e-6 + 15 / 16 * 1e-3)
    assert seconds(domains, "all_gather", 100 * MB, 32, 8) == pytest.approx(4e-6 + 10e-6 + 1 / 2 * 5e-3)
    assert transfer_seconds(100 * MB, replace(domains, num_hosts=2), crosses_hosts=True) == pytest.approx(1e-6 + 1e-3)
    assert transfer_seconds(100 * MB, domains, crosses_hosts=True) == pytest.approx(10e-6 + 10e-3)
    near = transfer_seconds(100 * MB, domains, crosses_hosts=True, crosses_domains=False)
    assert near == pytest.approx(1e-6 + 1e-3)


def test_trees_reach_the_hosts_of_a_domain_in_few_steps(cluster: Cluster):
    """Four hosts of eight in one domain: 7 steps down a chain, 2 down the tree over hosts, and back."""
    domain = replace(cluster, hosts_per_domain=4, algorithms=("ring", "double_tree"))
    assert seconds(domain, "all_reduce", 1, 32, 8) == pytest.approx(2 * (7 + 2) * 1e-6, rel=1e-4)
    summing = replace(domain, intra_host=replace(domain.intra_host, in_network_reduction=True))
    expected = 18e-6 + 33 / 32 / 0.85 * 1e-3
    assert seconds(summing, "all_reduce", 100 * MB, 32, 8) == pytest.approx(expected)


def test_above_the_switch_there_are_rings_and_double_trees_alone(cluster: Cluster):
    """Other algorithms of the library make no difference to a reduction in the network, over many hosts too."""
    link = replace(cluster.intra_host, in_network_reduction=True)
    summing = replace(cluster, intra_host=link, num_hosts=8)
    fewer = replace(summing, algorithms=("ring", "double_tree"))
    group = Group(num_devices=64, devices_per_host=8)
    found = [s for c in (summing, fewer) for s in schemes("all_reduce", 1e5, levels_of(group, c), c.algorithms)]
    above = {part.algorithm for s in found if s.name == "in the network" for part in s.parts[1:]}
    assert above == {"ring", "double_tree"}


def test_a_third_level_has_a_link_of_its_own(cluster: Cluster):
    middle = Link(bandwidth_bytes_per_second=40e9, latency_seconds=5e-6)
    three = replace(cluster, hosts_per_domain=2, intra_domain=middle)
    assert seconds(three, "all_gather", 100 * MB, 16, 8) == pytest.approx(3e-6 + 5e-6 + 1 / 2 * 2.5e-3)
    # 32 devices: two hosts in each of two domains; each domain sends 50 MB over 2 x 10 GB/s.
    assert seconds(three, "all_gather", 100 * MB, 32, 8) == pytest.approx(3e-6 + 5e-6 + 10e-6 + 1 / 2 * 5e-3)
    assert transfer_seconds(100 * MB, three, crosses_hosts=True, crosses_domains=False) == pytest.approx(5e-6 + 2.5e-3)


def test_a_group_says_how_many_members_share_a_domain(cluster: Cluster):
    """Two members, one in each domain, use the network although their hosts could be neighbours."""
    domains = replace(cluster, hosts_per_domain=2)
    group = Group(num_devices=2, devices_per_host=1)
    near = Collective(kind="permute", bytes=100 * MB, group=group)
    far = Collective(kind="permute", bytes=100 * MB, group=replace(group, devices_per_domain=1))
    assert collective_seconds(near, domains) == pytest.approx(1e-6 + 1e-3)
    assert collective_seconds(far, domains) == pytest.approx(10e-6 + 10e-3)


@pytest.mark.parametrize(
    ("num_devices", "share"),
    [(16, 1.0), (4, 0.5), (8, 0.75), (2, 0.25)],  # both rings; one; one and a line across; one link of four
)
def test_a_group_on_a_torus_uses_the_links_among_its_members(cluster: Cluster, num_devices: int, share: float):
    torus = Link(bandwidth_bytes_per_second=100e9, latency_seconds=0, torus=(4, 4))
    slice_ = replace(cluster, num_hosts=2, hosts_per_domain=2, intra_host=torus, algorithms=("ring", "hierarchical"))
    found = seconds(slice_, "all_gather", 100 * MB, num_devices, min(8, num_devices))
    assert found == pytest.approx((num_devices - 1) / num_devices * 100 * MB / (share * 100e9))


def test_an_all_to_all_on_a_ring_crosses_many_links(cluster: Cluster):
    """Of a ring of 16, both ways: bytes travel 4 links on average, M * 16/8 per link of 50 GB/s (scaling-book)."""
    ring = Link(bandwidth_bytes_per_second=100e9, latency_seconds=0, torus=(16,))
    slice_ = replace(cluster, num_hosts=2, hosts_per_domain=2, intra_host=ring, algorithms=("ring", "hierarchical"))
    assert seconds(slice_, "all_to_all", 100 * MB, 16, 8) == pytest.approx(15 / 16 * 100 * MB * 16 / 8 / 50e9)


@given(kind=kinds, group=groups(), size=sizes, factor=st.floats(1, 100), inside=st.booleans(), ramp=st.floats(0, 1e-3))
def test_a_slower_link_is_never_faster(
    cluster: Cluster, kind: CollectiveKind, group: Group, size: float, factor: float, inside: bool, ramp: float
):
    which = "intra_host" if inside else "inter_host"
    link = replace(getattr(cluster, which), ramp_seconds=ramp)
    slower = replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / factor)
    collective = Collective(kind=kind, bytes=size, group=group)
    before, after = (collective_seconds(collective, replace(cluster, **{which: each})) for each in (link, slower))
    assert before <= after * (1 + 1e-12)


@given(kind=kinds, group=groups(), size=sizes, more=st.floats(0, 1e-3), inside=st.booleans())
def test_more_latency_or_ramp_is_never_faster(
    cluster: Cluster, kind: CollectiveKind, group: Group, size: float, more: float, inside: bool
):
    which = "intra_host" if inside else "inter_host"
    link: Link = getattr(cluster, which)
    later = replace(link, latency_seconds=link.latency_seconds + more)
    ramped = replace(link, ramp_seconds=more)
    collective = Collective(kind=kind, bytes=size, group=group)
    before, *after = (
        collective_seconds(collective, replace(cluster, **{which: each})) for each in (link, later, ramped)
    )
    assert all(before <= each * (1 + 1e-12) for each in after)


@pytest.mark.parametrize("name", ["p3.16xlarge", "dgx-h100", "p5.48xlarge", "gb200-nvl72", "tpu-v5e"])
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_shipped_clusters_price_without_jumps(name: str, kind: CollectiveKind):
    """Over nine decades of bytes in small steps: never less, and no more than the step (ramps bend, nothing jumps)."""
    cluster = load_cluster(name, num_hosts=36)
    per_host = cluster.devices_per_host
    group = Group(num_devices=24 * per_host, devices_per_host=per_host)
    step = 1.01
    times = [
        collective_seconds(Collective(kind=kind, bytes=step**power, group=group), cluster) for power in range(0, 2100)
    ]
    for before, after in pairwise(times):
        assert before <= after <= before * step


def test_an_explanation_adds_up(cluster: Cluster):
    collective = Collective(kind="all_reduce", bytes=100 * MB, group=Group(num_devices=16, devices_per_host=8))
    cost = explain_collective(collective, cluster)
    assert cost.seconds == collective_seconds(collective, cluster) == cost.latency_seconds + cost.bandwidth_seconds
    inside, between = cost.levels
    assert (inside.level, between.level) == ("inside a host", "between hosts")
    assert (inside.num_members, between.num_members) == (8, 2)
    assert (inside.bytes, between.bytes) == pytest.approx((1.75 * 100 * MB, 100 * MB))
    assert (inside.bytes_per_second, between.bytes_per_second) == (100e9, 10e9)
    assert cost.latency_seconds == pytest.approx(6e-6 + 20e-6)
    assert cost.limiting_level == "between hosts"
    assert "10026.0 us: level by level, latency 26.0 us" in str(cost)
    assert "between hosts: ring over 2, 2 messages 20.0 us, 100.000 MB at 10.0 GB/s 10000.0 us" in str(cost)
    alone = replace(collective, group=Group(num_devices=1, devices_per_host=1))
    assert str(explain_collective(alone, cluster)) == "nothing to send"


def test_impossible_transfers_and_all_reduces_are_refused(cluster: Cluster):
    assert transfer_seconds(0, cluster, crosses_hosts=True) == 0
    with pytest.raises(CostModelError, match="The size of a transfer is -1"):
        transfer_seconds(-1, cluster, crosses_hosts=True)
    with pytest.raises(CostModelError, match="The number of links is 0"):
        transfer_seconds(1, cluster, crosses_hosts=True, num_links=0)
    with pytest.raises(CostModelError, match="'gossip', but only these are priced: auto, ring"):
        all_reduce_seconds(1, 2, cluster.intra_host, "gossip")  # pyright: ignore[reportArgumentType]
