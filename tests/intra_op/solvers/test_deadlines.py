"""The solver's time: something feasible comes first, and no step of it goes on for long once the time is up."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Edge, Problem, Status, evaluate
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solvers import Control, Elimination, IntegerProgram, Portfolio, Rounds, TooWide
from alpa_lite.intra_op.solvers.dual import Dual
from alpa_lite.intra_op.solvers.elimination import cheapest_choices, elimination_plan
from alpa_lite.intra_op.solvers.flat_problem import flat_problem
from alpa_lite.intra_op.solvers.neighbourhood import Neighbourhood
from alpa_lite.intra_op.solvers.solver import no_halt
from tests.intra_op.instances import random_problem, training_step

HANGS_SECONDS = 60.0
"""No bar: what goes on for so long has not looked at the clock."""


def greedy_descent_with_repair(problem: Problem, sweeps: int = 30) -> tuple[int, ...] | None:
    """One node after the other takes the strategy that leaves least forbidden, then least overrun, then least cost."""
    limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
    node_costs, edges = list(problem.node_costs), list(problem.edges)
    times = sorted({start for start, _ in problem.usage_times.tolist()})
    usages = list(problem.usages)

    def badness(choices: list[int]) -> tuple[float, float, float]:
        terms = [float(costs[choice]) for costs, choice in zip(node_costs, choices, strict=True)]
        terms += [float(edge.costs[choices[edge.source], choices[edge.target]]) for edge in edges]
        used = [
            sum(float(usage.bytes[choices[usage.node]]) for usage in usages if usage.start <= moment < usage.end)
            for moment in times
        ]
        finite = [term for term in terms if math.isfinite(term)]
        return len(terms) - len(finite), sum(max(0.0, amount - limit) for amount in used), sum(finite)

    choices = [0] * problem.num_nodes
    best = badness(choices)
    for _ in range(sweeps):
        before = best
        for node, size in enumerate(problem.num_strategies):
            for choice in range(size):
                tried = [*choices[:node], choice, *choices[node + 1 :]]
                if (found := badness(tried)) < best:
                    choices, best = tried, found
        if best == before:
            break
    return tuple(choices) if best[:2] == (0, 0.0) else None


SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"num_nodes": 9, "num_edges": 36},
    "sparse": {"num_nodes": 14, "num_edges": 10},
    "tight memory": {"num_nodes": 10, "num_edges": 12, "num_usages": 20, "tightness": 0.35},
    "infinities": {"num_nodes": 10, "num_edges": 14, "forbidden": 0.6},
    "many strategies": {"num_nodes": 6, "num_edges": 9, "max_strategies": 25},
}


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), seconds=st.sampled_from([0.0, 1e-3, 0.02, 0.3]))
def test_there_is_an_answer_where_greedy_descent_has_one(shape: str, seed: int, seconds: float) -> None:
    problem = random_problem(seed, **SHAPES[shape])
    greedy = greedy_descent_with_repair(problem)
    if greedy is None:
        return
    assert evaluate(problem, greedy).feasible
    for solver in (Portfolio(), Portfolio(max_program_entries=0, elimination=Elimination(max_table_entries=0))):
        found = solver.solve(problem, time_limit_seconds=seconds)
        assert found.choices is not None and evaluate(problem, found.choices).feasible, (solver, found)
        assert found.bound <= found.cost <= evaluate(problem, greedy).cost or found.status is Status.FEASIBLE


def with_hubs(num_nodes: int, num_hubs: int, num_strategies: int = 4) -> Problem:
    """A chain, each node of which is joined to one of a few nodes that have thousands of neighbours."""
    rng = np.random.default_rng(0)
    pairs = [(node, node + 1) for node in range(num_nodes - 1)]
    pairs += [(node, num_nodes + int(rng.integers(num_hubs))) for node in range(num_nodes)]
    pairs += [(num_nodes + first, num_nodes + second) for first in range(num_hubs) for second in range(first)]
    return Problem.of(
        node_costs=[rng.random(num_strategies) for _ in range(num_nodes + num_hubs)],
        edges=[Edge(source=u, target=v, costs=rng.random((num_strategies,) * 2)) for u, v in pairs],
    )


def test_orders_of_nodes_with_thousands_of_neighbours_are_soon_found() -> None:
    problem, began = with_hubs(20_000, 40), time.perf_counter()
    assert Elimination().plan(problem).total_entries == math.inf
    assert time.perf_counter() - began < HANGS_SECONDS
    with pytest.raises(TooWide, match="more than"):
        Elimination().solve(problem)


def test_an_order_avoids_tables_that_are_too_large() -> None:
    """The hub goes last, when its neighbours are gone."""
    leaves = [Edge(source=0, target=leaf, costs=np.ones((4, 4))) for leaf in range(1, 30)]
    problem = Problem.of(node_costs=[np.zeros(4)] * 30, edges=leaves)
    assert elimination_plan(problem, max_table_entries=16).largest_table == 16
    assert elimination_plan(problem, max_table_entries=15).largest_table == math.inf


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_large_instances_are_answered_in_hardly_any_time(seconds: float) -> None:
    problem, began = with_hubs(20_000, 40), time.perf_counter()
    found = Portfolio().solve(problem, time_limit_seconds=seconds)
    assert found.status is Status.FEASIBLE and evaluate(problem, found.choices or ()).feasible
    assert time.perf_counter() - began < HANGS_SECONDS


def test_whoever_stops_it_gets_the_best_so_far_at_any_time() -> None:
    problem = training_step(num_layers=20, limit_fraction=0.5)
    for after in (0.0, 0.05, 0.5, 2.0):
        began = time.perf_counter()
        control = Control(stop=lambda began=began, after=after: time.perf_counter() - began > after)
        solver = Portfolio(rounds=Rounds(max_rounds=10**9), max_program_entries=0)
        found = solver.solve(problem, time_limit_seconds=HANGS_SECONDS, control=control)
        assert found.choices is not None and evaluate(problem, found.choices).feasible
        assert time.perf_counter() - began < HANGS_SECONDS / 2


def test_reductions_that_are_stopped_change_nothing_or_are_right() -> None:
    problem = random_problem(4, num_nodes=12, num_edges=16, num_usages=8, tightness=0.8)
    best = Portfolio().solve(problem)
    assert best.status is Status.OPTIMAL
    for ticks in range(0, 120, 3):
        left = iter(range(ticks))
        reduced = simplify(problem, stop=lambda left=left: next(left, None) is None)
        found = Portfolio().solve(reduced.problem)
        assert found.choices is not None
        assert evaluate(problem, reduced.restore(found.choices)).cost == pytest.approx(best.cost)


def test_a_program_that_is_too_large_is_refused_before_it_is_written_down() -> None:
    problem, began = with_hubs(20_000, 40, num_strategies=8), time.perf_counter()
    with pytest.raises(ValueError, match="use Portfolio or Highs, or raise max_entries"):
        IntegerProgram().solve(problem, time_limit_seconds=1.0)
    assert time.perf_counter() - began < HANGS_SECONDS


def test_compiled_loops_end_at_a_halt() -> None:
    """Each would go on for days."""
    flat = flat_problem(training_step(num_layers=2))
    halt = no_halt()
    halt[0] = 1
    search, dual = Neighbourhood(flat=flat, seed=0, halt=halt), Dual(flat=flat, halt=halt)
    start = np.zeros(flat.cost_start.size - 1, dtype=np.int64)
    search.run(start, np.zeros(flat.room.size), num_blocks=10**12, first_heat=0.0, last_heat=0.0)
    dual.run(10**12, upper=1.0)
    assert math.isinf(dual.bound)


def test_large_eliminations_look_at_the_clock() -> None:
    """A grid whose tables take some seconds."""
    width, size = 5, 12
    edges = [
        Edge(source=width * row + column, target=width * row + column + step, costs=np.ones((size, size)))
        for row in range(30)
        for column in range(width)
        for step in ((1,) if column + 1 < width else ()) + ((width,) if row + 1 < 30 else ())
    ]
    problem = Problem.of(node_costs=[np.zeros(size)] * (30 * width), edges=edges)
    plan, began = Elimination().plan(problem), time.perf_counter()
    assert plan.total_entries > 1e7
    looks = iter(range(2))
    assert cheapest_choices(plan, problem.node_costs.values, problem.edge_costs.values, over=lambda: True) is None
    solved = cheapest_choices(
        plan, problem.node_costs.values, problem.edge_costs.values, over=lambda: next(looks, None) is None
    )
    assert solved is None and time.perf_counter() - began < HANGS_SECONDS
