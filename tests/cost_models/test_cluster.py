import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import (
    Cluster,
    ClusterError,
    Collective,
    Group,
    HostGroup,
    Link,
    cluster_sources,
    known_clusters,
    load_cluster,
    load_device,
)
from cost_models.catalogue import device_sources, link_sources, read_shipped
from cost_models.cluster import with_bandwidth, with_memory, with_memory_limit, with_times_the_hosts
from cost_models.communication import collective_seconds
from cost_models.hardware import MEMORY_RESERVE


@pytest.mark.parametrize("name", known_clusters())
def test_every_shipped_description_loads_and_names_its_sources(name: str):
    """What the file states has a source of its own; what it names has those of the device or link."""
    cluster = load_cluster(name)
    assert cluster.name == name == name.lower()
    assert cluster.num_hosts in (1, cluster.hosts_per_domain)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    stated = read_shipped("clusters", name)
    sources = cluster_sources(name)
    needed = set(stated) - {"name", "num_hosts", "device", "intra_host", "inter_host", "notes", "sources"}
    needed |= {f"inter_host.{key}" for key in stated["inter_host"]} - {"inter_host.link"}
    assert set(stated["sources"]) == needed
    links = link_sources(stated["inter_host"]["link"]), link_sources(stated["intra_host"])
    needed |= {f"inter_host.{key}" for key in links[0]} | {f"intra_host.{key}" for key in links[1]}
    needed |= {f"device.{key}" for key in device_sources(stated["device"])}
    assert set(sources) == needed
    assert all(len(source) > 4 for source in sources.values())


@pytest.mark.parametrize("name", known_clusters())
def test_shipped_descriptions_are_plausible(name: str):
    cluster = load_cluster(name)
    intra, inter = cluster.intra_host, cluster.inter_host
    assert 10e9 < intra.bytes_per_second < cluster.device.memory_bandwidth
    assert 1e9 < inter.bandwidth_bytes_per_second <= intra.bandwidth_bytes_per_second * cluster.devices_per_host
    assert inter.latency_seconds >= intra.latency_seconds
    assert (cluster.hosts_per_domain > 1) == (bool(intra.torus) or cluster.device.name.startswith("GB"))


def test_published_values_of_well_known_hosts():
    """Data sheets: V100 125 TFLOP/s, 16 GB, 25 Gb/s network; A100 312 TFLOP/s; H100 989 TFLOP/s, 8 x 400 Gb/s."""
    p3, p4d, dgx = (load_cluster(name) for name in ("p3.16xlarge", "P4D.24xlarge", "dgx-h100"))
    assert (p3.device.peak("float16"), p3.device.memory_bytes, p3.devices_per_host) == (125e12, 16e9, 8)
    assert p3.inter_host.bandwidth_bytes_per_second == 25e9 / 8
    assert (p4d.device.peak("bfloat16"), p4d.device.peak("float32")) == (312e12, 156e12)
    assert p4d.intra_host.bandwidth_bytes_per_second == 300e9
    assert (p3.inter_host.num_cards, p4d.inter_host.num_cards, dgx.inter_host.num_cards) == (1, 4, 8)
    assert (p3.device.num_units, p4d.device.num_units, dgx.device.num_units) == (80, 108, 132)
    rack = load_cluster("gb200-nvl72")
    assert (rack.num_devices, rack.hosts_per_domain, rack.intra_host.bandwidth_bytes_per_second) == (72, 18, 900e9)
    assert (dgx.device.peak("bfloat16"), dgx.inter_host.bandwidth_bytes_per_second) == (989e12, 400e9)


