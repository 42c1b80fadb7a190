"""Progress bars on terminals: for planning and other long work, and for the measurement of devices.

The bar of planning shows the current activity, the elapsed time, and the time left. It appears after
`PATIENCE_SECONDS`, on a terminal only, and is removed at the end. While the amount of work is unknown, it shows no time
left. The bar never moves back; the estimate of the time left is renewed with each change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from alpa_lite.plan.progress import Pace, Progress
from alpa_lite.text import show_about

PATIENCE_SECONDS = 2.0
"""Seconds of planning before the bar appears."""

REDRAWN_PER_SECOND = 4


class PlanningBar:
    """A follower of a `Progress` that draws it from its own thread, so that the time advances during long steps."""

    def __init__(self, console: Console, pace: Pace | None = None) -> None:
        """Create a bar that is not drawn yet; `pace` estimates the time left."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
        )
        # Without rich's own thread: `_draw` refreshes the bar, each time with a new estimate.
        self._bar = Bar(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._bar.add_task("", total=None, phase="", left="")
        self._pace, self._progress = pace or Pace(), Progress()
        self._began, self._furthest = time.perf_counter(), 0.0
        self._over = threading.Event()
        # A daemon: a planner that fails must not keep the process alive for its bar.
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __call__(self, progress: Progress) -> None:
        """Record a change of the progress."""
        # Only recorded here, as the planner's thread should not wait for a terminal.
        self._pace(progress)
        self._progress = progress

    def start(self) -> None:
        """Start the thread, which waits for `PATIENCE_SECONDS` and then draws."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and remove the bar."""
        self._over.set()
        # Joined, so that nothing is drawn over the output that follows.
        self._thread.join()

    def _draw(self) -> None:
        if self._over.wait(PATIENCE_SECONDS):
            return
        self._bar.start()
        try:
            while not self._over.wait(1 / REDRAWN_PER_SECOND):
                self._update()
        finally:
            self._bar.stop()

    def _update(self) -> None:
        """Redraw the bar; it is indeterminate while the time left is unknown."""
        left, elapsed = self._pace.left_seconds(), time.perf_counter() - self._began
        if left is not None:
            # A longer estimate must not move the bar back.
            self._furthest = max(self._furthest, elapsed / (elapsed + left))
        elif not self._progress.done:
            self._began, self._furthest = time.perf_counter(), 0.0  # another search
        self._bar.update(
            self._task,
            description=self._progress.doing,
            total=1.0 if self._furthest else None,
            completed=self._furthest,
            phase=self._progress.phase or "planning",
            left="" if left is None else f"about {show_about(left)} left",
            refresh=True,
        )


@contextmanager
def planning_progress(console: Console) -> Generator[Progress]:
    """Yield a `Progress` that a bar shows; without a terminal, one that nothing shows."""
    if not console.is_terminal or console.quiet:
        yield Progress()
        return
    bar = PlanningBar(console)
    bar.start()
    try:
        yield Progress(None, bar)
    finally:
        bar.stop()


class CalibrationProgress:
    """A progress bar that is redrawn while devices are measured; silent without a terminal."""

    def __init__(self, console: Console) -> None:
        """Create a bar that draws on `console` inside its `with` block."""
        columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> CalibrationProgress:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and remove the bar."""
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being measured, and how many of the measurements are done; called by `runtime.calibrate`."""
        self._bar.update(self._task, description=what, completed=done, total=total)
