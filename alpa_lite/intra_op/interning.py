"""Equal things made once: numbers for equal lists, and one array for equal sums and products of the same arrays.

The layers of a model repeat each other, and so do the nodes and edges of its problem. What is looked up by identity
rather than by content costs a repetition little more than the look-up; and arrays that are equal because they are made
alike are one object, so that whoever reads the problem may look at each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
T = TypeVar("T", bound=Hashable)
Made = TypeVar("Made")


def frozen(array: FloatArray) -> FloatArray:
    """The array itself, which from now on nobody can write to."""
    array.setflags(write=False)
    return array


class Numbering(Generic[T]):
    """Equal things get equal numbers, from 0 on; what was seen before is found without being compared."""

    def __init__(self) -> None:
        """Start empty."""
        self._numbers: dict[T, int] = {}
        self._ones: dict[T, T] = {}
        self._seen: dict[int, tuple[T, int]] = {}

    def __call__(self, thing: T) -> int:
        """The number of a thing."""
        seen = self._seen.get(id(thing))
        if seen is None:
            # It is kept, so that its id stays its own.
            seen = self._seen[id(thing)] = (thing, self._numbers.setdefault(thing, len(self._numbers)))
        return seen[1]

    def one(self, thing: T) -> T:
        """The one object that stands for all that equal this."""
        return self._ones.setdefault(thing, thing)


class Recent(Generic[T, Made]):
    """The things that were asked for last; others are made anew."""

    def __init__(self, size: int) -> None:
        """Keep so many."""
        self._size = size
        self._made: dict[T, Made] = {}

    def __call__(self, key: T, make: Callable[[], Made]) -> Made:
        """What was made for a key."""
        made = self._made[key] = self._made.pop(key) if key in self._made else make()
        if len(self._made) > self._size:
            del self._made[next(iter(self._made))]
        return made


class SharedArrays:
    """Arithmetic on frozen arrays; the same operands give the same object, frozen too."""

    def __init__(self) -> None:
        """Start empty."""
        self._made: dict[tuple[object, ...], tuple[FloatArray, tuple[FloatArray, ...]]] = {}
        self._any: dict[int, tuple[FloatArray, bool]] = {}

    def any(self, array: FloatArray) -> bool:
        """Whether anything in it is not zero."""
        found = self._any.get(id(array))
        if found is None:
            # It is kept, so that its id stays its own.
            found = self._any[id(array)] = (array, bool(array.any()))
        return found[1]

    def zeros(self, size: int) -> FloatArray:
        """A vector of zeros."""
        return self._once(("zeros", size), (), lambda: np.zeros(size))

    def product(self, array: FloatArray, factor: float) -> FloatArray:
        """array · factor."""
        if factor == 1.0:
            return array
        return self._once(("product", id(array), factor), (array,), lambda: array * factor)

    def sum(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """first + second."""
        return self._once(("sum", id(first), id(second)), (first, second), lambda: first + second)

    def transposed(self, array: FloatArray) -> FloatArray:
        """arrayᵀ."""
        return self._once(("transposed", id(array)), (array,), lambda: array.T)

    def diagonal(self, array: FloatArray) -> FloatArray:
        """The diagonal of a matrix."""
        return self._once(("diagonal", id(array)), (array,), lambda: np.diagonal(array).copy())

    def kept_where_zero(self, array: FloatArray, other: FloatArray) -> FloatArray:
        """array where other is zero, else 0."""
        return self._once(("kept", id(array), id(other)), (array, other), lambda: np.where(other == 0.0, array, 0.0))

    def _once(
        self, key: tuple[object, ...], operands: tuple[FloatArray, ...], make: Callable[[], FloatArray]
    ) -> FloatArray:
        found = self._made.get(key)
        if found is None:
            # The operands are kept, so that their ids stay their own.
            found = self._made[key] = (frozen(make()), operands)
        return found[0]