def test_the_named_clusters_are_there():
    wanted = {"p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "dgx-1", "dgx-2"}
    wanted |= {"dgx-a100", "dgx-h100", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}
    assert wanted <= set(known_clusters())


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(ClusterError, match=r"no cluster named 'p3\.16xlrge'\. Did you mean 'p3\.16xlarge'\?") as info:
        load_cluster("p3.16xlrge")
    assert all(name in str(info.value) for name in known_clusters())


def test_a_name_may_end_with_the_number_of_hosts(tmp_path):
    assert (
        load_cluster("p3.16xlarge:8")
        == load_cluster("P3.16xlarge", num_hosts=8)
        == load_cluster("p3.16xlarge:8", num_hosts=8)
    )
    path = tmp_path / "a:b.json"
    path.write_text(json.dumps(load_cluster("dgx-1").to_json()))
    assert load_cluster(str(path)).num_hosts == 1
    assert load_cluster(f"{path}:3").num_hosts == 3
    for name, num_hosts, says in (
        ("p3.16xlarge:many", None, "write NAME or NAME:HOSTS"),
        ("p3.16xlarge:0", None, "num_hosts"),
        ("p3.16xlarge:8", 4, "say it once"),
        ("p3.16xlrge:8", None, r"Did you mean 'p3\.16xlarge'"),
    ):
        with pytest.raises(ClusterError, match=says):
            load_cluster(name, num_hosts=num_hosts)


def test_num_hosts_multiplies_the_devices(cluster: Cluster):
    assert load_cluster("p3.16xlarge", num_hosts=8).num_devices == 64
    assert cluster.num_devices == 32
    with pytest.raises(ClusterError, match=r"Cluster\.num_hosts is 0, .* describe at least one host"):
        load_cluster("p3.16xlarge", num_hosts=0)


def test_a_step_waits_longer_for_the_last_of_more_hosts():
    waits = [load_cluster("dgx-a100", num_hosts=n).skew_seconds for n in (1, 2, 4, 64)]
    assert waits == pytest.approx([0.0, 0.006, 0.012, 0.036])


def test_a_file_of_ones_own(cluster: Cluster, tmp_path: Path):
    path = tmp_path / "Mine.json"
    path.write_text(json.dumps({**cluster.to_json(), "sources": {"all": "made up"}, "notes": "toy"}))
    assert load_cluster(str(path)) == cluster
    assert load_cluster(str(path), num_hosts=2) == replace(cluster, num_hosts=2)
    assert hash(load_cluster(str(path))) == hash(cluster)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read .* give the path of a file"),
        ("{", "is not JSON .*: correct it"),
        ("[]", "holds no JSON object"),
        ("{}", "The cluster lacks device, devices_per_host, inter_host, intra_host, name, num_hosts: add them"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, text: str | None, sentence: str):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterError, match=sentence):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("num_host", 2, "has the unknown keys num_host: known are .* Did you mean 'num_hosts' for 'num_host'"),
        ("hosts_per_domain", 0, "hosts_per_domain is 0, but a whole number"),
        ("device_share", 2, "device_share is 2, but a part above 0"),
        ("algorithms", ["gossip"], r"algorithms is \('gossip',\), but some of ring, tree, .* are needed"),
        ("algorithms", [], "algorithms is .*, but some of ring, tree, .* are needed"),
        (
            "device",
            "a100-sxm-40g",
            "no device named 'a100-sxm-40g'. Did you mean 'a100-sxm-40gb'.* Known devices: a10, ",
        ),
        ("intra_host", "nvlink", "no link named 'nvlink'. Did you mean 'nvlink2' or .* Known links: efa-v1"),
        ("intra_host", {"link": "nvlink3", "speed": 1}, "'intra_host' .* has the unknown keys speed"),
        ("inter_host", "infiniband", "'inter_host' of the cluster 'toy' lacks bandwidth_bytes_per_second: add them"),
        (
            "inter_host",
            {"bandwidth_bytes_per_second": 25, "latency_seconds": 1e-5},
            r"is 25, which no hardware has: is it in another unit\? Give it in bytes per second: 25 Gb/s is 25e9 / 8",
        ),
        (
            "inter_host",
            {"bandwidth_bytes_per_second": 25e9, "latency_seconds": 10},
            r"latency_seconds of 'inter_host' .* is 10, which no hardware has.* seconds: 7 us is 7e-6",
        ),
        ("device", 5, "'device' of the cluster 'toy' is 5, but a JSON object is needed"),
        ("intra_host", {"latency_seconds": 0}, "'intra_host' .* lacks bandwidth_bytes_per_second: add them"),
        ("shared_processor", "no", "shared_processor is 'no', but true or false is needed"),
        ("devices_per_host", 1.5, r"devices_per_host is 1\.5, but a whole number"),
    ],
)
def test_wrong_values_are_refused(cluster: Cluster, key: str, value: object, sentence: str):
    with pytest.raises(ClusterError, match=sentence):
        Cluster.from_json({**cluster.to_json(), key: value})
    given = cluster.to_json()["device"]
    with pytest.raises(ClusterError, match=r"memory_bytes of 'device' .* is 16, which no hardware has.* 16 GB is 16e9"):
        Cluster.from_json({**cluster.to_json(), "device": {**given, "memory_bytes": 16}})
    with pytest.raises(ClusterError, match=r"peak_flops\['float32'\] .* is 125, which .* 125 TFLOP/s is 125e12"):
        Cluster.from_json({**cluster.to_json(), "device": {**given, "peak_flops": {"float32": 125}}})
    rates = {**cluster.to_json()["device"], "peak_flops": 1e12}
    with pytest.raises(ClusterError, match=r"peak_flops of the device is .* but a JSON object is needed"):
        Cluster.from_json({**cluster.to_json(), "device": rates})


