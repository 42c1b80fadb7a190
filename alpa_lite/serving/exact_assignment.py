"""The cheapest workers of a workflow whose models are chosen, as an integer program in PuLP, solved by HiGHS.

    x[v,w] in {0, 1}               worker w serves operator v
    0 <= y[v,w] <= capacity x[v,w] messages per second of v that w handles
    sum_w y[v,w] = rate(v)         all messages are handled
    sum_v x[v,w] <= 1              a worker serves one operator
    minimise  sum price(w) x[v,w] + sum over edges of their traffic's price

The price of an edge (u, v) is a product of shares of u and of v, which no linear program has. Each operator is
therefore bound to a range of tiers, none of which begins below the end of its inputs' (`tier_ranges`; only ranges that
are in no larger ones are needed, as a range allows its tiers and requires none). Between two ranges prices are usually
a sum

    price(a, b) = out(a) + in(b)                                                                    `_sums_of_prices`

as with two tiers, where one of the two ranges is a single tier, or with prices that add up from tier to tier. Shares
add up to one, so that every message of u on a pays out(a) and every message of v on b pays in(b), and the program is
exact. Other prices are refused; `every_assignment` finds the optimum of small problems with any prices.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alpa_lite.errors import PlanError
from alpa_lite.serving.serving_plan import link_cost, worker_cost
from alpa_lite.serving.workflow import ServingProblem, WorkflowEdge, gib_per_hour

if TYPE_CHECKING:
    # PuLP and HiGHS take 0.1 s to import; the functions below import them.
    import pulp

_TOLERANCE = 1e-9
_NOTHING = 1e-7
"""The share of an operator's messages below which a load is a rounding error of the solver."""

TierRanges = Mapping[str, tuple[int, int]]
"""The lowest and the highest tier of each operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAssignment:
    """The cheapest workers for some models.

    Attributes:
        loads: messages per second by operator and worker.
        dollars_per_hour: price of workers and traffic.
    """

    loads: Mapping[str, Mapping[str, float]]
    dollars_per_hour: float


def cheapest_assignment(
    problem: ServingProblem, variants: Mapping[str, str], *, below: float = math.inf
) -> ExactAssignment | None:
    """Return the cheapest assignment; None if there is none, or none that costs less than `below`.

    Raises `PlanError` where the prices of links do not add up.
    """
    best: ExactAssignment | None = None
    for ranges in tier_ranges(problem):
        limit = below if best is None else best.dollars_per_hour
        loads = _Program(problem, variants, ranges).minimum(limit)
        if loads is None:
            continue
        # Priced anew: the program's own objective carries the tolerances of the solver.
        cost = worker_cost(problem, loads) + link_cost(problem, variants, loads)
        if cost < limit:
            best = ExactAssignment(loads=loads, dollars_per_hour=cost)
    return best


def largest_rate(problem: ServingProblem, variants: Mapping[str, str]) -> float:
    """Return the largest multiple of the sources' rates that the workers handle with these models."""
    return max(_Program(problem, variants, ranges).maximum_rate() for ranges in tier_ranges(problem))


def tier_ranges(problem: ServingProblem) -> list[dict[str, tuple[int, int]]]:
    """Return the ranges of tiers that operators may lie on together, without those that are within others."""
    found = list(_ranges(problem, problem.order, {}))

    def within(small: TierRanges, large: TierRanges) -> bool:
        return small != large and all(large[v][0] <= low and high <= large[v][1] for v, (low, high) in small.items())

    return [each for each in found if not any(within(each, other) for other in found)]


def _ranges(
    problem: ServingProblem, names: Sequence[str], chosen: Mapping[str, tuple[int, int]]
) -> Iterator[dict[str, tuple[int, int]]]:
    if not names:
        yield dict(chosen)
        return
    low = max((chosen[each][1] for each in problem.input_operators(names[0])), default=0)
    for high in range(low, problem.num_tiers):
        yield from _ranges(problem, names[1:], {**chosen, names[0]: (low, high)})


