"""The classic all-reduces as programs: `python -m benchmarks.collectives [--devices 17]`.

Each is built on `jax.lax.ppermute`, for use inside `jax.shard_map`, for any shape, any dtype that adds and any number N
of devices, and returns what `jax.lax.psum` returns. A device holds M bytes, L = ceil(log2 N).

    naive               everybody sends the whole array to everybody                    (naive)
    ring                slices of M/N go around twice: summed, then collected           (ring)
    tree                binomial tree: summed towards device 0, sent back               (tree)
    butterfly           partners at distance 1, 2, 4, ... exchange the whole array      (butterfly)
    halving-doubling    slices are summed over distances N/2, N/4, ..., 1, then
                        collected over distances 1, 2, 4, ...                           (halving_doubling)
    parameter server    workers send to one more member of the axis, which sends back   (parameter_server)

The command prints what the formulas of `cost_models.traffic` say next to what the programs send (`messages`), and
the time they take on the devices at hand. Arrays whose size N does not divide are padded where they are sliced, so that
ring and halving-doubling send up to N - 1 elements per device and phase more than the formula.

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; Bruck et al., IEEE TPDS 8(11), 1997 (distances for any N: the
all-gather here, whose mirror image is the reduce-scatter); Li et al., OSDI 2014 (parameter server).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from alpa_lite.api.doctor import virtual_cpu_environment
from benchmarks.charts import Series, bars_svg
from benchmarks.messages import Messages, count_messages
from cost_models import traffic

AXIS = "device"


def naive(x: jax.Array, axis: str) -> jax.Array:
    """Send the whole array to every other device, and sum the received arrays in the order of the devices."""
    n = lax.axis_size(axis)
    if n == 1:
        return x
    shifted = [x] + [lax.ppermute(x, axis, _shift(n, distance)) for distance in range(1, n)]
    # What came over distance d is that of device me - d.
    in_order = jnp.stack(shifted)[(lax.axis_index(axis) - jnp.arange(n)) % n]
    return _sum(in_order)


def ring(x: jax.Array, axis: str) -> jax.Array:
    """Reduce-scatter slices around the ring in N - 1 steps, then all-gather the sums in N - 1 steps."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    if n == 1:
        return x
    slices = _slices(x, n)
    onwards = partial(lax.ppermute, axis_name=axis, perm=_shift(n, 1))

    def add(step: Any, partial_sum: jax.Array) -> jax.Array:
        return onwards(partial_sum) + slices[(me - 1 - step) % n]

    def collect(step: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, last = state
        last = onwards(last)
        return sums.at[(me - step) % n].set(last), last

    mine = lax.fori_loop(1, n, add, slices[(me - 1) % n])
    sums, _ = lax.fori_loop(1, n, collect, (slices.at[me].set(mine), mine))
    return _joined(sums, x)


def tree(x: jax.Array, axis: str) -> jax.Array:
    """Sum towards device 0 along a binomial tree, then send the sum back along it."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    distances = [2**k for k in range((n - 1).bit_length())]
    for distance in distances:
        x = x + lax.ppermute(x, axis, [(i, i - distance) for i in range(distance, n, 2 * distance)])
    for distance in reversed(distances):
        pairs = [(i - distance, i) for i in range(distance, n, 2 * distance)]
        x = jnp.where(me % (2 * distance) == distance, lax.ppermute(x, axis, pairs), x)
    return x


def butterfly(x: jax.Array, axis: str) -> jax.Array:
    """Sum by recursive doubling; devices beyond a power of two give their array to a partner and get the sum last."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    inner = 2 ** (n.bit_length() - 1)
    surplus = [(inner + i, i) for i in range(n - inner)]
    if surplus:
        x = x + lax.ppermute(x, axis, surplus)
    for k in range(inner.bit_length() - 1):
        x = x + lax.ppermute(x, axis, [(i, i ^ 2**k) for i in range(inner)])
    if surplus:
        x = jnp.where(me >= inner, lax.ppermute(x, axis, [(i, outer) for outer, i in surplus]), x)
    return x


def halving_doubling(x: jax.Array, axis: str) -> jax.Array:
    """Reduce-scatter over halving distances, then all-gather over doubling distances.

    Row j of a device's rows belongs to the device j further on. Device i sends the rows from d on to device i + d,
    where they are the rows from 0 on; in the second half they are sent back in the same order.
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    if n == 1:
        return x
    rows = jnp.roll(_slices(x, n), -me, axis=0)
    distances = [2**k for k in range((n - 1).bit_length())]
    for d in reversed(distances):
        moved = lax.ppermute(rows[d:], axis, _shift(n, d))
        rows = rows[:d].at[: len(moved)].add(moved)
    for d in distances:
        rows = jnp.concatenate([rows, lax.ppermute(rows[: n - d], axis, _shift(n, -d))])
    return _joined(jnp.roll(rows, me, axis=0), x)


def parameter_server(x: jax.Array, axis: str) -> jax.Array:
    """Sum the arrays of the workers on the last member of the axis, the server, and send them the sum.

    The server has no array of its own to add: `x` on it only has the right shape.
    """
    workers, me = lax.axis_size(axis) - 1, lax.axis_index(axis)
    pushed = jnp.stack([lax.ppermute(x, axis, [(worker, workers)]) for worker in range(workers)])
    total = _sum(pushed)
    for worker in range(workers):
        pulled = lax.ppermute(total, axis, [(workers, worker)])
        x = jnp.where(me == worker, pulled, x)
    return jnp.where(me == workers, total, x)


def _shift(n: int, distance: int) -> list[tuple[int, int]]:
    return [(i, (i + distance) % n) for i in range(n)]


def _sum(rows: jax.Array) -> jax.Array:
    """Sum rows one after the other in their own dtype (`jnp.sum` widens small integers)."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _slices(x: jax.Array, n: int) -> jax.Array:
    """Return the array as n equal rows, padded with zeros."""
    width = -(-x.size // n)
    return jnp.pad(x.reshape(-1), (0, n * width - x.size)).reshape(n, width)


def _joined(slices: jax.Array, like: jax.Array) -> jax.Array:
    return slices.reshape(-1)[: like.size].reshape(like.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A program, the formula for its traffic among N workers, and the number of additional members it needs."""

    run: Callable[[jax.Array, str], jax.Array]
    formula: Callable[[float, int], traffic.Traffic]
    num_servers: int = 0


ALGORITHMS: dict[str, Algorithm] = {
    "naive": Algorithm(run=naive, formula=traffic.naive_all_reduce),
    "ring": Algorithm(run=ring, formula=traffic.ring_all_reduce),
    "tree": Algorithm(run=tree, formula=traffic.tree_all_reduce),
    "butterfly": Algorithm(run=butterfly, formula=traffic.butterfly_all_reduce),
    "halving-doubling": Algorithm(run=halving_doubling, formula=traffic.halving_doubling_all_reduce),
    "parameter server": Algorithm(run=parameter_server, formula=traffic.parameter_server, num_servers=1),
}
"""The algorithms by their names in the table."""


def on_mesh(run: Callable[[jax.Array, str], jax.Array], mesh: Mesh | AbstractMesh) -> Callable[[jax.Array], jax.Array]:
    """Return a function of [members, ...] that runs a program with row i on member i, and returns rows likewise."""
    spec = PartitionSpec(AXIS)
    return jax.shard_map(lambda rows: run(rows[0], AXIS)[None], mesh=mesh, in_specs=spec, out_specs=spec)


def executed_messages(
    algorithm: Algorithm, num_workers: int, shape: Sequence[int], dtype: Any = jnp.float32
) -> Messages:
    """Count the messages of the program for an array of this shape per device, on its jaxpr; needs no devices."""
    members = num_workers + algorithm.num_servers
    program = on_mesh(algorithm.run, AbstractMesh((members,), (AXIS,)))
    return count_messages(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((members, *shape), dtype)), members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; bytes are in units of the array on one device, seconds None without enough devices."""

    algorithm: str
    num_workers: int
    formula_total: float
    formula_max: float
    formula_rounds: int
    counted_total: float
    counted_max: float
    counted_rounds: int
    seconds: float | None
    psum_seconds: float | None

    @property
    def agrees(self) -> bool:
        """Whether the program's traffic agrees with the formula."""
        formula = (self.formula_total, self.formula_max, self.formula_rounds)
        return np.allclose(formula, (self.counted_total, self.counted_max, self.counted_rounds), rtol=1e-12)


def table_rows(sizes: Sequence[int], num_elements: int, repeats: int) -> list[Row]:
    """Return rows for all algorithms and sizes, measured where there are enough devices."""
    rows: list[Row] = []
    for n in sizes:
        seconds = measure(n, num_elements, repeats)
        for name, algorithm in ALGORITHMS.items():
            told = algorithm.formula(1.0, n)
            counted = executed_messages(algorithm, n, (num_elements,))
            array_bytes = 4 * num_elements
            rows.append(
                Row(
                    algorithm=name,
                    num_workers=n,
                    formula_total=told.total_sent_bytes,
                    formula_max=told.max_sent_bytes,
                    formula_rounds=told.num_rounds,
                    counted_total=sum(counted.sent_bytes) / array_bytes,
                    counted_max=max(counted.sent_bytes[:n]) / array_bytes,
                    counted_rounds=counted.num_rounds,
                    seconds=seconds.get(name),
                    psum_seconds=seconds.get("psum"),
                )
            )
    return rows


def measure(num_workers: int, num_elements: int, repeats: int) -> dict[str, float]:
    """Return median seconds by algorithm, measured in turn; psum is included."""
    psum = Algorithm(run=lambda x, axis: lax.psum(x, axis), formula=traffic.ring_all_reduce)
    calls: dict[str, Callable[[], Any]] = {}
    for name, algorithm in {**ALGORITHMS, "psum": psum}.items():
        members = num_workers + algorithm.num_servers
        if members > len(jax.devices()):
            continue
        mesh = Mesh(np.array(jax.devices()[:members]), (AXIS,))
        arrays = jnp.ones((members, num_elements), jnp.float32)
        placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(AXIS)))
        compiled = jax.jit(on_mesh(algorithm.run, mesh)).lower(placed).compile()
        calls[name] = partial(compiled, placed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spans[1:]) for name, spans in times.items()}


