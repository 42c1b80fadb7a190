"""Distributed matrix products as programs: `python -m benchmarks.matrix_products [--devices 64]`.

[m, k] × [k, n] on P devices, for use under `jax.shard_map`; each returns what `jnp.dot` returns. With A = mk + kn the
elements of the operands and C = mn those of the result, a device sends, and holds at a time with its own parts,

    1-D      k split over P                                                                       (one_dimensional)
             sends  2 (P-1)/P C                               all_reduce of the partial sum
             holds  A/P + 2 C
    2-D      both split over a grid q × q, P = q²; panels are gathered at once                           (gathered)
             sends  (q-1)/q² A                                all_gathers along rows and columns
             holds  A/P + A/q + C/P                           and the left panel, which is transposed, once more
    SUMMA    the same, one block of either panel in each of q steps                                         (summa)
             sends  2 (q-1)/q² A                              broadcasts, as all_reduces of one block and zeros
             holds  A/P + A/q² + 2 C/P
    2.5-D    grid c × q × q, P = c q²: each of c copies runs q/c of the steps; c = 1 is Cannon             (cannon)
             sends  (q/c - 1/q + (c-1)/c) A/q² + (c-1)/c C/q²
             holds  A/P + 2 A/q² + C/q² + C/P                 and a block less where a copy has one step
    3-D      grid q × q × q: rows, depth and columns over an axis each, P = q³                            (agarwal)
             sends  (q-1)/q³ (A + C)                          two all_gathers and a reduce_scatter
             holds  A/P + (A + C)/q² + C/P

elements. In the 2.5-D product skewing sends 1 - 1/q blocks of either operand on average, and q/c - 1 shifts send one
each; a copy begins its steps where the one before ends. SUMMA's broadcasts send twice what they must: JAX has no
collective for them. What is counted is the program's own text (`count_sent`), collectives as rings and permutes pair by
pair; what is held is XLA's account of the compiled program.

The 2-D product with gathered panels and the 3-D product are placements that plans have: factors over axes of the mesh,
operands that are gathered, and a sum that is scattered (tests run the latter as a plan). SUMMA and Cannon send as much
as gathers do and hold less at a time; plans have no op in steps.

Sources: Cannon, A cellular computer to implement the Kalman filter algorithm (1969); van de Geijn and Watts, SUMMA
(Concurrency 9(4), 1997); Agarwal et al., A three-dimensional approach to parallel matrix multiplication (IBM J. R&D
39(5), 1995); Solomonik and Demmel, Communication-optimal parallel 2.5D matrix multiplication (Euro-Par 2011).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from alpa_lite._jax import inner_jaxprs, open_jaxpr
from alpa_lite.api.doctor import virtual_cpu_environment
from benchmarks.charts import Series, bars_svg

RESULTS = Path(__file__).parent / "results" / "matrix_products.json"


class Sizes(NamedTuple):
    """Rows, depth and columns of a product."""

    m: int
    k: int
    n: int

    @property
    def operands(self) -> int:
        """Elements of both operands."""
        return self.m * self.k + self.k * self.n

    @property
    def result(self) -> int:
        """Elements of the result."""
        return self.m * self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A distributed matrix product.

    Attributes:
        grid: devices per axis.
        left, right, result: how the matrices lie on the grid, of which each device holds an equal part.
        run: what a device computes from its blocks.
        sends, holds: elements that a device sends, on average, and holds at a time, by the formulas.
    """

    grid: Mapping[str, int]
    left: P
    right: P
    result: P
    run: Callable[[jax.Array, jax.Array], jax.Array]
    sends: Callable[[Sizes], float]
    holds: Callable[[Sizes], float]

    @property
    def num_devices(self) -> int:
        """Devices of the grid."""
        return prod(self.grid.values())

    def on(self, mesh: Mesh | AbstractMesh) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Return the program on a mesh of the grid's axes."""
        return jax.shard_map(
            self.run, mesh=mesh, in_specs=(self.left, self.right), out_specs=self.result, check_vma=False
        )


