"""Buckets of gradients: sums that are reduced together, one bucket after the other (`Plan.buckets`).

    bucket n starts when all of bucket n - 1 is there, as on one queue of collectives              (Buckets.held)

XLA combines reductions that do not wait for each other into one, up to some size. What a bucket holds is left to that;
of two buckets the second waits for a number made of the whole first, so that they stay apart on any backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from alpa_lite.lower.waiting import once_there


class Buckets:
    """Holds back the values of each bucket, while a task is emitted bucket by bucket."""

    def __init__(self, buckets: Sequence[Sequence[int]], *, barriers_stay: bool) -> None:
        """`buckets`: values of the step's graph. `barriers_stay`: whether XLA keeps barriers to the end."""
        self.numbers = {v: number for number, bucket in enumerate(buckets) for v in bucket}
        self.barriers_stay = barriers_stay
        self.done: dict[int, jax.Array] = {}  # of each bucket a number that depends on all results so far

    def held(self, value: int, array: jax.Array) -> jax.Array:
        """A value before it is reduced, not before the bucket before its own is."""
        before = self.done.get(self.numbers[value] - 1)
        return array if before is None else once_there(array, before, barriers_stay=self.barriers_stay)

    def reduced(self, value: int, result: jax.Array) -> None:
        """The same after it."""
        number = self.numbers[value]
        first = lax.reshape(lax.slice(result, (0,) * result.ndim, (1,) * result.ndim), ()).real.astype("float32")
        self.done[number] = first + self.done[number] if number in self.done else first
