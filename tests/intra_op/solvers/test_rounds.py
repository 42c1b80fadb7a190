"""The search of large problems and its tools: bounds that hold, answers that fit, against enumeration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Edge, Problem, Solution, Status, Usage, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers import BruteForce, Elimination, Highs, IntegerProgram, Portfolio, Rounds
from alpa_lite.intra_op.solvers.dual import Dual
from alpa_lite.intra_op.solvers.flat_problem import (
    cost_of,
    flat_problem,
    overrun_of,
    usage_of,
    with_finite_costs,
    with_rows,
)
from alpa_lite.intra_op.solvers.improvements import recombine
from alpa_lite.intra_op.solvers.neighbourhood import Neighbourhood
from alpa_lite.intra_op.solvers.solver import Attempt, largest_cost, no_solution, smallest_cost
from tests.intra_op.instances import random_problem, training_step

FORBIDDEN = 1e6


def rounds_only(**options: object) -> Portfolio:
    """A portfolio that has nothing but its search."""
    options.setdefault("max_rounds", 12)
    return Portfolio(
        elimination=Elimination(max_table_entries=1),
        max_program_entries=0,
        rounds=Rounds(**options),  # type: ignore[arg-type]
    )


def test_kernels_compile_ahead():
    """In a process of its own, where nothing else has compiled them."""
    program = """
from alpa_lite.intra_op.solvers import compile_kernels, dual, flat_problem, neighbourhood
compile_kernels.compile_kernels()
called = (dual._pass, dual._price, dual._prefix_sums, dual._bounds_by_strategy, neighbourhood._search,
          flat_problem.add_usage, flat_problem.usage_of, flat_problem.cost_of)
print([each.__name__ for each in called if not each.signatures])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(2, 7),
    num_edges=st.integers(1, 14),
    tightness=st.sampled_from([None, 0.4, 0.5, 0.7]),
)
def test_bounds_hold_and_answers_fit(seed: int, num_nodes: int, num_edges: int, tightness: float | None):
    problem = random_problem(seed, num_nodes=num_nodes, num_edges=num_edges, tightness=tightness)
    expected = BruteForce().solve(problem)
    solution = rounds_only().solve(problem)
    if expected.choices is None:
        assert solution.choices is None
        return
    assert solution.status is not Status.INFEASIBLE
    assert solution.bound <= expected.cost + 1e-9
    if solution.choices is not None:
        assert evaluate(problem, solution.choices).feasible
        assert solution.cost >= expected.cost - 1e-9
        if solution.status is Status.OPTIMAL:
            assert solution.cost == pytest.approx(expected.cost)


@pytest.mark.parametrize("limit_fraction", [None, 0.6, 0.2])
def test_the_search_comes_close(limit_fraction: float | None):
    problem = training_step(num_layers=4, num_strategies=8, limit_fraction=limit_fraction)
    best = IntegerProgram(relative_gap=1e-3).solve(problem)
    solution = rounds_only(max_rounds=60).solve(problem)
    assert solution.cost <= best.cost * 1.01
    assert best.bound * 0.95 <= solution.bound <= best.cost


def test_equal_seeds_and_rounds_give_equal_answers():
    problem = training_step(num_layers=6, limit_fraction=0.3)
    first, second, other = (rounds_only(seed=seed).solve(problem) for seed in (1, 1, 2))
    assert (first.choices, first.bound) == (second.choices, second.bound)
    assert other.cost <= first.cost * 1.05
    alone = rounds_only(seed=1, num_threads=1).solve(problem)
    assert alone.cost <= first.cost * 1.05


@given(st.integers(0, 10**6))
def test_flat_arrays_say_what_the_problem_says(seed: int):
    problem = random_problem(seed, num_nodes=6, num_edges=9, num_usages=8, tightness=0.4, forbidden=0.0)
    choices = np.array([seed % size for size in problem.num_strategies])
    flat = flat_problem(problem)
    priced = evaluate(problem, choices.tolist())
    assert cost_of(flat, choices) == pytest.approx(priced.cost)
    over = overrun_of(flat, choices)
    assert (over > 0.0).any() == (priced.peak_bytes > problem.limit_bytes)
    if over.size and over.max() > 0.0:
        assert problem.limit_bytes + over.max() == priced.peak_bytes
    some = np.arange(0, over.size, 2)
    assert overrun_of(with_rows(flat, some), choices).tolist() == over[some].tolist()
    if np.isfinite(priced.cost):
        assert smallest_cost(problem) - 1e-9 <= priced.cost <= largest_cost(problem) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 0.4, 0.6]))
