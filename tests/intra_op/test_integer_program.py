"""The integer program beyond what all solvers share."""

import numpy as np
import pytest

from alpa_lite.intra_op.problem import Edge, Problem, Status, Usage, evaluate
from alpa_lite.intra_op.solvers import Elimination, IntegerProgram
from alpa_lite.intra_op.solvers.integer_program import leanest_choices
from tests.intra_op.instances import random_problem


def frustrated(num_nodes: int, num_strategies: int) -> Problem:
    """Random costs on many cycles: far more than HiGHS can do at once."""
    rng = np.random.default_rng(0)
    pairs = [tuple(int(node) for node in rng.choice(num_nodes, 2, replace=False)) for _ in range(3 * num_nodes)]
    return Problem(
        node_costs=tuple(rng.random(num_strategies) for _ in range(num_nodes)),
        edges=tuple(Edge(source=u, target=v, costs=rng.random((num_strategies,) * 2)) for u, v in pairs),
    )


def test_out_of_time_keeps_the_start_and_a_bound():
    problem = frustrated(30, 8)
    start = (0,) * 30
    solution = IntegerProgram().solve(problem, time_limit_seconds=0.2, start=start)
    assert solution.status is Status.FEASIBLE
    assert solution.cost <= evaluate(problem, start).cost
    assert solution.bound < solution.cost


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


def test_the_limit_holds_to_the_byte():
    """Usages of many gigabytes: tolerances of the solver would let the limit slip by some bytes."""
    rng = np.random.default_rng(0)
    sizes = np.array([2.0**33 + 1, 2.0**33])
    usages = tuple(Usage(node=node, bytes=sizes, start=0, end=1) for node in range(6))
    costs = tuple(np.array([0.0, 1.0 + float(rng.random())]) for _ in range(6))
    problem = Problem(node_costs=costs, usages=usages, limit_bytes=6 * 2.0**33 + 3)
    solution = IntegerProgram().solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes == problem.limit_bytes
    assert solution.cost == pytest.approx(sum(sorted(float(own[1]) for own in costs)[:3]))


def test_leanest_choices():
    problem = random_problem(5, num_nodes=4, num_usages=8)
    choices = leanest_choices(problem, time_limit_seconds=10.0)
    assert choices is not None
    impossible = Problem(node_costs=(np.array([np.inf]),))
    assert leanest_choices(impossible, time_limit_seconds=1.0) is None
