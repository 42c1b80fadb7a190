"""How commands end: their exit codes, and what is done when the reader of the output has left.

Imports nothing of this package: `alpa-lite --version` answers before anything else is loaded.
"""

from __future__ import annotations

import os
import sys
from enum import IntEnum


class Exit(IntEnum):
    """The exit codes of all commands; docs/command-line.md documents them for users."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    INFEASIBLE = 3
    # As shells tell of a process that SIGINT (2) or SIGPIPE (13) ended: 128 plus the number of the signal.
    INTERRUPTED = 130
    PIPE_CLOSED = 141


def reader_left() -> int:
    """Return the exit code after the reader of the output (`| head`) has seen enough and closed it."""
    # Without this Python complains when it flushes its output at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.PIPE_CLOSED