class _Program:
    """The program for one choice of models and tiers."""

    def __init__(self, problem: ServingProblem, variants: Mapping[str, str], ranges: TierRanges) -> None:
        import pulp

        self._problem, self._variants = problem, variants
        self._program = pulp.LpProblem("serving", pulp.LpMinimize)
        self._capacity = {
            name: {
                worker.name: problem.operator(name).variant(variants[name]).throughput(worker.name)
                for worker in problem.workers
                if low <= worker.tier <= high
            }
            for name, (low, high) in ranges.items()
        }
        self._used: dict[tuple[str, str], pulp.LpVariable] = {}
        self._load: dict[tuple[str, str], pulp.LpVariable] = {}
        for number, (name, capacity) in enumerate(self._capacity.items()):
            for place, (worker, most) in enumerate(capacity.items()):
                if most <= 0:
                    continue
                # Shares of the rate instead of messages keep all numbers near one.
                used = self._program.add_variable(f"x_{number}_{place}", 0, 1, pulp.LpInteger)
                load = self._program.add_variable(f"y_{number}_{place}", 0, None, pulp.LpContinuous)
                self._used[name, worker], self._load[name, worker] = used, load
                self._program += load <= most / problem.rate(name) * used
        for worker in problem.workers:
            serving = [used for (_, name), used in self._used.items() if name == worker.name]
            if serving:
                self._program += pulp.lpSum(serving) <= 1

    def minimum(self, below: float) -> dict[str, dict[str, float]] | None:
        """Return the loads of the cheapest assignment; None if there is none that costs less than `below`."""
        import pulp

        for name in self._capacity:
            self._program += self._served(name) == 1
        cost = pulp.lpSum(
            self._problem.worker(worker).dollars_per_hour * used for (_, worker), used in self._used.items()
        ) + pulp.lpSum(map(self._edge_price, self._problem.edges))
        self._program.setObjective(cost)
        if below < math.inf:
            self._program += cost <= below
        if not self._solved():
            return None
        return {
            name: {
                worker: min((load.varValue or 0.0) * self._problem.rate(name), self._capacity[name][worker])
                for (v, worker), load in self._load.items()
                if v == name and (load.varValue or 0.0) > _NOTHING
            }
            for name in self._capacity
        }

    def maximum_rate(self) -> float:
        """Return the largest multiple of the rates that some assignment handles."""
        import pulp

        multiple = self._program.add_variable("multiple", 0, None, pulp.LpContinuous)
        for name in self._capacity:
            self._program += self._served(name) == multiple
        self._program.setObjective(-1 * multiple)
        return float(multiple.varValue or 0.0) if self._solved() else 0.0

    def _served(self, name: str) -> pulp.LpAffineExpression:
        import pulp

        return pulp.lpSum(load for (v, _), load in self._load.items() if v == name)

    def _solved(self) -> bool:
        import pulp

        solver = pulp.HiGHS(
            msg=False,
            gapRel=0.0,
            gapAbs=0.0,
            mip_feasibility_tolerance=_TOLERANCE,
            primal_feasibility_tolerance=_TOLERANCE,
            dual_feasibility_tolerance=_TOLERANCE,
        )
        self._program.solve(solver)
        return self._program.sol_status == pulp.LpSolutionOptimal

    def _edge_price(self, edge: WorkflowEdge) -> pulp.LpAffineExpression:
        """Return the dollars per hour of an edge."""
        import pulp

        problem, variants = self._problem, self._variants
        kib = edge.message_kib(variants.get(edge.sender, ""), variants[edge.receiver])
        traffic = gib_per_hour(problem.rate(edge.receiver), kib)
        receivers = [worker for name, worker in self._load if name == edge.receiver]
        if problem.is_source(edge.sender):
            return pulp.lpSum(
                problem.link_price(edge.sender, worker) * traffic * self._load[edge.receiver, worker]
                for worker in receivers
            )
        senders = [worker for name, worker in self._load if name == edge.sender]
        if not senders or not receivers:
            return pulp.lpSum([])
        out, into = _sums_of_prices(problem, edge, senders, receivers)
        return pulp.lpSum(
            price[worker] * traffic * self._load[name, worker]
            for name, price in ((edge.sender, out), (edge.receiver, into))
            for worker in price
        )


def _sums_of_prices(
    problem: ServingProblem, edge: WorkflowEdge, senders: Sequence[str], receivers: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return out(a) of all senders and in(b) of all receivers whose sums are the prices of links."""
    prices = {(a, b): problem.link_price(a, b) for a in senders for b in receivers}
    out = {a: prices[a, receivers[0]] for a in senders}
    into = {b: prices[senders[0], b] - prices[senders[0], receivers[0]] for b in receivers}
    if any(abs(prices[a, b] - out[a] - into[b]) > _TOLERANCE for a in senders for b in receivers):
        raise PlanError(
            f"{problem.name}: the prices of the links from {edge.sender} to {edge.receiver} are no sums of a price to "
            "leave a worker and one to reach a worker, which the integer program needs where both operators may lie on "
            "several tiers. Use the solver jellybean, or every-assignment for a small problem."
        )
    return out, into
