"""End the processes of a launch whose launcher is gone: `python orphans.py LAUNCHER GRACE`, started by the launcher.

Each process writes its process id as a line into the pipe that is the standard input here, before it runs the program.
The launcher writes `done` when all have ended. If it ends without this word, because it was killed, every process group
gets SIGTERM, and SIGKILL after the grace period. Processes that start later still hold the pipe, whose end comes only
when the last of them has written or is gone, so none is missed.

This is a separate process, since a process of the job is not reliable: it may be stopped, hold Python's lock, or have
left child processes behind. It imports only the standard library, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

DONE = b"done"

_LOOK_SECONDS = 0.2

_ZOMBIE_SECONDS = 5.0
"""Seconds after SIGKILL; processes that exist then have ended, but nobody has read their exit codes."""


def watch(pipe: int, launcher: int, grace_seconds: float) -> None:
    """Return when the launch has ended in good order, or when none of its processes is left.

    The processes and the launcher, this process's parent, write to the pipe.
    """
    text, over, terminated = b"", False, set[int]()
    kill_at: float | None = None
    while True:
        if not over and select.select([pipe], [], [], _LOOK_SECONDS)[0]:
            part = os.read(pipe, 4096)
            text, over = text + part, not part
        # What follows the last line break may be a part of a line that is still being written.
        words = text.split(b"\n")[:-1]
        if DONE in words:
            return
        now = time.monotonic()
        # When its parent ends, this process gets another one. The end of the pipe may come later: a process of the job
        # holds it too until it has registered.
        if kill_at is None and (over or os.getppid() != launcher):
            kill_at = now + grace_seconds
        if kill_at is None:
            continue
        left = [group for group in map(int, words) if _is_there(group)]
        for group in left:
            if now > kill_at or group not in terminated:
                _signal(group, signal.SIGKILL if now > kill_at else signal.SIGTERM)
                _signal(group, signal.SIGCONT)  # a stopped process handles SIGTERM only once continued
                terminated.add(group)
        if over and (not left or now > kill_at + _ZOMBIE_SECONDS):
            return
        time.sleep(_LOOK_SECONDS)


def _is_there(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # this process must outlive the launch
    watch(0, int(sys.argv[1]), float(sys.argv[2]))
