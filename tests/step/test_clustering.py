import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.step.clustering import LEAST_SHARE, RELAXATION, cluster_contiguous, possible_places


def merit(flops, flows, bounds):
    """(largest inflow, sum of inflows, sum of squared FLOPs, FLOPs of each layer) of the cut at `bounds`."""
    inflows, work = [], []
    for first, end in pairwise(bounds):
        inflows.append(
            sum(
                size for producer, readers, size in flows if producer < first and any(first <= r < end for r in readers)
            )
        )
        work.append(sum(flops[first:end]))
    return max(inflows), sum(inflows), sum(each**2 for each in work), work


def brute_force(flops, flows, num_layers, imbalance):
    """The best (largest inflow, sum of inflows, sum of squared FLOPs) over all cuts."""
    cuts = list(itertools.combinations(range(1, len(flops)), num_layers - 1))
    merits = [merit(flops, flows, (0, *cut, len(flops))) for cut in cuts]
    while True:
        limit = (1 + imbalance) * sum(flops) / num_layers
        kept = [candidate for candidate in merits if max(candidate[3]) <= limit * (1 + 1e-9)]
        even = [candidate for candidate in kept if min(candidate[3]) >= LEAST_SHARE * sum(flops) / num_layers - 1e-9]
        if kept:
            return min(candidate[:3] for candidate in even or kept)
        imbalance += RELAXATION


@st.composite
def problems(draw):
    num_ops = draw(st.integers(1, 8))
    flows = []
    for producer in draw(st.lists(st.integers(0, num_ops - 2), max_size=10)) if num_ops > 1 else []:
        readers = draw(st.sets(st.integers(producer + 1, num_ops - 1), min_size=1, max_size=3))
        flows.append((producer, readers, float(draw(st.integers(0, 3)))))
    return (
        draw(st.lists(st.integers(0, 5), min_size=num_ops, max_size=num_ops)),
        flows,
        draw(st.integers(1, num_ops)),
        draw(st.sampled_from([0.0, 0.5, 2.0])),
    )


@settings(max_examples=300)
@given(problems())
def test_equals_exhaustive_search(problem):
    flops, flows, num_layers, imbalance = problem
    layers = cluster_contiguous(np.array(flops, float), flows, num_layers, imbalance=imbalance)
    assert sorted(set(layers)) == list(range(num_layers))
    assert list(layers) == sorted(layers)
    bounds = [layers.index(layer) for layer in range(num_layers)] + [len(flops)]
    assert merit(flops, flows, bounds)[:3] == brute_force(flops, flows, num_layers, imbalance)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 8), st.sampled_from([0.0, 0.5, 2.0]))
def test_layers_begin_at_possible_places_alone(flops, num_layers, imbalance):
    num_layers = min(num_layers, len(flops))
    limit = (1 + imbalance) * sum(flops) / num_layers
    cuts = [(0, *cut, len(flops)) for cut in itertools.combinations(range(1, len(flops)), num_layers - 1)]
    within = [cut for cut in cuts if all(sum(flops[a:b]) <= limit * (1 + 1e-9) for a, b in pairwise(cut))]
    places = possible_places(np.concatenate([[0.0], np.cumsum(flops)]), num_layers, limit).tolist()
    assert {0, len(flops)} | set(itertools.chain(*within)) <= set(places)


def test_few_layers_have_few_places():
    """Two layers of at most 55 % of the work each meet within 5 % of its middle, and four at the quarters."""
    assert possible_places(np.arange(1001.0), 2, 550.0).tolist() == [0, *range(450, 551), 1000]
    quarters = [*range(175, 276), *range(450, 551), *range(725, 826)]
    assert possible_places(np.arange(1001.0), 4, 275.0).tolist() == [0, *quarters, 1000]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 12])
