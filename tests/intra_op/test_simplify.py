"""Every reduction keeps the optimum and can be undone: against enumeration, and one by one on cases made for them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.intra_op.problem import Edge, Problem, Ragged, Status, Usage, evaluate
from alpa_lite.intra_op.reductions import RangeMaximum
from alpa_lite.intra_op.simplify import _min_plus, simplify
from alpa_lite.intra_op.solvers import BruteForce, Portfolio
from alpa_lite.intra_op.solvers.highs import Highs
from tests.intra_op.instances import random_problem, training_step

TIGHTNESS = st.sampled_from([None, None, 0.3, 0.4, 0.5, 0.7])


@settings(max_examples=400)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 7),
    num_edges=st.integers(0, 12),
    tightness=TIGHTNESS,
    scale=st.sampled_from([1.0, 1e-7]),
)
def test_the_optimum_is_kept(seed: int, num_nodes: int, num_edges: int, tightness: float | None, scale: float):
    problem = random_problem(seed, num_nodes=num_nodes, num_edges=num_edges, tightness=tightness, scale=scale)
    expected = BruteForce().solve(problem)
    reduced = simplify(problem)
    if math.isinf(reduced.offset):
        assert expected.choices is None
        return
    found = BruteForce().solve(reduced.problem)
    assert (found.choices is None) == (expected.choices is None)
    if found.choices is None:
        return
    restored = evaluate(problem, reduced.restore(found.choices))
    assert restored.feasible
    assert restored.cost == pytest.approx(expected.cost, rel=1e-9, abs=1e-12 * scale)
    assert found.cost + reduced.offset == pytest.approx(expected.cost, rel=1e-9, abs=1e-12 * scale)


@given(seed=st.integers(0, 10**6), tightness=TIGHTNESS)
def test_any_choices_cost_the_offset_more(seed: int, tightness: float | None):
    problem = random_problem(seed, num_nodes=6, num_edges=14, tightness=tightness, forbidden=0.0)
    reduced = simplify(problem)
    if math.isinf(reduced.offset):
        return
    choices = [seed % size for size in reduced.problem.num_strategies]
    inner = evaluate(reduced.problem, choices)
    outer = evaluate(problem, reduced.restore(choices))
    assert outer.cost == pytest.approx(inner.cost + reduced.offset, rel=1e-9, abs=1e-9)
    assert outer.feasible == inner.feasible


def triangle(costs: np.ndarray, *, node_costs: np.ndarray, **rest: object) -> Problem:
    """Four nodes, all joined: nothing but the node's own reduction applies."""
    edges = tuple(Edge(source=u, target=v, costs=costs) for u in range(4) for v in range(u + 1, 4))
    return Problem.of(node_costs=(node_costs,) * 4, edges=edges, **rest)  # type: ignore[arg-type]


HARD = np.random.default_rng(0).random((3, 3))


def test_a_problem_without_structure_stays():
    reduced = simplify(triangle(HARD, node_costs=np.zeros(3)))
    assert reduced.nodes == (0, 1, 2, 3)
    assert len(reduced.problem.edge_costs) == 6
    assert reduced.offset == 0.0


def test_parallel_edges_merge():
    problem = triangle(HARD, node_costs=np.zeros(3))
    doubled = Problem.of(node_costs=problem.node_costs, edges=[*problem.edges] * 2)
    assert len(simplify(doubled).problem.edge_costs) == 6


def test_separable_edges_vanish():
    costs = np.array([1.0, 2.0, 5.0])[:, None] + np.array([0.0, 3.0, 1.0])[None, :]
    reduced = simplify(triangle(costs, node_costs=np.array([0.0, 2.0, 7.0])))
    assert reduced.nodes == ()
    assert reduced.offset == BruteForce().solve(triangle(costs, node_costs=np.array([0.0, 2.0, 7.0]))).cost


def test_forbidden_strategies_go_and_an_empty_node_proves_infeasibility():
    matching = triangle(-np.eye(4), node_costs=np.array([0.0, np.inf, 0.0, 0.0]))
    assert simplify(matching).problem.num_strategies == (3,) * 4
    assert simplify(triangle(np.full((3, 3), np.inf), node_costs=np.zeros(3))).offset == math.inf
    with pytest.raises(ValueError, match="no feasible choices"):
        simplify(triangle(np.full((3, 3), np.inf), node_costs=np.zeros(3))).restore(())


