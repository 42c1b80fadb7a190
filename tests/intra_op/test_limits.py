"""Explanations of limits that are too low, and fronts of memory and time, against enumeration."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from alpa_lite.intra_op.limits import Infeasibility, Point, explain_infeasible, pareto_front
from alpa_lite.intra_op.problem import Edge, Problem, Status, Usage, evaluate, usage_over_time
from alpa_lite.intra_op.solvers import BruteForce, Highs, Portfolio, Solver
from tests.intra_op.instances import random_problem, training_step

SOLVERS: tuple[Solver | None, ...] = (None, BruteForce(), Highs())
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Peak and cost of some choices."""

    peak: float
    cost: float


def enumerated(problem: Problem) -> list[Priced]:
    """All choices of finite cost, by peak and cost."""
    priced = (evaluate(problem, choices) for choices in np.ndindex(*problem.num_strategies))
    finite = [Priced(peak=each.peak_bytes, cost=each.cost) for each in priced if math.isfinite(each.cost)]
    return sorted(finite, key=lambda each: (each.peak, each.cost))


def enumerated_front(problem: Problem) -> list[Priced]:
    front: list[Priced] = []
    for each in enumerated(problem):
        if not front or each.cost < front[-1].cost - TOLERANCE * abs(front[-1].cost):
            front.append(each)
    return front


def too_tight(seed: int) -> Problem:
    """A problem whose limit is a few bytes below what any choices of finite cost need, if there are any."""
    problem = random_problem(seed, num_nodes=4, num_edges=4, num_usages=8)
    least = min((each.peak for each in enumerated(problem)), default=0.0)
    return replace(problem, limit_bytes=max(least - 3.0, 0.0))


def two_nodes(limit_bytes: float | None = 10.0) -> Problem:
    return Problem.of(
        node_costs=(np.array([1.0, 4.0]), np.array([1.0, 2.0, np.inf])),
        usages=(
            Usage(node=0, bytes=np.array([30.0, 12.0]), start=0, end=3),
            Usage(node=1, bytes=np.array([20.0, 8.0, 0.0]), start=2, end=4),
            Usage(node=1, bytes=np.array([1.0, 1.0, 0.0]), start=0, end=9),
        ),
        limit_bytes=limit_bytes,
    )


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: "default" if solver is None else solver.name)
@pytest.mark.parametrize("seed", range(40))
def test_explanations_agree_with_enumeration(solver: Solver | None, seed: int):
    problem = too_tight(seed)
    explained, choices = explain_infeasible(problem, solver=solver), enumerated(problem)
    assert explained.impossible is (not choices)
    if not choices:
        assert (explained.smallest_limit_bytes, explained.cost, explained.nodes) == (math.inf, math.inf, ())
        return
    assert explained.choices is not None
    assert explained.proven
    assert explained.smallest_limit_bytes == choices[0].peak
    assert explained.cost == pytest.approx(choices[0].cost, rel=TOLERANCE, abs=TOLERANCE)
    assert explained.bound <= explained.cost
    priced = evaluate(problem, explained.choices)
    assert (priced.peak_bytes, priced.cost) == (explained.smallest_limit_bytes, explained.cost)
    assert explained.over_bytes == explained.smallest_limit_bytes - (problem.limit_bytes or 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_hold_what_is_used_at_the_worst_time(seed: int):
    problem = too_tight(seed)
    explained = explain_infeasible(problem)
    if explained.choices is None:
        return
    times, alive = usage_over_time(problem, explained.choices)
    assert explained.time is not None
    used = alive[np.searchsorted(times, explained.time, side="right") - 1]
    assert used == alive.max() == sum(each.bytes for each in explained.nodes)
    held = [each.bytes for each in explained.nodes]
    assert held == sorted(held, reverse=True)
    assert all(size > 0.0 for size in held)
    for each in explained.nodes:
        here = [u for u in problem.usages if u.node == each.node and u.start <= explained.time < u.end]
        assert each.bytes == sum(u.bytes[explained.choices[each.node]] for u in here)


def test_a_sentence_says_what_was_given_what_is_needed_and_what_to_do():
    explained = explain_infeasible(two_nodes())
    assert explained.sentence() == (
        "The limit is 10 bytes, but all choices of finite cost need at least 21 bytes. The cheapest choices that need "
        "no more overrun the limit by 11 bytes at time 2, when 12 bytes of node 0 and 9 bytes of node 1 are alive. "
        "Raise the limit to 21 bytes, where the best choices found cost 6 s, or make these smaller."
    )
    named = explained.sentence(name_of=["weights", "sums"].__getitem__, show_bytes="{:.1f} B".format, num_names=1)
    assert "12.0 B of weights and 9.0 B of 1 more are alive" in named


def test_a_sentence_claims_no_more_than_is_proven():
    unproven = replace(explain_infeasible(two_nodes()), bound_bytes=15.0)
    assert "but the leanest choices found need 21 bytes, and none can need less than 15 bytes." in unproven.sentence()
    assert "but the leanest choices found need 21 bytes. " in replace(unproven, bound_bytes=0.0).sentence()
    nothing = Infeasibility(limit_bytes=1.0, impossible=False, bound_bytes=0.0)
    assert nothing.sentence() == (
        "No choices of finite cost were found in the time; allow more time to learn what would fit."
    )


def test_limits_that_suffice():
    explained = explain_infeasible(two_nodes(limit_bytes=25.0))
    assert (explained.over_bytes, explained.smallest_limit_bytes) == (0.0, 21.0)
    assert explained.sentence() == "25 bytes suffice: there are choices that use at most 21 bytes."
    assert explain_infeasible(two_nodes(limit_bytes=None)).sentence().startswith("There is no limit: ")
    weightless = explain_infeasible(Problem.of(node_costs=(np.zeros(2),), limit_bytes=0.0))
    assert (weightless.smallest_limit_bytes, weightless.time, weightless.nodes) == (0.0, None, ())


def forbidding(*finite: list[list[int]], nodes: tuple[tuple[int, int], ...]) -> Problem:
    """Three nodes of two strategies; edges of which only some entries are finite."""
    return Problem.of(
        node_costs=(np.zeros(2),) * 3,
        edges=tuple(
            Edge(source=u, target=v, costs=np.where(np.array(allowed) == 1, 0.0, np.inf))
            for (u, v), allowed in zip(nodes, finite, strict=True)
        ),
        limit_bytes=5.0,
    )


def test_what_no_memory_helps():
    node = explain_infeasible(Problem.of(node_costs=(np.zeros(1), np.full(2, np.inf)), limit_bytes=5.0))
    assert (node.impossible, node.conflict) == (True, (1,))
    assert node.sentence(name_of="op {}".format) == (
        "No choices have finite cost, with however much memory: op 1 has no strategy of finite cost; give it one."
    )
    clash = explain_infeasible(forbidding([[0, 0], [0, 0]], nodes=((0, 2),)))
    assert (clash.impossible, clash.conflict) == (True, (0, 2))
    assert "node 0 and node 2 have no pair of strategies left" in clash.sentence()
    far = explain_infeasible(forbidding([[0, 0], [0, 1]], [[1, 0], [0, 0]], nodes=((0, 1), (1, 2))))
    assert (far.impossible, far.conflict) == (True, (1, 2))
    equal, unequal = [[1, 0], [0, 1]], [[0, 1], [1, 0]]
    cycle = explain_infeasible(forbidding(equal, equal, unequal, nodes=((0, 1), (1, 2), (2, 0))))
    assert (cycle.impossible, cycle.conflict) == (True, ())
    assert "no combination of them" in cycle.sentence()


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: "default" if solver is None else solver.name)
@pytest.mark.parametrize("seed", range(30))
def test_fronts_agree_with_enumeration(solver: Solver | None, seed: int):
    problem = replace(random_problem(seed, num_nodes=4, num_edges=3, num_usages=8), limit_bytes=1.0)
    front, expected = pareto_front(problem, num_points=1000, solver=solver), enumerated_front(problem)
    assert [point.peak_bytes for point in front] == [each.peak for each in expected]
    for point, each in zip(front, expected, strict=True):
        assert point.cost == pytest.approx(each.cost, rel=TOLERANCE, abs=TOLERANCE)
        assert_point(problem, point)
        assert point.status is Status.OPTIMAL


