"""The mutable state that ``simplify`` works on, and the inverses of its reductions.

    every reduction:  optimum(before) = optimum(after) + (growth of ``offset``)
    every step:       optimal choices after  ->  optimal choices before           ``UndoStep.restore``

Matrices are held in both directions: ``edges[u][v]`` has u's strategies as rows, and ``edges[v][u]`` is its transpose.
Memory is expressed over the rows of ``binding_times``: a node's ``NodeUsage`` says, for disjoint runs of rows, how many
bytes each of its strategies needs beyond the least one; that least is added to the base, which all choices keep alive.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.memory_rows import binding_times
from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem


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
        for other, costs in list(self.edges[node].items()):
            self._set_edge(node, other, costs[kept])
        if node in self._alive:
            self._alive[node] = [NodeUsage(rows=alive.rows, bytes=alive.bytes[:, kept]) for alive in self._alive[node]]
            self._unsettled.add(node)
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
