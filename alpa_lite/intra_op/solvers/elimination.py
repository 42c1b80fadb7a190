"""Exact elimination of the nodes one after the other (bucket elimination), for problems of small width.

    N_v         the neighbours of v not yet eliminated when it is v's turn                   ``elimination_plan``
    J_v(i, N)   = c_v(i) + sum of the edges from v into N_v, and of the tables M_w
                  in which v comes first                                                     ``_joint``
    M_v(N)      = min_i J_v(i, N); v's choice is the minimiser i                             ``_eliminate_all``
    optimum     = sum of the tables without arguments; choices follow in reverse order       ``Elimination.solve``

Time and space are those of the largest J_v. Memory limits are not seen: the answer holds if it happens to respect the
limit, since leaving a constraint out can only lower the optimum.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import AlpaLiteError
from alpa_lite.intra_op.problem import FloatArray, Problem, Solution, Status, evaluate
from alpa_lite.intra_op.solvers.solver import Control, Solver, no_solution, solution_of

_MAX_DIMENSIONS = 32

Scope = tuple[int, ...]
Adjacency = dict[int, set[int]]


class TooWide(AlpaLiteError):
    """The tables would be too large, or the choices do not fit a memory limit that elimination cannot see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationPlan:
    """An order of the nodes, each node's neighbours at its turn, and the entries of the tables that follow."""

    order: tuple[int, ...]
    scopes: tuple[Scope, ...]
    largest_table: float
    total_entries: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Costs over the strategies of the nodes in ``scope``, one dimension for each."""

    scope: Scope
    costs: FloatArray


def elimination_plan(problem: Problem, max_entries: float = math.inf) -> EliminationPlan:
    """The cheaper of the two greedy orders: least table first, and least fill first.

    An order whose tables exceed ``max_entries`` in all is given up half-way; the entries of its plan are inf.
    """
    plans = [_greedy_plan(problem, rank, max_entries) for rank in (_table_entries, _fill)]
    return min(plans, key=lambda plan: plan.total_entries)


def _table_entries(node: int, adjacency: Adjacency, sizes: Scope) -> float:
    return math.prod((float(sizes[other]) for other in adjacency[node]), start=float(sizes[node]))


def _fill(node: int, adjacency: Adjacency, sizes: Scope) -> float:
    """The entries of the edges that eliminating ``node`` would add."""
    others = sorted(adjacency[node])
    return sum(
        float(sizes[first] * sizes[second])
        for position, first in enumerate(others)
        for second in others[position + 1 :]
        if second not in adjacency[first]
    )


def _greedy_plan(
    problem: Problem, rank: Callable[[int, Adjacency, Scope], float], max_entries: float
) -> EliminationPlan:
    sizes = problem.num_strategies
    adjacency: Adjacency = {node: set() for node in range(len(sizes))}
    for source, target in problem.edge_nodes.tolist():
        adjacency[source].add(target)
        adjacency[target].add(source)
    ranks = {node: rank(node, adjacency, sizes) for node in adjacency}
    queue = [(value, node) for node, value in ranks.items()]
    heapq.heapify(queue)
    order: list[int] = []
    scopes: list[Scope] = []
    largest = total = 0.0
    while queue and total <= max_entries:
        value, node = heapq.heappop(queue)
        if ranks.get(node) != value:
            continue  # out of date: the node is gone, or has a newer entry
        entries = _table_entries(node, adjacency, sizes)
        largest, total = max(largest, entries), total + entries
        neighbours = adjacency.pop(node)
        del ranks[node]
        order.append(node)
        scopes.append(tuple(sorted(neighbours)))
        for other in neighbours:
            adjacency[other] |= neighbours
            adjacency[other] -= {node, other}
        affected = set(neighbours).union(*(adjacency[other] for other in neighbours)) if rank is _fill else neighbours
        for other in affected:
            ranks[other] = rank(other, adjacency, sizes)
            heapq.heappush(queue, (ranks[other], other))
    given_up = len(order) < len(sizes)
    return EliminationPlan(
        order=tuple(order),
        scopes=tuple(scopes),
        largest_table=math.inf if given_up else largest,
        total_entries=math.inf if given_up else total,
    )


def _joint(tables: list[Table], scope: Scope, sizes: Scope) -> FloatArray:
    """The sum of ``tables`` over ``scope``, which holds all of theirs."""
    axis = {node: index for index, node in enumerate(scope)}
    total = np.zeros([sizes[node] for node in scope])
    for table in tables:
        positions = [axis[node] for node in table.scope]
        shape = [1] * len(scope)
        for position, extent in zip(positions, table.costs.shape, strict=True):
            shape[position] = extent
        # Tables are many and have few dims: numpy's own sorting takes longer than adding them up.
        order = sorted(range(len(positions)), key=positions.__getitem__)
        total += table.costs.transpose(order).reshape(shape)
    return total


def _buckets(problem: Problem, plan: EliminationPlan) -> dict[int, list[Table]]:
    """Each node's own tables: its costs and the edges to the nodes that come after it."""
    turn = {node: index for index, node in enumerate(plan.order)}
    buckets = {node: [Table(scope=(node,), costs=costs)] for node, costs in enumerate(problem.node_costs)}
    for edge in problem.edges:
        first = min(edge.source, edge.target, key=lambda node: turn[node])
        buckets[first].append(Table(scope=(edge.source, edge.target), costs=edge.costs))
    return buckets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Eliminated:
    """``offset`` is the optimum; ``tables[v]`` went into J_v; ``received[v]`` is M_v and ``best[v]`` its minimisers."""

    offset: float
    tables: dict[int, list[Table]]
    received: dict[int, Table]
    best: dict[int, NDArray[np.int32]]
    parent: dict[int, int]


