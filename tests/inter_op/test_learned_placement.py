"""Placements by reinforcement: against all placements of small graphs, on chains and branches, with little memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from alpa_lite.inter_op.device_placement import (
    DevicePlacements,
    EventKind,
    GroupBytes,
    PlaceableDevice,
    PlacedEvent,
    Placement,
)
from alpa_lite.inter_op.learned_placement import Reinforce, RewardFunction, learn_placement

Edges = Sequence[tuple[int, int]]
TRAINED = Reinforce(steps=150, samples=10, hidden=32, learning_rate=0.003)


def _placements(seconds: Sequence[float], edges: Edges, transfer: float, num_devices: int = 2) -> DevicePlacements:
    """A graph of groups that take so many seconds, and whose edges take `transfer` seconds between devices."""
    events, count = list[PlacedEvent](), len(seconds)
    for group, own in enumerate(seconds):
        reads = list[int]()
        for source, target in edges:
            if target == group:
                array, times = count + len(events), (transfer, transfer)
                send = dict(kind=EventKind.SEND, group=group, source=source, seconds=times)
                events.append(PlacedEvent(**send, reads=(source,), writes=(array,)))
                reads.append(array)
        events.append(PlacedEvent(kind=EventKind.RUN, group=group, seconds=(own,), reads=tuple(reads), writes=(group,)))
    return DevicePlacements(
        num_groups=count,
        num_arrays=count + len(events),
        events=tuple(events),
        devices=(PlaceableDevice(),) * num_devices,
    )


def _embeddings(count: int, edges: Edges) -> np.ndarray:
    found = np.zeros((count, 2 * count))
    for a, b in edges:
        found[a, b] = found[b, count + a] = 1
    return np.concatenate([found, np.eye(count)], axis=1)


def _learned(placing: DevicePlacements, edges: Edges, options: Reinforce):
    def seconds(placement: Placement) -> float | None:
        return placing.seconds(placement) if placing.fits(placement) else None

    return learn_placement(_embeddings(placing.num_groups, edges), len(placing.devices), seconds, options)


@cache
def _random(seed: int) -> tuple[DevicePlacements, tuple[tuple[int, int], ...]]:
    random = np.random.default_rng(seed)
    edges = {(int(random.integers(max(0, b - 4), b)), b) for b in range(1, 10) for _ in range(2)}
    return _placements(random.uniform(0.5, 2, 10).tolist(), sorted(edges), 0.5), tuple(sorted(edges))


def _all(placing: DevicePlacements) -> list[float]:
    return [placing.seconds(p) for p in itertools.product(range(len(placing.devices)), repeat=placing.num_groups)]


@pytest.mark.parametrize("graph", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nine_of_ten_seeds_find_the_best_of_all_placements(graph: int) -> None:
    placing, edges = _random(graph)
    every = _all(placing)
    found = [_learned(placing, edges, replace(TRAINED, seed=seed)) for seed in range(10)]
    best = [learned.ranked[0][1] for learned in found]
    assert min(best) >= min(every) - 1e-9
    assert sum(seconds == pytest.approx(min(every)) for seconds in best) >= 9
    # The policy itself gets better, and is not only lucky.
    late = np.mean([learned.mean_seconds[-30:] for learned in found])
    assert late < np.mean(every) - 0.3 * np.std(every)


def test_a_chain_whose_transfers_take_longer_than_its_work_stays_on_one_device() -> None:
    edges = [(i, i + 1) for i in range(7)]
    learned = _learned(_placements([1.0] * 8, edges, 2.0), edges, TRAINED)
    assert len(set(learned.best)) == 1 and learned.ranked[0][1] == 8
    assert np.mean(learned.mean_seconds[-20:]) < np.mean(learned.mean_seconds[:20]) - 1


def test_branches_go_to_different_devices() -> None:
    edges = [(0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5)]
    placing = _placements([1, 3, 3, 3, 3, 1], edges, 0.5)
    learned = _learned(placing, edges, TRAINED)
    assert len(set(learned.best)) == 2 and learned.ranked[0][1] == min(_all(placing)) < 14
    assert learned.best[1] == learned.best[2] != learned.best[3] == learned.best[4]


def test_what_does_not_fit_is_never_returned() -> None:
    edges = [(i, i + 1) for i in range(5)]
    placing = replace(
        _placements([1.0] * 6, edges, 2.0),
        devices=(PlaceableDevice(usable_bytes=4.5),) * 2,
        bytes_of=((GroupBytes(held=1.0, temporary=0.5),) * 6,),
    )
    learned = _learned(placing, edges, TRAINED)
    assert learned.num_failed and all(placing.fits(placement) for placement, _ in learned.ranked)
    # Four groups on one device, and two on the other.
    assert learned.ranked[0][1] == 8
    none = replace(placing, devices=(PlaceableDevice(usable_bytes=1.0),) * 2)
    learned = _learned(none, edges, replace(TRAINED, steps=5, count_failures=2))
    assert not learned.ranked and set(learned.mean_seconds) == {math.inf}


def test_one_seed_gives_one_answer_and_told_says_the_best_so_far() -> None:
    placing, edges = _random(1)
    heard = list[float]()
    options = replace(TRAINED, steps=20)

    def learn():
        embeddings = _embeddings(10, edges)
        return learn_placement(embeddings, 2, placing.seconds, options, lambda step, least: heard.append(least))

    first, second = learn(), learn()
    assert first == second
    assert heard[:20] == heard[20:] == sorted(heard[:20], reverse=True) and heard[19] == first.ranked[0][1]
    assert first != learn_placement(_embeddings(10, edges), 2, placing.seconds, replace(options, seed=1))


def test_the_published_constants() -> None:
    published = Reinforce()
    assert (published.hidden, published.tanh_constant, published.noise, published.noise_until) == (512, 1.0, 0.5, 750)
    assert (published.failing_seconds, published.count_failures, published.baseline_decay) == (100.0, 1000, 0.9)
    assert published.clip == 1.0 and published.reward.of(4.0) == 2.0
    assert [published.rate(step) for step in (0, 400, 450, 500)] == pytest.approx([0.1, 0.1, 0.095, 0.09025])
    assert RewardFunction.IDENTITY.of(4.0) == 4.0 and RewardFunction.LOG.of(math.e - 1) == pytest.approx(1.0)
