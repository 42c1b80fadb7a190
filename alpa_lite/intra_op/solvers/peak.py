"""The smallest peak that choices of finite cost can reach: what to say when nothing fits the limit.

    start     x = argmin sum of b_v(x_v) (end - start) over the usages, allowed choices only      ``_leanest``
    descend   L = peak(x) - 1; x = argmin_x peak(x) among the allowed choices with peak(x) <= L;
              until there are none: then peak(x) was the smallest                                 ``smallest_peak``

Every cost is 0 or inf here, so that ``simplify`` under the limit L takes away whatever another strategy matches in
every interval, and little is left for the integer program.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from alpa_lite.intra_op.problem import Edge, FloatArray, Problem, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers.elimination import Elimination, cheapest_choices, elimination_plan
from alpa_lite.intra_op.solvers.integer_program import leanest_choices
from alpa_lite.intra_op.solvers.neighbourhood import neighbourhood_search


def _only_allowed(costs: FloatArray) -> FloatArray:
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _allowed_problem(problem: Problem) -> Problem:
    """``problem`` without limit, its finite costs at zero."""
    edges = (e for e in problem.edges if not np.isfinite(e.costs).all())
    return Problem(
        node_costs=tuple(_only_allowed(costs) for costs in problem.node_costs),
        edges=tuple(Edge(source=e.source, target=e.target, costs=_only_allowed(e.costs)) for e in edges),
        usages=problem.usages,
    )


def _leanest(problem: Problem, deadline: float) -> tuple[int, ...] | None:
    """Allowed choices of least bytes times lifetime; None if there are none (or none found when too wide)."""
    node_costs = list(problem.node_costs)
    for usage in problem.usages:
        node_costs[usage.node] = node_costs[usage.node] + usage.bytes * (usage.end - usage.start)
    reduced = simplify(replace(problem, node_costs=tuple(node_costs)))
    if math.isinf(reduced.offset):
        return None
    plan = elimination_plan(reduced.problem)
    if Elimination().fits(plan):
        return reduced.restore(cheapest_choices(reduced.problem, plan))
    choices = reduced.restore(neighbourhood_search(reduced.problem, deadline=deadline))
    return choices if evaluate(problem, choices).feasible else None


def smallest_peak(problem: Problem, *, time_limit_seconds: float) -> float:
    """The smallest peak in bytes of choices of finite cost, ``inf`` if there are none; best found when time is up."""
    deadline = time.perf_counter() + time_limit_seconds
    allowed = _allowed_problem(problem)
    choices = _leanest(allowed, deadline)
    peak_bytes = math.inf
    while choices is not None:
        peak_bytes = evaluate(allowed, choices).peak_bytes
        left = deadline - time.perf_counter()
        if peak_bytes == 0.0 or left <= 0.0:
            break
        reduced = simplify(replace(allowed, limit_bytes=peak_bytes - 1.0))
        if math.isinf(reduced.offset):
            break
        leaner = leanest_choices(reduced.problem, time_limit_seconds=left)
        choices = None if leaner is None else reduced.restore(leaner)
        if choices is not None and evaluate(allowed, choices).peak_bytes >= peak_bytes:
            break
    return peak_bytes
