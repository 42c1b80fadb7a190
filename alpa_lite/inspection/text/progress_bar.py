"""The line of progress that is shown while steps are traced, planned and compiled, on terminals and in notebooks.

    ⠹ planning: choosing shardings  ━━━━━━━━━╌╌╌╌╌╌╌  0:12  about 10 s left

`default_progress` is what `parallelize`, `plan` and the commands use unless the user passes something else. The line
appears on the error stream after `PATIENCE_SECONDS` and is removed at the end; without a terminal or notebook nothing
is written at all. Its parts:

    words     what happens, outer phase first, in the words of `PHASES`                          `line`
    bar       the share of the outer phase that is done; it never moves back                     `PlanningBar`
    left      the time that the outer phase still takes; it never grows                          `Countdown`

Where a line has no room for all of it, the last parts are left out. A process shows one line at a time: of plans that
are made at once, or one inside another, the one that was first drawn keeps the line until it is done.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TextIO

from alpa_lite.plan.progress import Clock, Pace, Progress
from alpa_lite.text import show_about

PATIENCE_SECONDS = 2.0
"""Seconds of work before the line appears."""

REDRAWN_PER_SECOND = 4

BAR_WIDTH = 16
LEAST_WIDTH = 12
"""The least room, in columns, in which the current activity is shown in detail."""

PHASES = {
    "trace": "tracing",
    "plan": "planning",
    "lower": "lowering",
    "compile": "compiling",
    "compare": "comparing",
    "demo": "the demo",
    "explain": "explaining",
    "simulate": "simulating",
    "measure": "measuring the devices",
    "run": "running the program",
    "split": "splitting the batch",
    "layers": "finding layers",
    "survey": "surveying stages",
    "stages": "choosing shardings",
    "refine": "refining the best plan",
    "manual": "trying manual plans",
    "alternatives": "pricing alternatives",
}
"""The words for each phase of a `Progress`; phases without words are not named."""

_LINE = threading.Lock()
"""Held by the drawing whose line is shown, since two would be written over each other."""

DEBUGGERS = frozenset({"bdb", "pdb", "IPython.core.debugger"})


class Display(Protocol):
    """A place where one line can be shown and replaced."""

    @property
    def width(self) -> int:
        """The number of columns."""
        ...

    @property
    def is_unicode(self) -> bool:
        """Whether it shows more than ASCII."""
        ...

    def show(self, line: str) -> None:
        """Show a line in place of the one before; an empty one removes it."""
        ...


@dataclass(frozen=True, kw_only=True)
class TerminalLine:
    """The last line of a terminal."""

    stream: TextIO

    @property
    def width(self) -> int:
        """The number of columns of the terminal, or of the variable COLUMNS."""
        asked = os.environ.get("COLUMNS", "")
        with suppress(OSError, ValueError):
            return int(asked) if asked.isdecimal() else os.get_terminal_size(self.stream.fileno()).columns
        return 80

    @property
    def is_unicode(self) -> bool:
        """Whether the encoding of the stream is UTF-8."""
        return (self.stream.encoding or "").lower().replace("-", "").startswith("utf")

    def show(self, line: str) -> None:
        """Write the line over the one before."""
        # The rest of a longer line is erased. The cursor stays behind the text, so that what a program prints meanwhile
        # is not mixed into it.
        self.stream.write(f"\r{line}\x1b[K" if line else "\r\x1b[K")
        self.stream.flush()


@dataclass(kw_only=True)
class NotebookLine:
    """An output of a notebook's cell, which is updated in place."""

    width: int = 80
    is_unicode: bool = True
    handle: Any = None

    def show(self, line: str) -> None:
        """Update the output, which the first line makes."""
        from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        data = {"text/plain": line}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)  # pyright: ignore[reportUnknownVariableType]
        else:
            self.handle.update(data, raw=True)


def display_at_hand() -> Display | None:
    """Return where progress is shown: the notebook or the terminal of this process; None if there is neither."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # Only the shell of notebooks has a kernel that displays data.
    if shell is not None and getattr(shell, "kernel", None) is not None:
        return NotebookLine()
    # None under pythonw; a dumb terminal cannot erase a line.
    if sys.stderr is None or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty():
        return None
    return TerminalLine(stream=sys.stderr)


@dataclass(kw_only=True)
class Countdown:
    """An estimate of the time left that never grows: the least of all estimates so far, each less the time since."""

    clock: Clock = time.monotonic
    ends: float | None = None

    def left_seconds(self, estimate: float | None) -> float | None:
        """Return the seconds left by a new estimate and the earlier ones; None before the first."""
        now = self.clock()
        if estimate is not None:
            self.ends = min(now + estimate, float("inf") if self.ends is None else self.ends)
        return None if self.ends is None else max(0.0, self.ends - now)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a line of progress shows.

    words     the current phases
    share     the share of the work that is done; None if unknown
    elapsed   seconds since the beginning
    left      seconds left; None if unknown
    doing     the current activity in detail
    """

    words: str
    share: float | None
    elapsed: float
    left: float | None
    doing: str

    def line(self, width: int, spinner: str = "", *, is_unicode: bool = True) -> str:
        """Return the line in less than `width` columns."""
        full, empty = ("━", "╌") if is_unicode else ("=", ".")
        done = None if self.share is None else round(BAR_WIDTH * min(1.0, self.share))
        bar = "" if done is None else full * done + empty * (BAR_WIDTH - done)
        seconds = int(self.elapsed)
        clock = f"{seconds // 60}:{seconds % 60:02d}"
        left = "" if self.left is None else f"about {show_about(self.left)} left" if self.left >= 1 else "almost done"
        head = f"{spinner} {self.words}".strip()
        # The cursor needs a column of its own, and the time left is worth more than the bar.
        fits = len(f"{head}  {bar}  {clock}  {left}") < width
        text = "  ".join(filter(None, (head, bar if fits else "", clock, left)))
        room = width - 1 - len(text) - 2
        doing = self.doing if is_unicode else self.doing.encode("ascii", "replace").decode()
        if doing and room >= LEAST_WIDTH:
            text = f"{text}  {doing if len(doing) <= room else doing[: room - 1] + ('…' if is_unicode else '~')}"
        return text[: width - 1]


