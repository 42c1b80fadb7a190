"""The problem's sentences, and ``evaluate`` against a plain re-computation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Edge, Problem, Solution, Status, Usage, evaluate
from tests.intra_op.instances import random_problem


def two_nodes(**changes: object) -> Problem:
    parts: dict[str, object] = {
        "node_costs": (np.array([1.0, 2.0]), np.array([0.0, 5.0, np.inf])),
        "edges": (Edge(source=0, target=1, costs=np.array([[1.0, 0.0, 0.0], [np.inf, 3.0, 0.0]])),),
        "usages": (
            Usage(node=0, bytes=np.array([4.0, 1.0]), start=0, end=3),
            Usage(node=1, bytes=np.array([2.0, 2.5, 0.0]), start=2, end=4),
            Usage(node=1, bytes=np.array([6.0, 0.0, 0.0]), start=3, end=5),
        ),
        "limit_bytes": 7.0,
    }
    return Problem.of(**{**parts, **changes})  # type: ignore[arg-type]


def test_evaluate_by_hand():
    priced = evaluate(two_nodes(), (0, 1))
    assert (priced.cost, priced.peak_bytes, priced.feasible) == (6.0, 7.0, True)  # 2.5 bytes count as 3
    assert evaluate(two_nodes(), (0, 0)).peak_bytes == 8.0
    assert not evaluate(two_nodes(), (0, 0)).feasible
    assert evaluate(two_nodes(limit_bytes=None), (0, 0)).feasible
    assert not evaluate(two_nodes(limit_bytes=None), (1, 0)).feasible
    assert evaluate(two_nodes(usages=()), (0, 0)).peak_bytes == 0.0
    assert evaluate(Problem.of(node_costs=()), ()).cost == 0.0


@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_evaluate_is_the_plain_sum(seed: int, num_nodes: int, limited: bool):
    problem = random_problem(seed, num_nodes=num_nodes, tightness=0.4 if limited else None)
    choices = [seed % size for size in problem.num_strategies]
    cost = math.fsum(
        [problem.node_costs[node][choice] for node, choice in enumerate(choices)]
        + [edge.costs[choices[edge.source]][choices[edge.target]] for edge in problem.edges]
    )
    peak = max(
        sum(usage.bytes[choices[usage.node]] for usage in problem.usages if usage.start <= moment < usage.end)
        for moment in range(20)
    )
    priced = evaluate(problem, choices)
    assert priced.cost == pytest.approx(cost)
    assert priced.peak_bytes == peak
    assert priced.feasible == (math.isfinite(cost) and (problem.limit_bytes is None or peak <= problem.limit_bytes))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: two_nodes(node_costs=(np.zeros((2, 2)),)), r"Node 0 has costs of shape \(2, 2\)"),
        (lambda: two_nodes(node_costs=(np.array([]),)), "at least one strategy"),
        (lambda: two_nodes(node_costs=(np.array([np.nan]),)), "NaN or minus infinity"),
        (
            lambda: two_nodes(edges=(Edge(source=0, target=1, costs=np.full((2, 3), -np.inf)),)),
            r"edge \(0, 1\).*NaN or minus infinity",
        ),
        (lambda: two_nodes(edges=(Edge(source=0, target=2, costs=np.zeros((2, 1))),)), "nodes 0 to 1"),
        (lambda: two_nodes(edges=(Edge(source=0, target=0, costs=np.zeros((2, 2))),)), "joins a node to itself"),
        (lambda: two_nodes(edges=(Edge(source=1, target=0, costs=np.zeros((2, 3))),)), "one row per strategy"),
        (lambda: two_nodes(limit_bytes=-1.0), "memory limit is -1.0 bytes"),
        (lambda: two_nodes(limit_bytes=math.inf), "None for none"),
        (
            lambda: two_nodes(usages=(Usage(node=0, bytes=np.array([-1.0, 0.0]), start=0, end=1),)),
            "negative or non-finite",
        ),
        (lambda: two_nodes(usages=(Usage(node=0, bytes=np.ones(2), start=2, end=2),)), "which is empty"),
        (lambda: two_nodes(usages=(Usage(node=0, bytes=np.ones(3), start=0, end=1),)), "the node has 2 strategies"),
        (lambda: two_nodes(usages=(Usage(node=7, bytes=np.ones(3), start=0, end=1),)), "names node 7"),
        (lambda: evaluate(two_nodes(), (0,)), "1 choices were given for 2 nodes"),
        (lambda: evaluate(two_nodes(), (0, 3)), "strategies 0 to 2"),
        (lambda: evaluate(two_nodes(), (-1, 0)), "Choice -1"),
    ],
)
def test_bad_input_is_a_sentence(make, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_arrays_are_frozen_and_the_callers_stay_writable():
    mine = np.array([1.0, 2.0])
    problem = Problem.of(node_costs=(mine,))
    with pytest.raises(ValueError, match="read-only"):
        problem.node_costs[0][0] = 3.0
    mine[0] = 1.5
    assert problem.num_strategies == (2,)


def test_gap():
    def gap(cost: float, bound: float, choices: tuple[int, ...] | None = ()) -> float:
        return Solution(
            choices=choices, cost=cost, status=Status.FEASIBLE, bound=bound, seconds=0.0, solver="", peak_bytes=0.0
        ).gap

    assert gap(2.0, 1.0) == 0.5
    assert gap(2.0, 2.0) == gap(0.0, 0.0) == gap(-1.0, 0.0) == 0.0
    assert gap(2.0, -math.inf) == math.inf
    assert gap(math.inf, 1.0, None) == math.inf
