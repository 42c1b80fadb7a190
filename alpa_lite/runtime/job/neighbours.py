"""The other processes of the job on this machine: one that a signal has stopped cannot speak, but it is seen.

Before the job ends for it, it is told to go on, so that it can write where it is, and end.
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
    """This process among all on all machines, for `Neighbours`; empty where that cannot be said."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    return ""


class Neighbours:
    """Those that see the same processes under the same numbers as this one."""

    def __init__(self, me: int, places: Callable[[], Mapping[int, str]], num_processes: int, limit: float) -> None:
        """Nobody is known yet.

        Args:
            me: number of this process in the job.
            places: `place` of the processes that have told theirs.
            num_processes: of the job; the places are asked for until that many are there.
            limit: seconds that one may stand still.
        """
        self._me, self._places, self._num_processes, self._limit = me, places, num_processes, limit
        self._known: Mapping[int, str] = {}
        self._since: dict[int, float] = {}

    def stopped(self, now: float) -> str:
        """Who has stood still for too long, in words; empty where nobody has."""
        still = self._still()
        self._since = {process: self._since.get(process, now) for process in still}
        for process, since in self._since.items():
            if now - since >= self._limit:
                number = still[process]
                return f"process {process} (its number is {number}) was stopped by a signal {self._limit:.0f} s ago."
        return ""

    def wake(self) -> None:
        """Tell all that stand still to go on, however short that is."""
        for pid in self._still().values():
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _still(self) -> dict[int, int]:
        """The numbers that the system gives those that stand still, by their numbers in the job."""
        if len(self._known) < self._num_processes:
            self._known = self._places()
        machine = self._known.get(self._me, "").split()[:2]
        others = {process: text.split() for process, text in self._known.items() if process != self._me and machine}
        here = {process: (int(text[2]), int(text[3])) for process, text in others.items() if text[:2] == machine}
        return {process: pid for process, (pid, started) in here.items() if _is_stopped(pid, started)}


def _is_stopped(pid: int, started: int) -> bool:
    """Whether the process that began then under this number is stopped; its number may be another's by now."""
    with suppress(OSError, IndexError):
        fields = _stat(pid)
        return fields[_STATE] in _STOPPED and int(fields[_STARTED]) == started
    return False


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
