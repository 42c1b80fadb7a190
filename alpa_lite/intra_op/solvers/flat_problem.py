"""The arrays that compiled kernels read: a problem by node, with its links to neighbours and its memory rows.

    costs[c + i]              c_v(i), with c = cost_start[v]
    tables[k + j S_v + i]     C(i of v, j of the neighbour), with k = link_table[l] for each link l of v
    bytes[b + i]              what v keeps alive under i in the rows run_first[r] <= t < run_last[r], b = run_bytes[r]
    room[t]                   the limit less the bytes that all choices keep alive in row t

An edge is two links, one at each of its ends; ``link_reverse`` maps each to the other. A kernel is a function that
numba compiles at its first use and caches on disk; it releases the GIL, so that threads run in parallel.
"""

# Kernels are typed for readers. Pyright cannot infer the types of functions that numba compiles, nor of array elements.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportReturnType=false
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem
from alpa_lite.intra_op.reductions import binding_times, sum_over_rows
from alpa_lite.program.kernel import kernel


class Flat(NamedTuple):
    """A problem as flat arrays (see the module); ``start`` arrays have one more entry than the things they index."""

    cost_start: IntArray
    costs: FloatArray
    link_start: IntArray
    link_node: IntArray
    link_reverse: IntArray
    link_table: IntArray
    tables: FloatArray
    run_start: IntArray
    run_first: IntArray
    run_last: IntArray
    run_bytes: IntArray
    bytes: FloatArray
    room: FloatArray


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]).astype(np.int64)


def _transposed(values: FloatArray, starts: IntArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """Return the flat array with every matrix transposed within its own range."""
    sizes = rows * columns
    owner = np.repeat(np.arange(sizes.size), sizes)
    inside = np.arange(values.size) - starts[:-1][owner]
    row, column = inside // columns[owner], inside % columns[owner]
    turned = np.empty_like(values)
    turned[starts[:-1][owner] + column * rows[owner] + row] = values
    return turned


def flat_problem(problem: Problem) -> Flat:
    """Lay out ``problem`` for the kernels, infinite costs included; it needs at least one node."""
    sizes = problem.node_costs.sizes
    sources, targets = problem.edge_nodes.T
    matrices, starts = problem.edge_costs.values, problem.edge_costs.starts
    # Each link has a copy of its matrix in which the strategies of its own node are contiguous.
    turned = _transposed(matrices, starts, sizes[sources], sizes[targets])
    node = np.concatenate([sources, targets])
    # Stable, so that equal problems are laid out equally and searches are reproducible.
    order = np.argsort(node, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    # Links at sources read the transposed copies, which come first in `tables`; links at targets read the matrices.
    table = np.concatenate([starts[:-1], starts[:-1] + matrices.size])
    return Flat(
        cost_start=problem.node_costs.starts.astype(np.int64),
        costs=problem.node_costs.values.copy(),
        link_start=_starts(np.bincount(node, minlength=sizes.size)),
        link_node=np.concatenate([targets, sources])[order].astype(np.int64),
        # Before they are sorted, link e of an edge lies at its source and link E + e at its target: E places apart.
        link_reverse=np.roll(place, sources.size)[order].astype(np.int64),
        link_table=table[order].astype(np.int64),
        tables=np.concatenate([turned, matrices]),
        **_flat_memory(problem),
    )


def _flat_memory(problem: Problem) -> dict[str, IntArray | FloatArray]:
    """Return the fields from ``run_start`` on."""
    times = binding_times(problem)
    rows = np.searchsorted(times, problem.usage_times)
    used, starts = problem.usage_bytes.values, problem.usage_bytes.starts[:-1]
    least = np.minimum.reduceat(used, starts) if starts.size else np.zeros(0)
    most = np.maximum.reduceat(used, starts) if starts.size else np.zeros(0)
    # A usage that is equal under all strategies only reduces the room.
    runs = np.flatnonzero((rows[:, 0] < rows[:, 1]) & (least < most))
    runs = runs[np.argsort(problem.usage_nodes[runs], kind="stable")]
    return {
        "run_start": _starts(np.bincount(problem.usage_nodes[runs], minlength=problem.num_nodes)),
        "run_first": rows[runs, 0].astype(np.int64),
        "run_last": rows[runs, 1].astype(np.int64),
        "run_bytes": starts[runs].astype(np.int64),
        "bytes": used - np.repeat(least, problem.usage_bytes.sizes),
        "room": (problem.limit_bytes or 0.0) - sum_over_rows(times.size, rows, least),
    }


def with_rows(flat: Flat, rows: IntArray) -> Flat:
    """Return ``flat`` with only these memory rows (ascending)."""
    first, last = np.searchsorted(rows, flat.run_first), np.searchsorted(rows, flat.run_last)
    # Runs that meet none of the rows would only take time.
    some = first < last
    owner = np.repeat(np.arange(flat.run_start.size - 1), np.diff(flat.run_start))[some]
    return flat._replace(
        run_start=_starts(np.bincount(owner, minlength=flat.run_start.size - 1)),
        run_first=first[some],
        run_last=last[some],
        run_bytes=flat.run_bytes[some],
        room=flat.room[rows],
    )


def with_finite_costs(flat: Flat, forbidden: float) -> Flat:
    """Return ``flat`` with ``forbidden`` (seconds) in place of every infinite cost."""

    def finite(values: FloatArray) -> FloatArray:
        return np.where(np.isfinite(values), values, forbidden)

    return flat._replace(costs=finite(flat.costs), tables=finite(flat.tables))


@kernel
def cost_of(flat: Flat, choices: IntArray) -> float:
    """Return the cost in seconds of one strategy per node."""
    total = 0.0
    for node in range(choices.size):
        size = flat.cost_start[node + 1] - flat.cost_start[node]
        total += flat.costs[flat.cost_start[node] + choices[node]]
        for link in range(flat.link_start[node], flat.link_start[node + 1]):
            other = flat.link_node[link]
            if other > node:
                total += flat.tables[flat.link_table[link] + choices[other] * size + choices[node]]
    return total


@kernel
def add_usage(flat: Flat, node: int, choice: int, sign: float, used: FloatArray) -> None:
    """Add ``sign`` times the bytes that ``node`` keeps alive under ``choice`` to the rows of ``used``."""
    for run in range(flat.run_start[node], flat.run_start[node + 1]):
        amount = sign * flat.bytes[flat.run_bytes[run] + choice]
        if amount != 0.0:
            for row in range(flat.run_first[run], flat.run_last[run]):
                used[row] += amount


@kernel
def usage_of(flat: Flat, choices: IntArray, used: FloatArray) -> None:
    """Write to each row of ``used`` the bytes that the choices keep alive beyond the bytes that all choices do."""
    used[:] = 0.0
    for node in range(choices.size):
        for run in range(flat.run_start[node], flat.run_start[node + 1]):
            # Added at the first row and taken away after the last: the prefix sums below then hold for every row.
            amount = flat.bytes[flat.run_bytes[run] + choices[node]]
            used[flat.run_first[run]] += amount
            if flat.run_last[run] < used.size:
                used[flat.run_last[run]] -= amount
    for row in range(1, used.size):
        used[row] += used[row - 1]


def overrun_of(flat: Flat, choices: IntArray) -> FloatArray:
    """Return the bytes by which each row exceeds the limit; negative where it does not."""
    used = np.zeros(flat.room.size)
    usage_of(flat, choices, used)
    return used - flat.room
