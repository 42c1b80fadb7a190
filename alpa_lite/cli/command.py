"""What all commands share: the description of a command, its output, its exit code, and modules run in child processes.

An exception of the user's own code, raised while it was imported, called or traced, is printed with the user's lines
that led to it (`blamed`) instead of a traceback through this package and JAX.
"""

from __future__ import annotations

import argparse
import json
import linecache
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rich.console import Console

from alpa_lite.cli.exit_codes import Exit, reader_left
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.text import did_you_mean
from cost_models.checks import message

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["SuggestingParser"]

_CHOICE = re.compile(r"invalid choice: '?(.*?)'? \(choose from (.*)\)")

VERSION = 1
"""The version of the `--json` schemas; it grows when an entry is removed or changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The description of one command.

    name             the command's name
    about            its purpose in a few words, as `--help` lists it
    example          arguments that work, as `--help` shows them
    run              runs it and returns the exit code
    add_arguments    adds its arguments to a parser
    """

    name: str
    about: str
    example: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def add_to(self, commands: Subparsers) -> None:
        """Add the parser of this command to the subparsers of argparse; every command has `--json`."""
        parser = commands.add_parser(
            self.name,
            help=self.about,
            description=f"{self.about[0].upper()}{self.about[1:]}.",
            epilog=f"example:\n  alpa-lite {self.name} {self.example}".rstrip(),
            # Otherwise argparse would join the lines of the example.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        self.add_arguments(parser)
        parser.set_defaults(run=self.run, parser=parser)


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    return _at_least(text, 1)


def count(text: str) -> int:
    """Parse a whole number of at least 0, for argparse."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    # `int` alone also reads "-3", "1_000" and blanks.
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} was given; it must be a whole number of at least {least}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    # Put in this way so that it refuses NaN too.
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} was given; it must be a number of seconds above 0")
    return found


class SuggestingParser(argparse.ArgumentParser):
    """A parser whose errors suggest the closest command, option or choice for a word that there is none for."""

    # The stub of the base class has overloads, of which one has no default for `namespace`.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse as the base class does; the parser of a command refuses an unknown option by itself."""
        found, rest = super().parse_known_args(args, namespace)
        wrong = next((word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"), None)
        if wrong is not None:
            self.error(f"there is no option {wrong}.{did_you_mean(wrong, self._option_string_actions)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        choice = _CHOICE.search(message)
        super().error(message + (did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2])) if choice else ""))


def suggests(action: argparse.Action, words: Sequence[str]) -> None:
    """Record the values that a shell may propose for an argument; other values are allowed too."""
    # Not `choices`, which argparse would enforce.
    setattr(action, SUGGESTIONS, tuple(words))


SUGGESTIONS = "suggestions"
"""The attribute of an argparse action under which `suggests` stores the values."""


@contextmanager
def json_alone(given: argparse.Namespace) -> Iterator[None]:
    """Let `answer` alone write to the output with `--json`; what else is printed goes to the error stream meanwhile.

    It belongs around the function that `ended` calls, which closes the output where its reader has left.
    """
    given.stdout = sys.stdout
    if not given.json:
        yield
        return
    # Modules of the user print when they are imported, and steps when they are traced.
    with redirect_stdout(sys.stderr):
        yield


def answer(given: argparse.Namespace, text: object, data: Callable[[], Mapping[str, object]]) -> None:
    """Print `text`, or with `--json` the data in the envelope that all commands share."""
    shown = json.dumps(enveloped(given.command, data()), indent=2, allow_nan=False) if given.json else text
    # Flushed here, so that a reader who left is noticed now, and not at the exit of Python.
    print(shown, file=given.stdout, flush=True)


def enveloped(command: str, data: Mapping[str, object]) -> dict[str, object]:
    """Return data with the name and version of their schema; numbers that are not finite become null."""
    return {"schema": f"alpa-lite/{command}", "version": VERSION, **cast("dict[str, object]", _finite(data))}


def _finite(value: object) -> object:
    # JSON has no infinity and no NaN, which Python would write nevertheless; `bool` and `int` pass unchanged.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in cast("Sequence[object]", value)]
    return value


def ended(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; print expected errors as their message.

    Exceptions of the user's code are printed with the user's lines. Any other exception is a defect, and raised.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except InfeasibleError as error:
        complain(error)
        return Exit.INFEASIBLE
    except AlpaLiteError as error:
        complain(error)
        return Exit.ERROR
    except BrokenPipeError:
        return reader_left()
    except Exception as error:
        found = blamed(error)
        if not found:
            raise
        complain(found)
        return Exit.ERROR
    except KeyboardInterrupt:
        complain(f"Interrupted: {name} has no result yet.")
        return Exit.INTERRUPTED


class Screen(Console):
    """A console that raises `BrokenPipeError` when its reader leaves, for `ended`; rich's own exits with 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error; called by rich while it handles a broken pipe."""
        raise BrokenPipeError


def complain(error: object) -> None:
    """Print a message to the error stream, so that it does not mix with the data on the output."""
    print(message(str(error)), file=sys.stderr)


class OutputError(AlpaLiteError, OSError):
    """An output file cannot be written."""


def check_writable(path: Path | None) -> None:
    """Raise `OutputError` if a file cannot be written; called before work that takes long. None is always allowed."""
    if path is None:
        return
    folder = path.parent
    # Asked of the system rather than tried: a plan that fails later should not leave an empty file.
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "may not be written to" if folder.is_dir() else "no such folder"
        raise OutputError(f"{path} cannot be written: {reason}. Give a file in an existing folder.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `OutputError` for any `OSError` while a file is written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{path} cannot be written: {reason}. Give a file in an existing folder.") from error


_LIBRARY_FOLDERS = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        # A checkout does not lie in the folders of installed packages.
        *(Path(__file__).parents[2] / package for package in ("alpa_lite", "cost_models")),
    )
)
_MAX_LINES = 6


