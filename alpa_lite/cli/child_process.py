"""Programs of this package in processes of their own, which end with this one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from alpa_lite.cli.command import Exit

GRACE_SECONDS = 10.0
"""So long a program that was interrupted may take to say so."""


def run_module(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    read: Callable[[str], None] | None = None,
) -> int:
    """Run `python -m name arguments`. Returns its exit code, of a program that a signal ended 128 and the signal.

    read: is given each line of its standard output, which else is that of this process.
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
    """On a terminal Ctrl-C reached the program too; from elsewhere the signal came to this process alone."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
    return Exit.INTERRUPTED
