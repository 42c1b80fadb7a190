"""Text that strangers wrote: names on their way to a terminal, and JSON on its way into a program.

printable    a name without characters that a terminal obeys or cannot write
message      the same of a message, on a screen at most
parse_json   the data of a JSON text whose size, depth and names are bounded before anything is made of it
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that turn the direction of writing, and lone halves of characters."""

LONGEST_TEXT = 4096
"""Characters of a string in a file; paths are not longer."""

LONGEST_MESSAGE = 3000
"""Characters of a message: about a screen."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NESTING = re.compile(r"[\[{]+|[\]}]+")


def printable(text: str, *, keep: str = "") -> str:
    r"""A text with `\x1b` and the like written out, less those in `keep`."""
    return _OBEYED.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def message(text: str) -> str:
    """What an error says: printable lines, the middle left out where there is more than a screen of them."""
    text = printable(text, keep="\n")
    half = LONGEST_MESSAGE // 2
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} … {text[-half:]}"


def parse_json(
    text: bytes, *, max_values: int, max_depth: int = 64, max_bytes: int | None = None, any_text: bool = False
) -> Any:
    """The data of a JSON text.

    Args:
        text: of which the caller has not read more than it wants to.
        max_values: lists, objects and what they hold; at most so many are made.
        max_depth: of lists and objects in one another.
        max_bytes: of the text; None for any number.
        any_text: whether strings may hold any characters, since nobody is shown them.

    Raises:
        ValueError: it is no JSON, larger or deeper than that, or (unless `any_text`) has a string that is longer than
            `LONGEST_TEXT` or that a terminal cannot show as it is. The message, without a full stop, is one line.
    """
    if max_bytes is not None and len(text) > max_bytes:
        raise ValueError(f"it has more than {max_bytes >> 10} KiB")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from error
    _check_sizes(_STRING.sub("", decoded), max_values, max_depth)  # the parser finds strings that are not ended
    try:
        data = json.loads(decoded, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}, column {error.colno}") from error
    if not any_text:
        _check_strings(data)
    return data


def _check_sizes(bare: str, max_values: int, max_depth: int) -> None:
    """The same of a text without its strings."""
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
    left = [data]
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
