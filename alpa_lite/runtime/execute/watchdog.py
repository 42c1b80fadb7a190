"""Notices a step that does not end while its caller waits for results, where no error can be raised.

A thread, one for all steps of the process, looks at the launches now and then as long as there are some that are not
done, and ends when there are none; the next step starts another. When nothing has ended for too long it says on stderr
what hangs; then the process ends (`Flight.tell_hang`), or the next call raises the same (`Flight.raise_if_hung`). It
holds the launches weakly: when the executor is dropped, the thread ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable

from alpa_lite.runtime.job.in_flight import Flight, Patience

LONGEST_LOOK = 15.0
"""Seconds between two looks, at most."""


def _to_stderr(text: str) -> None:
    # A stderr that is closed or full must not keep the next call from raising the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"alpa_lite: {text}", file=sys.stderr, flush=True)


class Watchdog:
    """Watches one `Flight`."""

    def __init__(self, flight: Flight, *, say: Callable[[str], None] = _to_stderr) -> None:
        """It watches nothing yet."""
        self._flight = weakref.ref(flight)
        self._say, self._limit = say, flight.patience
        weakref.finalize(flight, _thread.wake)

    @property
    def is_watching(self) -> bool:
        """Whether it is looked after."""
        return _thread.has(self)

    def watch(self) -> None:
        """A step was launched; its end is to be watched for."""
        if self._limit is not None:
            _thread.add(self, self._limit)

    def is_idle(self) -> bool:
        """Whether nothing is left to watch for."""
        flight = self._flight()
        return flight is None or not flight.pending()

    def look(self, patience: Patience) -> None:
        """Tell a hang, once."""
        flight = self._flight()
        pending = () if flight is None else flight.pending()
        if flight is not None and pending and not flight.hang and flight.is_hung(patience, pending):
            # Said first: who sees the hang, and perhaps ends the process for it, has the sentence on stderr.
            if not flight.ends:
                self._say(flight.sentence(pending))
            flight.tell_hang(pending)


class _Thread:
    """One thread for all steps of the process, while any of them has launches that are not done."""

    def __init__(self) -> None:
        # Reentrant: an executor may be collected, and wake the thread, while this thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._watched: dict[Watchdog, Patience] = {}
        self._pause = LONGEST_LOOK
        self._is_running = False

    def has(self, watchdog: Watchdog) -> bool:
        return watchdog in self._watched

    def add(self, watchdog: Watchdog, limit: float) -> None:
        with self._changed:  # which tells a look that is about to end of the launches before this call
            if watchdog in self._watched:
                return
            self._watched[watchdog] = Patience(limit)
            pause = min(limit / 4, LONGEST_LOOK)
            if pause < self._pause:
                self._pause = pause
                self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, daemon=True, name="alpa_lite watchdog").start()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._pause)
                for idle in [each for each in self._watched if each.is_idle()]:
                    del self._watched[idle]
                if not self._watched:
                    self._is_running, self._pause = False, LONGEST_LOOK
                    return
                watched = [*self._watched.items()]
            for each, patience in watched:
                each.look(patience)


_thread = _Thread()
