"""Exact elimination of the nodes one after the other (bucket elimination), for problems of small width.

    N_v         the neighbours of v that are not yet eliminated when v is                    ``elimination_plan``
    J_v(i, N)   = c_v(i) + sum of the edges from v into N_v, and of the tables M_w
                  in which v comes first                                                     ``EliminationPlan.layout``
    M_v(N)      = min_i J_v(i, N); v's choice is the minimiser i                             ``eliminate_all``
    optimum     = sum of the tables without arguments; choices follow in reverse order       ``cheapest_choices``

The time is proportional to the entries of all J_v, the memory to those of all M_v. Memory limits are ignored: the
answer is optimal if it happens to satisfy the limit, since leaving a constraint out can only lower the optimum.

The numba kernels fill all tables of one problem, which are small and many, one after the other:

    values[k]     the costs of nodes and edges, followed by space for each M_v
    J_v           the sum of v's tables t over (v, *N_v): values[table_offset[t] + sum of axis a's strategy * stride]

Most axes have few strategies, so entries are added up one by one: rows are too short for vectorisation to pay.
"""

# Kernels are typed for readers. Pyright cannot infer the types of functions that numba compiles, nor of array elements.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportReturnType=false
# pyright: reportArgumentType=false

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import AlpaLiteError
from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem, Solution, Status, evaluate
from alpa_lite.intra_op.solvers.solver import (
    Attempt,
    Clock,
    Control,
    Solver,
    no_halt,
    no_solution,
    run_attended,
    solution_of,
)
from alpa_lite.program.kernel import kernel


class FlatTables(NamedTuple):
    """The tables in elimination order k: the node, its neighbours, its tables and its M_k.

    ``start`` arrays have one entry more than there are nodes. ``strides`` has, for each table, one entry for the node
    and one for each of its neighbours: 0 where the table does not depend on it. ``message_start[k]`` is the offset of
    M_k in ``values``.
    """

    sizes: IntArray
    order: IntArray
    scope_start: IntArray
    scope_node: IntArray
    table_start: IntArray
    table_offset: IntArray
    strides: IntArray
    message_start: IntArray


@kernel
def eliminate_all(
    layout: FlatTables, values: FloatArray, best: NDArray[np.int32], choices: IntArray, halt: IntArray
) -> float:
    """Fill in each M, write the cheapest choices, and return their cost: inf where every choice is forbidden.

    ``best`` receives, for each entry of each M, the first minimising strategy. After a ``halt`` the result is nan,
    without choices.
    """
    total, stride = 0.0, 0
    for turn in range(layout.order.size):
        if halt[0]:
            return np.nan
        stride = _minimise(layout, values, best, turn, stride)
        if layout.scope_start[turn] == layout.scope_start[turn + 1]:
            # A table without arguments is the optimum of a connected component.
            total += values[layout.message_start[turn]]
    # In reverse: the neighbours in a node's scope are eliminated after it, so that their choices are made already.
    for turn in range(layout.order.size - 1, -1, -1):
        entry = 0
        for axis in range(layout.scope_start[turn], layout.scope_start[turn + 1]):
            node = layout.scope_node[axis]
            entry = entry * layout.sizes[node] + choices[node]
        choices[layout.order[turn]] = best[layout.message_start[turn] - layout.message_start[0] + entry]
    return total


@kernel
def _minimise(layout: FlatTables, values: FloatArray, best: NDArray[np.int32], turn: int, stride: int) -> int:
    """Fill in one M, whose tables have their strides from ``stride`` on; the result is the offset for the next node."""
    scope = layout.scope_node[layout.scope_start[turn] : layout.scope_start[turn + 1]]
    offsets = layout.table_offset[layout.table_start[turn] : layout.table_start[turn + 1]].copy()
    strides = layout.strides[stride : stride + offsets.size * (scope.size + 1)].reshape(offsets.size, scope.size + 1)
    at = np.zeros(scope.size, dtype=np.int64)  # the strategies of the neighbours
    for entry in range(layout.message_start[turn], layout.message_start[turn + 1]):
        least, where = np.inf, 0
        for i in range(layout.sizes[layout.order[turn]]):
            joint = 0.0
            for table in range(offsets.size):
                joint += values[offsets[table] + i * strides[table, 0]]
            if joint < least:
                least, where = joint, i
        values[entry], best[entry - layout.message_start[0]] = least, where
        for axis in range(scope.size - 1, -1, -1):  # advance to the next entry like an odometer
            at[axis] += 1
            wrapped = at[axis] == layout.sizes[scope[axis]]
            step = 1 - at[axis] if wrapped else 1
            for table in range(offsets.size):
                offsets[table] += step * strides[table, axis + 1]
            if not wrapped:
                break
            at[axis] = 0
    return stride + strides.size


Scope = tuple[int, ...]
Adjacency = dict[int, set[int]]


_MANY_ENTRIES = 5e6
"""Plans of more entries run on a thread of their own, so that the time limit is checked meanwhile."""
_MOST_NEIGHBOURS = 100
"""A node with more neighbours when it is eliminated is too wide, however few strategies they have."""


