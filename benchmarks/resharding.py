"""The cost of moving an array between submeshes: `python -m benchmarks.resharding [--json]`.

Nine pairs of specs on an array of 2 GiB, between submeshes of hosts with four V100s and 10 Gbit/s each, as in the
benchmark of Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023 (arXiv 2211.05322). The
pairs are those of the benchmark suite in Alpa's public repository, whose last-but-one equals the one before it. Each is
planned twice:

naive   every receiver gets its whole block from some sender       (`plan_transfer(..., direct_bytes=inf)`)
once    every element crosses once, and receivers gather           (`plan_transfer(..., direct_bytes=0)`)

Bytes are those sent from one submesh to the other, seconds those of `pricing.transfer_seconds`, gathers included. With
enough devices, an array with 1/N of the second dim (`--scale N`) is transferred by both plans and checked, and the
bytes sent between devices are counted. Virtual CPU devices share a processor, so times would mean nothing and are not
taken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, prod
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.doctor import virtual_cpu_environment
from alpa_lite.lower.emission import boundary_spec
from alpa_lite.plan.pricing import transfer_seconds
from alpa_lite.runtime.execute.crossing import Message
from alpa_lite.runtime.execute.run_transfers import compile_transfer
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.transfer import ArrayForm, Placement, PlannedTransfer, plan_transfer
from alpa_lite.text import show_bytes
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel

AXES = ("x", "y")
"""The axes of a mesh: hosts, and devices of a host."""

NUM_DEVICES = 20
"""The number of devices of the largest pair: two hosts send to three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A case: hosts × devices that send and receive, the array's shape, and per dim the axis on each side."""

    name: str
    senders: tuple[int, int]
    receivers: tuple[int, int]
    shape: tuple[int, int, int]
    source: tuple[str, str, str]
    target: tuple[str, str, str]


def _pair(
    name: str,
    source: tuple[str, str, str],
    target: tuple[str, str, str],
    meshes: tuple[tuple[int, int], tuple[int, int]] = ((2, 4), (2, 4)),
    shape: tuple[int, int, int] = (1024, 1024, 512),
) -> Pair:
    return Pair(name=name, senders=meshes[0], receivers=meshes[1], shape=shape, source=source, target=target)


