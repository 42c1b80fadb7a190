"""Predicted against measured collectives: `python -m benchmarks.collective_times --measurements FILE.csv`.

The file has one measurement per row, with the columns of nccl-tests and its origin:

source, kind, hardware, nodes, gpus_per_node, n_ranks, inter_link, collective, size_bytes,
time_us, algbw_GBps, busbw_GBps, efficiency, notes

bus bandwidth       f * size / seconds; f = 2(n-1)/n all_reduce, 1 send, else (n-1)/n
algorithm bandwidth size / seconds (for `psum`, JAX micro-benchmarks print bus bandwidth in its place)
ratio               predicted over measured seconds; of an efficiency row, measured over predicted efficiency

An efficiency is the time at data-sheet bandwidth, without latency, over the measured time; these rows have no time. The
cluster of a row follows from the hardware it names and the network that its link states. Rows that are marked as
misconfigured, or that state too little, are skipped and counted.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import cast

from rich.console import Console
from rich.table import Table

from cost_models import Cluster, Collective, CollectiveKind, Group, Link, known_clusters, load_cluster
from cost_models.communication import CollectiveCost, explain_collective
from cost_models.work import COLLECTIVE_KINDS

#: The plain machine of each accelerator that measurements name; networks and instances that they state replace its own.
GENERATIONS = {"V100": "dgx-1", "A100": "dgx-a100", "H100": "dgx-h100", "Hopper": "dgx-h100", "TPU v6e": "tpu-v6e"}
#: What measurements call a collective, by a word in it.
KINDS: Mapping[str, CollectiveKind] = {
    "p2p": "send",
    "psum": "all_reduce",
    "ring": "all_gather",
    "collectives": "all_gather",
}
#: Bytes of a size that is only called large.
LARGE_BYTES = 8e9
UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row: `ratio` is predicted over measured seconds, `bytes` the size of the message."""

    source: str
    what: str
    bytes: float
    ratio: float
    measured: float
    cost: CollectiveCost


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not compared, and the reason."""

    why: str


def compare(row: Mapping[str, str]) -> Comparison | Skipped:
    """Return the prediction for one row."""
    if "misconfigured" in row["notes"]:
        return Skipped("misconfigured")
    kind, size = _kind(row["collective"]), _bytes(row["size_bytes"])
    if kind is None:
        return Skipped("no collective of ours")
    if size is None:
        return Skipped("no size")
    cluster = _cluster(row)
    if cluster is None:
        return Skipped("hardware or network not stated")
    group = _group(row, cluster)
    if "DCN" in row["collective"]:
        # One chip of each slice: every chip of a host has such a group, and holds a part of the array.
        slices = int(row["nodes"])
        group = Group(
            num_devices=slices, devices_per_host=1, num_concurrent=cluster.devices_per_host, devices_per_domain=1
        )
        size /= slices
    cost = explain_collective(Collective(kind=kind, bytes=size, group=group), cluster)
    if row["efficiency"]:
        ideal = explain_collective(Collective(kind=kind, bytes=size, group=group), _ideal(cluster))
        measured = float(row["efficiency"])
        ratio = measured * cost.seconds / ideal.seconds
    else:
        measured = _seconds(row, kind, size, group.num_devices)
        if measured is None:
            return Skipped("no time")
        ratio = cost.seconds / measured
    what = f"{row['hardware']} {row['inter_link']}, {row['collective']}, {row['n_ranks'] or '?'} devices"
    return Comparison(source=row["source"], what=what, bytes=size, ratio=ratio, measured=measured, cost=cost)


def _kind(collective: str) -> CollectiveKind | None:
    words = collective.split()
    if words and words[0] in COLLECTIVE_KINDS:
        return cast("CollectiveKind", words[0])
    if "slowdown" in collective:
        return None
    return next((kind for word, kind in KINDS.items() if word in words), None)


def _bytes(text: str) -> float | None:
    """Parse a number, "large", or the upper end of a range with units, in bytes."""
    if text == "large":
        return LARGE_BYTES
    found = re.fullmatch(r"(?:.*-)?([\d.]+)(\w*)", text)
    return float(found[1]) * UNITS.get(found[2], 1.0) if found else None


@cache
def _named(hardware: str, inter_link: str) -> Cluster | None:
    """Return the cluster of the named instance, else a plain machine of the accelerator with its network."""
    words = re.findall(r"\w+", f"{hardware} {inter_link}".lower())
    instances = [name for name in known_clusters() if name.split(".")[0] in words and "." in name]
    base = next((name for word, name in GENERATIONS.items() if word in hardware), None)
    if not instances and base is None:
        return None
    cluster = load_cluster(instances[0] if instances else cast("str", base))
    network = re.search(r"(?:(\d+)x ?)?(?:HDR )?(\d+) Gb/s", inter_link)
    if network is None or instances:
        return cluster
    cards = int(network[1] or 1)
    link = replace(cluster.inter_host, bandwidth_bytes_per_second=cards * float(network[2]) * 1e9 / 8, num_cards=cards)
    return replace(cluster, inter_host=link)


def _cluster(row: Mapping[str, str]) -> Cluster | None:
    nodes = int(row["nodes"] or 0)
    cluster = _named(row["hardware"], row["inter_link"])
    stated = row["inter_link"] or "NIC" in row["collective"] or row["efficiency"] or "TPU" in row["hardware"]
    if cluster is None or not nodes or (nodes > 1 and not stated) or not row["n_ranks"]:
        return None
    if not row["gpus_per_node"]:
        nodes = int(row["n_ranks"]) // cluster.devices_per_host
    return replace(cluster, num_hosts=nodes)


def _group(row: Mapping[str, str], cluster: Cluster) -> Group:
    num_devices = int(row["n_ranks"])
    per_host = int(row["gpus_per_node"] or cluster.devices_per_host)
    return Group(num_devices=num_devices, devices_per_host=min(per_host, num_devices))


def _ideal(cluster: Cluster) -> Cluster:
    """Return the cluster at data-sheet bandwidth: rings at full bandwidth for all sizes, without latency."""

    def plain(link: Link) -> Link:
        return Link(
            bandwidth_bytes_per_second=link.bandwidth_bytes_per_second, latency_seconds=0.0, num_cards=link.num_cards
        )

    links = {"intra_host": plain(cluster.intra_host), "inter_host": plain(cluster.inter_host)}
    return replace(cluster, algorithms=("ring",), **links)


def _seconds(row: Mapping[str, str], kind: CollectiveKind, size: float, num_devices: int) -> float | None:
    """Return measured seconds, from the time or from a bandwidth; None if the row has neither."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    passes = {"all_reduce": 2, "send": 0, "permute": 0}.get(kind, 1)
    share = passes * (num_devices - 1) / num_devices if passes else 1.0
    if row["busbw_GBps"]:
        return share * size / (float(row["busbw_GBps"]) * 1e9)
    if row["algbw_GBps"]:
        counted = share if "psum" in row["collective"] else 1.0
        return counted * size / (float(row["algbw_GBps"]) * 1e9)
    return None


