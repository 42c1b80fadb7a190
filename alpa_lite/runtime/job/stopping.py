"""Whether the job was told to end by SIGTERM, as schedulers tell it some time before they kill it.

One process listens for the signal itself. Of several, JAX's preemption service does: any of them may get the signal at
any time, and all must stop at the same step, so the service tells all of them at which.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from alpa_lite.errors import CheckpointError


class Stopping:
    """Listens for SIGTERM from the first question on."""

    def __init__(self) -> None:
        """Nothing is listened for yet."""
        self._told = False
        self._before: Any = None
        self._listens = False

    def requested(self, step: int) -> bool:
        """Whether to end after `step`, the same on all processes; each asks once per step, with rising numbers."""
        if jax.process_count() > 1:
            return self._told_to_all(step)
        if not self._listens:
            self._listen()
        return self._told

    def close(self) -> None:
        """SIGTERM is handled as before."""
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)
            self._listens = False

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "SIGTERM can be listened for in the main thread of a program only: call stop_requested there first."
            )
        self._before = signal.signal(signal.SIGTERM, self._tell)
        self._listens = True

    def _tell(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._told = True

    def _told_to_all(self, step: int) -> bool:
        try:
            self._told = self._told or bool(multihost_utils.reached_preemption_sync_point(step))
        except RuntimeError as error:
            raise CheckpointError(
                f"The processes cannot agree on when to end: {error} Leave jax_enable_preemption_service on."
            ) from error
        return self._told
