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
        """Who has stood still for too long, in words, and was told to go on; empty where nobody has."""
        if len(self._known) < self._num_processes:
            self._known = self._places()
        machine = self._known.get(self._me, "").split()[:2]
        for process, text in self._known.items():
            if process == self._me or not machine or text.split()[:2] != machine:
                continue
            pid, started = map(int, text.split()[2:])
            if not _is_stopped(pid, started):
                self._since.pop(process, None)
            elif now - self._since.setdefault(process, now) >= self._limit:
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
                return f"process {process} (its number is {pid}) was stopped by a signal {self._limit:.0f} s ago."
        return ""


def _is_stopped(pid: int, started: int) -> bool:
    """Whether the process that began then under this number is stopped; its number may be another's by now."""
    with suppress(OSError, IndexError):
        fields = _stat(pid)
        return fields[_STATE] in _STOPPED and int(fields[_STARTED]) == started
    return False


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