def test_a_chain_of_equal_blocks_is_cut_at_block_boundaries(num_layers):
    """Within a block of five ops wide values pass; a narrow one leaves it."""
    num_blocks, length = 12, 5
    flows = [(op, {op + 1}, 1.0 if (op + 1) % length == 0 else 8.0) for op in range(num_blocks * length - 1)]
    layers = cluster_contiguous(np.tile([1.0, 100.0, 0.0, 100.0, 1.0], num_blocks), flows, num_layers, imbalance=0.1)
    share = num_blocks // num_layers * length
    assert layers == tuple(op // share for op in range(num_blocks * length))


def test_a_value_is_paid_once_in_each_layer_that_reads_it():
    """Op 0 is read by ops 1, 2 and 3, and op 1 by op 2: cutting before op 1 or 3 pays 4, before op 2 pays 4 + 1."""
    flows = [(0, {1, 2, 3}, 4.0), (1, {2}, 1.0)]
    layers = cluster_contiguous(np.ones(4), flows, 2, imbalance=1.0)
    assert layers in ((0, 1, 1, 1), (0, 0, 0, 1))
    assert cluster_contiguous(np.ones(4), flows, 2, imbalance=0.0) == (0, 0, 1, 1)


def test_a_long_skip_is_paid_by_the_layer_that_reads_it_alone():
    """Op 4 reads op 0: one layer pays for it, however many cuts lie between, so that the work may be even."""
    chain = [(op, {op + 1}, 1.0) for op in range(5)]
    assert cluster_contiguous(np.ones(6), [*chain, (0, {4}, 2.0)], 3, imbalance=1.0) == (0, 0, 1, 1, 2, 2)


def test_ties_go_to_the_smaller_sum_then_to_the_evener_flops():
    # All cuts have a maximum of 5; those at the free place before op 4 have the least sum, one of them equal layers.
    flows = [(0, [1], 5.0), (1, [2], 5.0), (2, [3], 5.0), (4, [5], 5.0)]
    assert cluster_contiguous(np.ones(6), flows, 3, imbalance=1.0) == (0, 0, 1, 1, 2, 2)
    assert cluster_contiguous(np.ones(9), [], 3, imbalance=2.0) == (0, 0, 0, 1, 1, 1, 2, 2, 2)


def test_values_of_one_op_and_size_are_told_apart():
    """Op 0 makes two values that op 1 adds: cutting between them pays both, after op 1 one."""
    flows = [(0, [1], 4.0), (0, [1], 4.0), (1, [2], 4.0)]
    assert cluster_contiguous(np.array([1.0, 0.0, 1.0]), flows, 2, imbalance=1.0) == (0, 0, 1)


def test_no_layer_is_left_nearly_empty_for_a_cheap_cut():
    """The first value is small, as positions are before they meet the samples: cut there, two layers do the work of
    three."""
    flows = [(0, [1], 1.0), *((op, {op + 1}, 4.0) for op in range(1, 5))]
    flops = np.array([0.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert cluster_contiguous(flops, flows, 3, imbalance=0.9) == (0, 0, 1, 1, 2, 2)
    assert cluster_contiguous(np.array([0.0, 9.0]), [(0, [1], 1.0)], 2) == (0, 1)  # where nothing else is possible


def test_the_limit_is_relaxed_when_one_op_exceeds_it():
    assert cluster_contiguous(np.array([1.0, 100.0, 0.0, 1.0]), [], 3) in ((0, 1, 1, 2), (0, 1, 2, 2))


def test_ops_without_flops_still_fill_every_layer():
    assert sorted(set(cluster_contiguous(np.zeros(7), [], 4))) == [0, 1, 2, 3]
    assert cluster_contiguous(np.array([1.0, 0.0, 0.0]), [], 3) == (0, 1, 2)


@pytest.mark.parametrize("flops", [np.linspace(0.5, 1.5, 2000), np.eye(1, 2000, 700)[0], np.zeros(2000)])
def test_thousands_of_ops_with_skewed_work_fill_every_layer(flops):
    rng = np.random.default_rng(0)
    pairs = [sorted(rng.choice(2000, 2, replace=False).tolist()) for _ in range(3000)]
    flows = [(first, {second}, float(rng.integers(1, 10**9))) for first, second in pairs]
    assert len(set(cluster_contiguous(flops, flows, 32))) == 32


def test_impossible_requests_are_refused():
    with pytest.raises(PlanError, match="3 ops cannot be cut into 4 layers: ask for 1 to 3"):
        cluster_contiguous(np.ones(3), [], 4)
    with pytest.raises(PlanError, match="cannot be cut into 0 layers"):
        cluster_contiguous(np.ones(3), [], 0)
    with pytest.raises(PlanError, match="must not be negative"):
        cluster_contiguous(np.array([1.0, -1.0]), [], 1)
    with pytest.raises(PlanError, match=r"cannot flow from op 1 to the ops \[1\]"):
        cluster_contiguous(np.ones(2), [(1, [1], 4.0)], 1)
