"""Exhaustive enumeration: the reference that the other solvers are tested against.

    x_v(k) = (k // prod_(w > v) S_w) mod S_v   for k = 0 ... prod_v S_v - 1     ``_all_choices``
    cost(k) = sum_v c_v(x_v(k)) + sum_(u,v) C_uv(x_u(k), x_v(k))                 ``_all_costs``
    peak(k) = max_t sum of b_v(x_v(k)) over the usages alive at t                ``_all_peaks``

The answer is the feasible k of least cost; all arrays have one entry per k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem, Solution, Status
from alpa_lite.intra_op.solvers.solver import Attempt, Control, Solver, no_solution, solution_of


def _all_choices(problem: Problem, count: int) -> list[IntArray]:
    index = np.arange(count, dtype=np.intp)
    columns: list[IntArray] = []
    # The last node changes fastest, as the digits of a number do.
    for size in reversed(problem.num_strategies):
        index, column = np.divmod(index, size)
        columns.append(column)
    return columns[::-1]


def _all_costs(problem: Problem, choices: list[IntArray], count: int) -> FloatArray:
    costs = np.zeros(count)
    for node_costs, column in zip(problem.node_costs, choices, strict=True):
        costs += node_costs[column]
    for edge in problem.edges:
        costs += edge.costs[choices[edge.source], choices[edge.target]]
    return costs


def _all_peaks(problem: Problem, choices: list[IntArray], count: int) -> FloatArray:
    peaks = np.zeros(count)
    # Usage grows only where a usage starts, so that the peak is at one of these times.
    for moment in sorted({usage.start for usage in problem.usages}):
        alive = np.zeros(count)
        for usage in problem.usages:
            if usage.start <= moment < usage.end:
                alive += usage.bytes[choices[usage.node]]
        np.maximum(peaks, alive, out=peaks)
    return peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteForce(Solver):
    """Solver that enumerates all combinations; it refuses problems with more than ``max_combinations``."""

    max_combinations: int = 2_000_000

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        """Return the best of all combinations. The time limit is ignored, since ``max_combinations`` bounds the time.

        Raises ValueError when there are more combinations than that.
        """
        attempt = Attempt(solver=self.name)
        count = math.prod(problem.num_strategies)
        if count > self.max_combinations:
            raise ValueError(
                f"The problem has {count:.3g} combinations of strategies and BruteForce tries at most "
                f"{self.max_combinations:.3g}; use Portfolio, or raise max_combinations."
            )
        choices = _all_choices(problem, count)
        costs = _all_costs(problem, choices, count)
        peaks = _all_peaks(problem, choices, count)
        finite = np.isfinite(costs)
        limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
        feasible = finite & (peaks <= limit)
        if not feasible.any():
            # The limit that would suffice is reported, so that forbidden choices must not lower it.
            smallest = float(peaks[finite].min()) if finite.any() else math.inf
            return no_solution(attempt, status=Status.INFEASIBLE, peak_bytes=smallest)
        best = int(np.where(feasible, costs, math.inf).argmin())
        answer = [int(column[best]) for column in choices]
        return solution_of(problem, answer, attempt, bound=float(costs[best]), proven=True)
