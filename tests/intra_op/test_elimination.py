"""Elimination orders and min-marginals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Edge, Problem
from alpa_lite.intra_op.solvers import BruteForce, Elimination
from alpa_lite.intra_op.solvers.elimination import elimination_plan, min_marginals
from tests.intra_op.instances import random_problem


def test_a_chain_has_small_tables_and_a_clique_large_ones():
    chain = tuple(Edge(source=node, target=node + 1, costs=np.eye(4)) for node in range(9))
    plan = elimination_plan(Problem(node_costs=(np.zeros(4),) * 10, edges=chain))
    assert plan.largest_table == 16
    assert sorted(plan.order) == list(range(10))
    clique = tuple(Edge(source=u, target=v, costs=np.eye(4)) for u in range(5) for v in range(u))
    assert elimination_plan(Problem(node_costs=(np.zeros(4),) * 5, edges=clique)).largest_table == 4**5


def test_many_neighbours_are_too_wide_for_arrays():
    star = tuple(Edge(source=u, target=v, costs=np.zeros((1, 1))) for u in range(40) for v in range(u))
    plan = elimination_plan(Problem(node_costs=(np.zeros(1),) * 40, edges=star))
    assert plan.largest_table == 1
    assert not Elimination().fits(plan)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_min_marginals_are_the_best_costs_with_one_choice_fixed(seed: int, num_nodes: int):
    problem = random_problem(seed, num_nodes=num_nodes, max_strategies=3)
    best = BruteForce().solve(problem)
    if best.choices is None:
        return
    marginals = min_marginals(problem, elimination_plan(problem))
    assert marginals.optimum == pytest.approx(best.cost)
    for node, costs in enumerate(problem.node_costs):
        for choice in range(costs.size):
            fixed = np.where(np.arange(costs.size) == choice, costs, np.inf)
            node_costs = (*problem.node_costs[:node], fixed, *problem.node_costs[node + 1 :])
            expected = BruteForce().solve(Problem(node_costs=node_costs, edges=problem.edges)).cost
            assert marginals.costs[node][choice] == pytest.approx(expected)
