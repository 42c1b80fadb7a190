"""Memory priced instead of limited: the Lagrangian dual of the intra-op problem, each point of it by elimination.

    u_t(x)  = (sum_v b_vt(x_v) - limit) / limit                the overrun of memory row t      ``_overrun``
    L(p)    = min_x cost(x) + sum_t p_t u_t(x),  p >= 0        a lower bound of the optimum     ``_at_prices``
    max L   : maximise z over p in a box around the best p,
              with z <= cost(x) + sum_t p_t u_t(x) for the x seen so far                        ``_next_prices``
    fix     : a strategy whose min-marginal in L(p) exceeds the cost of a feasible x is in
              no better x                                                                      ``strategies_left``
    recombine : between a feasible x and a cheaper y, the parts in which they differ and that
              no edge joins can be taken over one by one                                       ``_recombine``

Prices are seconds for overrunning the limit by all of it. L is concave and piecewise linear: cutting planes find its
maximum; the box, which doubles after a success at its border and shrinks after a failure, keeps them from jumping.
Rows enter with the first x that overruns them most. Any x that happens to fit is a feasible answer. With one row this
is the search for the price at which usage crosses the limit.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from alpa_lite.intra_op.memory import MemoryRow, memory_rows
from alpa_lite.intra_op.problem import FloatArray, Problem, evaluate
from alpa_lite.intra_op.solvers.elimination import EliminationPlan, cheapest_choices, min_marginals
from alpa_lite.intra_op.solvers.solver import PROOF_TOLERANCE, closes

_ENOUGH_GAIN = 1e-7
"""Stop when the cutting planes promise less than this relative gain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedMemory:
    """The best bound and the prices that give it, by row; the best feasible choices met on the way, if any."""

    bound: float
    prices: dict[int, float]
    rows: tuple[MemoryRow, ...]
    choices: tuple[int, ...] | None
    cost: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """The cutting planes so far: cut k says z <= ``costs[k]`` + p . ``overruns[k]``, over all rows."""

    problem: Problem
    plan: EliminationPlan
    rows: tuple[MemoryRow, ...]
    active: list[int] = field(default_factory=list[int])
    costs: list[float] = field(default_factory=list[float])
    overruns: list[FloatArray] = field(default_factory=list[FloatArray])
    seen: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    choices: tuple[int, ...] | None = None
    cost: float = math.inf

    def offer(self, choices: tuple[int, ...]) -> None:
        """Keep ``choices`` if they fit and are the cheapest so far."""
        priced = evaluate(self.problem, choices)
        if priced.feasible and priced.cost < self.cost:
            self.choices, self.cost = choices, priced.cost


def _overrun(search: _Search, choices: tuple[int, ...]) -> FloatArray:
    """u_t(x) for every row t."""
    limit = search.problem.limit_bytes or 0.0
    return np.array([row.total(choices) - limit for row in search.rows]) / _unit(search.problem)


def _unit(problem: Problem) -> float:
    """Prices are for this many bytes: the limit, or one byte if that is zero."""
    return max(problem.limit_bytes or 0.0, 1.0)


def priced_problem(problem: Problem, rows: tuple[MemoryRow, ...], prices: dict[int, float]) -> Problem:
    """cost(x) + sum_t p_t b_t(x) / unit as a problem without limit; L(p) is its optimum less sum_t p_t limit / unit."""
    node_costs = list(problem.node_costs)
    for index, price in prices.items():
        for node, used in rows[index].bytes.items():
            node_costs[node] = node_costs[node] + used * (price / _unit(problem))
    return Problem(node_costs=tuple(node_costs), edges=problem.edges)


def _at_prices(search: _Search, prices: dict[int, float]) -> float:
    """L(p); its minimiser becomes a cutting plane, and an answer if it fits."""
    choices = cheapest_choices(priced_problem(search.problem, search.rows, prices), search.plan)
    cost = evaluate(search.problem, choices).cost
    overrun = _overrun(search, choices)
    search.costs.append(cost)
    search.overruns.append(overrun)
    search.seen.append(choices)
    search.offer(choices)
    worst = max(range(overrun.size), key=lambda index: overrun[index], default=None)
    if worst is not None and overrun[worst] > 0 and worst not in search.active:
        search.active.append(worst)
    return cost + sum(price * float(overrun[index]) for index, price in prices.items())


