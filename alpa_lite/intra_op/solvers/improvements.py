"""Improve solutions between the annealing runs of `rounds`: solve blocks exactly, and recombine two solutions.

Exact blocks are neighbourhoods that are solved to optimality, memory rows included:

    block      nodes that are alive in one full row, and their surroundings; or the surroundings of one node   ``_draw``
    given      the nodes outside keep their strategies: their edges become costs, and their bytes are
               deducted from the limit. Of rows with the same live nodes of the block, the fullest counts   ``_problem``
    best       reductions, then elimination if no row is left, else HiGHS                                   ``_solve``
    size       grows while reduced blocks are small, and shrinks otherwise                                  ``improve``

A tree search rejects a block in which several nodes together overrun a row; here such nodes are traded off.

Partition crossover combines two solutions x and y into one that is at least as good as both:

    D          the nodes in which x and y differ; the parts P of D are its connected components
    gain(P)    cost(x) - cost(x with y on P): the gains of different parts add up        ``_gains``
    taken      the parts of positive gain, largest first, as long as memory allows       ``recombine``
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import Edge, FloatArray, IntArray, Problem, Usage
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers.elimination import Elimination, cheapest_choices
from alpa_lite.intra_op.solvers.flat_problem import Flat, add_usage, cost_of, overrun_of, usage_of
from alpa_lite.intra_op.solvers.highs import Highs
from alpa_lite.intra_op.solvers.solver import Control


def connected_parts(num_nodes: int, edges: IntArray) -> list[IntArray]:
    """Return the nodes of every connected component, ascending; ``edges`` is (E, 2): pairs of nodes."""
    # Imported at its first use: it takes longer to import than all of this package.
    from scipy.sparse import coo_array  # pyright: ignore
    from scipy.sparse.csgraph import connected_components  # pyright: ignore

    if num_nodes == 0:
        return []
    joined: Any = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    part_of: IntArray = cast(Any, connected_components)(joined, directed=False)[1]
    order = np.argsort(part_of, kind="stable").astype(np.intp)
    ends = np.cumsum(np.bincount(part_of)).tolist()
    return [order[first:last] for first, last in itertools.pairwise([0, *ends])]


def _costs(problem: Problem, choices: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the cost of each node and of each edge under the choices, in seconds."""
    sources, targets = problem.edge_nodes.T
    pairs = choices[sources] * problem.node_costs.sizes[targets] + choices[targets]
    own = problem.node_costs.values[problem.node_costs.starts[:-1] + choices]
    return own, problem.edge_costs.values[problem.edge_costs.starts[:-1] + pairs]


def _gains(problem: Problem, first: IntArray, second: IntArray, parts: list[IntArray]) -> FloatArray:
    """Return the seconds that each part saves when it changes from ``first`` to ``second``."""
    part_of = np.full(problem.num_nodes, -1, dtype=np.intp)
    for number, nodes in enumerate(parts):
        part_of[nodes] = number
    own, pairs = (before - after for before, after in zip(_costs(problem, first), _costs(problem, second), strict=True))
    gains = np.zeros(len(parts) + 1)  # nodes and edges in no part have number -1, the last entry
    np.add.at(gains, part_of, own)
    np.add.at(gains, part_of[problem.edge_nodes].max(axis=1), pairs)
    return gains[:-1]


def recombine(problem: Problem, flat: Flat, first: IntArray, second: IntArray) -> IntArray:
    """Return ``first`` with the parts of ``second`` that make it cheaper and leave it within the limit.

    Both must have finite cost, and ``first`` must be within the limit.
    """
    # Parts that no edge joins change the cost independently, so that each can be taken or left by itself.
    parts = _parts(problem, first != second)
    gains = _gains(problem, first, second, parts)
    result, overrun = first.copy(), overrun_of(flat, first)
    # Greedy, since parts compete for the rows that they share: which set of them is best is a knapsack problem.
    for part in sorted(range(len(parts)), key=lambda part: -gains[part]):
        if gains[part] <= 0.0:
            break
        changed = overrun.copy()
        for node in parts[part].tolist():
            add_usage(flat, node, int(first[node]), -1.0, changed)
            add_usage(flat, node, int(second[node]), 1.0, changed)
        if (changed <= 0.0).all():
            overrun = changed
            result[parts[part]] = second[parts[part]]
    return result