def test_a_node_that_follows_another_joins_it():
    follow = np.where(np.eye(3)[[2, 0, 1]] > 0, HARD, np.inf)
    problem = triangle(HARD, node_costs=np.zeros(3))
    edges = (Edge(source=0, target=1, costs=follow), *list(problem.edges)[1:])
    reduced = simplify(Problem.of(node_costs=problem.node_costs, edges=edges))
    assert reduced.nodes == ()  # three nodes left, then degree 2
    choices = reduced.restore(())
    assert choices[1] == [2, 0, 1][choices[0]]


def test_dominated_strategies_go():
    worse = np.vstack([HARD, HARD[0] + 0.1])
    problem = triangle(HARD, node_costs=np.zeros(3))
    edges = tuple(Edge(source=0, target=e.target, costs=worse) if e.source == 0 else e for e in problem.edges)
    costs = (np.zeros(4), *list(problem.node_costs)[1:])
    assert simplify(Problem.of(node_costs=costs, edges=edges)).problem.num_strategies == (3,) * 4
    lean = (Usage(node=0, bytes=np.array([5.0, 5.0, 5.0, 2.0]), start=0, end=1),)
    lean += tuple(Usage(node=node, bytes=np.array([5.0, 1.0, 3.0]), start=0, end=1) for node in (1, 2, 3))
    limited = Problem.of(node_costs=costs, edges=edges, usages=lean, limit_bytes=12.0)
    assert simplify(limited).problem.num_strategies == (4, 3, 3, 3)


def test_equal_costs_with_other_bytes_are_another_node():
    """Of two equal triangles one is limited, so that its strategy that is worse but leaner stays."""
    worse = np.vstack([HARD, HARD[0] + 0.1])
    edges = [
        Edge(source=e.source, target=e.target, costs=e.costs) for e in triangle(HARD, node_costs=np.zeros(3)).edges
    ]
    edges = [replace(e, costs=worse) if e.source == 0 else e for e in edges]
    costs = [np.zeros(4), *[np.zeros(3)] * 3]
    again = [replace(e, source=e.source + 4, target=e.target + 4) for e in edges]
    lean = [Usage(node=4, bytes=np.array([5.0, 5.0, 5.0, 2.0]), start=0, end=1)]
    lean += [Usage(node=node, bytes=np.array([5.0, 1.0, 3.0]), start=0, end=1) for node in (5, 6, 7)]
    problem = Problem.of(node_costs=costs * 2, edges=edges + again, usages=lean, limit_bytes=12.0)
    reduced = simplify(problem)
    assert dict(zip(reduced.nodes, reduced.problem.num_strategies, strict=True)) == {
        **dict.fromkeys(range(4), 3), 4: 4, **dict.fromkeys(range(5, 8), 3),
    }  # fmt: skip


def test_strategies_that_cannot_fit_go():
    usages = tuple(Usage(node=node, bytes=np.array([5.0, 1.0, 3.0]), start=0, end=1) for node in range(4))
    assert (
        simplify(triangle(HARD, node_costs=np.zeros(3), usages=usages, limit_bytes=6.0)).problem.num_strategies
        == (2,) * 4
    )
    assert simplify(triangle(HARD, node_costs=np.zeros(3), usages=usages, limit_bytes=3.0)).offset == math.inf


def test_what_is_left_by_the_last_reductions_must_fit_too():
    problem = random_problem(1108, max_strategies=3, num_edges=5, num_usages=9)
    least = BruteForce().solve(replace(problem, limit_bytes=0.0)).peak_bytes
    zero = Ragged(
        values=np.where(np.isfinite(problem.node_costs.values), 0.0, np.inf), starts=problem.node_costs.starts
    )
    pairs = Ragged(
        values=np.where(np.isfinite(problem.edge_costs.values), 0.0, np.inf), starts=problem.edge_costs.starts
    )
    allowed = replace(problem, node_costs=zero, edge_costs=pairs, limit_bytes=least - 1.0)
    assert BruteForce().solve(allowed).choices is None
    assert math.isinf(simplify(allowed).offset)


