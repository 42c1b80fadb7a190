"""The mutable state that ``simplify`` works on, the inverses of its reductions, memory rows, and the dominance rule.

    every reduction:  optimum(before) = optimum(after) + (growth of ``offset``)
    every step:       optimal choices after  ->  optimal choices before           ``UndoStep.restore``

Matrices are held in both directions: ``edges[u][v]`` has u's strategies as rows, and ``edges[v][u]`` is its transpose.
Memory is expressed over the rows of ``binding_times``: a node's ``NodeUsage`` says, for disjoint runs of rows, how many
bytes each of its strategies needs beyond the least one; that least is added to the base, which all choices keep alive.

Memory rows are the times at which the memory limit can bind, one constraint of the integer program for each.

    S_t = {usages with start <= t < end}
    row t matters  iff  no S_t' strictly contains S_t, and the sum over
                   usages in S_t of max_i b(i) exceeds the limit           ``maximal_times``, ``binding_times``
    row t:  sum_v b_vt(x_v) <= limit                                       ``MemoryRow``

S_t grows where a usage starts and shrinks where one ends, so it is maximal only at the last start before an end. A row
that stays under the limit even if every node takes its largest strategy never binds, and is left out.

Goldstein's dominance rule removes strategies that another one beats for all choices of the neighbours
(``drop_dominated``).
"""

# Pyright cannot infer the types of functions that numba compiles.
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem
from alpa_lite.program.kernel import kernel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """The memory constraint at ``time``; ``bytes[v]`` is a vector over the strategies of node v."""

    time: int
    bytes: dict[int, FloatArray]

    def total(self, choices: Sequence[int]) -> float:
        """Return the bytes alive at this time under the given choices."""
        return sum(float(used[choices[node]]) for node, used in self.bytes.items())


def maximal_times(usage_times: IntArray) -> IntArray:
    """Return the times, rising, whose set of live usages no other contains; ``usage_times``: (U, 2) starts and ends."""
    starts, ends = np.unique(usage_times[:, 0]), np.unique(usage_times[:, 1])
    if starts.size == 0:
        return starts
    # Sets of live usages grow at starts and shrink at ends: one is maximal where an end precedes the next start.
    next_end = ends[np.searchsorted(ends, starts, side="right")]
    next_start = np.append(starts[1:], next_end[-1])
    return starts[next_end <= next_start]


def sum_over_rows(num_rows: int, intervals: IntArray, amounts: FloatArray) -> FloatArray:
    """Return for every row r the sum of the amounts whose interval [first, last) has r; ``intervals`` is (U, 2)."""
    # Differences at the ends of the intervals and a cumulative sum: linear time, however long the intervals are.
    change = np.zeros(num_rows + 1)
    np.add.at(change, intervals[:, 0], amounts)
    np.add.at(change, intervals[:, 1], -amounts)
    return np.cumsum(change[:-1])


class RangeMaximum:
    """Sparse table: the maximum of any interval in O(1), from the maxima of all intervals of length 2^k."""

    def __init__(self, values: FloatArray) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= values.size:
            below = self._levels[-1]
            self._levels.append(np.maximum(below[:-width], below[width:]))
            width *= 2

    def of(self, intervals: IntArray) -> FloatArray:
        """Return the maximum over each interval [first, last); ``intervals`` is (k, 2), none of them empty."""
        first, last = intervals.T
        level = np.log2(last - first).astype(int)
        highest = np.empty(len(intervals))
        for number in range(len(self._levels)):
            here = level == number
            values = self._levels[number]
            # Two intervals of length 2^k, which may overlap, cover [first, last).
            highest[here] = np.maximum(values[first[here]], values[last[here] - (1 << number)])
        return highest