def test_strategies_of_the_best_choices_are_never_fixed_away(seed: int, tightness: float | None):
    problem = random_problem(seed, num_nodes=6, num_edges=10, tightness=tightness, forbidden=0.0)
    best = BruteForce().solve(problem)
    if best.choices is None:
        return
    dual = Dual(flat=with_finite_costs(flat_problem(problem), FORBIDDEN))
    dual.run(60, upper=best.cost)
    assert dual.bound <= best.cost + 1e-9
    left = dual.strategies_left(best.cost)
    starts = problem.node_costs.starts[:-1]
    assert left[starts + np.array(best.choices)].all()


def test_messages_find_the_optimum_of_a_tree_and_fix_the_rest():
    random = np.random.default_rng(3)
    problem = random_problem(3, num_nodes=30, num_edges=0, forbidden=0.0)
    edges = [
        (node // 2, node, random.random((problem.num_strategies[node // 2], problem.num_strategies[node])))
        for node in range(1, 30)
    ]
    tree = replace(
        problem,
        edge_nodes=np.array([(source, target) for source, target, _ in edges]),
        edge_costs=type(problem.edge_costs).of(costs for _, _, costs in edges),
    )
    reduced = simplify(tree)
    dual = Dual(flat=flat_problem(tree))
    dual.run(20, upper=reduced.offset)
    assert dual.bound == pytest.approx(reduced.offset)
    assert cost_of(dual.flat, dual.choices) == pytest.approx(reduced.offset)
    left = np.add.reduceat(dual.strategies_left(reduced.offset).astype(int), tree.node_costs.starts[:-1])
    assert (left >= 1).all()
    assert left.sum() < 0.6 * tree.node_costs.values.size
    dual.run(20, upper=reduced.offset)
    assert dual.converged


def _limited_step() -> tuple[Problem, float]:
    problem = training_step(num_layers=4, num_strategies=8, limit_fraction=0.4)
    return problem, 2.0 * largest_cost(problem)


def test_search_ends_within_the_limit_from_where_it_is_overrun():
    problem, forbidden = _limited_step()
    flat = with_finite_costs(flat_problem(problem), forbidden)
    greedy = {usage.node: int(usage.bytes.argmax()) for usage in problem.usages}
    start = np.array([greedy[node] for node in range(problem.num_nodes)])
    assert overrun_of(flat, start).max() > 0.0
    search = Neighbourhood(flat=flat, seed=0)
    at = start
    for _ in range(20):
        at = search.run(at, np.zeros(flat.room.size), num_blocks=500, first_heat=0.0, last_heat=0.0)
    assert search.best is not None
    priced = evaluate(problem, search.best.tolist())
    assert priced.feasible
    assert priced.cost == pytest.approx(search.best_cost)
    used = np.zeros(flat.room.size)
    usage_of(flat, search.best, used)
    assert (used <= flat.room).all()


def test_heat_leaves_where_search_is_and_never_loses_the_best():
    problem, forbidden = _limited_step()
    flat = with_finite_costs(flat_problem(problem), forbidden)
    search = Neighbourhood(flat=flat, seed=0)
    at = np.array([costs.argmin() for costs in problem.node_costs])
    for _ in range(20):
        at = search.run(at, np.zeros(flat.room.size), num_blocks=500, first_heat=0.0, last_heat=0.0)
    before = search.best_cost
    hot = search.run(at, np.zeros(flat.room.size), num_blocks=500, first_heat=before, last_heat=before)
    assert cost_of(flat, hot) > before
    assert search.best_cost <= before
    assert evaluate(problem, search.best.tolist()).feasible  # type: ignore[union-attr]


def test_search_never_leaves_the_limit_again():
    problem, forbidden = _limited_step()
    flat = with_finite_costs(flat_problem(problem), forbidden)
    search = Neighbourhood(flat=flat, seed=0)
    at = np.array([costs.argmin() for costs in problem.node_costs])
    while search.best is None:
        at = search.run(at, np.zeros(flat.room.size), num_blocks=200, first_heat=0.0, last_heat=0.0)
    search._rows.update(range(flat.room.size))  # rows count once they were overrun: make that all
    heat = search.best_cost / 10.0
    at = search.run(search.best, np.zeros(flat.room.size), num_blocks=300, first_heat=heat, last_heat=heat)
    assert (at != search.best).any()
    assert (overrun_of(flat, at) <= 0.0).all()


@given(st.integers(0, 10**6))
def test_recombined_choices_take_the_better_of_both(seed: int):
    problem = random_problem(seed, num_nodes=7, num_edges=6, tightness=0.7, forbidden=0.0)
    random = np.random.default_rng(seed)
    first, second = (np.array([random.integers(size) for size in problem.num_strategies]) for _ in range(2))
    flat = flat_problem(problem)
    if not evaluate(problem, first.tolist()).feasible:
        return
    result = recombine(problem, flat, first, second)
    assert ((result == first) | (result == second)).all()
    priced = evaluate(problem, result.tolist())
    assert priced.feasible
    assert priced.cost <= evaluate(problem, first.tolist()).cost + 1e-9
    if problem.num_nodes and (overrun_of(flat, second) <= 0.0).all() and flat.room.size == 0:
        assert priced.cost <= evaluate(problem, second.tolist()).cost + 1e-9


def test_recombined_choices_stay_within_the_limit():
    """Two parts would each save, the larger more; together they do not fit."""
    problem = Problem.of(
        node_costs=[np.array([5.0, 0.0]), np.array([9.0, 0.0]), np.array([4.0, 0.0])],
        usages=[Usage(node=node, bytes=np.array([0.0, 6.0]), start=0, end=1) for node in range(3)],
        limit_bytes=13.0,
    )
    lean, rich = np.array([0, 0, 0]), np.array([1, 1, 1])
    assert recombine(problem, flat_problem(problem), lean, rich).tolist() == [1, 1, 0]


@pytest.mark.parametrize("finishes", [True, False])
def test_what_fixing_leaves_is_finished_by_a_program(monkeypatch: pytest.MonkeyPatch, finishes: bool):
    """If the program proves the best, so is the answer; if it runs out of time, the bound is what it was."""
    problem = simplify(training_step(num_layers=4, num_strategies=8, limit_fraction=0.6)).problem
    sizes: list[int] = []
    search = Highs.search

    def searched(self: Highs, problem: Problem, *, time_limit_seconds: float, **options: object) -> Solution:
        sizes.append(problem.edge_costs.values.size)
        if finishes:
            return search(self, problem, time_limit_seconds=60.0)
        return no_solution(Attempt(solver=self.name, started=0.0), status=Status.TIME_LIMIT)

    monkeypatch.setattr(Highs, "search", searched)
    solver = replace(rounds_only(max_rounds=24), max_program_entries=problem.edge_costs.values.size - 1)
    solution = solver.solve(problem)
    assert sizes
    assert max(sizes) < problem.edge_costs.values.size
    monkeypatch.undo()
    best = Highs().solve(problem)
    assert (solution.status is Status.OPTIMAL) == finishes
    assert solution.cost == pytest.approx(best.cost, rel=1e-9 if finishes else 0.02)
    if not finishes:
        assert solution.bound < best.cost


@pytest.mark.parametrize("limit", [40.0, 60.0])
def test_problems_without_costs_are_a_matter_of_memory(limit: float):
    """Twelve nodes of at least four bytes each: 48 in all."""
    random = np.random.default_rng(0)
    nodes = range(12)
    problem = Problem.of(
        node_costs=[np.zeros(4)] * 12,
        edges=[
            Edge(source=u, target=v, costs=np.where(random.random((4, 4)) < 0.2, np.inf, 0.0))
            for u in nodes
            for v in range(u)
            if (u + v) % 3 == 0
        ],
        usages=[Usage(node=node, bytes=np.array([9.0, 4.0, 7.0, 4.0]), start=0, end=2) for node in nodes],
        limit_bytes=limit,
    )
    solution = rounds_only(max_rounds=40).solve(problem)
    if limit < 48.0:
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.choices is not None
        assert solution.cost == 0.0
