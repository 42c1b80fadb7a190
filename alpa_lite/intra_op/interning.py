"""Interning: one number for equal lists, and one array object for equal sums and products of the same arrays.

The layers of a model repeat each other, and so do the nodes and edges of its intra-op problem. Look-ups go by identity
and not by content, so that a repetition costs little more than a dict look-up. Arrays computed from the same operands
are one object, so that readers of the problem can process each distinct array once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from alpa_lite.intra_op.problem import FloatArray

T = TypeVar("T", bound=Hashable)
Made = TypeVar("Made")


def frozen(array: FloatArray) -> FloatArray:
    """Make an array read-only in place and return it."""
    array.setflags(write=False)
    return array


class Numbering(Generic[T]):
    """Numbering of equal objects from 0 on; one seen before is recognised by its identity, without a comparison."""

    def __init__(self) -> None:
        """Start empty."""
        self._numbers: dict[T, int] = {}
        self._ones: dict[T, T] = {}
        self._seen: dict[int, tuple[T, int]] = {}

    def __call__(self, thing: T) -> int:
        """Return the number of an object; equal objects have equal numbers."""
        seen = self._seen.get(id(thing))
        if seen is None:
            # Hold a reference: the id of a collected object could be given to another one.
            seen = self._seen[id(thing)] = (thing, self._numbers.setdefault(thing, len(self._numbers)))
        return seen[1]

    def one(self, thing: T) -> T:
        """Return the canonical object among all that equal this one."""
        return self._ones.setdefault(thing, thing)


class Recent(Generic[T, Made]):
    """Cache of the `size` results requested last; older ones are made again."""

    def __init__(self, size: int) -> None:
        """Start empty, with room for `size` results."""
        self._size = size
        self._made: dict[T, Made] = {}

    def __call__(self, key: T, make: Callable[[], Made]) -> Made:
        """Return the cached result of a key, or make and cache it."""
        # Taken out and put back, so that the dict is ordered by the last use.
        made = self._made[key] = self._made.pop(key) if key in self._made else make()
        if len(self._made) > self._size:
            del self._made[next(iter(self._made))]
        return made


class SharedArrays:
    """Arithmetic on read-only arrays; equal operands (by identity) give the same read-only result object."""

    def __init__(self) -> None:
        """Start empty."""
        self._made: dict[tuple[object, ...], tuple[FloatArray, tuple[FloatArray, ...]]] = {}
        self._any: dict[int, tuple[FloatArray, bool]] = {}

    def any(self, array: FloatArray) -> bool:
        """Return True if any entry of the array is not zero."""
        found = self._any.get(id(array))
        if found is None:
            # Hold a reference: the id of a collected array could be given to another one.
            found = self._any[id(array)] = (array, bool(array.any()))
        return found[1]

    def zeros(self, size: int) -> FloatArray:
        """Return a vector of `size` zeros."""
        return self._once(("zeros", size), (), lambda: np.zeros(size))

    def product(self, array: FloatArray, factor: float) -> FloatArray:
        """Return array · factor."""
        # The array itself, so that readers recognise it as one that they have processed.
        if factor == 1.0:
            return array
        return self._once(("product", id(array), factor), (array,), lambda: array * factor)

    def sum(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """Return first + second."""
        return self._once(("sum", id(first), id(second)), (first, second), lambda: first + second)

    def transposed(self, array: FloatArray) -> FloatArray:
        """Return arrayᵀ."""
        return self._once(("transposed", id(array)), (array,), lambda: array.T)

    def diagonal(self, array: FloatArray) -> FloatArray:
        """Return a copy of the diagonal of a square matrix."""
        # A copy, since the view of NumPy would hold the whole matrix in memory.
        return self._once(("diagonal", id(array)), (array,), lambda: np.diagonal(array).copy())

    def kept_where_zero(self, array: FloatArray, other: FloatArray) -> FloatArray:
        """Return `array` with zeros in all places where `other` is not zero."""
        return self._once(("kept", id(array), id(other)), (array, other), lambda: np.where(other == 0.0, array, 0.0))

    def _once(
        self, key: tuple[object, ...], operands: tuple[FloatArray, ...], make: Callable[[], FloatArray]
    ) -> FloatArray:
        found = self._made.get(key)
        if found is None:
            # Hold references to the operands: ids of collected arrays could be given to others.
            found = self._made[key] = (frozen(make()), operands)
        return found[0]
