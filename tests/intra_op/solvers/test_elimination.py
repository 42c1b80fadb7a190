"""Elimination orders."""

import numpy as np

from alpa_lite.intra_op.problem import Edge, Problem
from alpa_lite.intra_op.solvers import Elimination
from alpa_lite.intra_op.solvers.elimination import elimination_plan


def test_a_chain_has_small_tables_and_a_clique_large_ones():
    chain = tuple(Edge(source=node, target=node + 1, costs=np.eye(4)) for node in range(9))
    plan = elimination_plan(Problem.of(node_costs=(np.zeros(4),) * 10, edges=chain))
    assert plan.largest_table == 16
    assert sorted(plan.order) == list(range(10))
    clique = tuple(Edge(source=u, target=v, costs=np.eye(4)) for u in range(5) for v in range(u))
    assert elimination_plan(Problem.of(node_costs=(np.zeros(4),) * 5, edges=clique)).largest_table == 4**5


def test_a_node_may_have_more_neighbours_than_an_array_has_dims():
    clique = tuple(Edge(source=u, target=v, costs=np.ones((1, 1))) for u in range(70) for v in range(u))
    problem = Problem.of(node_costs=(np.zeros(1),) * 70, edges=clique)
    assert elimination_plan(problem).largest_table == 1
    assert Elimination().solve(problem).cost == len(clique)


def test_an_order_that_costs_too_much_is_given_up():
    clique = tuple(Edge(source=u, target=v, costs=np.eye(4)) for u in range(8) for v in range(u))
    problem = Problem.of(node_costs=(np.zeros(4),) * 8, edges=clique)
    assert elimination_plan(problem).total_entries > 4**8
    plan = elimination_plan(problem, max_total_entries=1000)
    assert plan.total_entries == np.inf
    assert not Elimination().fits(plan)
