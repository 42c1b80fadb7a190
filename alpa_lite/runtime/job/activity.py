"""Observe the processes of a job: what this one is doing, and whether a signal has stopped another one on this machine.

busy         context in which the process plans or compiles: the others wait for it longer  `busy`, `doing`
idle         context in which it waits for others                                           `idle`
where        the line of the user's program that the main thread is at                      `where`
stacks       those of all Python threads, on the error stream                               `dump_stacks`
neighbours   other processes of this machine: a stopped one cannot report, but can be seen  `Neighbours`

Before the job ends because of a stopped process, that one is continued, so that it can write its stacks, and end.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType

from alpa_lite import _jax

_COMPILING = tuple(os.path.join("jax", "_src", *name) for name in (("compiler.py",), ("interpreters", "mlir.py")))
"""Files of JAX whose functions run while it lowers and compiles."""

_doing: list[str] = []
"""The activities of the process, the innermost last; empty texts stand for waiting."""


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Mark this process as busy with a long activity, for example "compiling"; the other processes are told."""
    _doing.append(what)
    try:
        yield
    finally:
        # By value, not the last: activities of several threads may end in another order than they began.
        _doing.remove(what)


def idle() -> AbstractContextManager[None]:
    """Mark this process as waiting for others."""
    return busy("")


def doing() -> str:
    """Return this process's activity, empty while it has none. JAX may be compiling a function of the user's own."""
    if _doing and _doing[-1]:
        return _doing[-1]
    return "compiling" if any(map(_is_compiling, sys._current_frames().values())) else ""


def where() -> str:
    """Return the innermost line of the user's program that the main thread is at, as `file:line (function)`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the end of the program"
    found: FrameType = frame
    while _jax.is_in_a_library(found.f_code.co_filename) and found.f_back is not None:
        found = found.f_back
    # If no frame is of the user's own, the innermost one says most.
    found = frame if found.f_back is None and _jax.is_in_a_library(found.f_code.co_filename) else found
    return f"{found.f_code.co_filename}:{found.f_lineno} ({found.f_code.co_name})"


def dump_stacks() -> None:
    """Write the stacks of all Python threads to the error stream, even if Python's own is closed or redirected."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(Exception):
            # This needs a file descriptor, which a replaced stream may lack: then the next one is tried.
            faulthandler.dump_traceback(file=stream or 2, all_threads=True)
            return


_STOPPED = frozenset("Tt")
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat after the name."""


def place() -> str:
    """Return a key of the process namespace and number of this process, for `Neighbours`; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    return ""


class Neighbours:
    """The processes of the job that see the same processes under the same numbers as this one."""

    def __init__(self, me: int, places: Callable[[], Mapping[int, str]], num_processes: int, limit: float) -> None:
        """Start without any neighbour.

        Args:
            me: number of this process in the job.
            places: returns the `place` of each process that has published it.
            num_processes: of the job; `places` is called until it returns that many.
            limit: seconds that a process may be stopped.
        """
        self._me, self._places, self._num_processes, self._limit = me, places, num_processes, limit
        self._known: Mapping[int, str] = {}
        self._since: dict[int, float] = {}

    def stopped(self, now: float) -> str:
        """Return the processes that have been stopped for too long, in words; empty if there are none."""
        still = self._still()
        # A process that was continued in between has no entry here, so its time starts again.
        self._since = {process: self._since.get(process, now) for process in still}
        for process, since in self._since.items():
            if now - since >= self._limit:
                number = still[process]
                return f"process {process} (its number is {number}) was stopped by a signal {self._limit:.0f} s ago."
        return ""

    def wake(self) -> None:
        """Continue all stopped processes, however briefly they were stopped."""
        for pid in self._still().values():
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _still(self) -> dict[int, int]:
        """Return the process ids of the stopped processes, by their numbers in the job."""
        if len(self._known) < self._num_processes:
            self._known = self._places()
        # Process ids mean the same only on one running kernel and in one process namespace, as of a container.
        machine = self._known.get(self._me, "").split()[:2]
        others = {process: text.split() for process, text in self._known.items() if process != self._me and machine}
        here = {process: (int(text[2]), int(text[3])) for process, text in others.items() if text[:2] == machine}
        return {process: pid for process, (pid, started) in here.items() if _is_stopped(pid, started)}


def _is_stopped(pid: int, started: int) -> bool:
    """Return True if the process that began then under this id is stopped; the id may have been reused."""
    with suppress(OSError, IndexError):
        fields = _stat(pid)
        return fields[_STATE] in _STOPPED and int(fields[_STARTED]) == started
    return False


def _stat(pid: int) -> list[str]:
    # The name of the program, in parentheses, may itself contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_compiling(frame: FrameType | None) -> bool:
    """Return whether a thread whose innermost frame is `frame` is lowering or compiling a function in JAX."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILING):
            return True
        frame = frame.f_back
    return False