def test_parts_are_named_or_spelt_out(cluster: Cluster):
    """A name, an object, or a named link with other values."""
    named = {
        "name": "mine",
        "device": "A100-SXM-40GB",
        "num_hosts": 2,
        "devices_per_host": 8,
        "intra_host": "nvlink3",
        "inter_host": {"link": "infiniband", "bandwidth_bytes_per_second": 50e9, "num_cards": 2},
    }
    mine = Cluster.from_json(named)
    assert mine.device == load_device("a100-sxm-40gb") == load_cluster("p4d.24xlarge").device
    assert mine.intra_host == load_cluster("p4d.24xlarge").intra_host
    infiniband = load_cluster("dgx-a100").inter_host
    assert mine.inter_host == replace(infiniband, bandwidth_bytes_per_second=50e9, num_cards=2)
    spelt = {**named, "device": cluster.to_json()["device"], "intra_host": cluster.intra_host.to_json()}
    assert (Cluster.from_json(spelt).device, Cluster.from_json(spelt).intra_host) == (
        cluster.device,
        cluster.intra_host,
    )


MIXED = {
    "name": "mixed",
    "devices_per_host": 8,
    "inter_host": {"link": "ethernet", "bandwidth_bytes_per_second": 12.5e9},
    "groups": [
        {
            "device": "a100-sxm-40gb",
            "num_hosts": 2,
            "intra_host": "nvlink3",
            "inter_host": {"link": "infiniband", "bandwidth_bytes_per_second": 200e9, "num_cards": 8},
        },
        {"device": "v100-sxm2-32gb", "num_hosts": 3, "intra_host": "nvlink2", "notes": "older"},
    ],
}


