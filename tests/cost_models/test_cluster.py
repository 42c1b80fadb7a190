import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models import Cluster, ClusterError, cluster_sources, known_clusters, load_cluster


@pytest.mark.parametrize("name", known_clusters())
def test_every_shipped_description_loads_and_names_its_sources(name: str):
    cluster = load_cluster(name)
    assert (cluster.name, cluster.num_hosts) == (name, 1)
    assert name == name.lower()
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    data = cluster.to_json()
    parts = {key: data.pop(key) for key in ("device", "intra_host", "inter_host")}
    peaks = parts["device"].pop("peak_flops")
    needed = {f"{part}.{key}" for part, values in parts.items() for key in values} - {"device.name"}
    needed |= {f"device.peak_flops.{dtype}" for dtype in peaks} | {"devices_per_host"}
    sources = cluster_sources(name)
    assert set(sources) == needed
    assert all(sources.values())


@pytest.mark.parametrize("name", known_clusters())
def test_shipped_descriptions_are_plausible(name: str):
    cluster = load_cluster(name)
    device = cluster.device
    assert 1e12 < device.peaks["float32"] <= device.peak("float32") <= device.peak("bfloat16") <= 5e15
    assert 10e9 <= device.memory_bytes <= 200e9 and 100e9 < device.memory_bandwidth <= 8e12
    assert 10e9 < cluster.intra_host.bytes_per_second < device.memory_bandwidth
    assert cluster.inter_host.latency_seconds >= cluster.intra_host.latency_seconds


def test_published_values_of_well_known_hosts():
    """Data sheets: V100 125 TFLOP/s, 16 GB, 25 Gb/s network; A100 312 TFLOP/s; H100 989 TFLOP/s, 8 x 400 Gb/s."""
    p3, p4d, dgx = (load_cluster(name) for name in ("p3.16xlarge", "P4D.24xlarge", "dgx-h100"))
    assert (p3.device.peak("float16"), p3.device.memory_bytes, p3.devices_per_host) == (125e12, 16e9, 8)
    assert p3.inter_host.bandwidth_bytes_per_second == 25e9 / 8
    assert (p4d.device.peak("bfloat16"), p4d.device.peak("float32")) == (312e12, 156e12)
    assert p4d.intra_host.bandwidth_bytes_per_second == 300e9
    assert (dgx.device.peak("bfloat16"), dgx.inter_host.bandwidth_bytes_per_second) == (989e12, 400e9)


def test_the_named_clusters_are_there():
    wanted = {"p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "dgx-1", "dgx-2"}
    wanted |= {"dgx-a100", "dgx-h100", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}
    assert wanted <= set(known_clusters())


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(ClusterError, match=r"no cluster named 'p3\.16xlrge'\. Did you mean 'p3\.16xlarge'\?") as info:
        load_cluster("p3.16xlrge")
    assert all(name in str(info.value) for name in known_clusters())


def test_num_hosts_multiplies_the_devices(cluster: Cluster):
    assert load_cluster("p3.16xlarge", num_hosts=8).num_devices == 64
    assert cluster.num_devices == 32
    with pytest.raises(ClusterError, match=r"Cluster\.num_hosts is 0, .* describe at least one host"):
        load_cluster("p3.16xlarge", num_hosts=0)


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
        ("{", "is not JSON .*: correct that line"),
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
        ("num_host", 2, "has the unknown keys num_host: known are device,"),
        ("device", 5, "'device' of the cluster 'toy' is 5, but a JSON object is needed"),
        ("intra_host", {"latency_seconds": 0}, "'intra_host' .* lacks bandwidth_bytes_per_second: add them"),
        ("shared_processor", "no", "shared_processor is 'no', but true or false is needed"),
        ("devices_per_host", 1.5, r"devices_per_host is 1\.5, but a whole number"),
    ],
)
def test_wrong_values_are_refused(cluster: Cluster, key: str, value: object, sentence: str):
    with pytest.raises(ClusterError, match=sentence):
        Cluster.from_json({**cluster.to_json(), key: value})
    rates = {**cluster.to_json()["device"], "peak_flops": 1e12}
    with pytest.raises(ClusterError, match=r"peak_flops of the device is .* but a JSON object is needed"):
        Cluster.from_json({**cluster.to_json(), "device": rates})