def binding_times(problem: Problem) -> IntArray:
    """Return the maximal times at which the largest strategies overrun the limit; empty when there is no limit."""
    if problem.limit_bytes is None or problem.usage_nodes.size == 0:
        return np.zeros(0, dtype=np.intp)
    times = maximal_times(problem.usage_times)
    # Each usage at its largest strategy is an upper bound of all choices.
    greediest = np.maximum.reduceat(problem.usage_bytes.values, problem.usage_bytes.starts[:-1])
    totals = sum_over_rows(times.size, np.searchsorted(times, problem.usage_times), greediest)
    return times[totals > problem.limit_bytes]


def _row(problem: Problem, time: int) -> MemoryRow:
    alive: dict[int, FloatArray] = {}
    living = (problem.usage_times[:, 0] <= time) & (time < problem.usage_times[:, 1])
    for index in np.flatnonzero(living).tolist():
        node, used = int(problem.usage_nodes[index]), problem.usage_bytes[index]
        alive[node] = alive[node] + used if node in alive else used
    return MemoryRow(time=time, bytes=alive)


def maximal_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """Return the rows that determine the peak, in order of time."""
    return tuple(_row(problem, time) for time in maximal_times(problem.usage_times).tolist())


def memory_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """Return the rows that can bind, in order of time; empty when the problem has no limit."""
    return tuple(_row(problem, time) for time in binding_times(problem).tolist())


