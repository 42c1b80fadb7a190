"""The integer program beyond what all solvers share."""

import numpy as np
import pytest

from alpa_lite.intra_op.problem import Problem, Status, Usage
from alpa_lite.intra_op.solvers import Elimination, Highs, IntegerProgram, Solver
from alpa_lite.intra_op.solvers.integer_program import available_backends, leanest_choices
from tests.intra_op.instances import frustrated, random_problem


def test_out_of_time_without_anything():
    solution = IntegerProgram().solve(frustrated(30, 8), time_limit_seconds=0.0)
    assert solution.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    assert (solution.choices is None) == (solution.status is Status.TIME_LIMIT)


def test_relative_gap_is_honest():
    problem = frustrated(8, 4)
    best = Elimination().solve(problem).cost
    solution = IntegerProgram(relative_gap=0.5).solve(problem)
    assert solution.gap <= 0.5
    assert solution.bound <= best <= solution.cost


@pytest.mark.parametrize("solver", [IntegerProgram(), Highs()])
def test_the_limit_holds_to_the_byte(solver: Solver):
    """Usages of many gigabytes: tolerances of the solver would let the limit slip by some bytes."""
    rng = np.random.default_rng(0)
    sizes = np.array([2.0**33 + 1, 2.0**33])
    usages = tuple(Usage(node=node, bytes=sizes, start=0, end=1) for node in range(6))
    costs = tuple(np.array([0.0, 1.0 + float(rng.random())]) for _ in range(6))
    problem = Problem.of(node_costs=costs, usages=usages, limit_bytes=6 * 2.0**33 + 3)
    solution = solver.solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes == problem.limit_bytes
    assert solution.cost == pytest.approx(sum(sorted(float(own[1]) for own in costs)[:3]))


def test_leanest_choices():
    problem = random_problem(5, num_nodes=4, num_usages=8)
    choices = leanest_choices(problem, time_limit_seconds=10.0)
    assert choices is not None
    impossible = Problem.of(node_costs=(np.array([np.inf]),))
    assert leanest_choices(impossible, time_limit_seconds=1.0) is None


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("seed", range(8))
def test_every_solver_of_pulp_finds_the_optimum(backend: str, seed: int):
    problem = random_problem(seed, num_nodes=6, num_usages=6 if seed % 2 else 0)
    best, found = Highs().solve(problem), IntegerProgram(backend=backend).solve(problem)
    assert found.status is best.status
    if found.choices is not None:
        assert found.cost == pytest.approx(best.cost, rel=1e-6)
        assert found.bound <= best.cost * (1 + 1e-6)
