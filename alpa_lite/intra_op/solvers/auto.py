"""The solver to use: reduce, eliminate, price memory if it binds, and only then an integer program on what is left.

    free       x0 = argmin cost(x) without the limit                                  ``_solve_free``
               x0 fits  =>  x0 is optimal: leaving a constraint out can only lower the optimum
    bound      max_p L(p), with memory priced (see lagrangian.py)                     ``_solve_priced``
    remainder  strategies whose min-marginal exceeds the best feasible cost go; the
               integer program, with its memory rows, decides the rest                ``_finish_exactly``
    too wide   for elimination: neighbourhood search, then the integer program from
               its answer                                                             ``_solve_wide``

Every answer is re-priced by ``evaluate`` on the problem as given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.intra_op.memory import memory_rows
from alpa_lite.intra_op.problem import Problem, Solution, Status, evaluate
from alpa_lite.intra_op.simplify import Simplified, simplify
from alpa_lite.intra_op.solvers.elimination import Elimination, EliminationPlan, cheapest_choices, elimination_plan
from alpa_lite.intra_op.solvers.integer_program import IntegerProgram
from alpa_lite.intra_op.solvers.lagrangian import (
    PricedMemory,
    largest_cost,
    price_memory,
    priced_problem,
    strategies_left,
)
from alpa_lite.intra_op.solvers.neighbourhood import neighbourhood_search
from alpa_lite.intra_op.solvers.peak import smallest_peak
from alpa_lite.intra_op.solvers.solver import Solver, better, no_solution, solution_of

_MAX_PRICE_DOUBLINGS = 16
_MAX_PEAK_SECONDS = 5.0
_MAX_PAIRS = 400_000
"""Integer programs with more pairs of strategies take longer to build than they are worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSolver(Solver):
    """Exact within the time limit; otherwise the best choices found, with a proven bound.

    ``relative_gap``: choices proven to be this close to the best are good enough (1e-3 saves most of the time when
    memory binds). ``heuristic_share``: the part of the time that memory prices or neighbourhood search may take.
    """

    elimination: Elimination = field(default_factory=Elimination)
    relative_gap: float = 0.0
    heuristic_share: float = 0.4

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0) -> Solution:
        """The best choices within the limit; INFEASIBLE carries the smallest peak that any choices reach."""
        started = time.perf_counter()
        deadline = started + time_limit_seconds
        free = self._solve_free(replace(problem, limit_bytes=None), deadline=deadline)
        if problem.limit_bytes is None or free.status is Status.INFEASIBLE:
            solution = free
        elif free.choices is not None and evaluate(problem, free.choices).feasible:
            solution = self._answer(problem, free.choices, bound=free.bound, started=started)
        else:
            solution = self._solve_limited(problem, deadline=deadline)
            if solution.choices is None and solution.status is Status.INFEASIBLE:
                peak_bytes = smallest_peak(problem, time_limit_seconds=min(_left(deadline), _MAX_PEAK_SECONDS))
                solution = replace(solution, peak_bytes=peak_bytes)
            elif free.bound > solution.bound:
                solution = replace(solution, bound=min(free.bound, solution.cost))
        return replace(solution, seconds=time.perf_counter() - started)

    def _answer(self, problem: Problem, choices: Sequence[int], *, bound: float, started: float) -> Solution:
        return solution_of(problem, choices, bound=bound, started=started, solver=self.name)

    def _infeasible(self, started: float) -> Solution:
        return no_solution(status=Status.INFEASIBLE, started=started, solver=self.name)

    def _good_enough(self, solution: Solution) -> bool:
        return solution.status is Status.OPTIMAL or solution.gap <= self.relative_gap

    def _solve_free(self, problem: Problem, *, deadline: float) -> Solution:
        """The best choices without a memory limit."""
        started = time.perf_counter()
        reduced = simplify(problem)
        if math.isinf(reduced.offset):
            return self._infeasible(started)
        plan = elimination_plan(reduced.problem)
        if self.elimination.fits(plan):
            choices = reduced.restore(cheapest_choices(reduced.problem, plan))
            return self._answer(problem, choices, bound=evaluate(problem, choices).cost, started=started)
        inner = self._solve_wide(reduced.problem, deadline=deadline)
        return self._restored(problem, reduced, inner, started=started)

    def _solve_limited(self, problem: Problem, *, deadline: float) -> Solution:
        """The best choices within the limit, when the free ones overrun it."""
        started = time.perf_counter()
        reduced = simplify(problem)
        if math.isinf(reduced.offset):
            return self._infeasible(started)
        plan = elimination_plan(reduced.problem)
        if self.elimination.fits(plan):
            inner = self._solve_priced(reduced.problem, plan, deadline=deadline)
        else:
            inner = self._solve_wide(reduced.problem, deadline=deadline)
        return self._restored(problem, reduced, inner, started=started)

    def _restored(self, problem: Problem, reduced: Simplified, inner: Solution, *, started: float) -> Solution:
        """The reduced problem's solution as one of ``problem``."""
        bound = inner.bound + reduced.offset
        if inner.choices is None:
            return replace(inner, bound=bound, solver=self.name)
        proven = inner.status is Status.OPTIMAL
        choices = reduced.restore(inner.choices)
        return solution_of(problem, choices, bound=bound, started=started, solver=self.name, proven=proven)

    def _solve_priced(self, problem: Problem, plan: EliminationPlan, *, deadline: float) -> Solution:
        """Bound and incumbent from memory prices, then the rest exactly."""
        started = time.perf_counter()
        priced = price_memory(
            problem,
            plan,
            deadline=started + self.heuristic_share * _left(deadline),
            relative_gap=self.relative_gap,
        )
        if priced.bound > largest_cost(problem):
            return self._infeasible(started)
        if priced.choices is None:
            return self._finish_exactly(problem, priced, started=started, deadline=deadline)
        incumbent = self._answer(problem, priced.choices, bound=priced.bound, started=started)
        if self._good_enough(incumbent):
            return incumbent
        left = strategies_left(problem, plan, priced, cutoff=priced.cost)
        node_costs = (np.where(mask, costs, np.inf) for mask, costs in zip(left, problem.node_costs, strict=True))
        core = replace(problem, node_costs=tuple(node_costs))
        exact = self._finish_exactly(core, priced, started=started, deadline=deadline)
        best = better(incumbent, exact)
        assert best.choices is not None
        bound = max(priced.bound, min(exact.bound, priced.cost))
        return self._answer(problem, best.choices, bound=bound, started=started)

    def _finish_exactly(self, core: Problem, priced: PricedMemory, *, started: float, deadline: float) -> Solution:
        """The integer program over the strategies that are left; its bound holds for choices among them."""
        reduced = simplify(core)
        if math.isinf(reduced.offset):
            return self._infeasible(started)
        program = IntegerProgram(relative_gap=self.relative_gap)
        inner = program.solve(reduced.problem, time_limit_seconds=_left(deadline))
        solution = self._restored(core, reduced, inner, started=started)
        return replace(solution, bound=max(solution.bound, min(priced.bound, solution.cost)))

    def _solve_wide(self, problem: Problem, *, deadline: float) -> Solution:
        """Neighbourhood search for choices, then the integer program for better ones and a bound."""
        started = time.perf_counter()
        choices = self._search(problem, deadline=started + self.heuristic_share * _left(deadline))
        found = None if choices is None else self._answer(problem, choices, bound=-math.inf, started=started)
        if sum(edge.costs.size for edge in problem.edges) > _MAX_PAIRS:
            bound = sum(float(array.min()) for array in (*problem.node_costs, *(e.costs for e in problem.edges)))
            if found is None:
                return no_solution(status=Status.TIME_LIMIT, started=started, solver=self.name, bound=bound)
            return replace(found, bound=bound)
        program = IntegerProgram(relative_gap=self.relative_gap)
        exact = program.solve(problem, time_limit_seconds=_left(deadline), start=choices)
        if found is None or found.choices is None:
            return exact
        best = better(found, exact)
        return replace(best, bound=min(exact.bound, best.cost))

    def _search(self, problem: Problem, *, deadline: float) -> tuple[int, ...] | None:
        """Good choices that fit: memory rows that are overrun get a price, doubled until they are not."""
        rows, prices = memory_rows(problem), dict[int, float]()
        limit = problem.limit_bytes or 0.0
        first_price = max(largest_cost(problem), 1e-300) / 16
        for rounds_left in range(_MAX_PRICE_DOUBLINGS if rows else 1, 0, -1):
            now = time.perf_counter()
            slice_end = now + max(deadline - now, 0.1) / min(rounds_left, 4 if rows else 1)
            choices = neighbourhood_search(priced_problem(problem, rows, prices), deadline=slice_end)
            if evaluate(problem, choices).feasible:
                return choices
            for index, row in enumerate(rows):
                if row.total(choices) > limit:
                    prices[index] = max(first_price, 2.0 * prices.get(index, 0.0))
        return None


def _left(deadline: float) -> float:
    """Seconds until the deadline; a little when it has passed, so that a last step can still answer."""
    return max(deadline - time.perf_counter(), 0.1)