def blamed(error: BaseException) -> str:
    """Return the message of an error with the user's lines; "" if no code of the user took part in it."""
    # Only errors in whose traceback a line of the user stands are the user's; others are defects of this package.
    lines = list(_user_lines(error))
    if not lines:
        return ""
    said = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, SyntaxError):
        said = traceback.format_exception_only(error)[-1].strip()
    # The innermost lines are kept: they are next to the cause.
    left_out = [f"  … {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n".join([said, *left_out, *lines[-_MAX_LINES:]])


def _user_lines(error: BaseException) -> Iterator[str]:
    """Yield the user's lines in a traceback, the innermost last, as `  train.py:12 in loss: x @ w`."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_user_file(code.co_filename):
            text = linecache.getline(code.co_filename, number).strip()
            yield f"  {_short(code.co_filename)}:{number} in {code.co_qualname}" + (f": {text}" if text else "")
    # The file with the error was never run, so that no frame of the traceback is in it.
    if isinstance(error, SyntaxError) and error.filename and _is_user_file(error.filename):
        yield f"  {_short(error.filename)}:{error.lineno}" + (f": {error.text.strip()}" if error.text else "")


def _is_user_file(file: str) -> bool:
    # Names such as <string> or <frozen runpy> stand for code without a file.
    return not file.startswith((*_LIBRARY_FOLDERS, "<"))


def _short(file: str) -> str:
    """Return a path relative to the current folder if it is inside it, else unchanged."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


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
    # The interpreter of this process, which may be one of several environments.
    command = [sys.executable, "-m", name, *arguments]
    # Without a reader the child writes to the same terminal, and keeps its colours and progress lines.
    output = None if read is None else subprocess.PIPE
    with subprocess.Popen(command, env=dict(environment), stdout=output, text=True) as process:
        try:
            if read is not None:
                for line in process.stdout or ():
                    read(line.rstrip("\n"))
            code = process.wait()
        except KeyboardInterrupt:
            return _interrupted(process)
        # Anything else that ends this process must not leave a child behind that nobody waits for.
        except BaseException:
            process.kill()
            raise
    # `Popen` gives a signal as a negative number; shells give 128 plus the signal.
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
