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


def test_many_neighbours_are_too_wide_for_arrays():
    star = tuple(Edge(source=u, target=v, costs=np.zeros((1, 1))) for u in range(40) for v in range(u))
    plan = elimination_plan(Problem.of(node_costs=(np.zeros(1),) * 40, edges=star))
    assert plan.largest_table == 1
    assert not Elimination().fits(plan)


def test_an_order_that_costs_too_much_is_given_up():
    clique = tuple(Edge(source=u, target=v, costs=np.eye(4)) for u in range(8) for v in range(u))
    problem = Problem.of(node_costs=(np.zeros(4),) * 8, edges=clique)
    assert elimination_plan(problem).total_entries > 4**8
    plan = elimination_plan(problem, 1000)
    assert plan.total_entries == np.inf
    assert not Elimination().fits(plan)
