"""Portfolio on synthetic training steps: the parts it combines, against the plain integer program."""

from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intra_op.problem import Edge, Problem, Solution, Status, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers import (
    BruteForce,
    Control,
    Elimination,
    IntegerProgram,
    Portfolio,
    SolveProgress,
    portfolio,
)
from alpa_lite.intra_op.solvers import (
    memory_search as peak_module,
)
from alpa_lite.intra_op.solvers.memory_search import smallest_peak
from alpa_lite.intra_op.solvers.solver import Clock
from tests.intra_op.instances import random_problem, training_step


@pytest.mark.parametrize("limit_fraction", [None, 0.8, 0.3])
def test_agrees_with_the_integer_program(limit_fraction: float | None):
    problem = training_step(num_layers=3, num_strategies=6, limit_fraction=limit_fraction)
    solution = Portfolio().solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.gap <= 1e-9
    assert solution.cost == pytest.approx(IntegerProgram().solve(problem).cost, rel=1e-9)


def test_a_slack_limit_costs_nothing():
    problem = training_step(num_layers=3, limit_fraction=1.0)
    assert Portfolio().solve(problem).cost == Portfolio().solve(training_step(num_layers=3)).cost


def test_relative_gap_is_enough():
    problem = training_step(num_layers=4, limit_fraction=0.3)
    best = Portfolio().solve(problem)
    near = Portfolio(relative_gap=0.05).solve(problem)
    assert near.gap <= 0.05
    assert near.bound <= best.cost <= near.cost


def test_a_problem_is_reduced_once(monkeypatch: pytest.MonkeyPatch):
    problem, reduced = training_step(num_layers=3, limit_fraction=0.5), []
    monkeypatch.setattr(portfolio, "simplify", lambda p, **options: reduced.append(p) or simplify(p, **options))
    solutions = [Portfolio(relative_gap=gap).solve(problem) for gap in (0.9, 1e-3)]
    assert len(reduced) == 1
    assert solutions[1].cost == Portfolio(relative_gap=1e-3).solve(replace(problem)).cost


PROGRAM_ONLY = Portfolio(elimination=Elimination(max_table_entries=1))
ROUNDS_ONLY = Portfolio(elimination=Elimination(max_table_entries=1), max_program_entries=0)


def test_too_wide_and_limited():
    problem = training_step(num_layers=2, num_strategies=5, limit_fraction=0.5)
    wide = PROGRAM_ONLY.solve(problem)
    assert wide.status is Status.OPTIMAL
    assert wide.cost == pytest.approx(Portfolio().solve(problem).cost, rel=1e-9)


@pytest.mark.parametrize("solver", [Portfolio(), PROGRAM_ONLY, ROUNDS_ONLY], ids=["priced", "program", "rounds"])
def test_the_gap_is_relative_to_all_costs(solver: Portfolio):
    # What reductions remove is a part of the answer's cost too: a problem of little else is solved at once.
    inner, gap = training_step(num_layers=4, num_strategies=6, limit_fraction=0.3), 1e-3
    fixed = 1000 * Portfolio().solve(inner).cost
    problem = Problem.of(
        node_costs=[*inner.node_costs, np.array([fixed])],
        edges=inner.edges,
        usages=inner.usages,
        limit_bytes=inner.limit_bytes,
    )
    found = replace(solver, relative_gap=gap).solve(problem, time_limit_seconds=10.0)
    assert found.status is Status.FEASIBLE
    assert found.gap <= gap
    assert found.cost - found.bound > gap * (found.cost - fixed)
    assert found.bound - fixed <= Portfolio().solve(inner).cost <= found.cost - fixed


def test_parts_share_the_gap_and_what_reductions_removed():
    clock = Clock(seconds=1.0, control=Control()).inside(90.0).of_one(3)
    # Three parts that cost 10 each, and 90 beside them: a tenth of the whole is 12, and of one part 4.
    assert clock.is_near(10.0, 6.001, 0.1)
    assert not clock.is_near(10.0, 5.999, 0.1)
    assert not clock.is_near(np.inf, -np.inf, 0.1)


def test_hardly_any_time_still_answers():
    problem = training_step(num_layers=4, limit_fraction=0.5)
    solution = Portfolio().solve(problem, time_limit_seconds=0.0)
    assert solution.choices is None or evaluate(problem, solution.choices).feasible


def test_equal_parts_are_solved_once_and_all_parts_count():
    def ring(seed: int) -> Problem:
        random = np.random.default_rng(seed)
        edges = [Edge(source=u, target=v, costs=random.random((4, 4))) for u in range(5) for v in range(u)]
        return Problem.of(node_costs=[random.random(4) for _ in range(5)], edges=edges)

    parts = [ring(0), ring(1), ring(0)]
    edges = [
        replace(edge, source=edge.source + 5 * number, target=edge.target + 5 * number)
        for number, part in enumerate(parts)
        for edge in part.edges
    ]
    together = Problem.of(node_costs=[costs for part in parts for costs in part.node_costs], edges=edges)
    doing: list[str] = []
    solution = PROGRAM_ONLY.solve(together, control=Control(report=lambda progress: doing.append(progress.doing)))
    assert solution.status is Status.OPTIMAL
    assert solution.cost == pytest.approx(sum(BruteForce().solve(part).cost for part in parts))
    assert solution.choices is not None
    assert solution.choices[:5] == solution.choices[10:]
    assert doing.count("integer program") == 2


def test_the_caller_may_stop_at_any_time():
    problem = training_step(num_layers=8, num_strategies=16, limit_fraction=0.2)
    reports: list[SolveProgress] = []
    control = Control(stop=lambda: len(reports) > 4, report=reports.append)
    solution = ROUNDS_ONLY.solve(problem, time_limit_seconds=1e6, control=control)
    assert len(reports) < 10
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert reports[-1].bound <= solution.cost


@pytest.mark.parametrize("seed", range(20))
def test_smallest_peak(seed: int, monkeypatch: pytest.MonkeyPatch):
    problem = random_problem(seed, num_nodes=4, num_usages=8)
    costs = [evaluate(problem, choices) for choices in np.ndindex(*problem.num_strategies)]
    expected = min((priced.peak_bytes for priced in costs if np.isfinite(priced.cost)), default=np.inf)

    def solve(part: Problem, seconds: float) -> Solution:
        return BruteForce().solve(part)

    assert smallest_peak(problem, solve=solve, time_limit_seconds=10.0) == expected
    with monkeypatch.context() as patch:
        patch.setattr(peak_module, "_MAX_PROGRAM_ENTRIES", -1)
        assert smallest_peak(problem, solve=solve, time_limit_seconds=10.0) == expected
