"""Search under a binding memory limit: prices on memory for narrow problems, and the smallest peak of any choices.

Prices on memory with exact elimination, Kelley's cutting-plane method on the Lagrangian dual (J. SIAM 8(4), 1960):

    L(p)     = min_x cost(x) + sum_t p_t (U_t(x) - limit),  p >= 0, by elimination: a lower bound       ``_cheapest``
    next p   = argmax over p of the least over the choices x_k computed so far of
               cost(x_k) + sum_t p_t (U_t(x_k) - limit), a linear program                               ``_next_prices``
    answer   the cheapest x_k within the limit, once it is close enough to the best L               ``PricedSearch.run``

Only times at which some x_k exceeded the limit have a price. The first choices minimise bytes times lifetime.

The smallest peak memory of choices of finite cost, for explanations when nothing fits the limit:

    start     x = argmin sum of b_v(x_v) (end - start) over the usages, allowed choices only      ``_start``
    small     minimise P with  sum_v b_vt(x_v) <= P  for all t, as an integer program             ``leanest``
    large     bisect the interval between the proven least and peak(x): any x with
              peak(x) <= L, or a proof that there is none                                         ``_halve``

There every cost is 0 or inf, so that ``simplify`` under the limit L removes every strategy that another one matches in
every row, and little is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, Problem, Ragged, Solution, Status, evaluate, usage_over_time
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers.elimination import EliminationPlan, cheapest_choices
from alpa_lite.intra_op.solvers.integer_program import leanest_choices
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
            if clock.over() or (self._rounds and clock.is_near(self.cost, self.bound, relative_gap)):
                return
            self._round(clock)

    def _begin(self, clock: Clock) -> None:
        # Usage changes at starts and ends alone: a price for each interval between them covers all times.
        self._prices = np.zeros(np.unique(self.problem.usage_times).size)
        # At equal prices and without costs, choices of few bytes and short lives come first, which are likely to fit.
        if self._cheapest(np.ones(self._prices.size), clock, costs_count=False) is None:
            return
        if np.isinf(self._costs[0]):
            self.bound = np.inf  # no choices have finite cost, whatever their memory
            self._exhausted = True

    def _round(self, clock: Clock) -> None:
        if self._rounds:
            before, self._prices = self._prices, self._next_prices()
            # The model proposes the same prices again, so that another round would add a cut that it has.
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
        # Without an upper bound the linear program is unbounded while all choices so far exceed the limit.
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
        # Times that no choices have overrun need no price, and would only enlarge the linear program.
        prices = np.zeros(overruns.shape[1])
        # Without a solution of the linear program all prices are zero, as in the first round.
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


_MAX_PROGRAM_ENTRIES = 20_000

Solve = Callable[[Problem, float], Solution]
"""Function that solves a problem within the given number of seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leanest:
    """Choices of finite cost with a small peak. ``bound_bytes`` is a proven lower bound of all such peaks.

    Without choices the peak is inf; the bound is inf too when it is proven that no choices have finite cost.
    """

    choices: tuple[int, ...] | None
    peak_bytes: float
    bound_bytes: float


def _only_allowed(vectors: Ragged) -> Ragged:
    return Ragged(values=np.where(np.isfinite(vectors.values), 0.0, np.inf), starts=vectors.starts)


def _allowed_problem(problem: Problem) -> Problem:
    """Return ``problem`` without limit, with its finite costs set to zero."""
    node_costs, edge_costs = _only_allowed(problem.node_costs), _only_allowed(problem.edge_costs)
    return replace(problem, node_costs=node_costs, edge_costs=edge_costs, limit_bytes=None)


def _start(allowed: Problem, solve: Solve, seconds: float) -> Solution:
    """Solve for allowed choices with the least sum of bytes times lifetime."""
    costs: FloatArray = allowed.node_costs.values.copy()
    for usage in allowed.usages:
        first = allowed.node_costs.starts[usage.node]
        costs[first : first + usage.bytes.size] += usage.bytes * float(usage.end - usage.start)
    return solve(replace(allowed, node_costs=Ragged(values=costs, starts=allowed.node_costs.starts)), seconds)


