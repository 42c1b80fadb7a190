"""The user's line of an equation, as messages and plans name it: code of installed packages is not the user's."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path

import jax.extend.source_info_util as source_info_util

from alpa_lite import _jax
from alpa_lite.program.memo import memoized
from cost_models.checks import printable

_OWN_FOLDER = str(Path(_jax.__file__).parent)
_MODELS_FOLDER = os.path.join(_OWN_FOLDER, "cli", "models", "")
"""The built-in models, whose lines are named like those of a user."""

_NUMBERS_OF_FRAMES = (8, 100)
"""Numbers of traceback frames to read, in this order: most calls of libraries are no deeper than the first number."""

_STANDARD_LIBRARY = os.path.dirname(threading.__file__)


def source_line(eqn: _jax.JaxprEqn) -> str:
    """Return `file:line (function)` of the user code that an equation comes from, or an empty string if there is none.

    For code of a library of layers or optimizers, this is the line of the user's call rather than a line in the
    library.
    """
    line = printable(source_info_util.summarize(eqn.source_info))
    if _is_own(line):
        return ""
    if not in_a_library(line):
        return line
    # Frames are read from the innermost outwards, up to the first one in this package: those further out called
    # alpa_lite and are not part of the step.
    for num_frames in _NUMBERS_OF_FRAMES:
        frames = reversed(source_info_util.summarize(eqn.source_info, num_frames=num_frames).split("\n"))
        inner = itertools.takewhile(lambda frame: not _is_own(frame), frames)
        caller = next((frame for frame in inner if not in_a_library(frame)), None)
        if caller is not None:
            return printable(caller)
    return line


def in_a_library(line: str) -> bool:
    """Return whether a `file:line` belongs to an installed package, judged by its folder.

    A package that is installed in editable mode lies in a folder of the user, and counts as the user's code: that is
    most often the user's own project, and code that can be changed where a message names it.
    """
    return _lies_with_packages(line) or (
        not line.startswith(_MODELS_FOLDER) and _is_installed(os.path.dirname(line), tuple(sys.path))
    )


def is_in_a_library(file: str) -> bool:
    """Return whether a source file belongs to an installed package, to alpa_lite or to Python itself.

    Only the name is looked at: this is asked of a process that may hang because its disk does.
    """
    return _lies_with_packages(file) or _is_own(file) or file.startswith((_STANDARD_LIBRARY, "<frozen"))


def _lies_with_packages(line: str) -> bool:
    return ("site-packages" in line or "dist-packages" in line) and not line.startswith(_MODELS_FOLDER)


@memoized(entries=10_000)
def _is_installed(folder: str, search_path: tuple[str, ...]) -> bool:
    """Return whether a folder lies below one that packages were installed to, as by `pip install --target`.

    An editable install leaves its `.dist-info` in site-packages, apart from the code.
    """
    above = (path for path in search_path if path and (folder + os.sep).startswith(path.rstrip(os.sep) + os.sep))
    return any(next(Path(path).glob("*.dist-info"), None) is not None for path in above)


def _is_own(line: str) -> bool:
    """Return whether a `file:line` belongs to alpa_lite itself, without its models."""
    return line.startswith(_OWN_FOLDER) and not line.startswith(_MODELS_FOLDER)
