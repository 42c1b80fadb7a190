"""Tell a job to end on SIGTERM, which schedulers send some time before they kill it.

    one process    listens for the signal from the first question on                              `Stopping.requested`
    several        any of them may get the signal at any time, and all must stop after the same question:
                       told(i)  = last question that process i had answered when it hears of the signal
                       last     = 1 + max over i of told(i)                                       `Stopping._agree`
                   each answers no until its question number `last`, and yes from then on. A process that has published
                   its `told` delays its next answer until `last` is known, so that none goes past it; a thread does
                   this, since the program may be waiting for the others, one of which is behind.

A program that never asks keeps the default: SIGTERM ends the process. JAX's preemption service would take the signal
from all programs.
"""

from __future__ import annotations

import atexit
import itertools
import json
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.job.consensus import KeyValues

LOOK_SECONDS = 0.5
"""Seconds between two checks whether another process received the signal."""

_numbers = itertools.count()
"""Numbers of listeners; all processes make their listeners in the same order."""


class Stopping:
    """Listens for SIGTERM from the first question on, in the main thread."""

    def __init__(self) -> None:
        """Start without listening."""
        self._told = threading.Event()
        self._over = threading.Event()
        self._before: Any = None
        self._listens = False
        self._answering = threading.Lock()
        self._asked = 0
        self._last: float = float("inf")
        self._problem = ""
        self._thread: threading.Thread | None = None

    def requested(self, step: int) -> bool:
        """Return True if the job is to end after `step`, the same on all processes; each must ask once per step."""
        if not self._listens:
            self._listen(step)
        if self._thread is None:
            return self._told.is_set()
        with self._answering:
            if self._problem:
                raise CheckpointError(f"The processes cannot agree on when to end: {self._problem}")
            self._asked += 1
            return self._asked >= self._last

    def close(self) -> None:
        """Restore the previous handling of SIGTERM."""
        if self._listens:
            # Another handler that was installed on top of this one stays; it may still call this one.
            if signal.getsignal(signal.SIGTERM) == self._tell:
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._listens = False
        self._end()

    def _end(self) -> None:
        self._over.set()
        # While it agrees with the others, the thread holds the lock, and may wait for processes that have ended.
        if self._thread is not None and not self._answering.locked():
            self._thread.join(2 * LOOK_SECONDS)
            self._thread = None
            atexit.unregister(self._end)

    def _listen(self, step: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                f"stop_requested({step}) was called outside of the program's main thread, where SIGTERM cannot be "
                "listened for: call it in the main thread first."
            )
        self._before = signal.signal(signal.SIGTERM, self._tell)
        self._listens = True
        job = _jax.job()
        if job is not None and job.num_processes > 1:
            self._over.clear()
            work = (job, f"stop/{next(_numbers)}")
            self._thread = threading.Thread(target=self._watch, args=work, daemon=True, name="alpa_lite stop")
            self._thread.start()
            # The thread must not use the coordination service any more when JAX shuts that down.
            atexit.register(self._end)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told.set()
        if callable(self._before):  # another listener, or the user's own
            self._before(number, frame)

    def _watch(self, job: _jax.JobInfo, name: str) -> None:
        """Wait until any process has received the signal; then agree."""
        while not self._over.is_set():
            # Both the pause between two looks at the others, and a wait that a signal here ends at once.
            if self._told.wait(LOOK_SECONDS):
                self._set(job, f"alpa_lite/{name}/told")
            if self._told.is_set() or self._was_told(job, f"alpa_lite/{name}/told"):
                with self._answering:
                    try:
                        self._last = self._agree(job, KeyValues(job), name)
                    except Exception as error:
                        self._problem = str(error)
                return

    def _agree(self, job: _jax.JobInfo, words: KeyValues, name: str) -> int:
        """Return the number of the first question that all answer with yes."""
        words.set(f"{name}/asked/{job.process}", self._asked)
        if job.process:
            return words.get(f"{name}/last", 0)
        # No process has answered this question yet: each waits for the agreement before its next answer.
        last = 1 + max(words.get(f"{name}/asked/{process}", process) for process in range(job.num_processes))
        words.set(f"{name}/last", last)
        return last

    def _set(self, job: _jax.JobInfo, key: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            job.client.key_value_set(key, json.dumps(job.process), True)

    def _was_told(self, job: _jax.JobInfo, key: str) -> bool:
        with suppress(jax.errors.JaxRuntimeError):
            job.client.key_value_try_get(key)
            return True
        return False
