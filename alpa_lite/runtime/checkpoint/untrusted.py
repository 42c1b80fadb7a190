"""Reading files that may be damaged or hostile: bounded before anything is allocated, and shown without harm.

open_regular     a file that is a regular one: opening neither waits (a FIFO) nor does anything (a device)
read_bounded     the content of such a file that is not too large
shown            text from a file as a message may hold it: short, and without control characters
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from cost_models.text import printable

_SHOWN_LETTERS = 80


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


def shown(text: object, most: int = _SHOWN_LETTERS) -> str:
    """Text in one line, cut to so many letters, with escapes for what could act on a terminal or be no text."""
    cut = str(text)
    cut = cut if len(cut) <= most else f"{cut[:most]}…"
    return printable(cut)