def comparisons(path: Path) -> Iterator[Comparison | Skipped]:
    """Yield one comparison for each row of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        yield from map(compare, csv.DictReader(file))


def summary(found: list[Comparison]) -> Table:
    """Return the errors by source and hardware; an error is |predicted / measured - 1| of the seconds."""
    table = Table("source", "rows", "mean error", "median error", "mean ratio", title="predicted over measured seconds")
    sources = dict.fromkeys(each.source for each in found)
    for source in sources:
        _add(table, source, [each for each in found if each.source == source])
    table.add_section()
    _add(table, "all", found)
    return table


def _add(table: Table, name: str, found: list[Comparison]) -> None:
    errors = [abs(each.ratio - 1) for each in found]
    ratio = mean(each.ratio for each in found)
    table.add_row(name, str(len(found)), f"{mean(errors):.1%}", f"{median(errors):.1%}", f"{ratio:.2f}")


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and each row with `--rows`."""
    parser = argparse.ArgumentParser(description=cast("str", __doc__).splitlines()[0])
    parser.add_argument("--measurements", type=Path, required=True, help="a CSV file with the columns above")
    parser.add_argument("--rows", action="store_true", help="print each row as well")
    given = parser.parse_args(arguments)
    console = Console()
    results = list(comparisons(given.measurements))
    found = [each for each in results if isinstance(each, Comparison)]
    if given.rows:
        for each in found:
            console.print(
                f"{each.ratio:6.2f}  {each.bytes / 1e6:12.3f} MB  {each.what}: {each.cost.algorithm}, "
                f"{each.cost.seconds * 1e6:.1f} us (measured {each.measured:.6g})",
                highlight=False,
            )
    console.print(summary(found))
    skipped = Counter(each.why for each in results if isinstance(each, Skipped))
    console.print(f"{sum(skipped.values())} rows skipped: {', '.join(f'{n} {why}' for why, n in skipped.items())}")


if __name__ == "__main__":
    main()
