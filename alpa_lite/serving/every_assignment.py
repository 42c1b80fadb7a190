"""The cheapest workers of a small workflow by trying all: the twin of the integer program, for any prices of links.

For workers that are chosen, the price of traffic is linear in the loads of each operator alone, so that a cheapest
split is at a corner: all workers of an operator but one at full throughput, and the last with what remains (`_splits`).
Assignments whose workers alone cost as much as the best one so far are not completed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations

from alpa_lite.serving.exact_assignment import ExactAssignment
from alpa_lite.serving.serving_plan import link_cost, worker_cost
from alpa_lite.serving.workflow import ServingProblem

_ROUNDING = 1e-12


def cheapest_of_all(problem: ServingProblem, variants: Mapping[str, str]) -> ExactAssignment | None:
    """Return the cheapest assignment; None if there is none."""
    best: ExactAssignment | None = None

    def extend(number: int, loads: dict[str, dict[str, float]]) -> None:
        nonlocal best
        limit = math.inf if best is None else best.dollars_per_hour
        if number == len(problem.order):
            cost = worker_cost(problem, loads) + link_cost(problem, variants, loads)
            if cost < limit:
                best = ExactAssignment(loads=loads, dollars_per_hour=cost)
            return
        if worker_cost(problem, loads) >= limit:
            return
        name = problem.order[number]
        for split in _splits(problem, variants, loads, name):
            extend(number + 1, {**loads, name: split})

    extend(0, {})
    return best


def _splits(
    problem: ServingProblem, variants: Mapping[str, str], loads: Mapping[str, Mapping[str, float]], name: str
) -> Iterator[dict[str, float]]:
    """Yield the loads of an operator at which at most one of its workers is not at full throughput."""
    taken = {worker for given in loads.values() for worker in given}
    lowest = max(
        (problem.worker(worker).tier for each in problem.input_operators(name) for worker in loads[each]), default=0
    )
    variant, rate = problem.operator(name).variant(variants[name]), problem.rate(name)
    speeds = {
        each.name: variant.throughput(each.name)
        for each in problem.workers
        if each.name not in taken and each.tier >= lowest and each.name in variant.latency_ms
    }
    for size in range(len(speeds) + 1):
        for full in combinations(speeds, size):
            rest = rate - sum(speeds[each] for each in full)
            split = {each: speeds[each] for each in full}
            if abs(rest) <= _ROUNDING * rate:
                yield split
            elif rest > 0:
                yield from ({**split, last: rest} for last in speeds if last not in split and speeds[last] > rest)