def _least_along_first(joint: FloatArray) -> tuple[FloatArray, NDArray[np.int32]]:
    """The minimum along the first dimension, and where it is for the first time.

    Slice by slice: numpy's argmin jumps through memory there.
    """
    least, where = np.array(joint[0]), np.zeros(joint.shape[1:], dtype=np.int32)
    for index in range(1, joint.shape[0]):
        np.copyto(where, np.int32(index), where=joint[index] < least)
        np.minimum(least, joint[index], out=least)
    return least, where


def _eliminate_all(problem: Problem, plan: EliminationPlan) -> _Eliminated:
    sizes = problem.num_strategies
    turn = {node: index for index, node in enumerate(plan.order)}
    tables = _buckets(problem, plan)
    received: dict[int, Table] = {}
    best: dict[int, NDArray[np.int32]] = {}
    parent: dict[int, int] = {}
    offset = 0.0
    for node, neighbours in zip(plan.order, plan.scopes, strict=True):
        joint = _joint(tables[node], (node, *neighbours), sizes)
        least, best[node] = _least_along_first(joint)
        received[node] = Table(scope=neighbours, costs=least)
        if neighbours:
            parent[node] = min(neighbours, key=lambda other: turn[other])
            tables[parent[node]].append(received[node])
        else:
            offset += float(received[node].costs)
    return _Eliminated(offset=offset, tables=tables, received=received, best=best, parent=parent)


def _read_choices(plan: EliminationPlan, eliminated: _Eliminated) -> tuple[int, ...]:
    choices: dict[int, int] = {}
    for node, neighbours in zip(reversed(plan.order), reversed(plan.scopes), strict=True):
        choices[node] = int(eliminated.best[node][tuple(choices[other] for other in neighbours)])
    return tuple(choices[node] for node in sorted(choices))


def cheapest_choices(problem: Problem, plan: EliminationPlan) -> tuple[int, ...]:
    """The choices of least cost, memory aside, by an order that the caller keeps from problem to problem."""
    return _read_choices(plan, _eliminate_all(problem, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination(Solver):
    """Exact when the tables stay under ``max_table_entries``; says ``TooWide`` otherwise, before any work."""

    max_table_entries: int = 20_000_000
    max_total_entries: int = 400_000_000

    def fits(self, plan: EliminationPlan) -> bool:
        """Whether the tables of this plan are within both caps, and within numpy's number of dimensions."""
        if max(map(len, plan.scopes), default=0) >= _MAX_DIMENSIONS:
            return False
        return plan.largest_table <= self.max_table_entries and plan.total_entries <= self.max_total_entries

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        """The optimum; the caps keep it to seconds, so the time limit is not needed.

        Raises TooWide when the tables would exceed the caps, and when the best choices overrun the memory limit.
        """
        started = time.perf_counter()
        plan = elimination_plan(problem)
        if not self.fits(plan):
            raise TooWide(
                f"Elimination would need tables of {plan.largest_table:.3g} entries ({plan.total_entries:.3g} in all) "
                f"and is allowed {self.max_table_entries:.3g} ({self.max_total_entries:.3g}); use IntegerProgram, or "
                "raise max_table_entries."
            )
        eliminated = _eliminate_all(problem, plan)
        if math.isinf(eliminated.offset):
            return no_solution(status=Status.INFEASIBLE, started=started, solver=self.name)
        choices = _read_choices(plan, eliminated)
        if not evaluate(problem, choices).feasible:
            raise TooWide(
                "The cheapest choices overrun the memory limit, which Elimination cannot see; use IntegerProgram or "
                "Portfolio."
            )
        return solution_of(problem, choices, bound=eliminated.offset, started=started, solver=self.name, proven=True)
