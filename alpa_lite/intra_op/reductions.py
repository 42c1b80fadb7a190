"""The state that ``simplify`` works on, and what it takes to undo a reduction.

    every reduction:  optimum(before) = optimum(after) + (growth of ``offset``)
    every step:       optimal choices after  ->  optimal choices before           ``Step.restore``

Matrices are held in both directions: ``edges[u][v]`` has u's strategies as rows, and ``edges[v][u]`` is its transpose.
Memory is held by interval [first, last) of the rows of ``memory_rows``: ``bytes[v]`` has one vector per interval in
which v's strategies differ, and what is the same for all of them has moved to ``base_bytes``, one number per row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.memory import memory_rows
from alpa_lite.intra_op.problem import FloatArray, Problem

IntArray = NDArray[np.intp]
Interval = tuple[int, int]


class Step(ABC):
    """One reduction's inverse."""

    __slots__ = ()

    @abstractmethod
    def restore(self, choices: dict[int, int]) -> None:
        """Turn choices that are right after the reduction into choices that are right before it, in place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeepStrategies(Step):
    """``node`` lost all strategies but ``kept``: x_before = kept[x_after]."""

    node: int
    kept: IntArray

    def restore(self, choices: dict[int, int]) -> None:
        """See ``Step``."""
        choices[self.node] = int(self.kept[choices[self.node]])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoveNode(Step):
    """``node`` was decided by its ``neighbours``: x_node = best[x of the neighbours]."""

    node: int
    neighbours: tuple[int, ...]
    best: IntArray

    def restore(self, choices: dict[int, int]) -> None:
        """See ``Step``."""
        choices[self.node] = int(self.best[tuple(choices[neighbour] for neighbour in self.neighbours)])


@dataclass(slots=True, kw_only=True, eq=False)
class Workspace:
    """A problem under reduction, keyed by the original node numbers; the only mutable object of this module.

    ``dirty`` nodes await the cheap reductions, ``stale`` ones the search for dominated strategies.
    """

    costs: dict[int, FloatArray]
    edges: dict[int, dict[int, FloatArray]]
    bytes: dict[int, dict[Interval, FloatArray]]
    base_bytes: FloatArray
    limit_bytes: float
    offset: float = 0.0
    steps: list[Step] = field(default_factory=list[Step])
    dirty: dict[int, None] = field(default_factory=dict[int, None])
    stale: dict[int, None] = field(default_factory=dict[int, None])

    @staticmethod
    def load(problem: Problem) -> Workspace:
        """The problem's arrays; parallel edges are added up here (cost = C(i, j) + C'(i, j))."""
        times = np.array([row.time for row in memory_rows(problem)], dtype=np.int64)
        limit_bytes = math.inf if problem.limit_bytes is None else problem.limit_bytes
        work = Workspace(
            costs=dict(enumerate(problem.node_costs)),
            edges={node: {} for node in range(len(problem.node_costs))},
            bytes={node: {} for node in range(len(problem.node_costs))},
            base_bytes=np.zeros(times.size),
            limit_bytes=limit_bytes,
        )
        for edge in problem.edges:
            work.add_edge(edge.source, edge.target, edge.costs)
        for usage in problem.usages:
            first, last = (int(index) for index in np.searchsorted(times, (usage.start, usage.end)))
            if first < last:
                work.add_bytes(usage.node, (first, last), usage.bytes)
        for node in work.costs:
            work.settle_bytes(node)
        work.touch(work.costs)
        return work

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no choices have finite cost within the limit."""
        return math.isinf(self.offset) or bool((self.base_bytes > self.limit_bytes).any())

    def touch(self, nodes: Iterable[int]) -> None:
        """These nodes changed: look at them again."""
        for node in nodes:
            self.dirty[node] = None
            self.stale[node] = None

    def add_bytes(self, node: int, interval: Interval, used: FloatArray) -> None:
        """Add ``used`` to what the node's strategies keep alive in the interval."""
        mine = self.bytes[node].get(interval)
        self.bytes[node][interval] = used if mine is None else mine + used

    def settle_bytes(self, node: int) -> None:
        """Move the bytes that all strategies of ``node`` need to ``base_bytes``: b = min b + (b - min b)."""
        for (first, last), used in list(self.bytes[node].items()):
            least = float(used.min())
            self.base_bytes[first:last] += least
            if float(used.max()) == least:
                del self.bytes[node][first, last]
            elif least > 0.0:
                self.bytes[node][first, last] = used - least

    def add_edge(self, source: int, target: int, costs: FloatArray) -> None:
        """Add ``costs`` to what the pair already has."""
        if target in self.edges[source]:
            costs = self.edges[source][target] + costs
        self.edges[source][target] = costs
        self.edges[target][source] = costs.T

    def remove_edge(self, source: int, target: int) -> None:
        """Forget the pair's costs."""
        del self.edges[source][target]
        del self.edges[target][source]

    def keep(self, node: int, mask: NDArray[np.bool_]) -> None:
        """Take away the strategies of ``node`` outside ``mask``."""
        if mask.all():
            return
        kept = np.flatnonzero(mask)
        if kept.size == 0:
            self.offset = math.inf
            return
        self.steps.append(KeepStrategies(node=node, kept=kept))
        self.costs[node] = self.costs[node][kept]
        for other, costs in list(self.edges[node].items()):
            self.edges[node][other] = costs[kept]
            self.edges[other][node] = self.edges[node][other].T
        if self.bytes[node]:
            self.bytes[node] = {interval: used[kept] for interval, used in self.bytes[node].items()}
            self.settle_bytes(node)
        self.touch([node, *self.edges[node]])

    def remove_node(self, node: int, *, best: IntArray, neighbours: tuple[int, ...]) -> None:
        """Take ``node`` away; its costs must already be with its neighbours, and its bytes too."""
        self.steps.append(RemoveNode(node=node, neighbours=neighbours, best=best))
        self.touch(self.edges[node])
        for other in self.edges.pop(node):
            del self.edges[other][node]
        del self.costs[node], self.bytes[node]
        self.dirty.pop(node, None)
        self.stale.pop(node, None)