def assert_point(problem: Problem, point: Point) -> None:
    priced = evaluate(replace(problem, limit_bytes=point.limit_bytes), point.choices)
    assert priced.feasible
    assert (priced.peak_bytes, priced.cost) == (point.peak_bytes, point.cost)
    assert point.bound <= point.cost


def test_a_few_points_of_a_long_front():
    problem = training_step(num_layers=2, num_strategies=5)
    few, ends = pareto_front(problem, num_points=5), pareto_front(problem, num_points=2)
    assert (len(few), len(ends)) == (5, 2)
    for front in (few, ends):
        for point in front:
            assert_point(problem, point)
        assert all(a.peak_bytes < b.peak_bytes and a.cost > b.cost for a, b in pairwise(front))
        assert front[0].limit_bytes == front[0].peak_bytes == explain_infeasible(problem).smallest_limit_bytes
        assert front[-1].cost == pytest.approx(Portfolio().solve(problem).cost, rel=TOLERANCE)


def test_fronts_of_one_point_and_of_none():
    free = Problem.of(node_costs=(np.array([2.0, 1.0]),))
    (only,) = pareto_front(free)
    assert (only.peak_bytes, only.cost, only.choices) == (0.0, 1.0, (1,))
    assert pareto_front(Problem.of(node_costs=(np.array([np.inf]),))) == ()
    with pytest.raises(ValueError, match="its two ends are the least"):
        pareto_front(free, num_points=1)


def test_little_time_gives_less_but_nothing_wrong():
    problem = replace(training_step(num_layers=6, num_strategies=12), limit_bytes=5e7)
    for solver, seconds in ((Highs(), 0.5), (Highs(), 1e-3)):
        explained = explain_infeasible(problem, solver=solver, time_limit_seconds=seconds)
        assert explained.bound_bytes <= explained.smallest_limit_bytes
        assert explained.bound <= explained.cost
        assert explained.choices is not None or "in the time" in explained.sentence()
        if explained.choices is not None:
            assert evaluate(problem, explained.choices).peak_bytes == explained.smallest_limit_bytes
        for point in pareto_front(problem, solver=solver, time_limit_seconds=seconds):
            assert_point(problem, point)