def smallest_peak(problem: Problem, *, solve: Solve, time_limit_seconds: float) -> float:
    """Return the smallest peak (bytes) of choices of finite cost, the best when time is up; ``inf`` for none."""
    return leanest(problem, solve=solve, time_limit_seconds=time_limit_seconds).peak_bytes


def leanest(problem: Problem, *, solve: Solve, time_limit_seconds: float) -> Leanest:
    """Return the choices of finite cost with the smallest peak, the best when time is up; the limit is ignored."""
    deadline = time.perf_counter() + time_limit_seconds
    allowed = _allowed_problem(problem)
    first = _start(allowed, solve, time_limit_seconds / 2)
    if first.choices is None:
        bound = math.inf if first.status is Status.INFEASIBLE else 0.0
        return Leanest(choices=None, peak_bytes=math.inf, bound_bytes=bound)
    peak_bytes = evaluate(allowed, first.choices).peak_bytes
    found = Leanest(choices=first.choices, peak_bytes=peak_bytes, bound_bytes=0.0)
    # One byte less than what was reached: if nothing is left, the first answer is the least.
    reduced = simplify(replace(allowed, limit_bytes=max(peak_bytes - 1.0, 0.0)))
    if math.isinf(reduced.offset) or peak_bytes == 0.0:
        return replace(found, bound_bytes=peak_bytes)
    if reduced.problem.edge_costs.values.size > _MAX_PROGRAM_ENTRIES:
        return _halve(allowed, found, solve, deadline)
    leaner = leanest_choices(reduced.problem, time_limit_seconds=max(deadline - time.perf_counter(), 0.1))
    return found if leaner is None else _leaner(allowed, found, reduced.restore(leaner))


def _leaner(allowed: Problem, found: Leanest, choices: tuple[int, ...]) -> Leanest:
    """Return `found`, or the choices if their peak is smaller."""
    peak_bytes = evaluate(allowed, choices).peak_bytes
    return found if peak_bytes >= found.peak_bytes else replace(found, choices=choices, peak_bytes=peak_bytes)


def prove_leanest(problem: Problem, found: Leanest, *, solve: Solve, time_limit_seconds: float) -> Leanest:
    """Solve for a peak one byte smaller until there is none, which proves the smallest peak, or until time is up."""
    deadline, allowed = time.perf_counter() + time_limit_seconds, _allowed_problem(problem)
    while found.choices is not None and found.bound_bytes < found.peak_bytes:
        left = deadline - time.perf_counter()
        less = solve(replace(allowed, limit_bytes=found.peak_bytes - 1.0), left) if left > 0.0 else None
        # Peaks are whole bytes, so that nothing lies between the limit that is ruled out and the peak that was reached.
        if less is not None and less.status is Status.INFEASIBLE:
            return replace(found, bound_bytes=found.peak_bytes)
        leaner = found if less is None or less.choices is None else _leaner(allowed, found, less.choices)
        if leaner is found:
            break
        found = leaner
    return found


def _halve(allowed: Problem, found: Leanest, solve: Solve, deadline: float) -> Leanest:
    """Bisect between the reached peak and the proven bound until both meet, or until time is up."""
    while found.bound_bytes < found.peak_bytes and (left := deadline - time.perf_counter()) > 0.0:
        limit = float(math.floor((found.peak_bytes + found.bound_bytes - 1.0) / 2))
        less = solve(replace(allowed, limit_bytes=max(limit, 0.0)), left)
        if less.choices is not None:
            found = _leaner(allowed, found, less.choices)
        elif less.status is Status.INFEASIBLE:
            found = replace(found, bound_bytes=limit + 1.0)
        else:
            break
    return found
