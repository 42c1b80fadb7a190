"""Reading files that may be damaged or hostile: bounded before anything is allocated, and shown without harm.

open_regular     a file that is a regular one: opening neither waits (a FIFO) nor does anything (a device)
read_bounded     the content of such a file that is not too large
parse_json       JSON of bounded depth and number of values
shown            text from a file as a message may hold it: short, and without control characters
"""

from __future__ import annotations

import json
import os
import re
import stat
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any

_SHOWN_LETTERS = 80
_STRING = re.compile(
    rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL
)  # also one without an end, so that it never goes back
_NO_BRACKET = re.compile(rb"[^\[\]{},:]+")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class TooLargeError(ValueError):
    """A file that is larger than any that is written."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also (as a sentence) for what is no regular file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a file of at most `most` bytes. Raises OSError, or `TooLargeError`."""
    with open_regular(path) as file:
        _check_size(file, most)
        return file.read(most)


def check_size(path: Path, most: int) -> None:
    """Raise OSError or `TooLargeError` unless this is a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        _check_size(file, most)


def _check_size(file: BufferedReader, most: int) -> None:
    if os.fstat(file.fileno()).st_size > most:
        raise TooLargeError(f"it has more than {most} bytes")


def parse_json(data: bytes, *, most_values: int, most_depth: int) -> Any:
    """JSON data with at most so many values and names, nested at most so deep. Raises ValueError."""
    marks = _NO_BRACKET.sub(b"", _STRING.sub(b"", data))
    if len(marks) > 3 * most_values:  # of each at most two brackets and a comma, or a comma and a colon
        raise ValueError(f"it holds more than {most_values} values")
    if max(accumulate(_STEP.get(mark, 0) for mark in marks), default=0) > most_depth:
        raise ValueError(f"it is nested deeper than {most_depth}")
    return json.loads(data, parse_constant=_refused)


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def shown(text: object, most: int = _SHOWN_LETTERS) -> str:
    """Text in one line, cut to so many letters, with escapes for what could act on a terminal or be no text."""
    cut = str(text)
    cut = cut if len(cut) <= most else f"{cut[:most]}…"
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in cut)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")
