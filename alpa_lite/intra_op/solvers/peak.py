"""The smallest peak that choices of finite cost can reach: what to say when nothing fits the limit.

    start     x = argmin sum of b_v(x_v) (end - start) over the usages, allowed choices only      ``_leanest``
    small     minimise P with  sum_v b_vt(x_v) <= P  for all t, as an integer program             ``smallest_peak``
    large     halve the interval between the proven least and peak(x): any x with
              peak(x) <= L, or the proof that there is none                                       ``_halve``

Every cost is 0 or inf here, so that ``simplify`` under the limit L takes away whatever another strategy matches in
every interval, and little is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, Problem, Ragged, Solution, Status, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers.integer_program import leanest_choices

_MAX_PROGRAM_ENTRIES = 20_000

Solve = Callable[[Problem, float], Solution]
"""Solves a problem within so many seconds."""


def _only_allowed(vectors: Ragged) -> Ragged:
    return Ragged(values=np.where(np.isfinite(vectors.values), 0.0, np.inf), starts=vectors.starts)


def _allowed_problem(problem: Problem) -> Problem:
    """``problem`` without limit, its finite costs at zero."""
    node_costs, edge_costs = _only_allowed(problem.node_costs), _only_allowed(problem.edge_costs)
    return replace(problem, node_costs=node_costs, edge_costs=edge_costs, limit_bytes=None)


def _leanest(allowed: Problem, solve: Solve, seconds: float) -> tuple[int, ...] | None:
    """Allowed choices of little bytes times lifetime; None if there are none, or none were found."""
    costs: FloatArray = allowed.node_costs.values.copy()
    for usage in allowed.usages:
        first = allowed.node_costs.starts[usage.node]
        costs[first : first + usage.bytes.size] += usage.bytes * float(usage.end - usage.start)
    lean = replace(allowed, node_costs=Ragged(values=costs, starts=allowed.node_costs.starts))
    return solve(lean, seconds).choices


def smallest_peak(problem: Problem, *, solve: Solve, time_limit_seconds: float) -> float:
    """The smallest peak in bytes of choices of finite cost, ``inf`` if there are none; best found when time is up."""
    deadline = time.perf_counter() + time_limit_seconds
    allowed = _allowed_problem(problem)
    choices = _leanest(allowed, solve, time_limit_seconds / 2)
    if choices is None:
        return math.inf
    peak_bytes = evaluate(allowed, choices).peak_bytes
    reduced = simplify(replace(allowed, limit_bytes=max(peak_bytes - 1.0, 0.0)))
    if math.isinf(reduced.offset) or peak_bytes == 0.0:
        return peak_bytes
    left = max(deadline - time.perf_counter(), 0.1)
    if reduced.problem.edge_costs.values.size <= _MAX_PROGRAM_ENTRIES:
        leaner = leanest_choices(reduced.problem, time_limit_seconds=left)
        return peak_bytes if leaner is None else min(peak_bytes, evaluate(allowed, reduced.restore(leaner)).peak_bytes)
    return _halve(allowed, peak_bytes, solve, deadline)


def _halve(allowed: Problem, peak_bytes: float, solve: Solve, deadline: float) -> float:
    """From above, until nothing is left between what is reached and what is proven unreachable."""
    below = -1.0
    while peak_bytes - below > 1.0 and (left := deadline - time.perf_counter()) > 0.0:
        limit = math.floor((peak_bytes + max(below, 0.0)) / 2)
        found = solve(replace(allowed, limit_bytes=float(limit)), left)
        if found.choices is not None:
            peak_bytes = evaluate(allowed, found.choices).peak_bytes
        elif found.status is Status.INFEASIBLE:
            below = float(limit)
        else:
            break
    return peak_bytes
