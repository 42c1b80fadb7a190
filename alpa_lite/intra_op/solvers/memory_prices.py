"""Prices on memory with exact elimination: a solver for narrow problems whose memory limit binds.

    L(p)     = min_x cost(x) + sum_t p_t (U_t(x) - limit),  p >= 0, by elimination: a lower bound       ``_cheapest``
    next p   = argmax over p of the least over the choices x_k computed so far of
               cost(x_k) + sum_t p_t (U_t(x_k) - limit), a linear program                               ``_next_prices``
    answer   the cheapest x_k within the limit, once it is close enough to the best L               ``PricedSearch.run``

This is Kelley's cutting-plane method on the Lagrangian dual (Kelley, J. SIAM 8(4), 1960). Only times at which some x_k
exceeded the limit have a price. The first choices minimise bytes times lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, Problem, evaluate, usage_over_time
from alpa_lite.intra_op.solvers.elimination import EliminationPlan, cheapest_choices
from alpa_lite.intra_op.solvers.solver import Clock

MAX_ROUNDS = 40
_PUSHES = (1.02, 1.1, 1.5)
"""The factors by which prices are raised in turn while the resulting choices exceed the limit."""
_HIGHEST = 1e3
"""The highest price of ``limit`` bytes, as a multiple of the largest cost of the choices computed so far."""


@dataclass(slots=True, kw_only=True)
class PricedSearch:
    """The state of a search: the best choices with their cost (seconds), the lower bound, and all choices so far.

    ``_costs`` and ``_overruns`` hold the cost of each choices and their bytes above the limit at each time.
    """

    problem: Problem
    plan: EliminationPlan
    choices: tuple[int, ...] | None = None
    cost: float = np.inf
    bound: float = -np.inf
    _rounds: int = 0
    _prices: FloatArray = field(default_factory=lambda: np.zeros(0))
    _exhausted: bool = False
    _costs: list[float] = field(default_factory=list[float])
    _overruns: list[FloatArray] = field(default_factory=list[FloatArray])

    def run(self, *, relative_gap: float, clock: Clock) -> None:
        """Search until the gap is at most `relative_gap`, or prices cannot improve it any more.

        A second call, with a smaller gap, continues the search.
        """
        if not self._costs:
            self._begin(clock)
        while self._costs and not self._exhausted:
            if clock.over() or (self._rounds and self.cost - self.bound <= relative_gap * abs(self.cost)):
                return
            self._round(clock)

    def _begin(self, clock: Clock) -> None:
        self._prices = np.zeros(np.unique(self.problem.usage_times).size)
        if self._cheapest(np.ones(self._prices.size), clock, costs_count=False) is None:
            return
        if np.isinf(self._costs[0]):
            self.bound = np.inf  # no choices have finite cost, whatever their memory
            self._exhausted = True

    def _round(self, clock: Clock) -> None:
        if self._rounds:
            before, self._prices = self._prices, self._next_prices()
            self._exhausted = np.allclose(self._prices, before, rtol=1e-6, atol=0.0)
        if self._exhausted:
            return
        value = self._cheapest(self._prices, clock)
        if value is None:
            return
        if value > self.bound:
            self.bound = value
            self._push(self._prices, clock)
        self._rounds += 1
        self._exhausted = self._rounds == MAX_ROUNDS

    def _push(self, prices: FloatArray, clock: Clock) -> None:
        """Raise prices until the choices satisfy the limit."""
        for push in _PUSHES:
            if np.all(self._overruns[-1] <= 0) or clock.over():
                return
            self._cheapest(push * prices, clock)

    def _cheapest(self, prices: FloatArray, clock: Clock, *, costs_count: bool = True) -> float | None:
        """Return L at some prices and record its choices; None if the time is up before."""
        problem = self.problem
        costs = _with_prices(problem, prices, costs_count=costs_count)
        found = cheapest_choices(self.plan, *costs, over=clock.over)
        if found is None:
            return None
        choices = found.choices
        cost, used = evaluate(problem, choices).cost, usage_over_time(problem, choices)[1]
        overrun: FloatArray = used.astype(np.float64) - float(problem.limit_bytes or 0.0)
        self._costs.append(cost)
        self._overruns.append(overrun)
        if np.all(overrun <= 0) and cost < self.cost:
            self.choices, self.cost = choices, cost
        return cost + float(prices @ overrun)

    def _next_prices(self) -> FloatArray:
        """Return the prices that maximise the cutting-plane model of L."""
        # Imported at its first use: it takes longer to import than all of this package.
        from scipy.optimize import linprog  # pyright: ignore

        overruns = np.stack(self._overruns)
        priced = np.flatnonzero((overruns > 0).any(axis=0))
        highest = _HIGHEST * max(self._costs) / max(1.0, float(self.problem.limit_bytes or 0.0))
        # Bytes are in units of the limit, so that all coefficients have a similar magnitude.
        unit = max(1.0, float(self.problem.limit_bytes or 0.0))
        rows = np.hstack([np.ones((len(self._costs), 1)), -overruns[:, priced] / unit])
        found: Any = linprog(
            np.concatenate([[-1.0], np.zeros(priced.size)]),
            A_ub=rows,
            b_ub=np.array(self._costs),
            bounds=[(None, None), *[(0.0, highest * unit)] * priced.size],
            method="highs",
        )
        prices = np.zeros(overruns.shape[1])
        if found.x is not None:
            prices[priced] = found.x[1:] / unit
        return prices


def _with_prices(problem: Problem, prices: FloatArray, *, costs_count: bool) -> tuple[FloatArray, FloatArray]:
    """Return the costs of nodes and of edges, with the prices of bytes added to the nodes.

    Without `costs_count`, all finite costs count as zero, so that the bytes alone decide.
    """
    times, total = np.unique(problem.usage_times), np.concatenate([[0.0], np.cumsum(prices)])
    node, edge = problem.node_costs.values.copy(), problem.edge_costs.values
    if not costs_count:
        node, edge = (np.where(np.isfinite(part), 0.0, np.inf) for part in (node, edge))
    begin, end = (total[np.searchsorted(times, problem.usage_times[:, side])] for side in (0, 1))
    sizes = problem.usage_bytes.sizes
    charges = problem.usage_bytes.values * np.repeat(end - begin, sizes)
    within = np.arange(charges.size) - np.repeat(problem.usage_bytes.starts[:-1], sizes)
    np.add.at(node, np.repeat(problem.node_costs.starts[problem.usage_nodes], sizes) + within, charges)
    return node, edge
