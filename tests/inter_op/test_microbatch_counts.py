"""In which order numbers of micro-batches are searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.inter_op.joint_search import JointSearch, Unplanned
from alpa_lite.inter_op.microbatch_counts import (
    MAX_IN_VAIN,
    NEAR,
    Guess,
    Searched,
    divisors,
    next_numbers,
    numbers_left,
    surveyed_numbers,
)
from alpa_lite.inter_op.surveyed_searches import SurveyedSearches
from alpa_lite.plan.progress import Progress


def _searched(true: Mapping[int, float], guesses: Mapping[int, Guess], solved_at: float) -> tuple[int | None, set[int]]:
    """The best number after all that are proposed were searched, and these."""
    open_, searched = set(guesses), set[int]()
    best, at_most = None, math.inf
    while ways := next_numbers(open_, guesses.__getitem__, Searched(searched, best, at_most), solved_at):
        number = ways[0]
        open_.remove(number)
        searched.add(number)
        if true[number] < at_most:
            best, at_most = number, true[number]
    return best, searched


def _guesses(at_best: Mapping[int, float], likely: Mapping[int, float]) -> dict[int, Guess]:
    return {n: Guess(at_best=at_best[n], likely=likely[n]) for n in at_best}


@given(
    down=st.lists(st.floats(0.01, 1.0), max_size=6),
    up=st.lists(st.floats(0.01, 1.0), max_size=6),
    optimism=st.lists(st.floats(0.5, 1.0), min_size=13, max_size=13),
    fits_from=st.integers(0, 12),
    solved_at=st.sampled_from([1.0, 8.0, 300.0]),
    too_high=st.sampled_from([1.0, 1.02, 3.0]),
)
def test_the_best_is_found_where_times_fall_and_then_rise(
    down: list[float], up: list[float], optimism: list[float], fits_from: int, solved_at: float, too_high: float
) -> None:
    times = [1.0 + sum(down[i:]) for i in range(len(down) + 1)] + [1.0 + sum(up[: i + 1]) for i in range(len(up))]
    true = {2**i: time for i, time in enumerate(times)}
    # All guesses may be too high alike.
    at_best = {n: time * part for (n, time), part in zip(true.items(), optimism, strict=False)}
    if too_high > 1:
        at_best = {n: time * too_high for n, time in true.items()}
    likely = {n: time if i >= fits_from else math.inf for i, (n, time) in enumerate(true.items())}
    best, searched = _searched(true, _guesses(at_best, likely), solved_at)
    assert best is not None
    assert true[best] == min(true.values())
    # What is not even at best faster is never searched after the best.
    assert too_high > 1 or len(searched) <= 1 + sum(at_best[n] < max(true.values()) for n in true)


def test_of_numbers_that_are_likely_close_the_one_nearest_to_what_was_solved_comes_first() -> None:
    guesses = _guesses({8: 1.02, 64: 1.0, 256: 1.01}, {8: 1.2, 64: 1.0, 256: 1.01})
    assert next_numbers(guesses, guesses.__getitem__, Searched(), 200.0) == [256, 64, 8]
    assert next_numbers(guesses, guesses.__getitem__, Searched(), 10.0) == [64, 256, 8]


def test_what_fits_at_best_is_not_searched_beyond_what_is_no_better() -> None:
    guesses = _guesses({2: 0.5, 4: 1.1, 16: 1.2, 32: 0.8}, {2: math.inf, 4: 1.3, 16: 1.2, 32: 0.9})
    guesses[8] = Guess(at_best=0.9, likely=0.9)
    assert next_numbers(guesses.keys() - {8}, guesses.__getitem__, Searched((8,), 8, 1.0), 8.0) == [32]
    guesses[8] = Guess(at_best=1.15, likely=1.15)  # was guessed too high, as its neighbour at 4 may be
    assert next_numbers(guesses.keys() - {8}, guesses.__getitem__, Searched((8,), 8, 1.0), 8.0) == [32, 4]


def test_beyond_what_was_searched_only_what_is_clearly_better_is_and_at_last() -> None:
    guesses = _guesses({1: 0.8, 2: 0.9, 8: 0.9, 16: 0.95}, {1: 0.93, 2: 0.995, 8: 0.9, 16: 0.999})
    assert next_numbers({1, 2, 16}, guesses.__getitem__, Searched((4, 8), 8, 1.0), 8.0) == [16]
    assert next_numbers({1, 2}, guesses.__getitem__, Searched((4, 8, 16), 8, 1.0), 8.0) == [1]
    # What is likely no better may be at best.
    assert next_numbers({1, 2}, guesses.__getitem__, Searched((4, 8, 16), 8, 0.92), 8.0) == [1, 2]
    assert next_numbers({1, 2}, guesses.__getitem__, Searched((4, 8, 16), 8, 0.85), 8.0) == [1]
    assert next_numbers({1, 2}, guesses.__getitem__, Searched((4, 8, 16), 8, 0.75), 8.0) == []


def test_where_none_likely_fits_the_largest_of_about_the_best_numbers_comes_first() -> None:
    at_best = {64: 1.0, 128: 1.05, 256: 1.09, 512: 1.2}
    guesses = {number: Guess(at_best=seconds, likely=math.inf) for number, seconds in at_best.items()}
    assert next_numbers(guesses.keys(), guesses.__getitem__, Searched(), 8.0) == [256, 128, 64, 512]
    likely = guesses | {512: Guess(at_best=1.2, likely=1.3)}
    assert next_numbers(likely.keys(), likely.__getitem__, Searched(), 8.0)[0] == 512


def test_the_whole_batch_is_searched_last_whatever_its_guess() -> None:
    guesses = {1: Guess(at_best=9.0, likely=9.0), 4: Guess(at_best=2.0, likely=2.0), 8: Guess(at_best=1.0, likely=1.0)}
    assert numbers_left({1, 4, 8}, guesses.__getitem__, Searched(), 8.0)[0] == 8
    after = Searched(numbers={8}, best=8, at_most=1.0)
    assert numbers_left({1, 4}, guesses.__getitem__, after, 8.0) == [1]
    in_vain = Searched(numbers={8}, best=8, at_most=5.0, in_vain=MAX_IN_VAIN)
    assert numbers_left({1, 4}, guesses.__getitem__, in_vain, 8.0) == [1]
    assert numbers_left({4}, guesses.__getitem__, after, 8.0) == []


def test_layers_are_surveyed_at_sizes_that_the_devices_of_a_host_divide() -> None:
    """With 96 samples and hosts of 6 devices, 16 and 4 samples lie nearest to the places, and 6 divides neither."""
    chosen = surveyed_numbers(divisors(96), 96, 6, lambda samples: sum(samples % ways == 0 for ways in (1, 2, 3, 6)))
    assert len(chosen) == 2 and all(96 // number % 6 == 0 for number in chosen)
    # Where all sizes suit as many meshes, the nearest are taken.
    assert surveyed_numbers(divisors(96), 96, 6, lambda samples: 1) == [6, 24]


@dataclass(frozen=True)
class _Rough:
    """Stands for searches: what a rough solution takes at each number, and the numbers that were asked for."""

    seconds: dict[int, float]
    asked: list[int] = field(default_factory=list[int])

    def tried_at(self, number: int) -> float:
        self.asked.append(number)
        return self.seconds[number]


def _tried(guesses: dict[int, Guess], rough: _Rough) -> dict[int, float]:
    asking = SimpleNamespace(at_most=math.inf, request=SimpleNamespace(progress=Progress()))
    found = JointSearch._tried(cast(JointSearch, asking), cast(SurveyedSearches, rough), guesses)
    return {number: guess.likely for number, guess in found.items()}


def test_numbers_that_memory_alone_makes_unlikely_are_tried_until_they_do_not_fit() -> None:
    guesses = {
        1: Guess(at_best=20.0, likely=math.inf),
        2: Guess(at_best=21.0, likely=math.inf),
        4: Guess(at_best=22.0, likely=40.0),
        8: Guess(at_best=23.0, likely=30.0),
        16: Guess(at_best=28.0, likely=28.0),
    }
    rough = _Rough({8: 24.0, 4: 22.5, 2: math.inf})
    assert _tried(guesses, rough) == {1: math.inf, 2: math.inf, 4: 22.5, 8: 24.0, 16: 28.0}
    assert rough.asked == [8, 4, 2]


def test_numbers_that_are_no_better_at_best_are_not_tried() -> None:
    guesses = {2: Guess(at_best=27.9, likely=40.0), 4: Guess(at_best=28.0, likely=28.0)}
    rough = _Rough({})
    assert _tried(guesses, rough) == {2: 40.0, 4: 28.0} and not rough.asked
    nothing_fits = {2: Guess(at_best=1.0, likely=math.inf)}
    assert _tried(nothing_fits, rough) == {2: math.inf} and not rough.asked


def _found(
    guesses: dict[int, float], true: dict[int, float], surveyed: Mapping[int, float] = MappingProxyType({})
) -> tuple[float, list[tuple[int, float]]]:
    """The best seconds that a search finds, and the numbers that it looked at, each with the limit.

    `guesses`: likely seconds at each number; `true`: what its best stages take; `surveyed`: guesses by a survey at
    numbers where there was none. A search of one number ends at its limit.
    """
    looked_at = list[tuple[int, float]]()

    def best_at(
        number: int, searches: object, at_most: float, further: float, fastest: float
    ) -> tuple[object, None, float]:
        looked_at.append((number, at_most))
        if true[number] >= at_most:
            return None, None, at_most
        return SimpleNamespace(seconds=true[number], by_dp=true[number]), None, math.inf

    asking = SimpleNamespace(
        at_most=math.inf,
        gap=None,
        request=SimpleNamespace(progress=Progress()),
        _batch=max(guesses),
        _tried=lambda searches, known: dict(known),
        _not_excluded=lambda open_, at_most: [],
        _best_at=best_at,
    )
    first = {number: Guess(at_best=seconds, likely=seconds) for number, seconds in guesses.items()}
    known, left = dict(first), dict(surveyed)

    def survey_at(number: int) -> bool:
        if number not in left:
            return False
        known[number] = Guess(at_best=left[number], likely=left.pop(number))
        return True

    searches = SimpleNamespace(survey=SimpleNamespace(first_size=1.0), guess_at=known.__getitem__, survey_at=survey_at)
    searches.having_seen = lambda number, excess: searches
    found = JointSearch._found(cast(JointSearch, asking), cast(SurveyedSearches, searches), first)
    return min(better.seconds for better in found if not isinstance(better, Unplanned)), looked_at


def test_a_number_is_left_for_one_that_is_clearly_better_by_then() -> None:
    """Its stages do not fit as guessed: what they take instead is of no use."""
    best, looked_at = _found({32: 9.4, 64: 9.6, 128: 10.3}, {32: 39.0, 64: 10.4, 128: 11.2})
    assert best == 10.4
    (first, limit), *others = looked_at
    assert first == 32 and 9.6 < limit < 11 and (64, math.inf) not in others
    assert all(at_most < 12 for number, at_most in others if number == 32)


def test_a_number_that_was_left_is_taken_up_again() -> None:
    best, looked_at = _found({32: 9.4, 64: 9.6}, {32: 11.0, 64: 20.0})
    assert best == 11.0 and [number for number, _ in looked_at][:3] == [32, 64, 32]


def test_large_micro_batches_are_surveyed_before_they_are_searched() -> None:
    """What was extrapolated to be the best is not; what looked no better is not surveyed."""
    best, looked_at = _found({1: 8.0, 2: 9.0, 4: 30.0}, {1: 15.0, 2: 9.2, 4: 30.0}, {1: 14.0, 4: 1.0})
    assert best == 9.2 and [number for number, _ in looked_at] == [2, 1]
    assert looked_at[1][1] < 14.0


@given(st.lists(st.tuples(st.floats(1.0, 2.0), st.floats(1.0, 3.0)), min_size=1, max_size=3))
def test_leaving_numbers_hides_none_that_is_clearly_better(times: list[tuple[float, float]]) -> None:
    """With few numbers all of them are looked at, until none can be better."""
    guesses = {2**i: seconds for i, (seconds, _) in enumerate(times)}
    true = {2**i: seconds * longer for i, (seconds, longer) in enumerate(times)}
    best, _ = _found(guesses, true)
    assert best * (1 - NEAR) <= min(true.values())
    assert best <= true[min(guesses, key=guesses.__getitem__)]