CHART_SIZES = (4, 8, 16)
"""The numbers of workers in the charts."""

CHART_SERVERS = 4
"""The number of servers in the charts beside a single one; `planners.ParameterServer` runs any number."""

_CHART_ELEMENTS = 3 * 2**6  # which all numbers of slices divide


def bytes_svg() -> str:
    """Return a chart of what the member that sends most sends, servers included, in arrays of one device."""

    def served(n: int) -> float:
        # Half of what crosses the link of a server is sent by it.
        return traffic.parameter_server(1.0, n, CHART_SERVERS).serial_bytes / 2

    return _chart(lambda sent: max(sent.sent_bytes) / (4 * _CHART_ELEMENTS), served, unit="M")


def rounds_svg() -> str:
    """Return a chart of the rounds of messages, each of which waits for the one before."""
    served = traffic.parameter_server(1.0, CHART_SIZES[0], CHART_SERVERS).num_rounds
    return _chart(lambda sent: float(sent.num_rounds), lambda _: float(served), unit="rounds")


def _chart(counted: Callable[[Messages], float], served: Callable[[int], float], *, unit: str) -> str:
    """Return a chart of a number counted on each program, and by the formula for several servers."""
    names = [*ALGORITHMS, f"{CHART_SERVERS} servers"]
    names[names.index("parameter server")] = "1 server"

    def values(n: int) -> tuple[float, ...]:
        sent = (executed_messages(each, n, (_CHART_ELEMENTS,)) for each in ALGORITHMS.values())
        return (*map(counted, sent), served(n))

    series = [Series(name=f"{n} workers", values=values(n)) for n in CHART_SIZES]
    return bars_svg(names, series, unit=unit, digits=int(unit == "M"))


