"""Run modules of this project in child processes that end with this one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from alpa_lite.cli.command import Exit

GRACE_SECONDS = 10.0
"""Seconds that an interrupted child process gets to end by itself before it is killed."""


def run_module(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    read: Callable[[str], None] | None = None,
) -> int:
    """Run `python -m name arguments` and return its exit code: 128 plus the signal if a signal ended it.

    read: called with each line of its standard output; None lets it write to the output of this process.
    """
    command = [sys.executable, "-m", name, *arguments]
    output = None if read is None else subprocess.PIPE
    with subprocess.Popen(command, env=dict(environment), stdout=output, text=True) as process:
        try:
            if read is not None:
                for line in process.stdout or ():
                    read(line.rstrip("\n"))
            code = process.wait()
        except KeyboardInterrupt:
            return _interrupted(process)
        except BaseException:
            process.kill()
            raise
    return code if code >= 0 else 128 - code


def _interrupted(process: subprocess.Popen[str]) -> int:
    """Interrupt the child process, wait for it to end, and return the exit code of an interrupt.

    Ctrl-C on a terminal reaches the child too, but a signal sent by another process reached this process alone, so the
    child is interrupted only if it is still running after a second.
    """
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
    return Exit.INTERRUPTED
