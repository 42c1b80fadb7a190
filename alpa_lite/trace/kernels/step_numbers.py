"""Integers of a program as functions of the grid step, and how operations change them (see `grid_split`).

x(s + p) = x'(p) + s · shift        for the first step s of a device, a multiple of the granule
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from alpa_lite import _jax


@dataclass(frozen=True, slots=True)
class Number:
    """An integer or array of a program: its shift (None if mixed) and bounds within one granule, None if unknown."""

    shift: Fraction | None
    low: int | None = None
    high: int | None = None

    @property
    def same(self) -> bool:
        """Whether all devices compute this number from their own steps and data."""
        return self.shift == 0

    @property
    def only(self) -> int | None:
        """The only value, if there is just one."""
        return self.low if self.same and self.low == self.high else None


ZERO = Fraction(0)
DATA = Number(ZERO)
"""A number that every device computes alike, from its own steps and data."""
MIXED = Number(None)


@dataclass(frozen=True, slots=True)
class Ref:
    """An array in memory that a kernel reads and writes, by its number among the kernel's arguments; -1 if local."""

    number: int


Item = Number | Ref


def read_item(atom: Any, known: Mapping[Any, Item]) -> Item:
    return of_literal(atom.val) if isinstance(atom, _jax.Literal) else known[atom]


def of_literal(value: Any) -> Number:
    array = np.asarray(value)
    if array.dtype.kind not in "iub" or not array.size:
        return DATA
    return Number(ZERO, int(array.min()), int(array.max()))


def constant(value: int) -> Number:
    return Number(ZERO, value, value)


def numbers_of(items: Iterable[Item]) -> list[Number]:
    return [item for item in items if isinstance(item, Number)]


def join_items(items: Sequence[Item]) -> Item:
    """Return an item that covers all of these."""
    first = items[0]
    if all(item == first for item in items):
        return first
    numbers = numbers_of(items)
    if len(numbers) < len(items) or len({n.shift for n in numbers}) > 1:
        return MIXED
    lows, highs = [n.low for n in numbers], [n.high for n in numbers]
    low = None if None in lows else min(n for n in lows if n is not None)
    high = None if None in highs else max(n for n in highs if n is not None)
    return Number(numbers[0].shift, low, high)


def widened(before: Item, after: Item) -> Item:
    """Return an item that covers both, with unknown bounds where they grow, so that loops end."""
    joined = join_items([before, after])
    if joined == before or not isinstance(joined, Number) or not isinstance(before, Number):
        return joined
    low = joined.low if joined.low == before.low else None
    return Number(joined.shift, low, joined.high if joined.high == before.high else None)


def _combined(
    function: Callable[[int, int], int],
) -> Callable[[int | None, int | None], int | None]:
    return lambda a, b: None if a is None or b is None else function(a, b)


_plus, _minus = _combined(lambda a, b: a + b), _combined(lambda a, b: a - b)


def _add(x: Number, y: Number) -> Number:
    if x.shift is None or y.shift is None:
        return MIXED
    return Number(x.shift + y.shift, _plus(x.low, y.low), _plus(x.high, y.high))


def _subtract(x: Number, y: Number) -> Number:
    if x.shift is None or y.shift is None:
        return MIXED
    return Number(x.shift - y.shift, _minus(x.low, y.high), _minus(x.high, y.low))


def _multiply(x: Number, y: Number) -> Number:
    x, y = (y, x) if x.only is not None else (x, y)
    by = y.only
    if x.shift is None or (by is None and not (x.same and y.same)):
        return MIXED
    if by is None:
        ends = [_combined(lambda a, b: a * b)(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
        known = [e for e in ends if e is not None]
        return Number(ZERO, min(known), max(known)) if len(known) == len(ends) else DATA
    ends = [None if e is None else e * by for e in (x.low, x.high)]
    low, high = ends if by >= 0 else ends[::-1]
    return Number(x.shift * by, low, high)


def _extreme(largest: bool) -> Callable[[Number, Number], Number]:
    choose = _combined(max if largest else min)

    def function(x: Number, y: Number) -> Number:
        if x.shift is None or x.shift != y.shift:
            return MIXED
        return Number(x.shift, choose(x.low, y.low), choose(x.high, y.high))

    return function


def comparison(never: Callable[[Number, Number], bool], always: Callable[[Number, Number], bool]) -> Any:
    """Return a comparison, from conditions on bounds under which it never (or always) holds."""

    def function(x: Number, y: Number) -> Number:
        if x.shift is None or x.shift != y.shift:
            return MIXED
        if never(x, y):
            return constant(0)
        return constant(1) if always(x, y) else Number(ZERO, 0, 1)

    return function


def _below(x: Number, y: Number) -> bool:
    return x.high is not None and y.low is not None and x.high < y.low


def _not_above(x: Number, y: Number) -> bool:
    return x.high is not None and y.low is not None and x.high <= y.low


def apart(x: Number, y: Number) -> bool:
    return _below(x, y) or _below(y, x)


def equal(x: Number, y: Number) -> bool:
    return x.low is not None and x.low == x.high == y.low == y.high


def _select(which: Number, *cases: Number) -> Number:
    if which.only is not None and 0 <= which.only < len(cases):
        return cases[which.only]
    joined = join_items(cases) if which.same else MIXED
    return joined if isinstance(joined, Number) else MIXED


def _logic(function: Callable[[int, int], int], stop: int) -> Callable[[Number, Number], Number]:
    """Return `and` or `or` on bits; `stop` is the boolean operand that decides the result alone."""

    def bits(x: Number, y: Number) -> Number:
        if not (x.same and y.same):
            return MIXED
        if x.only is not None and y.only is not None:
            return constant(function(x.only, y.only))
        return constant(stop) if stop in (x.only, y.only) else DATA

    return bits


PURE: Mapping[str, Callable[..., Number]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "neg": lambda x: _subtract(constant(0), x),
    "max": _extreme(True),
    "min": _extreme(False),
    "lt": comparison(lambda x, y: _not_above(y, x), _below),
    "le": comparison(lambda x, y: _below(y, x), _not_above),
    "gt": comparison(_not_above, lambda x, y: _below(y, x)),
    "ge": comparison(_below, lambda x, y: _not_above(y, x)),
    "eq": comparison(apart, equal),
    "ne": comparison(equal, apart),
    "select_n": _select,
    "and": _logic(lambda a, b: a & b, 0),
    "or": _logic(lambda a, b: a | b, 1),
    **dict.fromkeys(
        "broadcast_in_dim reshape squeeze expand_dims transpose copy convert_element_type multiple_of "
        "max_contiguous stop_gradient tile".split(),
        lambda x, *_: x,
    ),
}