class UndoStep(ABC):
    """The inverse of one reduction."""

    __slots__ = ()

    @abstractmethod
    def restore(self, choices: dict[int, int]) -> None:
        """Change optimal choices of the reduced problem into optimal choices before the reduction, in place."""

    @abstractmethod
    def project(self, choices: dict[int, int]) -> None:
        """Change any choices before the reduction into choices after it, in place; 0 replaces a removed strategy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeepStrategies(UndoStep):
    """Removal of all strategies of ``node`` but ``kept``: x_before = kept[x_after]."""

    node: int
    kept: IntArray

    def restore(self, choices: dict[int, int]) -> None:
        """See ``UndoStep``."""
        choices[self.node] = int(self.kept[choices[self.node]])

    def project(self, choices: dict[int, int]) -> None:
        """See ``UndoStep``."""
        # `kept` is ascending, so that binary search finds the new number of an old strategy.
        place = int(np.searchsorted(self.kept, choices[self.node]))
        there = place < self.kept.size and self.kept[place] == choices[self.node]
        choices[self.node] = place if there else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoveNode(UndoStep):
    """Elimination of ``node``, whose choice its ``neighbours`` determine: x_node = best[x of the neighbours]."""

    node: int
    neighbours: tuple[int, ...]
    best: IntArray

    def restore(self, choices: dict[int, int]) -> None:
        """See ``UndoStep``."""
        choices[self.node] = int(self.best[tuple(choices[neighbour] for neighbour in self.neighbours)])

    def project(self, choices: dict[int, int]) -> None:
        """See ``UndoStep``."""
        del choices[self.node]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeUsage:
    """The memory of one node: ``bytes[k, i]`` in the rows ``rows[k, 0] <= t < rows[k, 1]``, for runs k of rows.

    ``rows`` is (K, 2) and ``bytes`` (K, S). The runs may overlap until they are settled (``Workspace.alive_of``).
    """

    rows: IntArray
    bytes: FloatArray

    def __len__(self) -> int:
        return len(self.rows)


def _join(parts: list[NodeUsage]) -> NodeUsage:
    """Merge runs that may overlap into disjoint runs in order of rows."""
    rows = np.concatenate([part.rows for part in parts])
    used = np.concatenate([part.bytes for part in parts])
    bounds, index = np.unique(rows, return_inverse=True)
    # Releases of NumPy disagree on the shape of the inverse.
    index = index.reshape(-1, 2)
    change = np.zeros((bounds.size, used.shape[1]))
    np.add.at(change, index[:, 0], used)
    np.add.at(change, index[:, 1], -used)
    return NodeUsage(rows=np.stack([bounds[:-1], bounds[1:]], axis=1), bytes=np.cumsum(change, axis=0)[:-1])


def _joined_equal(alive: NodeUsage) -> NodeUsage:
    """Remove runs without bytes, and merge adjacent runs with equal bytes."""
    some = alive.bytes.any(axis=1)
    rows, used = alive.rows[some], alive.bytes[some]
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (rows[1:, 0] != rows[:-1, 1]) | (used[1:] != used[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(rows)) - 1 if first.size else first
    return NodeUsage(rows=np.stack([rows[first, 0], rows[last, 1]], axis=1), bytes=used[first])


@dataclass(slots=True, kw_only=True, eq=False)
class Workspace:
    """A problem under reduction, keyed by the original node numbers; the only mutable object of this module.

    ``changed_edges`` (pairs in ascending order) and ``changed`` nodes await the cheap reductions, ``stale`` nodes the
    search for dominated strategies. ``base_change[t]`` is the base (bytes) of row t less the base of row t - 1.
    ``offset`` (seconds) is the part of the optimum that the reductions have already fixed.
    """

    costs: dict[int, FloatArray]
    edges: dict[int, dict[int, FloatArray]]
    base_change: FloatArray
    limit_bytes: float
    offset: float = 0.0
    steps: list[UndoStep] = field(default_factory=list[UndoStep])
    # Dicts serve as ordered sets, so that reductions run in a reproducible order.
    changed_edges: dict[tuple[int, int], None] = field(default_factory=dict[tuple[int, int], None])
    changed: dict[int, None] = field(default_factory=dict[int, None])
    stale: dict[int, None] = field(default_factory=dict[int, None])
    _alive: dict[int, list[NodeUsage]] = field(default_factory=dict[int, list[NodeUsage]])
    _unsettled: set[int] = field(default_factory=set[int])

    @staticmethod
    def load(problem: Problem) -> Workspace:
        """Make a workspace from a problem; parallel edges are added up (cost = C(i, j) + C'(i, j))."""
        times = binding_times(problem)
        work = Workspace(
            costs=dict(enumerate(problem.node_costs)),
            edges={node: {} for node in range(problem.num_nodes)},
            base_change=np.zeros(times.size + 1),
            limit_bytes=math.inf if problem.limit_bytes is None else problem.limit_bytes,
        )
        for edge in problem.edges:
            work.add_edge(edge.source, edge.target, edge.costs)
        # A usage covers the rows of the binding times from its start to before its end, perhaps none.
        rows = np.searchsorted(times, problem.usage_times)
        for index in np.flatnonzero(rows[:, 0] < rows[:, 1]).tolist():
            work.add_alive(
                int(problem.usage_nodes[index]),
                NodeUsage(rows=rows[index : index + 1], bytes=problem.usage_bytes[index][None, :]),
            )
        work.touch(work.costs)
        return work

    @property
    def base_bytes(self) -> FloatArray:
        """The bytes that all choices keep alive in each row; a lower estimate while nodes are unsettled."""
        return np.cumsum(self.base_change[:-1])

    @property
    def infeasible(self) -> bool:
        """True once it is proven that no choices have finite cost within the limit."""
        return math.isinf(self.offset)

    def touch(self, nodes: Iterable[int]) -> None:
        """Mark nodes as changed, so that all reductions are tried on them again."""
        for node in nodes:
            self.changed[node] = None
            self.stale[node] = None

    # ------------------------------------------------------------------------------------------------ memory

    def add_alive(self, node: int, alive: NodeUsage) -> None:
        """Add bytes that the node's strategies keep alive."""
        self._alive.setdefault(node, []).append(alive)
        self._unsettled.add(node)

    def alive_of(self, node: int) -> NodeUsage | None:
        """Return what the strategies of ``node`` keep alive beyond the least of them in each row; None if nothing."""
        if node in self._unsettled:
            self._settle(node)
        parts = self._alive.get(node)
        return parts[0] if parts else None

    def _settle(self, node: int) -> None:
        self._unsettled.discard(node)
        parts = self._alive.pop(node)
        # A single run overlaps nothing.
        alive = parts[0] if len(parts) == 1 and len(parts[0]) == 1 else _join(parts)
        # All choices pay for what even the leanest strategy needs, so that it moves to the base.
        least = alive.bytes.min(axis=1)
        np.add.at(self.base_change, alive.rows[:, 0], least)
        np.add.at(self.base_change, alive.rows[:, 1], -least)
        alive = _joined_equal(NodeUsage(rows=alive.rows, bytes=alive.bytes - least[:, None]))
        if len(alive):
            self._alive[node] = [alive]

    def take_alive(self, node: int) -> list[NodeUsage]:
        """Remove and return the usage of ``node``, so that another node can take it over."""
        self._unsettled.discard(node)
        return self._alive.pop(node, [])

    # ------------------------------------------------------------------------------------------------ edges, nodes

    def add_edge(self, source: int, target: int, costs: FloatArray) -> None:
        """Add ``costs`` to the edge of a pair of nodes, or make the edge."""
        if target in self.edges[source]:
            costs = self.edges[source][target] + costs
        self._set_edge(source, target, costs)

    def _set_edge(self, source: int, target: int, costs: FloatArray) -> None:
        self.edges[source][target] = costs
        # A view, which is safe because matrices are replaced and never written to.
        self.edges[target][source] = costs.T
        self.changed_edges[min(source, target), max(source, target)] = None

    def remove_edge(self, source: int, target: int) -> None:
        """Remove the edge of a pair of nodes."""
        del self.edges[source][target]
        del self.edges[target][source]

    def keep(self, node: int, mask: NDArray[np.bool_]) -> None:
        """Remove the strategies of ``node`` outside ``mask``; without any left, the problem is infeasible."""
        if mask.all():
            return
        kept = np.flatnonzero(mask)
        if kept.size == 0:
            self.offset = math.inf
            return
        self.steps.append(KeepStrategies(node=node, kept=kept))
        self.costs[node] = self.costs[node][kept]
        # A copy of the items, since `_set_edge` writes to the dict.
        for other, costs in list(self.edges[node].items()):
            self._set_edge(node, other, costs[kept])
        if node in self._alive:
            self._alive[node] = [NodeUsage(rows=alive.rows, bytes=alive.bytes[:, kept]) for alive in self._alive[node]]
            self._unsettled.add(node)
        # Fewer strategies here may make edges separable, and strategies of neighbours dominated or lonely.
        self.touch([node, *self.edges[node]])

    def remove_node(self, node: int, *, best: IntArray, neighbours: tuple[int, ...]) -> None:
        """Remove ``node``, whose costs and bytes must have moved to its neighbours already."""
        self.steps.append(RemoveNode(node=node, neighbours=neighbours, best=best))
        self.touch(self.edges[node])
        for other in self.edges.pop(node):
            del self.edges[other][node]
        del self.costs[node]
        self.changed.pop(node, None)
        self.stale.pop(node, None)


_ROUNDING = 1e-13


Kept = dict[tuple[bytes, ...], NDArray[np.bool_]]
"""The strategies that are not dominated, by all numbers that this depends on: equal layers have equal nodes."""


def drop_dominated(work: Workspace, node: int, known: Kept) -> None:
    """Remove the strategies of a node that another strategy beats whatever the neighbours choose.

    `known` holds the results for equal nodes, and receives this one.
    """
    alive = work.alive_of(node)
    arrays = [work.costs[node], *work.edges[node].values(), *([] if alive is None else [alive.bytes])]
    # With the number of strategies, the first entry, and whether there are bytes, the rest determines all shapes.
    key = (b"" if alive is None else b"bytes", *(array.tobytes() for array in arrays))
    if key not in known:
        known[key] = _not_dominated(arrays[0], arrays[1 : 1 + len(work.edges[node])], alive)
    work.keep(node, known[key])


def _not_dominated(costs: FloatArray, matrices: Sequence[FloatArray], alive: NodeUsage | None) -> NDArray[np.bool_]:
    """Return the mask of the strategies that no other one dominates.

    Strategy i is dominated by j if c(i) - c(j) + sum over neighbours n of min_k (C_n(i, k) - C_n(j, k)) >= 0 and j uses
    no more bytes than i in any memory row.

    A pair (i, j) is discarded early when an upper bound of this sum is negative: the sum with min_k C(i, k) - min_k
    C(j, k) for each neighbour, or with C(i, k) - C(j, k) at the k of the least C(i, k) (``_difference_bound``).
    """
    least = [matrix.min(axis=1) for matrix in matrices]
    # The least cost of each strategy, every neighbour at its best: the cheap bound that rules most pairs out.
    total = sum(least, costs)
    # Forbidden strategies, whose differences are undefined, are removed by cheaper reductions first.
    if costs.size == 1 or not np.isfinite(total).all():
        return np.ones(costs.size, dtype=np.bool_)
    slack = _ROUNDING * sum(float(np.abs(part).max()) for part in (costs, *least))
    possible = total[:, None] - total[None, :] >= -slack
    # Every strategy is as good as itself, which is no reason to remove it.
    np.fill_diagonal(possible, val=False)
    if alive is not None:
        # A better strategy that needs more memory in some row may be the one that does not fit.
        for used in alive.bytes:
            possible &= used[None, :] <= used[:, None]
    bound = costs[:, None] - costs[None, :]
    for matrix, low in zip(matrices, least, strict=True):
        bound += _difference_bound(matrix, low)
    possible &= bound >= -slack
    worse, better = np.nonzero(possible)
    # The exact sum takes O(strategies) per pair and neighbour. `upper` starts as the cheap bound and is replaced
    # neighbour by neighbour with the exact term, so that most pairs are discarded after a few neighbours.
    upper = total[worse] - total[better]
    exact = costs[worse] - costs[better]
    for matrix, low in zip(matrices, least, strict=True):
        if worse.size == 0:
            break
        upper -= low[worse] - low[better]
        change = np.empty(worse.size)
        _least_differences(np.ascontiguousarray(matrix), worse, better, -slack - upper, change)
        upper += change
        exact = exact + change
        open_pairs = upper >= -slack
        worse, better, upper, exact = worse[open_pairs], better[open_pairs], upper[open_pairs], exact[open_pairs]
    return _undominated(costs.size, worse=worse[exact >= 0], better=better[exact >= 0])


def _difference_bound(matrix: FloatArray, least: FloatArray) -> FloatArray:
    """Return for each (i, j) an upper bound of min_k matrix[i, k] - matrix[j, k].

    It is the difference at the k of the least matrix[i, k].
    """
    return least[:, None] - matrix[:, matrix.argmin(axis=1)].T


@kernel
def _least_differences(
    matrix: FloatArray, worse: IntArray, better: IntArray, enough: FloatArray, found: FloatArray
) -> None:
    """Write min_k matrix[worse, k] - matrix[better, k] of each pair to `found`.

    The scan of a pair ends early at the first difference below `enough`, which already rules the pair out. Entries
    where both are inf do not count.
    """
    for pair in range(worse.size):
        first, second, least = matrix[worse[pair]], matrix[better[pair]], np.inf
        for k in range(first.size):
            difference = first[k] - second[k]
            if difference < least:
                least = difference
                if least < enough[pair]:
                    break
        found[pair] = least


def _undominated(count: int, *, worse: IntArray, better: IntArray) -> NDArray[np.bool_]:
    """Return the mask of the strategies that remain when each strategy with a remaining better one is removed.

    Of several equal strategies, the last remains.
    """
    kept = np.ones(count, dtype=np.bool_)
    # One after the other: of two equal strategies each dominates the other, and only one of them may go.
    for first, second in zip(worse.tolist(), better.tolist(), strict=True):
        if kept[second]:
            kept[first] = False
    return kept
