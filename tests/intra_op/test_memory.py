"""Which times make memory rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.intra_op.memory import maximal_rows, maximal_times, memory_rows
from alpa_lite.intra_op.problem import Problem, Usage, evaluate
from tests.intra_op.instances import random_problem


def usage(start: int, end: int) -> Usage:
    return Usage(node=0, bytes=np.array([1.0]), start=start, end=end)


def test_maximal_times():
    assert maximal_times(()) == ()
    assert maximal_times((usage(0, 9), usage(2, 4), usage(3, 5))) == (3,)
    assert maximal_times((usage(0, 2), usage(1, 3), usage(2, 4))) == (1, 2)  # half-open: 2 frees the first
    assert maximal_times((usage(0, 1), usage(5, 6))) == (0, 5)


@given(st.integers(0, 10**6))
def test_the_rows_decide_the_peak(seed: int):
    problem = random_problem(seed, num_usages=8, tightness=0.4)
    choices = tuple(seed % size for size in problem.num_strategies)
    peak = evaluate(problem, choices).peak_bytes
    assert max(row.total(choices) for row in maximal_rows(problem)) == peak
    overrun = max((row.total(choices) for row in memory_rows(problem)), default=0.0) > problem.limit_bytes
    assert overrun == (peak > problem.limit_bytes)


def test_no_rows_without_limit_or_when_anything_fits():
    problem = random_problem(1)
    assert memory_rows(problem) == ()
    assert memory_rows(Problem(node_costs=problem.node_costs, usages=problem.usages, limit_bytes=1e9)) == ()
    assert memory_rows(Problem(node_costs=problem.node_costs, limit_bytes=0.0)) == ()
