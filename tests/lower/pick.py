"""What the drawn calls are made of: shapes, dtypes, arrays, choices; and the table of calls by primitive.

Shapes and static parameters are drawn by hypothesis one by one, so that a failing call shrinks; the numbers of an array
come from one drawn seed. Small is simple: choices stand in order from the plainest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.rules.row import Row

T = TypeVar("T")

#: Dims, the ones that any mesh can split first.
DIMS = (8, 16, 4, 2, 1, 12, 6, 3)
MAX_ELEMENTS = 2048
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0)

FLOATS = ("float32", "bfloat16")
COMPLEX = ("complex64",)
INTEGERS = ("int32", "uint8")
NUMBERS = (*FLOATS, *INTEGERS, *COMPLEX)
ORDERED = (*FLOATS, *INTEGERS, "bool")
ANY = (*NUMBERS, "bool")
#: What can be moved: numbers and random keys.
MOVED = (*ANY, "key")


@dataclass(kw_only=True)
class Pick:
    """Hypothesis's `draw` with the choices that calls need.

    `special`: floats hold NaN, infinities and -0 as well. `adds`: they are multiples of a step, so that sums of a few
    hundred, and of products, are exact in any order.
    """

    draw: Callable[[st.SearchStrategy[Any]], Any]
    special: bool = False
    adds: bool = False
    dims: Sequence[int] = field(default=DIMS)

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        """False or true."""
        return self.draw(st.booleans())

    def integer(self, low: int, high: int) -> int:
        """In [low, high]."""
        return self.draw(st.integers(low, high))

    def order(self, items: Sequence[T]) -> list[T]:
        """The items in any order."""
        return list(self.draw(st.permutations(items)))

    def some(self, items: Sequence[T], least: int = 0, most: int | None = None) -> list[T]:
        """Some of the items, each at most once, in any order."""
        most = len(items) if most is None else min(most, len(items))
        return self.order(items)[: self.integer(min(least, most), most)]

    def dim(self, among: Sequence[int] | None = None) -> int:
        """One size."""
        return self.one_of(self.dims if among is None else among)

    def shape(self, low: int = 1, high: int = 3) -> tuple[int, ...]:
        """A shape of rank low to high."""
        found: list[int] = []
        for _ in range(self.integer(low, high)):
            size = self.dim()
            found.append(size if prod(found) * size <= MAX_ELEMENTS else self.one_of((1, 2)))
        return tuple(found)

    def axis(self, rank: int) -> int:
        """A dim of an array of some rank."""
        return self.integer(0, rank - 1)

    def numbers(self) -> np.random.Generator:
        """A generator with a drawn seed."""
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def array(self, shape: Sequence[int], dtype: str = "float32", low: float = -2.0, high: float = 2.0) -> Any:
        """Numbers in [low, high), and special ones if asked for."""
        random = self.numbers()
        shape = tuple(shape)
        if dtype == "key":
            return jax.random.wrap_key_data(jnp.asarray(random.integers(0, 2**31, (*shape, 2)), jnp.uint32))
        if dtype == "bool":
            return jnp.asarray(random.integers(0, 2, shape), bool)
        if dtype.startswith(("float", "bfloat", "complex")):
            found = random.uniform(low, high, shape)
            if dtype == "complex64":
                found = found + 1j * random.uniform(low, high, shape)
            if self.adds:
                step = 1 if dtype == "bfloat16" else 1 / 8
                found = np.round(found / step) * step
            if self.special:
                found = np.where(random.random(shape) < 0.15, random.choice(SPECIAL, shape), found)
            return jnp.asarray(np.asarray(found), dtype)
        low, high = (max(low, 0), max(high, 9)) if dtype.startswith("uint") else (min(low, -9), max(high, 9))
        return jnp.asarray(random.integers(int(low), int(high), shape), dtype)

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: str = "int32") -> Any:
        """Whole numbers in [low, high)."""
        return jnp.asarray(self.numbers().integers(low, max(high, low + 1), tuple(shape)), dtype)

    def assignment(self, options: Callable[[str], Sequence[T]], axes: Sequence[str]) -> list[tuple[str, T]]:
        """Axes in any order, most with one of the options that each then has."""
        found: list[tuple[str, T]] = []
        for axis in self.order(axes):
            choices = options(axis)
            if choices and self.integer(0, 3) < 3:
                found.append((axis, self.one_of(choices)))
        return found


Call = Callable[[Pick, str], Row]
CALLS: dict[str, Call] = {}


def drawn(*primitives: str) -> Callable[[Call], Call]:
    """Decorator: the function draws a valid call of these primitives."""

    def register(call: Call) -> Call:
        for primitive in primitives:
            assert primitive not in CALLS, primitive
            CALLS[primitive] = call
        return call

    return register


def call(primitive: str, function: Callable[..., Any], *arguments: Any, oracle: str = "") -> Row:
    """A drawn call."""
    return Row(name=primitive, primitive=primitive, function=function, arguments=arguments, oracle=oracle)
