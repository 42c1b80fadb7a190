"""Blocks of nodes solved exactly: never worse, never over the limit, and the optimum where a block is everything."""

from __future__ import annotations

import numpy as np
import pytest

from alpa_lite.intra_op.problem import IntArray, Problem, evaluate
from alpa_lite.intra_op.solvers import BruteForce
from alpa_lite.intra_op.solvers.flat_problem import flat_problem, with_finite_costs
from alpa_lite.intra_op.solvers.improvements import ExactBlocks
from alpa_lite.intra_op.solvers.portfolio import choices_in_haste
from alpa_lite.intra_op.solvers.solver import Control, cost_span
from tests.intra_op.instances import random_problem, training_step


def blocks_of(problem: Problem, seed: int = 0) -> ExactBlocks:
    flat = with_finite_costs(flat_problem(problem), 2.0 * cost_span(problem))
    return ExactBlocks(flat=flat, seed=seed, stop=lambda: False, seconds_left=lambda: 60.0)


def first_of(problem: Problem) -> IntArray:
    choices = choices_in_haste(problem, seconds=5.0, control=Control())
    assert choices is not None
    return np.array(choices)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("tightness", [None, 0.5, 0.8])
def test_a_block_of_all_nodes_is_the_optimum(seed: int, tightness: float | None) -> None:
    problem = random_problem(seed, num_nodes=7, num_edges=12, num_usages=9, tightness=tightness)
    best = BruteForce().solve(problem)
    if best.choices is None:
        return
    found = blocks_of(problem).improve(first_of(problem), 30)
    priced = evaluate(problem, found.tolist())
    # Parts that no edge joins are never in one block, unless a row is: 30 blocks come to each of them.
    assert priced.feasible and priced.cost == pytest.approx(best.cost)


@pytest.mark.parametrize("limit_fraction", [None, 0.1, 0.5])
def test_choices_get_no_worse_and_keep_the_limit(limit_fraction: float | None) -> None:
    problem = training_step(num_layers=6, limit_fraction=limit_fraction)
    blocks, choices = blocks_of(problem), first_of(problem)
    first = cost = evaluate(problem, choices.tolist()).cost
    for _ in range(6):
        choices = blocks.improve(choices, 4)
        priced = evaluate(problem, choices.tolist())
        assert priced.feasible and priced.cost <= cost * (1 + 1e-12)
        cost = priced.cost
    assert cost < first


def test_equal_seeds_give_equal_answers() -> None:
    problem = training_step(num_layers=4, limit_fraction=0.4)
    start = first_of(problem)
    one, other = (blocks_of(problem, seed=3).improve(start, 10) for _ in range(2))
    assert np.array_equal(one, other)
