"""Which times make memory rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Problem, evaluate
from alpa_lite.intra_op.reductions import maximal_rows, maximal_times, memory_rows
from tests.intra_op.instances import random_problem


def test_maximal_times():
    def maximal(*intervals: tuple[int, int]) -> list[int]:
        return maximal_times(np.array(intervals).reshape(-1, 2)).tolist()

    assert maximal() == []
    assert maximal((0, 9), (2, 4), (3, 5)) == [3]
    assert maximal((0, 2), (1, 3), (2, 4)) == [1, 2]  # half-open: 2 frees the first
    assert maximal((0, 1), (5, 6)) == [0, 5]


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
    assert memory_rows(Problem.of(node_costs=problem.node_costs, usages=problem.usages, limit_bytes=1e9)) == ()
    assert memory_rows(Problem.of(node_costs=problem.node_costs, limit_bytes=0.0)) == ()