def _next_prices(search: _Search, center: dict[int, float], radius: float) -> tuple[dict[int, float], float]:
    """The prices in the box at which the cutting planes promise most, and what they promise."""
    columns = search.active
    cuts: NDArray[np.float64] = np.stack(search.overruns)[:, columns]
    middle = np.array([center.get(index, 0.0) for index in columns])
    answer = linprog(
        c=np.append(np.zeros(len(columns)), -1.0),
        A_ub=np.hstack([-cuts, np.ones((len(cuts), 1))]),
        b_ub=np.array(search.costs),
        bounds=[*zip(np.maximum(middle - radius, 0.0), middle + radius, strict=True), (None, None)],
        method="highs",
    )
    if answer.x is None:
        return center, -math.inf
    return dict(zip(columns, answer.x[:-1].tolist(), strict=True)), float(answer.x[-1])


def price_memory(
    problem: Problem, plan: EliminationPlan, *, deadline: float, relative_gap: float = 0.0, max_points: int = 60
) -> PricedMemory:
    """Maximise L until the promise or the gap to the best answer is small, the points are used up, or
    ``time.perf_counter()`` passes ``deadline``.

    ``problem`` needs a finite free optimum; a bound above the sum of its largest finite costs proves it infeasible.
    """
    search = _Search(problem=problem, plan=plan, rows=memory_rows(problem))
    center: dict[int, float] = {}
    bound = _at_prices(search, center)
    scale = radius = max(abs(bound), largest_cost(problem) - bound) / 8
    for _ in range(max_points):
        if not search.active or time.perf_counter() > deadline:
            break
        near = math.isfinite(search.cost) and search.cost - bound <= relative_gap * abs(search.cost)
        if near or closes(bound, search.cost):
            break
        prices, promise = _next_prices(search, center, radius)
        if promise - bound <= _ENOUGH_GAIN * scale:
            break
        value = _at_prices(search, prices)
        if value > bound:
            at_border = any(price >= center.get(index, 0.0) + 0.99 * radius for index, price in prices.items())
            center, bound, radius = prices, value, radius * (2.0 if at_border else 1.0)
        else:
            radius /= 2.0
        if bound > largest_cost(problem):
            break
    _recombine(search)
    return PricedMemory(bound=bound, prices=center, rows=search.rows, choices=search.choices, cost=search.cost)


def _recombine(search: _Search) -> None:
    """Move the best feasible choices towards each cheaper x seen, part by part, as far as the limit allows."""
    for other in sorted(set(search.seen), key=lambda choices: evaluate(search.problem, choices).cost):
        if search.choices is not None and other != search.choices:
            _move_towards(search, search.choices, other)


def _move_towards(search: _Search, choices: tuple[int, ...], other: tuple[int, ...]) -> None:
    """The nodes in which two choices differ fall into parts that no edge joins: their costs add up. Greedy knapsack:
    the part that saves most for the bytes it adds comes first."""
    problem = search.problem
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(node for node, choice in enumerate(choices) if choice != other[node])
    graph.add_edges_from((e.source, e.target) for e in problem.edges if e.source in graph and e.target in graph)
    cost = evaluate(problem, choices).cost
    overrun = _overrun(search, choices)
    moves: list[tuple[float, FloatArray, set[int]]] = []
    for part in nx.connected_components(graph):
        moved = _mix(choices, other, part)
        saved = cost - evaluate(problem, moved).cost
        if saved > 0:
            moves.append((saved, _overrun(search, moved) - overrun, part))
    moves.sort(key=lambda move: -move[0] / max(float(move[1].max(initial=0.0)), 1e-12))
    for _, added, part in moves:
        if (overrun + added <= 0).all():
            overrun = overrun + added
            choices = _mix(choices, other, part)
    search.offer(choices)


def _mix(choices: tuple[int, ...], other: tuple[int, ...], part: set[int]) -> tuple[int, ...]:
    return tuple(other[node] if node in part else choice for node, choice in enumerate(choices))


def largest_cost(problem: Problem) -> float:
    """sum_v max finite c_v + sum_uv max finite C_uv: no choices of finite cost cost more."""
    arrays = [*problem.node_costs, *(edge.costs for edge in problem.edges)]
    return sum(float(array[np.isfinite(array)].max()) for array in arrays)


def strategies_left(
    problem: Problem, plan: EliminationPlan, priced: PricedMemory, *, cutoff: float
) -> list[NDArray[np.bool_]]:
    """For each node, the strategies that choices costing at most ``cutoff`` may still use."""
    marginals = min_marginals(priced_problem(problem, priced.rows, priced.prices), plan)
    paid = sum(priced.prices.values()) * (problem.limit_bytes or 0.0) / _unit(problem)
    slack = PROOF_TOLERANCE * (abs(cutoff) + paid)
    return [costs - paid <= cutoff + slack for costs in marginals.costs]
