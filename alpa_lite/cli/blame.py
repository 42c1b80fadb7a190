"""What a user's own code raised while it was imported, called or traced, with its lines that led there."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_NOT_THE_USERS = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(Path(__file__).parents[2] / package for package in ("alpa_lite", "cost_models", "benchmarks")),
    )
)
_MAX_LINES = 6


def blamed(error: BaseException) -> str:
    """The sentence; empty where no code of the user's had a part in the error."""
    lines = list(_places(error))
    if not lines:
        return ""
    said = traceback.format_exception_only(error)[-1].strip() if isinstance(error, SyntaxError) else _said(error)
    left_out = [f"  … {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n".join([said, *left_out, *lines[-_MAX_LINES:]])


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _places(error: BaseException) -> Iterator[str]:
    """`  train.py:12 in loss: x @ w`, the innermost last."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_users(code.co_filename):
            text = linecache.getline(code.co_filename, number).strip()
            yield f"  {_short(code.co_filename)}:{number} in {code.co_qualname}" + (f": {text}" if text else "")
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        yield f"  {_short(error.filename)}:{error.lineno}" + (f": {error.text.strip()}" if error.text else "")


def _is_users(file: str) -> bool:
    return not file.startswith((*_NOT_THE_USERS, "<"))


def _short(file: str) -> str:
    """Relative to where the user works, if it lies there."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
