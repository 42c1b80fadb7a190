"""HiGHS on arrays beyond what all solvers share."""

import threading

from alpa_lite.intra_op.problem import Status, evaluate
from alpa_lite.intra_op.solvers import Control, Elimination, Highs
from tests.intra_op.instances import frustrated, training_step


def test_out_of_time_keeps_the_start_and_a_bound():
    problem = frustrated(30, 8)
    start = (0,) * 30
    solution = Highs().solve(problem, time_limit_seconds=0.5, start=start)
    assert solution.status is Status.FEASIBLE
    assert solution.cost <= evaluate(problem, start).cost
    assert solution.bound < solution.cost


def test_the_caller_may_stop_it():
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    solution = Highs().solve(frustrated(40, 10), time_limit_seconds=600.0, control=Control(stop=stopped.is_set))
    assert solution.seconds < 60.0
    assert solution.status in (Status.FEASIBLE, Status.TIME_LIMIT)


def test_relative_gap_is_honest():
    problem = frustrated(8, 4)
    best = Elimination().solve(problem).cost
    solution = Highs(relative_gap=0.5).solve(problem)
    assert solution.gap <= 0.5
    assert solution.bound <= best <= solution.cost


def test_memory_rows_enter_as_they_are_overrun():
    problem = training_step(num_layers=3, num_strategies=6, limit_fraction=0.3)
    solution = Highs().solve(problem)
    assert solution.status is Status.OPTIMAL
    assert evaluate(problem, solution.choices or ()).feasible
    assert solution.cost > Highs().solve(training_step(num_layers=3, num_strategies=6)).cost
