"""Prices on memory: bounds are bounds, choices keep the limit, and both are close to the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intra_op.problem import Edge, Problem, Status, Usage, evaluate
from alpa_lite.intra_op.solvers.brute_force import BruteForce
from alpa_lite.intra_op.solvers.elimination import elimination_plan
from alpa_lite.intra_op.solvers.memory_search import PricedSearch
from alpa_lite.intra_op.solvers.solver import Clock, Control
from tests.intra_op.instances import random_problem


def _priced(problem: Problem) -> PricedSearch:
    search = PricedSearch(problem=problem, plan=elimination_plan(replace(problem, limit_bytes=None)))
    search.run(relative_gap=0.0, clock=Clock(seconds=10.0, control=Control()))
    return search


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds_and_the_choices_fit(seed: int) -> None:
    problem = random_problem(seed, num_nodes=5, num_edges=4, tightness=0.45, forbidden=0.0)
    best = BruteForce().solve(problem)
    search = _priced(problem)
    if best.status is Status.INFEASIBLE:
        assert search.choices is None and search.bound > -np.inf
        return
    assert search.bound <= best.cost + 1e-9
    if search.choices is not None:
        found = evaluate(problem, search.choices)
        assert found.feasible and found.cost == pytest.approx(search.cost) and search.cost >= best.cost - 1e-9


def test_many_small_items_leave_no_gap() -> None:
    """Items that are cheap and large, or dear and small: the limit holds half of the large ones."""
    rng = np.random.default_rng(0)
    savings, sizes = rng.uniform(1.0, 2.0, 200), rng.integers(50, 100, 200).astype(float)
    chain = [Edge(source=v, target=v + 1, costs=np.array([[0.0, 0.01], [0.01, 0.0]])) for v in range(199)]
    problem = Problem.of(
        node_costs=[np.array([0.0, saving]) for saving in savings],
        edges=chain,
        usages=[Usage(node=v, bytes=np.array([size, 0.0]), start=0, end=1) for v, size in enumerate(sizes)],
        limit_bytes=float(sizes.sum() / 2),
    )
    search = _priced(problem)
    # By value for size, the fractional optimum of the knapsack is the best that any choices can do but for the chain.
    order = np.argsort(-savings / sizes)
    kept = np.cumsum(sizes[order]) <= sizes.sum() / 2
    greedy = savings.sum() - savings[order][kept].sum()
    assert search.choices is not None and evaluate(problem, search.choices).feasible
    assert search.bound <= search.cost <= 1.02 * greedy
    assert search.bound >= 0.97 * greedy


@pytest.mark.parametrize("seed", range(10))
def test_a_search_that_goes_on_finds_what_one_in_a_single_run_does(seed: int) -> None:
    problem = random_problem(seed, num_nodes=8, num_edges=9, tightness=0.4, forbidden=0.0)
    plan, clock = elimination_plan(replace(problem, limit_bytes=None)), Clock(seconds=10.0, control=Control())
    once, twice = (PricedSearch(problem=problem, plan=plan) for _ in range(2))
    once.run(relative_gap=1e-3, clock=clock)
    for gap in (0.9, 0.1, 1e-3):
        twice.run(relative_gap=gap, clock=clock)
    assert (twice.choices, twice.cost, twice.bound) == (once.choices, once.cost, once.bound)
