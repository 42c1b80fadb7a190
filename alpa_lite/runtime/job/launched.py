"""Run a program as a process of `alpa-lite launch`: `python launched.py (PROGRAM.py | -m MODULE) ARGUMENT...`.

The program runs as if Python had started it, except at its end: a process that fails does not wait for the others,
which wait for it (`leave`). Nothing is imported before the program, as it may set what JAX reads when imported.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from contextlib import suppress
from types import TracebackType

_MOST_LETTERS = 300


def leave(code: int, reason: str) -> None:
    """End this process with an exit code, without JAX's wait at exit until all processes of the job end.

    `reason`: the reason that the others receive.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    # A program that has not imported JAX has joined no job, and importing it now would take seconds.
    if "jax" in sys.modules:
        with suppress(Exception):
            from alpa_lite import _jax
            from alpa_lite.runtime.job.shutdown import take_leave

            take_leave(reason)
            _jax.forget_job()
    with suppress(Exception):
        # `os._exit` below would leave these out.
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    # Not `sys.exit`, which would wait for the program's other threads.
    os._exit(code)


def run(arguments: list[str]) -> None:
    """Run a program; if it fails, end this process."""
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        if code:
            leave(code, f"exit code {code}")
        raise SystemExit(0) from None
    except BaseException as error:
        # The user sees the traceback that Python would have printed without the launcher.
        error.__traceback__ = _users(error)
        sys.excepthook(type(error), error, error.__traceback__)
        leave(130 if isinstance(error, KeyboardInterrupt) else 1, summary(error))


def summary(error: BaseException) -> str:
    """Return an error in one short line."""
    text = " ".join(str(error).split())
    text = f"{text[:_MOST_LETTERS]}…" if len(text) > _MOST_LETTERS else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _users(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame that is neither this file's nor runpy's."""
    rest = error.__traceback__
    while rest is not None and rest.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        rest = rest.tb_next
    return rest


def register() -> None:
    """Register this process with the launcher's `orphans`, which ends it together with the launcher."""
    # Removed from the environment, as the pipe is closed for whatever this program starts.
    pipe = int(os.environ.pop("ALPA_LITE_REGISTER"))
    with suppress(OSError):
        os.write(pipe, b"%d\n" % os.getpid())
    os.close(pipe)


if __name__ == "__main__":
    register()
    run(sys.argv[1:])
