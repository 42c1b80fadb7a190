"""AutoSolver on synthetic training steps: the parts it combines, against the plain integer program."""

import time

import numpy as np
import pytest

from alpa_lite.intra_op.memory import memory_rows
from alpa_lite.intra_op.problem import Status, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers import AutoSolver, Elimination, IntegerProgram
from alpa_lite.intra_op.solvers.elimination import elimination_plan
from alpa_lite.intra_op.solvers.lagrangian import price_memory, strategies_left
from alpa_lite.intra_op.solvers.neighbourhood import neighbourhood_search
from alpa_lite.intra_op.solvers.peak import smallest_peak
from tests.intra_op.instances import random_problem, training_step


@pytest.mark.parametrize("limit_fraction", [None, 0.8, 0.3])
def test_agrees_with_the_integer_program(limit_fraction: float | None):
    problem = training_step(num_layers=3, num_strategies=6, limit_fraction=limit_fraction)
    solution = AutoSolver().solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.gap <= 1e-9
    assert solution.cost == pytest.approx(IntegerProgram().solve(problem).cost, rel=1e-9)


def test_a_slack_limit_costs_nothing():
    problem = training_step(num_layers=3, limit_fraction=1.0)
    assert AutoSolver().solve(problem).cost == AutoSolver().solve(training_step(num_layers=3)).cost


def test_relative_gap_is_enough():
    problem = training_step(num_layers=4, limit_fraction=0.3)
    best = AutoSolver().solve(problem)
    near = AutoSolver(relative_gap=0.05).solve(problem)
    assert near.gap <= 0.05
    assert near.bound <= best.cost <= near.cost


def test_too_wide_and_limited():
    problem = training_step(num_layers=2, num_strategies=5, limit_fraction=0.5)
    wide = AutoSolver(elimination=Elimination(max_table_entries=1)).solve(problem)
    assert wide.status is Status.OPTIMAL
    assert wide.cost == pytest.approx(AutoSolver().solve(problem).cost, rel=1e-9)


def test_hardly_any_time_still_answers():
    problem = training_step(num_layers=4, limit_fraction=0.5)
    solution = AutoSolver().solve(problem, time_limit_seconds=0.0)
    assert solution.choices is None or evaluate(problem, solution.choices).feasible


def test_prices_bound_the_optimum_and_keep_it():
    problem = simplify(training_step(num_layers=3, num_strategies=6, limit_fraction=0.3)).problem
    assert memory_rows(problem)
    best = IntegerProgram().solve(problem)
    assert best.choices is not None
    plan = elimination_plan(problem)
    priced = price_memory(problem, plan, deadline=time.perf_counter() + 20.0)
    assert priced.bound <= best.cost * (1 + 1e-9)
    assert priced.bound >= best.cost * 0.9
    assert priced.choices is not None
    assert priced.cost == evaluate(problem, priced.choices).cost >= best.cost * (1 - 1e-9)
    near = price_memory(problem, plan, deadline=time.perf_counter() + 20.0, relative_gap=0.5)
    assert near.choices is not None
    left = strategies_left(problem, plan, priced, cutoff=priced.cost)
    assert all(mask[choice] for mask, choice in zip(left, best.choices, strict=True))
    assert sum(int(mask.sum()) for mask in left) < 0.7 * sum(problem.num_strategies)


def test_neighbourhood_search_comes_close():
    problem = training_step(num_layers=4)
    choices = neighbourhood_search(problem, deadline=time.perf_counter() + 20.0)
    assert evaluate(problem, choices).cost <= 1.02 * AutoSolver().solve(problem).cost


@pytest.mark.parametrize("seed", range(20))
def test_smallest_peak(seed: int):
    problem = random_problem(seed, num_nodes=4, num_usages=8)
    costs = [evaluate(problem, choices) for choices in np.ndindex(*problem.num_strategies)]
    expected = min((priced.peak_bytes for priced in costs if np.isfinite(priced.cost)), default=np.inf)
    assert smallest_peak(problem, time_limit_seconds=10.0) == expected
