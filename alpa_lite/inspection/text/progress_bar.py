"""A bar for planning, and for all that takes longer: what is done, the time so far, and about how long it still takes.

It shows after `PATIENCE_SECONDS`, on a terminal only, and goes away at the end. As long as nobody knows how much work
there is, it says so by showing no time. The bar never goes back; the time that is left is said anew as it is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from alpa_lite.plan.progress import Pace, Progress
from alpa_lite.text import show_about

PATIENCE_SECONDS = 2.0
"""Planning that takes less shows no bar."""

REDRAWN_PER_SECOND = 4


class PlanningBar:
    """Follows a `Progress`, and draws it from a thread of its own, so that the time goes on within long steps."""

    def __init__(self, console: Console, pace: Pace | None = None) -> None:
        """Nothing is drawn yet; `pace` says how long what is left will take."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Bar(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._bar.add_task("", total=None, phase="", left="")
        self._pace, self._progress = pace or Pace(), Progress()
        self._began, self._furthest = time.perf_counter(), 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __call__(self, progress: Progress) -> None:
        """Take note of a change."""
        self._pace(progress)
        self._progress = progress

    def start(self) -> None:
        """Begin to wait, then to draw."""
        self._thread.start()

    def stop(self) -> None:
        """Take the bar away."""
        self._over.set()
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
        """Draw what is known now; before anyone knows the end, the bar has none either."""
        left, elapsed = self._pace.left_seconds(), time.perf_counter() - self._began
        if left is not None:
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
    """A `Progress` with a bar; without a terminal, one that nobody sees."""
    if not console.is_terminal or console.quiet:
        yield Progress()
        return
    bar = PlanningBar(console)
    bar.start()
    try:
        yield Progress(None, bar)
    finally:
        bar.stop()