class PlanningBar:
    """A follower of a `Progress` that shows it while it is in any phase.

    A thread of its own redraws the line, so that the time advances during long steps.
    """

    def __init__(self, display: Callable[[], Display | None] = display_at_hand, pace: Pace | None = None) -> None:
        """Create a bar; `display` is asked where to draw when work begins, and `pace` estimates the time left."""
        self._display, self._pace = display, pace or Pace()
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._progress = Progress()

    def __call__(self, progress: Progress) -> None:
        """Record a change of the progress; begin to draw with the first phase and end with the last."""
        # Nothing is drawn here, as the planner's thread should not wait for a terminal.
        self._pace(progress)
        self._progress = progress
        if progress.phases and self._over is None:
            self._start()
        elif not progress.phases and self._over is not None:
            self._stop()

    def _start(self) -> None:
        self._over = threading.Event()
        if (display := self._display()) is not None:
            drawing = _Drawing(display=display, progress=self._progress, pace=self._pace)
            # A daemon: a planner that fails must not keep the process alive for its bar.
            self._thread = threading.Thread(target=drawing.run, args=(self._over,), daemon=True)
            self._thread.start()

    def _stop(self) -> None:
        assert self._over is not None, "only what was started is stopped"
        self._over.set()
        # Joined, so that nothing is drawn over the output that follows.
        if self._thread is not None:
            self._thread.join()
        self._over = self._thread = None


@dataclass(kw_only=True)
class _Drawing:
    """The drawing thread: what it reads, and what it must remember so that bar and time left only advance."""

    display: Display
    progress: Progress
    pace: Pace
    drawn_for: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.monotonic)
    part: str = ""
    part_began: float = 0.0
    furthest: float | None = None
    countdown: Countdown = field(default_factory=Countdown)

    def run(self, over: threading.Event) -> None:
        """Wait for `PATIENCE_SECONDS`, then draw until the work is over."""
        if over.wait(PATIENCE_SECONDS):
            return
        spinners = itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if self.display.is_unicode else "|/-\\")
        # Tried again at each turn: the work that is shown now may end before this one does.
        while not _LINE.acquire(blocking=False):
            if over.wait(1 / REDRAWN_PER_SECOND):
                return
        try:
            # The terminal may be gone, and the work goes on without it.
            with suppress(OSError, ValueError):
                while not over.wait(1 / REDRAWN_PER_SECOND):
                    self._draw(next(spinners))
                self.display.show("")
        finally:
            _LINE.release()

    def _draw(self, spinner: str) -> None:
        if not _is_debugged(self.drawn_for):
            self.display.show(self.shown().line(self.display.width, spinner, is_unicode=self.display.is_unicode))

    def shown(self) -> Shown:
        """Return what to draw now."""
        phases, now = self.progress.phases, time.monotonic()
        named = [phase for phase in phases if phase in PHASES]
        part = named[0] if named else ""
        # Each outer phase has a bar and an estimate of its own.
        if part != self.part:
            self.part, self.part_began, self.furthest, self.countdown = part, now, None, Countdown()
        left = self.countdown.left_seconds(self.pace.left_seconds())
        if left is not None:
            spent = now - self.part_began
            # A longer estimate must not move the bar back.
            self.furthest = max(self.furthest or 0.0, spent / (spent + left) if spent + left else 1.0)
        inner = f": {PHASES[named[-1]]}" if len(named) > 1 else ""
        return Shown(
            words=f"{PHASES[part]}{inner}" if part else "working",
            share=self.furthest,
            elapsed=now - self.began,
            left=left,
            doing=self.progress.doing,
        )


def _is_debugged(thread: int) -> bool:
    """Return whether a thread is in a debugger, over whose prompt nothing may be drawn."""
    frame: FrameType | None = sys._current_frames().get(thread) if "bdb" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def default_progress() -> Progress:
    """Return a `Progress` that is shown on the terminal or in the notebook of this process while it is in a phase."""
    return Progress(None, PlanningBar())


@contextmanager
def shown_progress(phase: str) -> Generator[Progress]:
    """Yield a `default_progress` that stays in a phase for the duration of the context."""
    progress = default_progress()
    with progress.during(phase):
        yield progress