def test_hosts_may_differ():
    mixed = Cluster.from_json(MIXED)
    assert (mixed.num_hosts, mixed.num_devices) == (5, 40)
    a100, v100 = load_device("a100-sxm-40gb"), load_device("v100-sxm2-32gb")
    assert mixed.device.memory_bytes == 32e9 and mixed.device.memory_bandwidth == 900e9
    assert mixed.device.peaks == {"float16": 125e12, "float32": 15.7e12}
    assert mixed.intra_host.bandwidth_bytes_per_second == 150e9
    first, second, both = mixed.at(0, 16), mixed.at(16, 8), mixed.at(8, 16)
    assert (first.device, first.intra_host.bandwidth_bytes_per_second) == (a100, 300e9)
    assert first.inter_host.bandwidth_bytes_per_second == 200e9
    assert (second.device, second.intra_host.bandwidth_bytes_per_second) == (v100, 150e9)
    assert second.inter_host.bandwidth_bytes_per_second == 12.5e9
    assert both.device == mixed.device and both.inter_host == mixed.inter_host
    assert both.groups == () and both.num_devices == 40
    assert mixed.at(15, 1).device == a100 and mixed.at(39, 1).device == v100
    assert Cluster.from_json(json.loads(json.dumps(mixed.to_json()))) == mixed
    assert hash(mixed) == hash(Cluster.from_json(MIXED))


def test_the_least_memory_is_the_least_that_is_usable(cluster: Cluster):
    """What is kept for the allocator counts: the device of more memory may have less for a plan."""
    large = replace(cluster.device, memory_bytes=40e9, memory_reserve=0.5)
    small = replace(cluster.device, memory_bytes=30e9, memory_reserve=0.1)
    groups = tuple(HostGroup(num_hosts=2, device=each, intra_host=cluster.intra_host) for each in (small, large))
    assert replace(cluster, groups=groups).at(8, 16).device.usable_bytes == large.usable_bytes == 20e9


def test_a_description_without_a_reserve_has_the_default_one(cluster: Cluster):
    data = json.loads(json.dumps(cluster.to_json()))
    assert data["device"].pop("memory_reserve") == MEMORY_RESERVE
    assert Cluster.from_json(data) == cluster
    gpu, tpu = (load_cluster(name).device for name in ("p4d.24xlarge", "tpu-v4"))
    assert (gpu.usable_bytes, tpu.usable_bytes) == pytest.approx((36e9, 30.4e9))


def test_the_slowest_of_a_range_is_slowest_in_every_respect(cluster: Cluster):
    """Less memory here, less bandwidth there: a stage that spans both has the least of each."""
    small = replace(cluster.device, name="small", memory_bytes=1e9, launch_seconds=9e-6)
    slow = replace(cluster.device, name="slow", memory_bandwidth=1e10, memory_efficiency=0.5, contention=0.3)
    link = replace(cluster.intra_host, latency_seconds=5e-6)
    groups = tuple(
        HostGroup(num_hosts=2, device=device, intra_host=each)
        for device, each in ((small, cluster.intra_host), (slow, link))
    )
    spanning = replace(cluster, groups=groups).at(8, 16)
    assert (spanning.device.memory_bytes, spanning.device.memory_bandwidth) == (1e9, 1e10)
    assert (spanning.device.launch_seconds, spanning.device.memory_efficiency) == (9e-6, 0.5)
    assert spanning.device.contention == 0.3
    assert spanning.device.name == "slow | small"
    assert spanning.intra_host == link


@given(first=st.integers(0, 39), number=st.integers(1, 40), size=st.floats(1, 1e11), members=st.integers(2, 8))
def test_a_range_is_never_slower_than_a_range_around_it(first: int, number: int, size: float, members: int):
    mixed = Cluster.from_json(MIXED)
    number = min(number, 40 - first)
    inner, outer = mixed.at(first, number), mixed.at(first // 2, number + first - first // 2)
    assert inner.device.memory_bytes >= outer.device.memory_bytes
    assert all(inner.device.peak(dtype) >= outer.device.peak(dtype) for dtype in ("float32", "bfloat16", "float16"))
    for group in (
        Group(num_devices=members, devices_per_host=members),
        Group(num_devices=2 * members, devices_per_host=members),
    ):
        collective = Collective(kind="all_gather", bytes=size, group=group)
        assert collective_seconds(collective, inner) <= collective_seconds(collective, outer) * (1 + 1e-12)


def test_equal_hosts_are_what_they_are(cluster: Cluster):
    assert cluster.at(3, 20) is cluster
    for first, number in ((-1, 2), (0, 0), (30, 3)):
        with pytest.raises(ClusterError, match=f"{number} devices from {first} on .* has 32: give a range within"):
            cluster.at(first, number)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"groups": 3}, "'groups' of the cluster 'mixed' is 3, but a list"),
        ({"groups": [3]}, r"groups\[0\] of the cluster 'mixed' is 3, but a JSON object"),
        ({"groups": [{"device": "t4", "num_hosts": 1}]}, r"groups\[0\] .* lacks intra_host: add them"),
        ({"device": "t4"}, "has groups and device beside them: move these into the groups"),
    ],
)
def test_wrong_groups_are_refused(changes: dict[str, Any], sentence: str):
    with pytest.raises(ClusterError, match=sentence):
        Cluster.from_json({**MIXED, **changes})


