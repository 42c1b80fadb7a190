"""Observe the other processes of the job on this machine: one that a signal has stopped cannot report, but can be seen.

Before the job ends because of it, it is continued, so that it can write its stacks, and end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

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
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
