"""The cluster of a published run, from the names and texts of its row: what this project knows of such hardware.

The accelerator is the shipped device whose name shares most words with the row's. Links come from the row's text where
it states a rate ("8x400 Gb/s", "25 Gb/s per node", "9e10 B/s per link one-way"), and from what such machines usually
have where it does not: the generation of the link inside a host is the accelerator's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.published.row import Row, RowError
from cost_models.catalogue import known_devices, link_from_json, load_device
from cost_models.cluster import Cluster
from cost_models.hardware import Device, Link

#: Memory is not what these rows are about: the runs did fit. See `predict.peak_gigabytes` for what the model thinks.
UNLIMITED_BYTES = 1e15
#: Network of one host in bits per second where a row states none, by family of accelerators: what such hosts ship with
#: (the node types of cost_models/clusters).
_USUAL_NETWORK = (
    ("v100", 100e9),
    ("a100", 1600e9),
    ("h100", 3200e9),
    ("h200", 3200e9),
    ("b200", 3200e9),
    ("b300", 6400e9),
    ("gb200", 1600e9),
    ("gb300", 3200e9),
    ("mi", 3200e9),
    ("tpu", 200e9),
)
_USUAL_LINK = (
    ("v100", "nvlink2"),
    ("a100", "nvlink3"),
    ("h100", "nvlink4"),
    ("h200", "nvlink4"),
    ("b200", "nvlink5"),
    ("b300", "nvlink5"),
    ("gb", "nvlink5"),
    ("mi35", "infinity-fabric4"),
    ("mi", "infinity-fabric3"),
)
#: JAX devices of one chip, where these are several; tables count chips.
_DEVICES_PER_CHIP = {"tpu-v2": 2, "tpu-v3": 2, "tpu7x": 2}


def cluster_of(row: Row) -> Cluster:
    """Return the hosts, devices and links of a run. Raises `RowError` for an unknown accelerator."""
    name = device_name(row.hardware)
    device = replace(_chip(load_device(name), _DEVICES_PER_CHIP.get(name, 1)), memory_bytes=UNLIMITED_BYTES)
    if "fp4" in row.precision and "float4" in device.peaks:
        # Models are traced with products in eight bits, which then run in four.
        device = replace(device, peak_flops={**device.peaks, "float8": device.peaks["float4"]})
    per_host = min(row.devices_per_host, row.num_devices)
    num_hosts = -(-row.num_devices // per_host)
    common = {"name": row.id, "device": device, "num_hosts": num_hosts, "devices_per_host": per_host}
    network = _network(row, name, per_host)
    if name.startswith("tpu"):
        return _slices(row, name, device, num_hosts, per_host, network)
    domain = _domain(row)
    intra = link_from_json(_intra_name(row, name), "intra_host")
    return Cluster(
        **common,
        intra_host=_stated(row.intra_link, intra),
        inter_host=network,
        hosts_per_domain=_shared_equally(num_hosts, max(1, domain // per_host)),
        algorithms=("ring", "double_tree"),
    )


def _chip(device: Device, count: int) -> Device:
    """Return `count` devices of one chip as a device."""
    return replace(
        device,
        memory_bandwidth=count * device.memory_bandwidth,
        peak_flops={dtype: count * rate for dtype, rate in device.peaks.items()},
        num_units=count * device.num_units,
    )


def device_name(hardware: str) -> str:
    """Return the shipped device that a row means: of its family (first word of the name), the one sharing most words.

    PCIe cards are meant only where they are named. Raises `RowError` if the family is unknown.
    """
    words = _words(hardware)
    found = [name for name in known_devices() if family(name) in words]
    if not found:
        raise RowError(f"hardware is {hardware!r}: no such device is known ({', '.join(known_devices())}).")

    def likeness(name: str) -> tuple[int, bool, int]:
        own = _words(name)
        return len(own & words), "pcie" not in own - words, -len(own - words)

    return max(found, key=likeness)


def family(name: str) -> str:
    """Return the family of a shipped device: the first word of its name, with the generation where that is a second."""
    return "-".join(name.split("-")[: 2 if name.startswith(("tpu-", "rtx-")) else 1])


def _words(name: str) -> set[str]:
    """Return the words of a name in lower case; words that name a family only together are joined."""
    text = re.sub(r"\b(?:(tpu)[\s\-_]*(?=v)|(rtx)[\s\-_]*(?=\d))", r"\1\2-", name.lower())
    words = {w for w in re.split(r"[\s_/]+|(?<!tpu)(?<!rtx)-", text) if w}
    return words | {"sxm" for w in words if w.startswith("sxm")}


def _intra_name(row: Row, device: str) -> str:
    text = row.intra_link.lower()
    stated = re.search(r"nvlink\s?(\d)", text)
    if stated:
        return (
            "nvlink2-cube-mesh"
            if stated[1] == "2" and "cube" in text and row.devices_per_host <= 8
            else f"nvlink{stated[1]}"
        )
    pcie = re.search(r"pcie\s*(?:gen)?\s*(\d)", text)
    if pcie:
        return f"pcie{min(5, max(3, int(pcie[1])))}"
    return next((link for family, link in _USUAL_LINK if family in device), "pcie4")


def _stated(text: str, link: Link) -> Link:
    """Return the link with the bandwidth that the text states: GB/s are bytes, both directions if it says bidir."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*(TB|GB)/s", text)
    if not found:
        return link
    rate = float(found[1]) * (1e12 if found[2] == "TB" else 1e9)
    return replace(link, bandwidth_bytes_per_second=rate / 2 if "bidir" in text.lower() else rate)


