"""The smallest peak memory of choices of finite cost, for explanations when nothing fits the limit.

    start     x = argmin sum of b_v(x_v) (end - start) over the usages, allowed choices only      ``_start``
    small     minimise P with  sum_v b_vt(x_v) <= P  for all t, as an integer program             ``leanest``
    large     bisect the interval between the proven least and peak(x): any x with
              peak(x) <= L, or a proof that there is none                                         ``_halve``

Every cost is 0 or inf here, so that ``simplify`` under the limit L removes every strategy that another one matches in
every row, and little is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, Problem, Ragged, Solution, Status, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers.integer_program import leanest_choices

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
    """Return the smallest peak in bytes of choices of finite cost, ``inf`` if there are none; the best one when time
    is up.
    """
    return leanest(problem, solve=solve, time_limit_seconds=time_limit_seconds).peak_bytes


def leanest(problem: Problem, *, solve: Solve, time_limit_seconds: float) -> Leanest:
    """Return the choices of finite cost with the smallest peak, or the best ones when time is up; the limit is
    ignored.
    """
    deadline = time.perf_counter() + time_limit_seconds
    allowed = _allowed_problem(problem)
    first = _start(allowed, solve, time_limit_seconds / 2)
    if first.choices is None:
        bound = math.inf if first.status is Status.INFEASIBLE else 0.0
        return Leanest(choices=None, peak_bytes=math.inf, bound_bytes=bound)
    peak_bytes = evaluate(allowed, first.choices).peak_bytes
    found = Leanest(choices=first.choices, peak_bytes=peak_bytes, bound_bytes=0.0)
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
