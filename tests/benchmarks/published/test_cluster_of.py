"""Which devices and links the words of a table mean."""

from __future__ import annotations

import pytest

from benchmarks.published.cluster_of import cluster_of, device_name
from benchmarks.published.row import RowError
from cost_models.catalogue import link_from_json, load_device
from tests.benchmarks.published.runs import row


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-SXM-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("A100-PCIe-80GB", "a100-pcie-80gb"),
        ("A100 80GB", "a100-sxm-80gb"),
        ("V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("V100-SXM3-32GB", "v100-sxm2-32gb"),
        ("Tesla V100 PCIe 32GB", "v100-pcie-32gb"),
        ("H100-SXM-80GB", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("H100 PCIe", "h100-pcie-80gb"),
        ("H100-SXM-96GB-HBM2e-500W", "h100-sxm-96gb-500w"),
        ("H200-SXM-141GB", "h200-sxm-141gb"),
        ("B200-180GB", "b200-180gb"),
        ("B300-288GB", "b300-288gb"),
        ("GB200-186GB", "gb200-186gb"),
        ("GB200 NVL72", "gb200-186gb"),
        ("GB300-288GB", "gb300-279gb"),
        ("TPU v5p", "tpu-v5p"),
        ("TPUv5e", "tpu-v5e"),
        ("tpu_v6e (Trillium)", "tpu-v6e"),
        ("TPU v3", "tpu-v3"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("RTX 4090", "rtx-4090"),
        ("GeForce RTX3090", "rtx-3090"),
        ("A10G", "a10g"),
        ("A10", "a10"),
        ("L4", "l4"),
        ("L40S", "l40s"),
        ("Trainium2", "trainium2"),
        ("GH200 96GB", "gh200-96gb"),
        ("NVIDIA GH200 144GB HBM3e", "gh200-144gb"),
        ("MI355X", "mi355x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("H20", "h20-96gb"),
        ("H800-SXM-80GB", "h800-sxm-80gb"),
        ("A800 80GB", "a800-sxm-80gb"),
        ("TPU7x (Ironwood)", "tpu7x"),
    ],
)
def test_devices(text: str, name: str) -> None:
    assert device_name(text) == name


def test_unknown_devices_are_refused_by_name() -> None:
    with pytest.raises(RowError, match=r"hardware is 'Gaudi 2': no such device is known \(a10, "):
        device_name("Gaudi 2")


@pytest.mark.parametrize(
    ("text", "gigabits", "cards"),
    [
        ("8x400 Gb/s InfiniBand per node", 3200, 8),
        ("DGX A100 IB (8x200 Gb/s class)", 1600, 8),
        ("4 x 100Gb/s", 400, 4),
        ("800 Gb/s per node (4x HDR200)", 800, 4),
        ("400 Gb/s RDMA per GPU", 3200, 8),
        ("50 GB/s per GPU", 3200, 8),
        ("25 Gb/s per node (AWS p3.16xlarge)", 25, 1),
        ("100 Gbps", 100, 1),
        ("3.2 Tb/s EFA", 3200, 8),
        ("200GbE RoCE", 200, 2),
        ("12.5 GB/s per node", 100, 1),
        ("25 GB/s (8x200 Gb/s shared)", 1600, 8),  # bits say the network, bytes what somebody made of it
        ("not stated", 1600, 8),  # what such hosts usually have
        ("", 1600, 8),
    ],
)
def test_networks_of_one_host(text: str, gigabits: float, cards: int) -> None:
    network = cluster_of(row(inter_link=text)).inter_host
    assert network.bandwidth_bytes_per_second == pytest.approx(gigabits * 1e9 / 8)
    assert network.num_cards == cards


def test_kinds_of_networks_have_latencies_of_their_own() -> None:
    texts = ("8x100 Gb/s EFA", "10 Gb/s", "8x100 Gb/s IB")
    latencies = [cluster_of(row(inter_link=text)).inter_host.latency_seconds for text in texts]
    assert len(set(latencies)) == 3 and min(latencies) == latencies[2]


@pytest.mark.parametrize(
    ("hardware", "text", "gigabytes"),
    [
        ("A100-SXM-80GB", "NVLink3 600 GB/s/GPU bidir, NVSwitch", 300),
        ("GB200-186GB", "NVLink5 1800 GB/s/GPU bidir, NVL72 domain", 900),
        ("GB200-186GB", "1.8 TB/s bidirectional", 900),
        ("A100-SXM-80GB", "300 GB/s", 300),
        ("H100-SXM-80GB", "", 450),
        ("MI300X", "", 448),
        ("MI355X", "", 537.6),
    ],
)
def test_links_inside_a_host_count_one_direction(hardware: str, text: str, gigabytes: float) -> None:
    link = cluster_of(row(hardware=hardware, intra_link=text)).intra_host
    assert link.bandwidth_bytes_per_second == pytest.approx(gigabytes * 1e9)


def test_domains_reach_over_hosts() -> None:
    rack = cluster_of(
        row(hardware="GB200-186GB", devices_per_node=4, n_devices=144, intra_link="NVLink5, NVL72 domain")
    )
    assert (rack.num_hosts, rack.devices_per_host, rack.hosts_per_domain) == (36, 4, 18)
    host = cluster_of(row(n_devices=64))
    assert (host.num_hosts, host.hosts_per_domain) == (8, 1)
    part = cluster_of(row(n_devices=4))
    assert (part.num_hosts, part.devices_per_host) == (1, 4)


def test_slices_of_tpus() -> None:
    found = cluster_of(
        row(
            hardware="TPU v5e",
            devices_per_node=4,
            n_devices=512,
            intra_link="ICI 2D torus 16x16, 4.5e10 B/s per link one-way",
            zero_fsdp="FSDP256 in slice (ICI), DP2 across slices (DCN)",
        )
    )
    assert found.intra_host.torus == (16, 16) and found.hosts_per_domain == 64 and found.num_devices == 512


def test_chips_of_several_devices_are_counted_as_chips() -> None:
    chip = cluster_of(row(hardware="TPU7x", n_devices=64, devices_per_node=4, intra_link="ICI 3D torus"))
    core = load_device("tpu7x")
    assert chip.num_devices == 64 and chip.intra_host.torus == (4, 4, 4)
    assert chip.intra_host.bandwidth_bytes_per_second == 600e9
    assert chip.device.peaks["bfloat16"] == 2 * core.peaks["bfloat16"]
    assert chip.device.memory_bandwidth == 2 * core.memory_bandwidth


def test_products_in_four_bits_run_at_their_rate_where_there_is_one() -> None:
    four, eight = (cluster_of(row(hardware="B200", precision=p)).device.peak("float8") for p in ("nvfp4", "mxfp8"))
    assert four == 2 * eight == load_device("b200-180gb").peak("float4_e2m1fn")
    assert cluster_of(row(hardware="H100", precision="nvfp4")).device.peak("float8") == 1979e12


@pytest.mark.parametrize(
    ("text", "link"), [("4x Omni-Path 100 Gb/s per node", "omni-path"), ("GCP A3 (High): 1000 Gb/s", "gpudirect-tcpx")]
)
def test_networks_with_links_of_their_own(text: str, link: str) -> None:
    known = link_from_json({"link": link, "bandwidth_bytes_per_second": 5e10}, "inter_host")
    found = cluster_of(row(inter_link=text)).inter_host
    assert (found.latency_seconds, found.efficiency) == (known.latency_seconds, known.efficiency)


def test_every_shipped_device_makes_a_cluster() -> None:
    for name in ("TPU v2", "TPU v4", "TPU v5p", "B300", "L40S", "T4", "RTX 4090", "MI250X", "Trainium2"):
        assert cluster_of(row(hardware=name, intra_link="", inter_link="")).num_devices == 8, name


@pytest.mark.parametrize(("devices", "hosts"), [(64, 16), (128, 16), (144, 18), (256, 16), (100, 13)])
def test_runs_have_equally_many_hosts_of_each_rack(devices: int, hosts: int) -> None:
    """Of 18 hosts; as few racks as hold the run."""
    link = "NVLink5 1800 GB/s/GPU bidir, NVL72 domain"
    run = row(hardware="GB200-186GB", n_devices=devices, devices_per_node=4, intra_link=link)
    assert cluster_of(run).hosts_per_domain == hosts
