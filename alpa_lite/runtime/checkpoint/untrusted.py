"""Read files that may be damaged or hostile: sizes are bounded before allocation, and text is shown without harm.

open_regular     a regular file: opening it neither blocks (a FIFO) nor has an effect (a device)
read_bounded     the content of such a file, if it is not too large
shown            text from a file, fit for a message: short, and without control characters
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from cost_models.checks import printable

_SHOWN_LETTERS = 80


class TooLargeError(ValueError):
    """A file that is larger than any that alpa_lite writes."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, with a sentence if it is not a regular file."""
    # Before opening, which has an effect on some devices; and after it, as the file may have been replaced.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises OSError, or `TooLargeError`."""
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
    """Return text in one line, cut to `most` characters, with escapes for control characters and undecodable bytes."""
    cut = str(text)
    cut = cut if len(cut) <= most else f"{cut[:most]}…"
    return printable(cut)