def test_stopping_early_forgets_no_memory():
    usage = Usage(node=0, bytes=np.array([6.0, 6.0]), start=0, end=1)
    problem = Problem.of(node_costs=(np.zeros(2),), usages=(usage,), limit_bytes=5.0)
    assert simplify(problem, stop=lambda: True).problem is problem


@pytest.mark.parametrize("fixed", [(5.0, 9.0), (9.0, 5.0), (9.0, 9.0)])
def test_of_rows_that_hold_the_same_nodes_the_fullest_stays(fixed: tuple[float, float]):
    """Four nodes live throughout; two more, with one strategy each, come and go."""
    usages = [Usage(node=node, bytes=np.array([5.0, 1.0, 3.0]), start=0, end=9) for node in range(4)]
    usages += [Usage(node=4, bytes=np.array([fixed[0]]), start=2, end=4)]
    usages += [Usage(node=5, bytes=np.array([fixed[1]]), start=6, end=8)]
    problem = triangle(HARD, node_costs=np.zeros(3))
    limited = Problem.of(
        node_costs=[*problem.node_costs, np.zeros(1), np.zeros(1)],
        edges=problem.edges,
        usages=usages,
        limit_bytes=18.0,
    )
    reduced = simplify(limited)
    assert reduced.problem.usage_times.max() == 1
    found = BruteForce().solve(reduced.problem)
    assert found.choices is not None
    assert evaluate(limited, reduced.restore(found.choices)).feasible
    assert found.cost + reduced.offset == pytest.approx(BruteForce().solve(limited).cost)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_the_maximum_over_any_interval(seed: int, size: int):
    random = np.random.default_rng(seed)
    values = random.random(size)
    intervals = np.sort(random.integers(0, size, (20, 2)), axis=1) + np.array([0, 1])
    expected = [values[first:last].max() for first, last in intervals]
    assert RangeMaximum(values).of(intervals).tolist() == expected


def test_chains_and_trees_are_solved_outright():
    rng = np.random.default_rng(1)
    edges = tuple(Edge(source=node // 2, target=node, costs=rng.random((6, 6))) for node in range(1, 60))
    problem = Problem.of(node_costs=tuple(rng.random(6) for _ in range(60)), edges=edges)
    reduced = simplify(problem)
    assert reduced.nodes == ()
    assert evaluate(problem, reduced.restore(())).cost == pytest.approx(reduced.offset)


def test_a_training_step_shrinks():
    problem = training_step(num_layers=4)
    reduced = simplify(problem)
    assert len(reduced.nodes) < 0.7 * len(problem.node_costs)
    assert reduced.problem.usage_nodes.size == 0


def equal_layers(num_layers: int) -> Problem:
    """Layers that a stream and a mask cross: node 0 is the mask, 1 the stream; a layer is two nodes and its end."""
    rng = np.random.default_rng(3)
    inside = [rng.random(4) for _ in range(3)]
    pairs = {pair: rng.random((4, 4)) for pair in [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)]}
    to_mask, node_costs, edges = rng.random((4, 4)), [rng.random(4), inside[2]], list[Edge]()
    for _ in range(num_layers):
        first = len(node_costs) - 1
        node_costs += inside
        edges += [Edge(source=first + a, target=first + b, costs=costs) for (a, b), costs in pairs.items()]
        edges.append(Edge(source=0, target=first + 1, costs=to_mask))
    return Problem.of(node_costs=node_costs, edges=edges)


def test_equal_layers_share_their_tables_and_cost_what_they_cost_as_one_problem(monkeypatch: pytest.MonkeyPatch):
    minimised = list[int]()

    def counted(left: np.ndarray, right: np.ndarray) -> object:
        minimised[-1] += 1
        return _min_plus(left, right)

    monkeypatch.setattr("alpa_lite.intra_op.simplify._min_plus", counted)
    for num_layers in (2, 5, 12):
        problem = equal_layers(num_layers)
        minimised.append(0)
        found = Portfolio().solve(problem)
        assert found.status is Status.OPTIMAL
        assert found.cost == pytest.approx(Highs().solve(problem).cost, rel=1e-9)
    assert minimised[0] == minimised[1] == minimised[2] > 0
