"""Check what comes from outside: amounts and choices of callers, and untrusted text and JSON.

AlpaLiteError               (`alpa_lite.errors`)
└── CostModelError          a quantity that cannot be priced (negative bytes, an empty group, an unknown kind)
    └── ClusterError        a description of hardware that is incomplete, contradictory or unknown

    require_*    raise one of these unless an amount, a count or a choice is usable
    printable    escape characters that a terminal interprets or cannot display
    message      escape a message and truncate it to about one screen
    excerpt      escape a text and truncate it, to be quoted in a message
    parse_json   parse JSON after bounding its size, nesting depth and strings
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, NoReturn, cast

_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, bidirectional control characters, and lone surrogates."""

JsonObject = dict[str, Any]
"""A parsed JSON object. The values have any type until the classes that are built of them have checked them."""

LONGEST_TEXT = 4096
"""Largest number of characters of a string in a file; on Linux no path is longer."""

LONGEST_MESSAGE = 3000
"""Largest number of characters of a message, about one screen."""

# Possessive quantifiers: a match that fails, at an unterminated string, must not backtrack through the text.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NESTING = re.compile(r"[\[{]+|[\]}]+")


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with control characters escaped (as `\x1b`), except for those in `keep`."""
    return _OBEYED.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def message(text: str) -> str:
    """Return the text of an error message with control characters escaped and the middle of long texts removed."""
    text = printable(text, keep="\n")
    # The start of a message states the problem and its end the remedy, so the middle is dropped.
    mark = " … "
    half = (LONGEST_MESSAGE - len(mark)) // 2
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:half]}{mark}{text[-half:]}"


def excerpt(text: object, most: int = 80) -> str:
    """Return a value as one line of a message: cut to `most` characters, with control characters escaped."""
    full = str(text)
    # Cut first: escapes then cannot be cut in the middle, and a huge text is not escaped as a whole.
    return printable(full if len(full) <= most else f"{full[:most]}…")


def parse_json(
    text: bytes, *, max_values: int, max_depth: int = 64, max_bytes: int | None = None, any_text: bool = False
) -> Any:
    """Parse a JSON text whose size is bounded before any object is allocated.

    Args:
        text: encoded JSON; the caller bounds how much of a file it reads.
        max_values: largest number of lists, objects and their elements.
        max_depth: largest nesting depth of lists and objects.
        max_bytes: largest size of the text in bytes; None for no limit.
        any_text: whether strings may have any length and characters, for strings that are never displayed.

    Raises:
        ValueError: the text is not JSON, exceeds a limit, or (unless `any_text`) has a string that is longer than
            `LONGEST_TEXT` or holds control characters. The message is one line without a full stop.
    """
    if max_bytes is not None and len(text) > max_bytes:
        raise ValueError(f"it has more than {max_bytes >> 10} KiB")
    try:
        decoded = text.decode("utf-8-sig")  # editors on Windows begin files with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from error
    # Counted before parsing, since the parser allocates; unterminated strings are left to the parser.
    _check_sizes(_STRING.sub("", decoded), max_values, max_depth)
    try:
        # By default Python also accepts NaN and Infinity, which are not JSON and would pass most comparisons unnoticed.
        data = json.loads(decoded, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}, column {error.colno}") from error
    if not any_text:
        _check_strings(data)
    return data


def _check_sizes(bare: str, max_values: int, max_depth: int) -> None:
    """Raise ValueError if a JSON text, given without its strings, has too many values or nests too deep."""
    # Every element but the first of its container follows a comma, so this bounds the number of values.
    values = sum(map(bare.count, ",[{")) + 1
    if values > max_values:
        raise ValueError(f"it has {values} values, of at most {max_values}")
    depth = deepest = 0
    for found in _NESTING.finditer(bare):
        brackets = found[0]
        depth += len(brackets) if brackets[0] in "[{" else -len(brackets)
        deepest = max(deepest, depth)
    if deepest > max_depth:
        raise ValueError(f"it nests {deepest} deep, of at most {max_depth}")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_strings(data: Any) -> None:
    left = [data]  # a stack instead of recursion, which deep nesting would exhaust
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"it has a text of {len(value)} characters, of at most {LONGEST_TEXT}")
        elif isinstance(value, str) and _OBEYED.search(value):
            raise ValueError(f"the text {ascii(value)[:40]} has characters that cannot be shown")


class AlpaLiteError(Exception):
    """Base class of all exceptions that alpa_lite raises deliberately."""

    def __init__(self, *args: object) -> None:
        """Store the arguments, with control characters escaped and the middle of long messages removed.

        Messages quote user input, which may fill many screens or contain terminal escape sequences.
        """
        super().__init__(*(message(each) if isinstance(each, str) else each for each in args))


class CostModelError(AlpaLiteError, ValueError):
    """Raised for a quantity that has no cost; the message states the given value, the requirement and a remedy."""


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
