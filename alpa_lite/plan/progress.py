"""How far planning is: what it does, how much work is done, and how much is left as far as anyone knows.

    phases     what takes the time now, one within another: "stages", and in it "split"        `Progress.during`
    units      of work done, one per stage that is solved                                      `Progress.did`
    left       units that a phase will still take; said anew as more is known                  `Progress.expect`
    seconds    by phase                                                                        `PhaseTimes`
    remaining  seconds = sum over phases of left(phase) · seconds per unit(phase)              `Pace.left_seconds`

Who plans only says what happens; the times are kept by those who follow.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Clock = Callable[[], float]
Say = Callable[[str], None]

FEW = 3
"""So many units must be done before they tell how long others take."""


class Progress:
    """What planning is at. Call it with a line of text; `say` gets these lines.

    `left` holds the units expected by phase: a number, or None where it is not known yet that there will be any end.
    """

    def __init__(self, say: Say | None = None, *followers: Callable[[Progress], None]) -> None:
        """`followers` are called after each change of phase, and with each unit and expectation."""
        self._say, self._followers = say, followers
        self.doing = ""
        self.phases: tuple[str, ...] = ()
        self.searches, self.interrupted = 0, False
        self.done: dict[str, int] = {}
        self.left: dict[str, float | None] = {}

    @staticmethod
    def of(say: Say | Progress | None) -> Progress:
        """What the user gave: a function of text, a `Progress`, or nothing."""
        return say if isinstance(say, Progress) else Progress(say)

    @property
    def phase(self) -> str:
        """The innermost phase; empty outside of all."""
        return self.phases[-1] if self.phases else ""

    def follow(self, follower: Callable[[Progress], None]) -> None:
        """Call `follower` as well from now on."""
        self._followers += (follower,)

    def __call__(self, text: str) -> None:
        """Say what is done next."""
        self.doing = text
        if self._say is not None:
            self._say(text)

    @contextmanager
    def during(self, phase: str, text: str = "") -> Generator[None]:
        """What happens within belongs to this phase; `text` is said first."""
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
        """A search begins, and nobody knows yet how much work these phases of it are."""
        self.searches += 1
        self.done, self.left = {}, dict.fromkeys(phases)
        self._tell()

    def expect(self, phase: str, units: float | None) -> None:
        """So many units of a phase are still to come, as far as is known now."""
        self.left[phase] = units
        self._tell()

    def did(self) -> None:
        """One more unit of this phase is done."""
        self.done[self.phase] = self.done.get(self.phase, 0) + 1
        left = self.left.get(self.phase)
        if left is not None:
            self.left[self.phase] = max(0.0, left - 1)
        self._tell()

    @contextmanager
    def interrupts(self) -> Generator[None]:
        """Within, Ctrl-C raises `KeyboardInterrupt` with the next news, between two units of work; twice, at once.

        Raised anywhere, it may leave half of what others go on with, and it is lost where Python happens to be in a
        callback of its garbage collector, of which JAX has some: one of ten interrupts of planning was.
        """

        def interrupt(*_: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted, self.doing = True, "interrupted: this ends with the step at hand"

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

    def _tell(self) -> None:
        for follower in self._followers:
            follower(self)
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt


class PhaseTimes:
    """Follows: the seconds of each phase, without those of phases within it."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        """Nothing has begun."""
        self.seconds: dict[str, float] = {}
        self._clock, self._phase, self._since = clock, "", clock()

    def __call__(self, progress: Progress) -> None:
        """Keep the time since the last change for the phase that it belongs to."""
        now = self._clock()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = progress.phase, now


class Pace:
    """Follows: how long the units of each phase take, with what happens within it, and what is left by that."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        """Nothing is done."""
        self._clock, self._seconds = clock, dict[str, float]()
        self._progress = Progress()
        self._phase, self._since, self._searches = "", clock(), 0

    def __call__(self, progress: Progress) -> None:
        """Keep the time since the last change for the phase whose units it is; of a new search, nothing."""
        now = self._clock()
        if progress.searches != self._searches:
            self._searches, self._phase, self._seconds = progress.searches, "", {}
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        counted = (phase for phase in reversed(progress.phases) if phase in progress.left)
        self._phase, self._since, self._progress = next(counted, ""), now, progress

    def left_seconds(self) -> float | None:
        """About how long what is left will take; None as long as nobody knows.

        A phase of which little is done is taken to be like the others.
        """
        left, done = dict(self._progress.left), self._progress.done  # who draws does so in another thread
        num_done = sum(done.get(phase, 0) for phase in left)
        if None in left.values() or num_done < FEW:
            return None
        usual = sum(self._seconds.get(phase, 0.0) for phase in left) / num_done
        rates = {p: (self._seconds.get(p, 0.0) + FEW * usual) / (done.get(p, 0) + FEW) for p in left}
        found = sum((units or 0.0) * rates[phase] for phase, units in left.items())
        # What the unit at work has taken so far is no longer left.
        return max(0.0, found - min(self._clock() - self._since, rates.get(self._phase, 0.0)))