def rendered(rows: Sequence[Row]) -> Table:
    """Return the table: formulas, counts where they differ, and times."""
    table = Table("N", "algorithm", "total sent", "most by one", "rounds", "counted", "ms", "ms of psum")
    for column in table.columns[2:]:
        column.justify = "right"
    for number, row in enumerate(rows):
        counted = f"{row.counted_total:.6g} / {row.counted_max:.6g} / {row.counted_rounds}"
        table.add_row(
            str(row.num_workers),
            row.algorithm,
            f"{row.formula_total:.6g} M",
            f"{row.formula_max:.6g} M",
            str(row.formula_rounds),
            "the same" if row.agrees else counted,
            _milliseconds(row.seconds),
            _milliseconds(row.psum_seconds),
            end_section=number + 1 == len(rows) or rows[number + 1].num_workers != row.num_workers,
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, count, measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description="All-reduces that run.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16], metavar="N", help="numbers of workers")
    parser.add_argument("--elements", type=int, default=1 << 18, help="of the float32 array on a device")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each; the median counts")
    parser.add_argument("--devices", type=int, help="run in a process of its own with so many virtual CPU devices")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args(argv)
    if given.devices is not None:
        rest = [*map(str, given.sizes), "--elements", str(given.elements), "--repeats", str(given.repeats)]
        command = [sys.executable, "-m", "benchmarks.collectives", "--sizes", *rest, *(["--json"] * given.json)]
        environment = {**os.environ, **virtual_cpu_environment(given.devices)}
        return subprocess.run(command, env=environment, check=False).returncode
    rows = table_rows(given.sizes, given.elements, given.repeats)
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(rendered(rows))
    console.print(
        f"M = {4 * given.elements} bytes on each device. Counted: total / most by one worker / rounds, on the programs."
    )
    first = jax.devices()[0]
    if first.platform == "cpu":
        console.print(
            f"Measured on {len(jax.devices())} CPU devices: virtual ones share a processor, so these times add up what "
            "all devices copy and say nothing about a network."
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
