"""What every solver owes: the optimum that enumeration finds, re-priced by ``evaluate``, with its status and bound."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Edge, Problem, Status, Usage, evaluate
from alpa_lite.intra_op.solvers import SOLVERS, BruteForce, Elimination, Portfolio, Solver, TooWide
from alpa_lite.intra_op.solvers.solver import closes
from tests.intra_op.instances import random_problem

TOO_WIDE = Portfolio(elimination=Elimination(max_table_entries=1))
"""Takes the path of problems too wide to eliminate."""

PARAMETERS = [
    *(pytest.param(solver, id=solver.name) for solver in SOLVERS if not isinstance(solver, BruteForce)),
    pytest.param(TOO_WIDE, id="Portfolio-wide"),
]


@pytest.mark.parametrize("solver", PARAMETERS)
@settings(max_examples=120)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 7),
    num_edges=st.integers(0, 14),
    tightness=st.sampled_from([None, 0.3, 0.4, 0.5]),
    scale=st.sampled_from([1.0, 1e-7, 1e4]),
)
def test_agrees_with_enumeration(
    solver: Solver, seed: int, num_nodes: int, num_edges: int, tightness: float | None, scale: float
):
    problem = random_problem(seed, num_nodes=num_nodes, num_edges=num_edges, tightness=tightness, scale=scale)
    expected = BruteForce().solve(problem)
    try:
        solution = solver.solve(problem, time_limit_seconds=20.0)
    except TooWide:
        assert isinstance(solver, Elimination)
        assert problem.limit_bytes is not None
        return
    assert solution.status is expected.status
    assert solution.seconds >= 0.0
    assert solution.solver == solver.name
    assert solution.peak_bytes == expected.peak_bytes or solution.choices is not None
    if solution.choices is None:
        assert solution.cost == solution.bound == solution.gap == math.inf
        return
    tolerance = 1e-9 * scale
    assert solution.cost == pytest.approx(expected.cost, rel=1e-9, abs=tolerance)
    assert expected.cost - 1e-6 * scale <= solution.bound <= solution.cost
    priced = evaluate(problem, solution.choices)
    assert priced.feasible
    assert (priced.cost, priced.peak_bytes) == (solution.cost, solution.peak_bytes)


@pytest.mark.parametrize("solver", [*PARAMETERS, pytest.param(BruteForce(), id="BruteForce")])
def test_edge_cases(solver: Solver):
    assert solver.solve(Problem.of(node_costs=())).choices == ()
    single = solver.solve(Problem.of(node_costs=(np.array([3.0, -1.0, np.inf]),), limit_bytes=0.0))
    assert (single.choices, single.cost, single.status) == ((1,), -1.0, Status.OPTIMAL)
    hopeless = solver.solve(Problem.of(node_costs=(np.array([np.inf]),)))
    assert (hopeless.status, hopeless.peak_bytes) == (Status.INFEASIBLE, math.inf)
    clash = Edge(source=0, target=1, costs=np.full((2, 2), np.inf))
    assert solver.solve(Problem.of(node_costs=(np.zeros(2),) * 2, edges=(clash,))).status is Status.INFEASIBLE


@pytest.mark.parametrize("solver", [*PARAMETERS, pytest.param(BruteForce(), id="BruteForce")])
def test_equal_calls_give_equal_answers(solver: Solver):
    problem = random_problem(3, num_nodes=6, num_edges=10, forbidden=0.0)
    assert solver.solve(problem).choices == solver.solve(problem).choices


@pytest.mark.parametrize("solver", [param for param in PARAMETERS if not isinstance(param.values[0], Elimination)])
def test_infeasible_says_how_much_memory_is_needed(solver: Solver):
    usages = tuple(Usage(node=node, bytes=np.array([8.0, 5.0]), start=0, end=2) for node in range(3))
    together = Edge(source=0, target=1, costs=np.array([[0.0, 1.0], [1.0, np.inf]]))
    problem = Problem.of(node_costs=(np.zeros(2),) * 3, edges=(together,), usages=usages, limit_bytes=10.0)
    solution = solver.solve(problem)
    assert (solution.status, solution.peak_bytes) == (Status.INFEASIBLE, 18.0)


def test_what_closes_the_gap():
    assert closes(1.0, 1.0 + 1e-12)
    assert not closes(1.0, 1.001)
    assert not closes(-math.inf, 1.0)


def test_brute_force_refuses_large_problems():
    with pytest.raises(ValueError, match="use Portfolio"):
        BruteForce().solve(Problem.of(node_costs=(np.zeros(10),) * 7))


def test_elimination_refuses_wide_problems_and_overruns():
    problem = random_problem(3, num_nodes=6, num_edges=15)
    with pytest.raises(TooWide, match="raise max_table_entries"):
        Elimination(max_table_entries=1).solve(problem)
    usage = Usage(node=0, bytes=np.array([9.0, 0.0]), start=0, end=1)
    with pytest.raises(TooWide, match="overrun the memory limit"):
        Elimination().solve(Problem.of(node_costs=(np.array([0.0, 1.0]),), usages=(usage,), limit_bytes=1.0))