class TooWide(AlpaLiteError):
    """Raised when the tables would be too large, or the cheapest choices overrun the limit, which is ignored here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EliminationPlan:
    """An elimination order of the nodes, with the neighbours of each node when it is eliminated and the table sizes.

    ``sizes``: the number of strategies of each node; ``edge_nodes`` (E, 2): source and target. Costs are not included,
    so that problems that differ in costs alone can share a plan.
    """

    order: tuple[int, ...]
    scopes: tuple[Scope, ...]
    largest_table: float
    total_entries: float
    sizes: Scope
    edge_nodes: IntArray

    @cached_property
    def layout(self) -> FlatTables:
        """The offsets of all tables in one array: costs of nodes, of edges, then each M_v in elimination order."""
        sizes, turn = self.sizes, {node: index for index, node in enumerate(self.order)}
        tables: list[list[tuple[int, Scope]]] = [[] for _ in sizes]
        end = 0
        for node, size in enumerate(sizes):
            tables[node].append((end, (node,)))
            end += size
        edges: list[tuple[int, int]] = self.edge_nodes.tolist()
        for source, target in edges:
            # A table belongs to the node that is eliminated first.
            first = min(source, target, key=turn.__getitem__)
            tables[first].append((end, (source, target)))
            end += sizes[source] * sizes[target]
        message_start = [end]
        for scope in self.scopes:
            if scope:
                # M_v is a table over its scope like any other, read by the first of these nodes to be eliminated.
                tables[min(scope, key=turn.__getitem__)].append((end, scope))
            end += math.prod(sizes[node] for node in scope)
            message_start.append(end)
        table_start, offsets, strides = [0], list[int](), list[int]()
        for node, scope in zip(self.order, self.scopes, strict=True):
            for offset, over in tables[node]:
                steps = _strides(over, sizes)
                offsets.append(offset)
                strides.extend([steps.get(axis, 0) for axis in (node, *scope)])
            table_start.append(len(offsets))
        scope_start = [0, *itertools.accumulate(map(len, self.scopes))]
        return FlatTables(
            sizes=_array(sizes),
            order=_array(self.order),
            scope_start=_array(scope_start),
            scope_node=_array(itertools.chain.from_iterable(self.scopes)),
            table_start=_array(table_start),
            table_offset=_array(offsets),
            strides=_array(strides),
            message_start=_array(message_start),
        )


def _array(numbers: Iterable[int]) -> IntArray:
    return np.fromiter(numbers, dtype=np.int64)


def _strides(scope: Scope, sizes: Scope) -> dict[int, int]:
    """Return the stride of each node's axis in a table over `scope`; the last node's axis is contiguous."""
    steps, step = dict[int, int](), 1
    for node in reversed(scope):
        steps[node] = step
        step *= sizes[node]
    return steps


class Cheapest(NamedTuple):
    """One strategy per node, and their total cost in seconds: inf where every choice is forbidden."""

    choices: tuple[int, ...]
    cost: float


def elimination_plan(
    problem: Problem, *, max_table_entries: float = math.inf, max_total_entries: float = math.inf
) -> EliminationPlan:
    """Return the cheaper of two greedy elimination orders: least table first, and least fill first.

    An order is abandoned as soon as one of its tables, or all together, exceed the maxima; its plan has inf entries.
    """
    # Neither rule is better on all problems, and planning takes little of the time of an elimination.
    plans = [_greedy_plan(problem, rank, max_table_entries, max_total_entries) for rank in (_table_entries, _fill)]
    return min(plans, key=lambda plan: plan.total_entries)


def _table_entries(node: int, adjacency: Adjacency, sizes: Scope, most: float = math.inf) -> float:
    """Return the entries of the table for eliminating ``node``, or inf for more than ``most``."""
    # Before the product, which takes time in the number of neighbours and is computed very often.
    if len(adjacency[node]) > _MOST_NEIGHBOURS:
        return math.inf
    entries = float(sizes[node])
    for other in adjacency[node]:
        entries *= sizes[other]
        if entries > most:
            return math.inf
    return entries


def _fill(node: int, adjacency: Adjacency, sizes: Scope, most: float = math.inf) -> float:
    """Return the entries of the edges that eliminating ``node`` would add, or inf if its table exceeds ``most``."""
    if math.isinf(_table_entries(node, adjacency, sizes, most)):
        return math.inf
    others, entries = set(adjacency[node]), 0.0
    for first in adjacency[node]:
        others.remove(first)
        if missing := others - adjacency[first]:
            entries += sizes[first] * sum([sizes[second] for second in missing])
    return entries


def _connect(neighbours: set[int], adjacency: Adjacency) -> set[int]:
    """Join the neighbours of an eliminated node pairwise; return the nodes whose fill changes."""
    changed = set(neighbours)
    for first, second in itertools.combinations(sorted(neighbours), 2):
        if second not in adjacency[first]:
            adjacency[first].add(second)
            adjacency[second].add(first)
            # Common neighbours of a new edge have one pair less to join.
            changed |= adjacency[first] & adjacency[second]
    return changed


def _greedy_plan(
    problem: Problem, rank: Callable[[int, Adjacency, Scope, float], float], max_table: float, max_total: float
) -> EliminationPlan:
    sizes = problem.num_strategies
    adjacency: Adjacency = {node: set() for node in range(len(sizes))}
    for source, target in problem.edge_nodes.tolist():
        adjacency[source].add(target)
        adjacency[target].add(source)
    ranks = {node: rank(node, adjacency, sizes, max_table) for node in adjacency}
    queue = [(value, node) for node, value in ranks.items() if value < math.inf]
    heapq.heapify(queue)
    order: list[int] = []
    scopes: list[Scope] = []
    largest = total = 0.0
    while queue and total <= max_total:
        value, node = heapq.heappop(queue)
        if ranks.get(node) != value:
            continue  # a stale heap entry: the node is eliminated, or has a newer entry
        entries = _table_entries(node, adjacency, sizes)
        largest, total = max(largest, entries), total + entries
        neighbours = adjacency.pop(node)
        del ranks[node]
        order.append(node)
        scopes.append(tuple(sorted(neighbours)))
        for other in neighbours:
            adjacency[other].discard(node)
        # Only these ranks change; ranking all nodes again would take quadratic time.
        for other in _connect(neighbours, adjacency):
            value = rank(other, adjacency, sizes, max_table)
            if value != ranks[other]:
                ranks[other] = value
                if value < math.inf:  # else its table is too large until some neighbours are eliminated
                    heapq.heappush(queue, (value, other))
    given_up = len(order) < len(sizes)
    return EliminationPlan(
        order=tuple(order),
        scopes=tuple(scopes),
        largest_table=math.inf if given_up else largest,
        total_entries=math.inf if given_up else total,
        sizes=sizes,
        edge_nodes=problem.edge_nodes,
    )


def cheapest_choices(
    plan: EliminationPlan,
    node_costs: FloatArray,
    edge_costs: FloatArray,
    *,
    over: Callable[[], bool] = lambda: False,
) -> Cheapest | None:
    """Return the choices of least cost, regardless of memory, or None once ``over`` returns True.

    Costs are laid out as in the problem that the plan was made for. Only plans of many entries call ``over``.
    """
    layout = plan.layout
    values = np.empty(layout.message_start[-1])
    values[: node_costs.size] = node_costs
    values[node_costs.size : layout.message_start[0]] = edge_costs
    # Half the memory of the default integers, for the largest array after the values.
    best = np.empty(layout.message_start[-1] - layout.message_start[0], dtype=np.int32)
    choices = np.zeros(len(plan.order), dtype=np.int64)
    costs, halt = list[float](), no_halt()

    def job() -> None:
        costs.append(float(eliminate_all(layout, values, best, choices, halt)))

    # A small plan ends before the clock would be read.
    if plan.total_entries < _MANY_ENTRIES:
        job()
    else:
        with ThreadPoolExecutor(1) as pool:
            run_attended(pool, [job], over=over, halt=halt)
    return None if math.isnan(costs[0]) else Cheapest(choices=tuple(choices.tolist()), cost=costs[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination(Solver):
    """Exact solver for problems whose tables have at most ``max_table_entries``; raises ``TooWide`` otherwise."""

    max_table_entries: int = 20_000_000
    max_total_entries: int = 400_000_000

    def plan(self, problem: Problem) -> EliminationPlan:
        """Return an elimination order within the caps, or a plan with inf entries."""
        return elimination_plan(
            problem, max_table_entries=self.max_table_entries, max_total_entries=self.max_total_entries
        )

    def fits(self, plan: EliminationPlan) -> bool:
        """Return True if the tables of this plan are within both caps."""
        return plan.largest_table <= self.max_table_entries and plan.total_entries <= self.max_total_entries

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        """Return the optimum, or no choices if the time limit is reached.

        Raises TooWide when the tables would exceed the caps, and when the best choices overrun the memory limit.
        """
        attempt = Attempt(solver=self.name)
        clock = Clock(seconds=time_limit_seconds, control=control or Control())
        plan = self.plan(problem)
        if not self.fits(plan):
            raise TooWide(
                f"Elimination would need a table of more than {self.max_table_entries:.3g} entries, or more than "
                f"{self.max_total_entries:.3g} in all; use Portfolio, or raise max_table_entries and max_total_entries."
            )
        found = cheapest_choices(plan, problem.node_costs.values, problem.edge_costs.values, over=clock.over)
        if found is None:
            return no_solution(attempt, status=Status.TIME_LIMIT)
        choices, cost = found
        if math.isinf(cost):
            return no_solution(attempt, status=Status.INFEASIBLE)
        if not evaluate(problem, choices).feasible:
            raise TooWide(
                "The cheapest choices overrun the memory limit, which Elimination cannot see; use IntegerProgram or "
                "Portfolio."
            )
        return solution_of(problem, choices, attempt, bound=cost, proven=True)
