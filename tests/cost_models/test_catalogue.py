import pytest

from cost_models import ClusterError, known_clusters, known_devices, known_links, load_cluster, load_device
from cost_models.catalogue import device_from_json, device_sources, link_from_json, link_sources, read_shipped


@pytest.mark.parametrize("name", known_devices())
def test_every_device_loads_and_names_its_sources(name: str):
    device = load_device(name)
    assert load_device(name.upper()) == device
    values = {
        key: value for key, value in read_shipped("devices", name).items() if key not in ("sources", "notes", "name")
    }
    needed = set(values) - {"peak_flops"} | {f"peak_flops.{dtype}" for dtype in values["peak_flops"]}
    sources = device_sources(name)
    assert set(sources) == needed
    assert all(len(source) > 4 for source in sources.values())


@pytest.mark.parametrize("name", known_devices())
def test_devices_are_plausible(name: str):
    device = load_device(name)
    assert 7e12 < device.peaks["float32"] <= device.peak("float32") <= device.peak("bfloat16") <= 5e15
    assert 8e9 <= device.memory_bytes <= 300e9 and 100e9 < device.memory_bandwidth <= 8e12
    assert 1 <= device.num_units <= 304
    assert all(0.3 < part <= 0.95 for part in device.efficiencies.values())


@pytest.mark.parametrize("name", known_links())
def test_every_link_loads_and_names_its_sources(name: str):
    data = read_shipped("links", name)
    link = link_from_json({"link": name, "bandwidth_bytes_per_second": 5e10}, name)
    assert link.bandwidth_bytes_per_second == 5e10
    assert set(link_sources(name)) == set(data) - {"sources", "notes"}
    assert (
        0 < link.latency_seconds <= 1e-4
        and 0 <= link.ramp_seconds < 1e-3
        and 0 <= link.skew_seconds < 0.1
        and 0.5 < link.efficiency <= 1
    )


def test_no_device_or_link_is_there_for_nothing():
    """Each generation of links joins some cluster, and each name is that of one file."""
    used = {str(each) for name in known_clusters() for each in _named_links(name)}
    assert set(known_links()) - used <= {"pcie3", "pcie5", "omni-path", "ici-v2"}
    assert len({load_device(name).name for name in known_devices()}) == len(known_devices())


def _named_links(name: str) -> list[object]:
    data = read_shipped("clusters", name)
    parts = (data["intra_host"], data["inter_host"])
    return [part["link"] if isinstance(part, dict) else part for part in parts]


def test_slower_generations_are_slower():
    for older, newer in (
        ("v100-sxm2-32gb", "a100-sxm-80gb"),
        ("a100-sxm-80gb", "h100-sxm-80gb"),
        ("tpu-v5e", "tpu-v6e"),
    ):
        assert load_device(older).peak("bfloat16") < load_device(newer).peak("bfloat16")
        assert load_device(older).memory_bandwidth < load_device(newer).memory_bandwidth
    generations = [link_from_json(f"nvlink{number}", "x").bytes_per_second for number in (2, 3, 4, 5)]
    assert generations == sorted(generations)


def test_unknown_names_have_the_closest_known_one():
    with pytest.raises(ClusterError, match=r"no device named 'h100'\. Did you mean 'h100-pcie-80gb' or 'h100-sxm-"):
        load_device("h100")
    with pytest.raises(ClusterError, match="no link named 7"):
        link_from_json({"link": 7}, "x")
    with pytest.raises(ClusterError, match="'device' is 7, but a JSON object is needed"):
        device_from_json(7)


def test_devices_of_shipped_clusters_are_shared():
    assert load_cluster("p4d.24xlarge").device == load_cluster("nd-a100-v4").device == load_device("a100-sxm-40gb")
