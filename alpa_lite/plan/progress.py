"""Progress of planning: the current activity, the work done, and an estimate of the work left.

    phases     activities that take time now, one inside another: "stages", and in it "split"   `Progress.during`
    units      work done, one unit per solved stage                                             `Progress.did`
    left       units that a phase will still take; updated when more is known                   `Progress.expect`
    seconds    time by phase                                                                    `PhaseTimes`
    remaining  seconds = sum over phases of left(phase) · seconds per unit(phase)               `Pace.left_seconds`

Planning code only reports events; followers measure times. The lines of text are also logged at the level DEBUG.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Clock = Callable[[], float]
Say = Callable[[str], None]

_logger = logging.getLogger("alpa_lite")

FEW = 3
"""The minimum number of finished units before the remaining time is estimated."""


class TimeIsUp(KeyboardInterrupt):
    """The time limit of a search has passed, which ends it as Ctrl-C does."""


class Progress:
    """The state of planning. Call it with a line of text, which is passed to `say`.

    Attributes:
        doing: the last line of text.
        phases: the current phases, outermost first.
        searches: number of searches begun.
        interrupted: whether the user pressed Ctrl-C and the exception is still to be raised.
        done: units done by phase.
        left: units expected by phase; None while the number is unknown.
    """

    def __init__(self, say: Say | None = None, *followers: Callable[[Progress], None]) -> None:
        """Create the state; `followers` are called after each change of phase, unit and expectation."""
        self._say, self._followers = say, followers
        self.doing = ""
        self.phases: tuple[str, ...] = ()
        self.searches, self.interrupted = 0, False
        self.done: dict[str, int] = {}
        self.left: dict[str, float | None] = {}
        self._ends_at = math.inf

    @staticmethod
    def of(say: Say | Progress | None) -> Progress:
        """Return a `Progress` for what the user passed: a function of text, a `Progress`, or None."""
        return say if isinstance(say, Progress) else Progress(say)

    @property
    def phase(self) -> str:
        """The innermost phase; empty outside of all phases."""
        return self.phases[-1] if self.phases else ""

    def follow(self, follower: Callable[[Progress], None]) -> None:
        """Add a follower, which is called on every change."""
        # A new tuple, since `_tell` may be going through the old one.
        self._followers += (follower,)

    def __call__(self, text: str) -> None:
        """Report the next activity as text."""
        self.doing = text
        _logger.debug("%s", text)
        if self._say is not None:
            self._say(text)

    @contextmanager
    def during(self, phase: str, text: str = "") -> Generator[None]:
        """Enter a phase for the duration of the context; `text` is reported first."""
        before = self.phases
        self.phases = (*before, phase)
        self._tell()
        if text:
            self(text)
        try:
            yield
        finally:
            self.phases = before
            self._tell()

    def begin(self, *phases: str) -> None:
        """Report the start of a search whose phases have an unknown number of units."""
        self.searches += 1
        self.done, self.left = {}, dict.fromkeys(phases)
        self._tell()

    def expect(self, phase: str, units: float | None) -> None:
        """Report the number of units of a phase that are still expected, None if unknown."""
        self.left[phase] = units
        self._tell()

    def did(self) -> None:
        """Report that one more unit of the current phase is done."""
        self.done[self.phase] = self.done.get(self.phase, 0) + 1
        left = self.left.get(self.phase)
        if left is not None:
            # An expectation may have been too low.
            self.left[self.phase] = max(0.0, left - 1)
        self._tell()

    def counting(self, phase: str) -> Callable[[str, int, int], None]:
        """Begin a phase whose units are known, and return a function that reports it: name, units done, all units."""
        self.begin(phase)

        def report(name: str, done: int, total: int) -> None:
            self(f"{name} ({done} of {total})")
            # Several units may have ended since the last report.
            for _ in range(done - self.done.get(phase, 0)):
                self.did()
            self.expect(phase, total - done)

        return report

    @contextmanager
    def interrupts(self) -> Generator[None]:
        """Delay Ctrl-C within this context to the next report, between two units of work; a second one is immediate.

        Raised at an arbitrary point, `KeyboardInterrupt` may leave shared data half written. It is even lost if Python
        happens to be in a callback of its garbage collector, of which JAX installs some: one of ten interrupts of
        planning was.
        """

        def interrupt(*_: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            # A signal handler may run between any two instructions, so that it only leaves a note.
            self.interrupted, self.doing = True, "interrupted: stopping after the current unit of work"

        # Only the main thread may set handlers, and a handler that the application installed is left in place.
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self.interrupted = False

    @contextmanager
    def within(self, seconds: float | None) -> Generator[None]:
        """Raise `TimeIsUp` within this context, at the first report after so many seconds; None: never."""
        if seconds is not None:
            self._ends_at = time.monotonic() + seconds
        try:
            yield
        finally:
            self._ends_at = math.inf

    def _tell(self) -> None:
        """Call all followers, then raise a delayed `KeyboardInterrupt`."""
        for follower in self._followers:
            follower(self)
        if time.monotonic() > self._ends_at:
            self._ends_at, self.doing = math.inf, "the time limit has passed: stopping"
            raise TimeIsUp
        # Cleared before it is raised: leaving the phases reports again, and must not raise a second one.
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt


class PhaseTimes:
    """A follower that measures the seconds of each phase, excluding phases inside it."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        """Start without a phase; `clock` returns seconds."""
        self.seconds: dict[str, float] = {}
        self._clock, self._phase, self._since = clock, "", clock()

    def __call__(self, progress: Progress) -> None:
        """Add the time since the last change to the phase that was current."""
        now = self._clock()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = progress.phase, now


class Pace:
    """A follower that measures seconds per unit of each phase, inner phases included, to estimate the time left."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        """Start without measurements; `clock` returns seconds."""
        self._clock, self._seconds = clock, dict[str, float]()
        self._progress = Progress()
        self._phase, self._since, self._searches = "", clock(), 0

    def __call__(self, progress: Progress) -> None:
        """Add the time since the last change to the phase that counts units; a new search resets all measurements."""
        now = self._clock()
        if progress.searches != self._searches:
            self._searches, self._phase, self._seconds = progress.searches, "", {}
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        # Phases that count no units are part of the phase around them.
        counted = (phase for phase in reversed(progress.phases) if phase in progress.left)
        self._phase, self._since, self._progress = next(counted, ""), now, progress

    def left_seconds(self) -> float | None:
        """Return the estimated remaining seconds, or None while no estimate is possible.

        The rate of a phase with few finished units is pulled towards the average over all phases.
        """
        # Copied, since the display calls this from another thread.
        left, done = dict(self._progress.left), self._progress.done
        num_done = sum(done.get(phase, 0) for phase in left)
        if None in left.values() or num_done < FEW:
            return None
        usual = sum(self._seconds.get(phase, 0.0) for phase in left) / num_done
        # As if each phase had finished FEW more units at the average pace.
        rates = {p: (self._seconds.get(p, 0.0) + FEW * usual) / (done.get(p, 0) + FEW) for p in left}
        found = sum((units or 0.0) * rates[phase] for phase, units in left.items())
        # Subtract the time that the current unit has taken already.
        return max(0.0, found - min(self._clock() - self._since, rates.get(self._phase, 0.0)))
