"""Exceptions that this package raises, and the checks of amounts, counts and choices that raise them.

ValueError
└── CostModelError          a quantity that cannot be priced (negative bytes, an empty group, an unknown kind)
    └── ClusterError        a description of hardware that is incomplete, contradictory or unknown
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import cast

from cost_models.untrusted_text import message


class CostModelError(ValueError):
    """Raised for a quantity that has no cost; the message states the given value, the requirement and a remedy."""

    def __init__(self, *args: object) -> None:
        """Escape control characters in messages and truncate them, since they quote values from untrusted input."""
        super().__init__(*(message(each) if isinstance(each, str) else each for each in args))


class ClusterError(CostModelError):
    """Raised for an unusable cluster description; the message states the value, the requirement and a remedy."""


def require_amount(
    what: str, value: object, *, advice: str, positive: bool = False, error: type[CostModelError] = CostModelError
) -> None:
    """Raise `error` unless `value` is a finite number of at least 0 (above 0 if `positive`)."""
    # The exact type test is the fast path for Python numbers; the ABC test is slow but admits numpy scalars.
    is_number = type(value) in (int, float) or (type(value) is not bool and isinstance(value, Real))
    if is_number:
        number = cast("float", value)
        if math.isfinite(number) and (number > 0 or (number == 0 and not positive)):
            return
    needed = "a finite number above 0" if positive else "a finite number of at least 0"
    raise error(f"{what} is {value!r}, but {needed} is needed: {advice}.")


def require_count(what: str, value: object, *, advice: str, error: type[CostModelError] = CostModelError) -> None:
    """Raise `error` unless `value` is a whole number of at least 1."""
    # `bool` is a subclass of `int`, and numpy integers are `Integral` without being `int`.
    is_whole = type(value) is int or (type(value) is not bool and isinstance(value, Integral))
    if is_whole and cast("int", value) >= 1:
        return
    raise error(f"{what} is {value!r}, but a whole number of at least 1 is needed: {advice}.")


def require_choice(what: str, value: str, choices: Collection[str]) -> None:
    """Raise CostModelError unless `value` is one of `choices`."""
    if value in choices:
        return
    raise CostModelError(f"{what} is {value!r}, but only these are priced: {', '.join(choices)}. Choose one of them.")