def test_groups_have_the_hosts_of_the_cluster(cluster: Cluster):
    group = HostGroup(num_hosts=3, device=cluster.device, intra_host=cluster.intra_host)
    with pytest.raises(ClusterError, match=r"has 4 hosts, but its groups have 3: change num_hosts"):
        replace(cluster, groups=(group,))
    with pytest.raises(ClusterError, match=r"HostGroup\.num_hosts is 0"):
        replace(group, num_hosts=0)


def test_optional_parts_survive_json(cluster: Cluster):
    three = replace(
        cluster,
        hosts_per_domain=2,
        intra_domain=Link(bandwidth_bytes_per_second=4e10, latency_seconds=5e-6),
        algorithms=("ring",),
        shared_processor=True,
        device_share=0.5,
    )
    assert Cluster.from_json(json.loads(json.dumps(three.to_json()))) == three
    assert not {"hosts_per_domain", "intra_domain", "algorithms", "groups"} & set(cluster.to_json())


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
    assert found.device.usable_bytes == 8e9 and found.device.reserved_bytes == 0
    assert with_memory(found, cluster.device.usable_bytes) == with_memory(cluster, cluster.device.usable_bytes)
    assert replace(found, device=cluster.device, groups=cluster.groups) == cluster


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
    assert [group.device.usable_bytes for group in found.groups] == [14.4e9, 40e9]
    # A limit above what is usable changes nothing.
    assert found.groups[0].device == found.device == few and found.groups[1].device.reserved_bytes == 0


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


def test_a_cluster_states_the_memory_of_its_hosts(tmp_path):
    """Data sheets: 1 TB and PCI Express 4.0 in a DGX A100 of 320 GB; what is missing or wrong is a sentence."""
    cluster = load_cluster("dgx-a100-40gb")
    host = cluster.host_memory
    assert host is not None and (host.memory_bytes, host.link.bandwidth_bytes_per_second) == (1e12, 31.5e9)
    assert host.usable_bytes == pytest.approx(0.9e12)
    assert ("memory of a host", host.words) in cluster.hardware()
    half = with_bandwidth(cluster, 0.5).host_memory
    assert half is not None and half.link.bandwidth_bytes_per_second == 31.5e9 / 2
    data = cluster.to_json()
    for value, says in (
        ({"memory_bytes": 1e12}, r"'host_memory' of the cluster 'dgx-a100-40gb' lacks link"),
        ({"memory_bytes": 0, "link": "pcie4"}, r"HostMemory\.memory_bytes|memory_bytes of 'host_memory'"),
        ({"memory_bytes": 1e12, "link": "pcie44"}, "no link named 'pcie44'"),
        ({"memory_byte": 1e12, "link": "pcie4"}, "unknown keys memory_byte"),
        ("1 TB", "a JSON object is needed"),
    ):
        with pytest.raises(ClusterError, match=says):
            Cluster.from_json({**data, "host_memory": value})
    assert Cluster.from_json({key: value for key, value in data.items() if key != "host_memory"}).host_memory is None
