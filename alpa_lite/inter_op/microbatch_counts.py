"""Numbers of micro-batches: the candidates, those at which a few layers are surveyed, and the order of the search.

Larger micro-batches take more memory and leave devices idle for longer; smaller ones take longer per sample. So the
search starts at the number that is likely the best and goes both ways while plans get better. Then it continues with
numbers that are likely clearly better, or would be at best, if there are any, and with the whole batch: one stage
without micro-batches may be as good as many stages with many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from alpa_lite.inter_op.plan_request import PlanRequest

NEAR = 0.01
"""Among numbers that are likely this close to the best, the one nearest to a surveyed number comes first."""

ABOUT = 0.1
"""Among numbers that likely do not fit and are this close to the best one at best, the largest comes first.

While nothing is found, the search of a number ends where another one likely takes less by more than this.
"""

PARTS = (0.5, 0.9)
"""The surveyed numbers, as positions on a logarithmic scale between 1 and the largest number that makes sense."""

MAX_SEARCHED, MAX_IN_VAIN = 5, 3
"""The most numbers that are searched for their guesses, in all and in a row without a better plan."""

NEARBY = 2.0
"""The largest ratio between a place on that scale and the number that is surveyed there, if there is any."""


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


def numbers_to_search(request: PlanRequest) -> tuple[int, ...]:
    """Return the candidate numbers of micro-batches of a request."""
    # Virtual devices of one processor gain nothing from overlap, so that one micro-batch is best when it fits.
    shared = request.cluster.shared_processor
    return request.microbatch_choices((1,) if shared else divisors(request.batch_size or 1))


def surveyed_numbers(
    numbers: Sequence[int], batch_size: int, devices_per_host: int, num_meshes: Callable[[int], int]
) -> list[int]:
    """Return the numbers to survey: in the middle, on a logarithmic scale, of those that make sense, and near the last.

    With fewer samples than half of the devices of a host, these devices cannot split the batch while others split the
    model. Of the numbers within `NEARBY` of such a place the one is taken whose micro-batches the most logical meshes
    divide, by `num_meshes(samples)`: what a mesh takes is unknown where no surveyed micro-batch can be split over it.
    """
    largest = max(1.0, batch_size / max(1.0, devices_per_host / 2))
    chosen: dict[int, None] = {}
    for part in PARTS:
        ratios = {n: max(n / largest**part, largest**part / n) for n in numbers if n not in chosen}
        nearby = [n for n, ratio in ratios.items() if ratio <= NEARBY] or [*ratios]
        if nearby:
            chosen[max(nearby, key=lambda n: (num_meshes(batch_size // n), -ratios[n]))] = None
    return list(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Guessed seconds of a step at some number of micro-batches, at best and likely; infinite if it does not fit."""

    at_best: float
    likely: float

    def no_less_than(self, seconds: float) -> Guess:
        """Return the guess with what a search has found that it takes at least."""
        return Guess(at_best=max(self.at_best, seconds), likely=max(self.likely, seconds))


@dataclass(frozen=True, slots=True)
class Searched:
    """The numbers that were searched, and the best one of them with its seconds; None and infinity before any fits.

    Attributes:
        in_vain: how many of them in a row, the last ones, gave no better plan.
    """

    numbers: Collection[int] = ()
    best: int | None = None
    at_most: float = math.inf
    in_vain: int = 0

    def better_at(self, number: int, at_most: float) -> Searched:
        """Return what is known once a number gave the best plan, of so many seconds."""
        return Searched(numbers={*self.numbers, number}, best=number, at_most=at_most)

    def no_better_at(self, number: int) -> Searched:
        """Return what is known once a number gave no better plan."""
        in_vain = self.in_vain + (self.best is not None)
        return replace(self, numbers={*self.numbers, number}, in_vain=in_vain)


def numbers_left(
    open_: Collection[int], guess: Callable[[int], Guess], searched: Searched, solved_at: float
) -> list[int]:
    """Return the numbers to search next, the most promising first: by their guesses (`next_numbers`), then 1.

    The whole batch is looked at in any case: layers that are surveyed with smaller micro-batches tell little of it. Its
    search ends at once if the guesses are then far above the best plan.
    """
    ways: list[int] = []
    if len(searched.numbers) < MAX_SEARCHED and searched.in_vain < MAX_IN_VAIN:
        ways = next_numbers(open_, guess, searched, solved_at)
    return ways or ([1] if 1 in open_ else [])


def next_numbers(
    open_: Collection[int], guess: Callable[[int], Guess], searched: Searched, solved_at: float
) -> list[int]:
    """Return the numbers to search next, the most promising first; none if there is nothing to gain.

    `open_`: numbers that were not searched; `solved_at`: the number at which layers were surveyed.
    """
    best, at_most = searched.best, searched.at_most
    if best is not None:
        known = sorted({*open_, *searched.numbers})
        place = known.index(best)
        # If the guess of the best number was too high, those of its neighbours are too.
        near = max(at_most, guess(best).at_best)
        # From the best number outwards, smaller and larger ones.
        sides = (known[:place][::-1], known[place + 1 :])
        found = [_first_better(numbers, open_, guess, near, at_most) for numbers in sides]
        if around := sorted((n for n in found if n is not None), key=lambda n: guess(n).at_best):
            return around
        likely = (n for n in open_ if guess(n).likely < at_most * (1 - NEAR))
        ways = sorted(likely, key=lambda n: guess(n).likely)
        at_best = (n for n in open_ if guess(n).at_best < at_most * (1 - NEAR))
        return ways or sorted(at_best, key=lambda n: guess(n).at_best)
    faster = [n for n in sorted(open_) if guess(n).at_best < at_most]
    least = min((guess(n).likely for n in faster), default=math.inf)
    least_at_best = min((guess(n).at_best for n in faster), default=math.inf)

    def order(number: int) -> tuple[float, ...]:
        likely = guess(number).likely
        if likely <= least * (1 + NEAR) < math.inf:
            # Guesses are surest near the number at which layers were surveyed.
            return (0.0, abs(math.log(number / solved_at)))
        at_best = guess(number).at_best
        # Where none is likely to fit (infinite), memory is short: of those that are about as good at best, the largest
        # number needs the least, and what it takes spares others a long search.
        if likely == math.inf and at_best <= (1 + ABOUT) * least_at_best:
            return (1.0, likely, least_at_best, -number)
        return (1.0, likely, at_best)

    return sorted(faster, key=order)


def _first_better(
    numbers: Sequence[int], open_: Collection[int], guess: Callable[[int], Guess], near: float, at_most: float
) -> int | None:
    """Return the first number, before any that was searched, that may take less; None if there is none.

    The nearest number must take less than `near` at best, one behind it likely less than `at_most`.
    """
    for place, number in enumerate(numbers):
        if number not in open_:
            return None
        if guess(number).likely < at_most if place else guess(number).at_best < near:
            return number
    return None