def _parts(problem: Problem, differs: NDArray[np.bool_]) -> list[IntArray]:
    nodes = np.flatnonzero(differs)
    place = np.full(differs.size, -1, dtype=np.intp)
    place[nodes] = np.arange(nodes.size)
    ends = place[problem.edge_nodes]
    return [nodes[part] for part in connected_parts(nodes.size, ends[(ends >= 0).all(axis=1)])]


_FIRST_NODES, _LEAST_NODES, _MOST_NODES = 40.0, 6.0, 400.0
_MOST_ENTRIES = 8_000
"""Most pairs of strategies of a reduced block; HiGHS would take seconds for a larger one, which is skipped."""
_MOST_BRANCHES = 200
"""Most nodes of HiGHS's tree: a number, not seconds, so that equal seeds give equal answers."""
_GROWTH, _SHRINKAGE = 1.03, 0.8
_OF_ROWS = 0.5
"""The fraction of blocks that begin with the nodes of a row."""


@dataclass(slots=True, kw_only=True, eq=False)
class ExactBlocks:
    """A search of one problem; ``flat`` has finite costs, and ``stop`` tells whether the time is up."""

    flat: Flat
    seed: int
    stop: Callable[[], bool]
    seconds_left: Callable[[], float]
    _random: np.random.Generator = field(init=False)
    _num_nodes: float = _FIRST_NODES

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def improve(self, choices: IntArray, num_blocks: int) -> IntArray:
        """Return choices that cost no more than the given ones, which are within the limit.

        Of equally cheap choices of a block the new ones are taken, so that the search moves on plateaus.
        """
        choices, cost = choices.copy(), cost_of(self.flat, choices)
        used = np.zeros(self.flat.room.size)
        usage_of(self.flat, choices, used)
        for _ in range(num_blocks):
            if self.stop():
                break
            nodes = self._draw()
            for node in nodes.tolist():
                add_usage(self.flat, node, int(choices[node]), -1.0, used)
            found = self._solve(_problem(self.flat, nodes, choices, used), choices[nodes].tolist())
            if found is not None:
                changed = choices.copy()
                changed[nodes] = found
                if (changed_cost := cost_of(self.flat, changed)) <= cost:
                    choices, cost = changed, changed_cost
            for node in nodes.tolist():
                add_usage(self.flat, node, int(choices[node]), 1.0, used)
        return choices

    def _draw(self) -> IntArray:
        """Return the nodes of a random block, ascending."""
        flat, random, count = self.flat, self._random, int(self._num_nodes)
        # A dict serves as an ordered set, so that equal seeds give equal blocks.
        block = dict.fromkeys(self._of_a_row(count // 2) if random.random() < _OF_ROWS else ())
        if not block:
            block[int(random.integers(flat.cost_start.size - 1))] = None
        front = list(block)
        while len(block) < count and front:
            place = int(random.integers(len(front)))
            links = slice(flat.link_start[front[place]], flat.link_start[front[place] + 1])
            others = [node for node in flat.link_node[links].tolist() if node not in block]
            if not others:
                front[place] = front[-1]
                front.pop()
                continue
            node = others[int(random.integers(len(others)))]
            block[node] = None
            front.append(node)
        return np.array(sorted(block))

    def _of_a_row(self, count: int) -> list[int]:
        """Return some of the nodes whose strategies differ in the bytes that they keep alive in a random row."""
        flat = self.flat
        if flat.room.size == 0:
            return []
        row = int(self._random.integers(flat.room.size))
        runs = np.flatnonzero((flat.run_first <= row) & (row < flat.run_last))
        # From the right, which passes over nodes without runs: they start where the next node does.
        owners = np.unique(np.searchsorted(flat.run_start, runs, side="right") - 1)
        return self._random.permutation(owners)[:count].tolist()

    def _solve(self, problem: Problem, now: Sequence[int]) -> tuple[int, ...] | None:
        """Return the best choices of a block, or None if that would take too much work."""
        reduced = simplify(problem, stop=self.stop)
        if math.isinf(reduced.offset) or self.stop():
            return None
        left = reduced.problem
        if left.num_nodes == 0:
            return reduced.restore(())
        # The next block is sized by what the reductions leave of this one, which depends on the problem.
        self._num_nodes *= _GROWTH if left.edge_costs.values.size <= _MOST_ENTRIES else _SHRINKAGE
        self._num_nodes = min(max(self._num_nodes, _LEAST_NODES), _MOST_NODES)
        if not left.usage_nodes.size:
            # Smaller than by default, since several blocks are solved in each round.
            elimination = Elimination(max_table_entries=10**6, max_total_entries=10**7)
            plan = elimination.plan(left)
            if elimination.fits(plan):
                found = cheapest_choices(plan, left.node_costs.values, left.edge_costs.values, over=self.stop)
                return None if found is None else reduced.restore(found.choices)
        if left.edge_costs.values.size > _MOST_ENTRIES:
            return None
        found = Highs(max_branches=_MOST_BRANCHES).search(
            left,
            time_limit_seconds=max(self.seconds_left(), 0.01),
            control=Control(stop=self.stop),
            # HiGHS begins with the current strategies, and can then only improve on them.
            start=reduced.project(now),
        )
        return None if found.choices is None else reduced.restore(found.choices)


def _problem(flat: Flat, nodes: IntArray, choices: IntArray, used: FloatArray) -> Problem:
    """Return the problem of the nodes of a block; ``used``: the bytes that all other nodes keep alive in each row."""
    place = {node: index for index, node in enumerate(nodes.tolist())}
    costs: list[FloatArray] = []
    edges: list[Edge] = []
    for node, index in place.items():
        own = flat.costs[flat.cost_start[node] : flat.cost_start[node + 1]].copy()
        for link in range(int(flat.link_start[node]), int(flat.link_start[node + 1])):
            other, table = int(flat.link_node[link]), int(flat.link_table[link])
            if other not in place:
                first = table + int(choices[other]) * own.size
                own += flat.tables[first : first + own.size]
            # An edge inside the block is met at both of its ends.
            elif node < other:
                size = int(flat.cost_start[other + 1] - flat.cost_start[other])
                pairs = flat.tables[table : table + own.size * size].reshape(size, own.size)
                edges.append(Edge(source=index, target=place[other], costs=pairs.T))
        costs.append(own)
    usages, limit = _usages(flat, place, [own.size for own in costs], used)
    return Problem.of(node_costs=costs, edges=edges, usages=usages, limit_bytes=limit)


def _usages(
    flat: Flat, place: dict[int, int], sizes: Sequence[int], used: FloatArray
) -> tuple[list[Usage], float | None]:
    """Return the usages of a block, over the runs of rows in which the same of its nodes are alive, and its limit."""
    owned = [
        (index, run)
        for node, index in place.items()
        for run in range(int(flat.run_start[node]), int(flat.run_start[node + 1]))
    ]
    # No row is affected, so that the block needs no limit.
    if not owned:
        return [], None
    runs = np.array([run for _, run in owned])
    bounds = np.unique(np.concatenate([flat.run_first[runs], flat.run_last[runs]]))
    starts, ends = (np.searchsorted(bounds, rows).tolist() for rows in (flat.run_first[runs], flat.run_last[runs]))
    # Cut at the last bound, since `reduceat` extends its last range to the end of the array.
    room = np.minimum.reduceat((flat.room - used)[: bounds[-1]], bounds[:-1])
    limit = max(float(room.max()), 0.0)
    usages = [
        Usage(
            node=index,
            bytes=flat.bytes[flat.run_bytes[run] : flat.run_bytes[run] + sizes[index]],
            start=start,
            end=end,
        )
        for (index, run), start, end in zip(owned, starts, ends, strict=True)
    ]
    # A problem has one limit for all rows: a row with less room gets the difference as a constant usage.
    usages += [
        Usage(node=0, bytes=np.full(sizes[0], limit - free), start=index, end=index + 1)
        for index, free in enumerate(room.tolist())
        if free < limit
    ]
    return usages, limit