def one_dimensional(num_devices: int) -> MatrixProduct:
    """Return the product whose depth is split: Megatron-LM's second layer of a block."""
    p = num_devices
    return MatrixProduct(
        grid={"d": p},
        left=P(None, "d"),
        right=P("d", None),
        result=P(),
        run=lambda a, b: lax.psum(a @ b, "d"),
        sends=lambda s: 2 * (p - 1) / p * s.result,
        holds=lambda s: s.operands / p + 2 * s.result,
    )


def gathered(q: int) -> MatrixProduct:
    """Return the product on a grid q × q that gathers a panel of rows and a panel of columns."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.all_gather(a, "column", axis=1, tiled=True) @ lax.all_gather(b, "row", axis=0, tiled=True)

    return MatrixProduct(
        grid={"row": q, "column": q},
        left=P("row", "column"),
        right=P("row", "column"),
        result=P("row", "column"),
        run=run,
        sends=lambda s: (q - 1) / q**2 * s.operands,
        holds=lambda s: (s.operands + s.result) / q**2 + (s.operands + s.m * s.k) / q,
    )


def summa(q: int) -> MatrixProduct:
    """Return SUMMA on a grid q × q: in each step a column of blocks goes along rows, and a row of blocks down."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        row, column = lax.axis_index("row"), lax.axis_index("column")

        def step(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            # Only the owner of a block adds anything but zeros.
            across = lax.psum(jnp.where(column == number, a, jnp.zeros_like(a)), "column")
            down = lax.psum(jnp.where(row == number, b, jnp.zeros_like(b)), "row")
            return total + across @ down, None

        # A loop, in which the blocks of one step are gone before the next: unrolled, XLA sends those of all at once.
        return lax.scan(step, jnp.zeros((a.shape[0], b.shape[1]), a.dtype), jnp.arange(q))[0]

    return MatrixProduct(
        grid={"row": q, "column": q},
        left=P("row", "column"),
        right=P("row", "column"),
        result=P("row", "column"),
        run=run,
        sends=lambda s: 2 * (q - 1) / q**2 * s.operands,
        holds=lambda s: 2 * (s.operands + s.result) / q**2,
    )


def cannon(q: int, copies: int = 1) -> MatrixProduct:
    """Return the 2.5-D product on copies × q × q devices; with one copy, Cannon's on q × q.

    Raises:
        ValueError: the copies do not divide the steps.
    """
    c, steps = copies, q // copies
    if q % c:
        raise ValueError(f"{c} copies share {q} steps, which they do not divide: choose a divisor of {q}.")

    def permuted(x: jax.Array, source: Callable[[int, int, int], tuple[int, int]]) -> jax.Array:
        """Let (copy, row, column) receive the block of `source`; devices are numbered in that order."""
        pairs = [
            (layer * q * q + i * q + j, layer * q * q + row * q + column)
            for layer in range(c)
            for row in range(q)
            for column in range(q)
            for i, j in [source(layer, row, column)]
        ]
        return lax.ppermute(x, ("copy", "row", "column"), pairs)

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        if c > 1:
            a = lax.all_gather(a, "copy", axis=0, tiled=True)
            b = lax.all_gather(b, "copy", axis=1, tiled=True)
        # The device at (row, column) begins with the depth row + column, further by the steps of the copies before.
        a = permuted(a, lambda layer, row, column: (row, (row + column + layer * steps) % q))
        b = permuted(b, lambda layer, row, column: ((row + column + layer * steps) % q, column))

        def step(held: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
            a = permuted(held[0], lambda _, row, column: (row, (column + 1) % q))
            b = permuted(held[1], lambda _, row, column: ((row + 1) % q, column))
            return (a, b, held[2] + a @ b), None

        (_, _, total), _ = lax.scan(step, (a, b, a @ b), length=steps - 1)
        return lax.psum_scatter(total, "copy", scatter_dimension=0, tiled=True) if c > 1 else total

    def sends(s: Sizes) -> float:
        moves = (1 - 1 / q) + (steps - 1)
        return (moves + (c - 1) / c) * s.operands / q**2 + (c - 1) / c * s.result / q**2

    return MatrixProduct(
        grid={"copy": c, "row": q, "column": q},
        left=P(("row", "copy"), "column"),
        right=P("row", ("column", "copy")),
        result=P(("row", "copy"), "column"),
        run=run,
        sends=sends,
        holds=lambda s: (s.operands + s.result) / (c * q**2) + ((1 + (steps > 1)) * s.operands + s.result) / q**2,
    )


def agarwal(q: int) -> MatrixProduct:
    """Return the 3-D product on q × q × q devices: rows, depth and columns over an axis each."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = lax.all_gather(a, "j", axis=0, tiled=True), lax.all_gather(b, "i", axis=0, tiled=True)
        return lax.psum_scatter(a @ b, "l", scatter_dimension=1, tiled=True)

    return MatrixProduct(
        grid={"l": q, "i": q, "j": q},
        left=P(("i", "j"), "l"),
        right=P(("l", "i"), "j"),
        result=P("i", ("j", "l")),
        run=run,
        sends=lambda s: (q - 1) / q**3 * (s.operands + s.result),
        holds=lambda s: (s.operands + s.result) / q**3 + (s.operands + s.result) / q**2,
    )


def products(num_devices: int) -> dict[str, MatrixProduct]:
    """Return the products that a number of devices has a grid for, by name."""
    found = {"1-D": one_dimensional(num_devices)}
    q = isqrt(num_devices)
    if q * q == num_devices:
        found |= {"2-D, gathered": gathered(q), "SUMMA": summa(q), "Cannon": cannon(q)}
    for copies in range(2, num_devices + 1):
        q = isqrt(num_devices // copies)
        if copies * q * q == num_devices and copies <= q and q % copies == 0:
            found[f"2.5-D, {copies} copies"] = cannon(q, copies)
        if q == copies and q**3 == num_devices:
            found["3-D"] = agarwal(q)
    return found


class Sent(NamedTuple):
    """A collective of a program: its kind, the members of a group, and the bytes that a member sends on average."""

    kind: str
    num_devices: int
    bytes: float


def count_sent(product: MatrixProduct, sizes: Sizes, dtype: Any = jnp.float32) -> list[Sent]:
    """Return the collectives of a program in order, on its jaxpr; needs no devices."""
    mesh = AbstractMesh(tuple(product.grid.values()), tuple(product.grid))
    shapes = jax.ShapeDtypeStruct((sizes.m, sizes.k), dtype), jax.ShapeDtypeStruct((sizes.k, sizes.n), dtype)
    return [*_sent(open_jaxpr(jax.make_jaxpr(product.on(mesh))(*shapes)), product.grid)]


def _sent(jaxpr: Any, grid: Mapping[str, int]) -> Iterator[Sent]:
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            # The programs have no loops but those with a static number of trips.
            yield from eqn.params.get("length", 1) * [*_sent(open_jaxpr(inner), grid)]
        name = eqn.primitive.name
        names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        n = prod(grid[axis] for axis in (names if isinstance(names, tuple) else (names,)) if axis in grid)
        given, made = (sum(v.aval.size * v.aval.dtype.itemsize for v in some) for some in (eqn.invars, eqn.outvars))
        if name.startswith("psum"):
            yield Sent("all_reduce", n, 2 * (n - 1) / n * given)
        elif name.startswith("all_gather"):
            yield Sent("all_gather", n, (n - 1) / n * made)
        elif name.startswith("reduce_scatter"):
            yield Sent("reduce_scatter", n, (n - 1) / n * given)
        elif name == "ppermute":
            moved = sum(source != target for source, target in eqn.params["perm"])
            yield Sent("permute", n, moved / n * given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One product on a number of devices; bytes per device, `None` where there were too few devices to run it.

    Attributes:
        name, num_devices, sizes: the product.
        collectives: how often the program has each kind.
        formula_sent_bytes, sent_bytes: what the formula says, and what the program sends.
        formula_held_bytes, held_bytes: the same of memory at a time, by XLA's account of the compiled program.
        error: largest difference from one device's product, relative to the largest number in it.
    """

    name: str
    num_devices: int
    sizes: Sizes
    collectives: Mapping[str, int]
    formula_sent_bytes: float
    sent_bytes: float
    formula_held_bytes: float
    held_bytes: float | None
    error: float | None


def row(name: str, product: MatrixProduct, sizes: Sizes) -> ProductRow:
    """Count a product, and compile and run it if there are devices for it."""
    sent = count_sent(product, sizes)
    held = error = None
    if product.num_devices <= len(jax.devices()):
        rng = np.random.default_rng(0)
        a = rng.normal(size=(sizes.m, sizes.k)).astype(np.float32)
        b = rng.normal(size=(sizes.k, sizes.n)).astype(np.float32)
        devices = np.array(jax.devices()[: product.num_devices]).reshape(tuple(product.grid.values()))
        mesh = Mesh(devices, tuple(product.grid))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, product.left), (b, product.right))]
        compiled = jax.jit(product.on(mesh)).lower(*placed).compile()
        memory: Any = compiled.memory_analysis()
        held = float(memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes)
        whole = np.asarray(jnp.dot(a, b))
        error = float(np.abs(np.asarray(compiled(*placed)) - whole).max() / np.abs(whole).max())
    kinds = [each.kind for each in sent]
    return ProductRow(
        name=name,
        num_devices=product.num_devices,
        sizes=sizes,
        collectives={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        formula_sent_bytes=4 * product.sends(sizes),
        sent_bytes=sum(each.bytes for each in sent),
        formula_held_bytes=4 * product.holds(sizes),
        held_bytes=held,
        error=error,
    )


def rendered(rows: Sequence[ProductRow]) -> Table:
    """Return the table, in MiB per device."""
    table = Table("product", "devices", "collectives", "sends", "formula", "holds", "formula", "error")
    for column in table.columns[3:]:
        column.justify = "right"
    for each in rows:
        listed = ", ".join(f"{count} {kind}" for kind, count in each.collectives.items())
        numbers = (each.sent_bytes, each.formula_sent_bytes, each.held_bytes, each.formula_held_bytes)
        shown = ("–" if number is None else f"{number / 2**20:.3f}" for number in numbers)
        error = "–" if each.error is None else f"{each.error:.0e}"
        table.add_row(each.name, str(each.num_devices), listed, *shown, error)
    return table


def chart() -> str:
    """Return a chart of what the products of the kept results send and hold on the largest number of devices."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    most = max(each["num_devices"] for each in rows)
    shown = [each for each in rows if each["num_devices"] == most]
    series = [
        Series(name=name, values=tuple(each[f"{which}_bytes"] / 2**20 for each in shown))
        for name, which in (("sends", "sent"), ("holds", "held"))
    ]
    return bars_svg([each["name"] for each in shown], series, unit="MiB per device", digits=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, count, run, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix_products", description="Products that run.")
    parser.add_argument("--on", type=int, nargs="+", default=[8, 16, 32, 64], metavar="P", help="numbers of devices")
    parser.add_argument("--size", type=int, default=1024, help="rows, depth and columns of the matrices")
    parser.add_argument("--devices", type=int, help="run in a process of its own with so many virtual CPU devices")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args(argv)
    if given.devices is not None:
        rest = [*map(str, given.on), "--size", str(given.size), *(["--json"] * given.json)]
        environment = {**os.environ, **virtual_cpu_environment(given.devices)}
        command = [sys.executable, "-m", "benchmarks.matrix_products", "--on", *rest]
        return subprocess.run(command, env=environment, check=False).returncode
    sizes = Sizes(given.size, given.size, given.size)
    rows = [row(name, product, sizes) for count in given.on for name, product in products(count).items()]
    if given.json:
        print(json.dumps({"rows": [asdict(each) for each in rows]}, indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(rendered(rows))
    console.print(f"float32 matrices of {given.size} × {given.size}, in MiB per device and product.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
