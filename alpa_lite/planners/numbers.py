"""Numbers of micro-batches: those that are considered, and those at which a few layers are solved to guess the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

RATIO = 1.5
"""A number of micro-batches is considered when it is at least so many times the one before."""


def microbatch_numbers(batch_size: int) -> tuple[int, ...]:
    """Divisors of a batch that lie well apart, from 1 on."""
    chosen = [1]
    for number in range(2, batch_size + 1):
        if batch_size % number == 0 and number >= RATIO * chosen[-1]:
            chosen.append(number)
    return tuple(chosen)


def surveyed_numbers(numbers: Sequence[int], batch_size: int, num_devices: int) -> list[int]:
    """Where to survey: near two samples per device and near one for 32 devices, between which the best mostly lie."""
    chosen: dict[int, None] = {}
    for size in (2.0 * num_devices, max(1.0, num_devices / 32)):
        left = [n for n in numbers if n not in chosen]
        if left:
            chosen[min(left, key=lambda n: abs(math.log(batch_size / n / size)))] = None
    return list(chosen)
