"""Track what this process is doing: whether it runs something that takes long, and which line its program is at.

busy     context in which the process plans or compiles: the others wait for it longer  `busy`, `doing`
idle     context in which it waits for others                                           `idle`
where    the line of the user's program that the main thread is at                      `where`
stacks   those of all Python threads, on the error stream                               `dump_stacks`
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from alpa_lite import _jax

_doing: list[str] = []
"""The activities of the process, the innermost last; empty texts stand for waiting."""


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Mark this process as busy with a long activity, for example "compiling"; the other processes are told."""
    _doing.append(what)
    try:
        yield
    finally:
        _doing.remove(what)


def idle() -> AbstractContextManager[None]:
    """Mark this process as waiting for others."""
    return busy("")


def doing() -> str:
    """Return this process's activity, empty while it has none. JAX may be compiling a function of the user's own."""
    if _doing and _doing[-1]:
        return _doing[-1]
    return "compiling" if any(map(_jax.is_compiling, sys._current_frames().values())) else ""


def where() -> str:
    """Return the innermost line of the user's program that the main thread is at, as `file:line (function)`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the end of the program"
    found: FrameType = frame
    while _jax.is_in_a_library(found.f_code.co_filename) and found.f_back is not None:
        found = found.f_back
    found = frame if found.f_back is None and _jax.is_in_a_library(found.f_code.co_filename) else found
    return f"{found.f_code.co_filename}:{found.f_lineno} ({found.f_code.co_name})"


def dump_stacks() -> None:
    """Write the stacks of all Python threads to the error stream, even if Python's own is closed or redirected."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(Exception):
            faulthandler.dump_traceback(file=stream or 2, all_threads=True)
            return