def _domain(row: Row) -> int:
    """Return the number of devices that the link inside a host connects."""
    found = re.search(r"nvl\s?(\d+)", f"{row.intra_link} {row.inter_link}".lower())
    return int(found[1]) if found else row.devices_per_host


def _shared_equally(num_hosts: int, per_domain: int) -> int:
    """Return the hosts that a run has in each domain: equally many, in as few domains as hold them.

    Jobs ask for that with Slurm's `--segment`, so that no group of devices that talk to each other straddles two racks.
    """
    return -(-num_hosts // -(-num_hosts // per_domain))


#: Rates as texts write them, and what their units are in bits per second.
_BITS = r"(\d+(?:\.\d+)?)\s*([GT]b)(?:it)?(?:/s|ps|E)"
_BYTES = r"(\d+(?:\.\d+)?)\s*([GT]B)(?:/s|ps)"
_UNITS = {"Gb": 1e9, "Tb": 1e12, "GB": 8e9, "TB": 8e12}


@dataclass(frozen=True, slots=True)
class _Network:
    bits_per_second: float
    cards: int


def _network(row: Row, device: str, per_host: int) -> Link:
    stated = _stated_network(row.inter_link, row.devices_per_host)
    if stated is None:
        bits = next((bits for family, bits in reversed(_USUAL_NETWORK) if family in device), 400e9)
        cards = min(per_host, max(1, round(bits / 400e9))) if bits > 1000e9 else max(1, round(bits / 100e9))
        stated = _Network(bits, max(cards, row.devices_per_host if bits >= 1600e9 else 1))
    text = row.inter_link.lower()
    name = "infiniband"
    if "efa" in text:
        name = "efa-v2"
    elif re.search(r"omni-?path", text):
        name = "omni-path"
    elif "tcpx" in text or "a3 (high)" in text or "a3-highgpu" in text:
        name = "gpudirect-tcpx"
    elif stated.bits_per_second <= 50e9 or "tcp" in text:
        name = "ethernet"
    link = link_from_json({"link": name, "bandwidth_bytes_per_second": stated.bits_per_second / 8}, "inter_host")
    return replace(link, num_cards=stated.cards)


def _stated_network(text: str, per_host: int) -> _Network | None:
    """Return bits per second and network cards of one host, or None if the text states none.

    Examples of texts are "8x400 Gb/s" and "800 Gb/s per node (4x HDR200)".
    """
    times = re.search(rf"(\d+)\s*[x×]\s*{_BITS}", text) or re.search(rf"(\d+)\s*[x×]\s*{_BYTES}", text)
    if times:
        return _Network(int(times[1]) * float(times[2]) * _UNITS[times[3]], int(times[1]))
    single = re.search(_BITS, text) or re.search(_BYTES, text)
    if not single:
        return None
    bits = float(single[1]) * _UNITS[single[2]]
    if re.search(r"per\s+(gpu|device|chip|accelerator)", text.lower()):
        return _Network(bits * per_host, per_host)
    cards = re.search(r"(\d+)\s*x\s*[A-Z]", text)
    return _Network(bits, int(cards[1]) if cards else per_host if bits >= 1600e9 else max(1, round(bits / 100e9)))


def _slices(row: Row, name: str, device: Device, num_hosts: int, per_host: int, network: Link) -> Cluster:
    """Return TPU slices: all chips of a slice on one torus, slices on the data-centre network."""
    generation = name.removeprefix("tpu-").removeprefix("tpu")
    link = link_from_json(f"ici-{generation}", "intra_host")
    count = _DEVICES_PER_CHIP.get(name, 1)
    link = replace(
        link,
        bandwidth_bytes_per_second=count * link.bandwidth_bytes_per_second,
        torus=(link.torus[0] // count, *link.torus[1:]) if link.torus else (),
    )
    per_slice = _slice_size(row)
    torus = link.torus or (16, 16)
    sides = [int(n) for n in re.findall(r"(\d+)\s*x\s*(\d+)", row.intra_link)[0]] if "x" in row.intra_link else []
    return Cluster(
        name=row.id,
        device=device,
        num_hosts=num_hosts,
        devices_per_host=per_host,
        intra_host=replace(link, torus=tuple(sides) if len(sides) == len(torus) else torus),
        inter_host=network,
        hosts_per_domain=max(1, per_slice // per_host),
        algorithms=("ring", "hierarchical"),
    )


def _slice_size(row: Row) -> int:
    """Return the chips per slice: as the sharding text says, else all of them up to a pod of 256."""
    found = re.search(r"fsdp(\d+) in slice", row.sharding.lower())
    return int(found[1]) if found else min(row.num_devices, 256)