PAIRS = (
    _pair("case 1", ("x", "", ""), ("x", "", "")),
    _pair("case 2", ("", "", ""), ("x", "", "")),
    _pair("case 3", ("", "x", ""), ("x", "", "")),
    _pair("case 4", ("", "xy", ""), ("xy", "", "")),
    _pair("case 5", ("y", "", ""), ("x", "", "")),
    _pair("case 6", ("x", "", ""), ("x", "", ""), ((2, 4), (3, 4)), (3072, 1024, 170)),
    _pair("case 7", ("y", "", ""), ("", "", ""), ((1, 4), (2, 4))),
    _pair("case 8", ("y", "", ""), ("", "", ""), ((1, 4), (2, 4))),
    _pair("case 9", ("", "x", ""), ("", "", "x")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; `*_bytes` cross between the submeshes, except `gathered_bytes`: buffers of all receivers.

    `executed_*`: counted on a smaller array, relative to its size; None without enough devices.
    """

    name: str
    source: str
    target: str
    array_bytes: int
    naive_bytes: int
    once_bytes: int
    gathered_bytes: float
    naive_seconds: float
    once_seconds: float
    executed_naive: float | None
    executed_once: float | None

    @property
    def saving(self) -> float:
        """The ratio of the bytes of the naive plan to those of the other."""
        return self.naive_bytes / self.once_bytes


def hosts_of_the_paper(num_hosts: int = 5) -> Cluster:
    """Return hosts like p3.8xlarge: half of a p3.16xlarge, and 10 Gbit/s."""
    whole = al.cluster("p3.16xlarge", num_hosts=num_hosts)
    link = replace(whole.inter_host, bandwidth_bytes_per_second=1.25e9) if whole.inter_host else None
    return replace(whole, name="p3.8xlarge", devices_per_host=4, inter_host=link)


def planned(pair: Pair, *, naive: bool, scale: int = 1) -> PlannedTransfer:
    """Return the planned transfer of a pair, with 1/scale of its second dim."""
    shape = (pair.shape[0], pair.shape[1] // scale, pair.shape[2])
    first = 0
    ends: list[Placement] = []
    for mesh, dims in ((pair.senders, pair.source), (pair.receivers, pair.target)):
        submesh = Submesh(first_device=first, num_hosts=mesh[0], devices_per_host=mesh[1])
        spec = Spec(tuple(tuple(axes) for axes in dims))
        ends.append(Placement(submesh=submesh, mesh=LogicalMesh(axis_names=AXES, shape=mesh), spec=spec))
        first += submesh.num_devices
    return plan_transfer(ArrayForm(shape, 4), ends[0], ends[1], devices_per_host=4, direct_bytes=inf if naive else 0)


def executed(transfer: PlannedTransfer) -> int | None:
    """Execute a transfer and return the bytes sent between devices; None without enough devices.

    Raises:
        RuntimeError: the received array differs from the sent one.
    """
    ends = (transfer.source, transfer.target)
    if ends[1].submesh.devices[-1] >= len(jax.devices()):
        return None
    source, target = (
        Mesh(np.array([jax.devices()[d] for d in end.submesh.devices]).reshape(end.mesh.shape), end.mesh.axis_names)
        for end in ends
    )
    array = np.arange(prod(transfer.array.shape), dtype=np.float32).reshape(transfer.array.shape)
    placed = jax.device_put(array, NamedSharding(source, boundary_spec(transfer.source.spec)))
    sent: list[Message] = []
    result = compile_transfer(transfer, "float32", source, target)(placed, sent)
    assert result is not None, "all devices belong to this process"
    for shard in result.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), array[shard.index]):
            raise RuntimeError(f"{transfer} did not bring the block of {shard.device}.")
    return sum(message.bytes for message in sent)


def row(pair: Pair, cluster: Cluster, scale: int) -> Row:
    """Plan a pair in full, and run it at the smaller size."""
    model = ComposedCostModel(cluster)
    naive, once = (planned(pair, naive=way) for way in (True, False))
    small = [planned(pair, naive=way, scale=scale) for way in (True, False)]
    counted = [None if (sent := executed(t)) is None else sent / t.array.bytes for t in small]
    gathered = sum(step.bytes_factor for step in once.gathers) * once.target.mesh.num_devices
    return Row(
        name=pair.name,
        source=f"{_mesh(pair.senders)} {once.source.spec}",
        target=f"{_mesh(pair.receivers)} {once.target.spec}",
        array_bytes=once.array.bytes,
        naive_bytes=naive.sent_bytes,
        once_bytes=once.sent_bytes,
        gathered_bytes=gathered * once.array.bytes,
        naive_seconds=transfer_seconds(naive, model),
        once_seconds=transfer_seconds(once, model),
        executed_naive=counted[0],
        executed_once=counted[1],
    )


def _mesh(shape: tuple[int, int]) -> str:
    return f"({shape[0]}, {shape[1]})"


def rendered(rows: Sequence[Row]) -> Table:
    """Return the table: predicted bytes and seconds of both plans, and the counted bytes in units of the array."""
    table = Table("", "from", "to", "array", "naive", "once", "ratio", "naive s", "once s", "faster", "ran")
    for column in table.columns[3:]:
        column.justify = "right"
    for line in rows:
        ran = [line.executed_naive, line.executed_once]
        table.add_row(
            line.name,
            escape(line.source),
            escape(line.target),
            *(show_bytes(size) for size in (line.array_bytes, line.naive_bytes, line.once_bytes)),
            f"{line.saving:.2f}×",
            f"{line.naive_seconds:.2f}",
            f"{line.once_seconds:.2f}",
            f"{line.naive_seconds / line.once_seconds:.2f}×",
            " / ".join("–" if times is None else f"{times:g}" for times in ran),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, run, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resharding", description="Arrays between submeshes.")
    parser.add_argument("--scale", type=int, default=64, metavar="N", help="run arrays with 1/N of the second dim")
    parser.add_argument("--devices", type=int, default=NUM_DEVICES, help="virtual CPU devices; 0: those at hand")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    parser.add_argument("--json", action="store_true", help="print the rows as one line of JSON, last")
    given = parser.parse_args(argv)
    if given.devices:
        rest = list(sys.argv[1:] if argv is None else argv)
        environment = {**os.environ, **virtual_cpu_environment(given.devices)}
        command = [sys.executable, "-m", "benchmarks.resharding", *rest, "--devices", "0"]
        return subprocess.run(command, env=environment, check=False).returncode
    cluster = hosts_of_the_paper()
    rows = [row(pair, cluster, given.scale) for pair in PAIRS]
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(rendered(rows))
    console.print(
        f"naive: every receiver gets its whole block; once: each element crosses once. Seconds are predicted for "
        f"{cluster.name} hosts; ran: bytes handed over by devices, in arrays of 1/{given.scale} of the size."
    )
    kept = {"rows": [{**asdict(line), "saving": line.saving} for line in rows]}
    if given.out is not None:
        given.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if given.json:
        print(json.dumps(kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
