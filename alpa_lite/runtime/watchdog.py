"""Notices a step that does not end while its caller waits for results, where no error can be raised.

A thread looks at the launches now and then as long as there are some that are not done, and ends when there are none;
the next step starts another. When nothing has ended for too long it says on stderr what hangs; then the process ends
(`Flight.tell_hang`), or the next call raises the same (`Flight.raise_if_hung`). It holds the launches weakly: when the
executor is dropped, the thread ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable

from alpa_lite.runtime.flight import Flight, Patience

LONGEST_LOOK = 15.0
"""Seconds between two looks, at most."""


def _to_stderr(text: str) -> None:
    # A stderr that is closed or full must not keep the next call from raising the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"alpa_lite: {text}", file=sys.stderr, flush=True)


class Watchdog:
    """Watches one `Flight`."""

    def __init__(self, flight: Flight, *, say: Callable[[str], None] = _to_stderr) -> None:
        """No thread runs yet."""
        self._flight = weakref.ref(flight)
        self._say, self._limit = say, flight.patience
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        weakref.finalize(flight, self._over.set)

    @property
    def is_watching(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None

    def watch(self) -> None:
        """A step was launched; its end is to be watched for."""
        if self._limit is None:
            return
        # The lock also tells a thread that is about to end of the launches before this call.
        with self._lock:
            if self._thread is None:
                run = threading.Thread(target=self._run, args=(self._limit,), daemon=True, name="alpa_lite watchdog")
                self._thread = run
                run.start()

    def _run(self, limit: float) -> None:
        patience = Patience(limit)
        while not self._over.wait(min(limit / 4, LONGEST_LOOK)):
            if not self._look(patience):
                return

    def _look(self, patience: Patience) -> bool:
        """Whether to look again."""
        flight = self._flight()
        if flight is None:
            return False
        with self._lock:
            pending = flight.pending()
            if not pending:
                self._thread = None
                return False
        if not flight.hang and flight.is_hung(patience, pending):
            # Said first: who sees the hang, and perhaps ends the process for it, has the sentence on stderr.
            if not flight.ends:
                self._say(flight.sentence(pending))
            flight.tell_hang(pending)
        return True
