"""The order in which XLA's CPU client runs programs that span processes.

Launches on one device of this process keep their order among themselves, and so do launches on several. But a launch
on one device does not wait for one on several, nor the other way round (docs/decisions/0005): it may overtake, and what
two programs send to the same devices of other processes gets mixed up. So before a launch of the other kind what was
launched is awaited. That cannot hang: all processes launch in one order, and what was launched needs nothing later.

Other platforms run what shares a device in the order of the launches, whatever else it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_lite.runtime.job.processes import all_here, any_here, is_here

_MOST_PENDING = 64


class Turns:
    """Launches of one kind at a time."""

    def __init__(self) -> None:
        """Nothing was launched."""
        self._alone = False
        self._pending: list[Any] = []

    def take(self, *, alone: bool) -> None:
        """Before a launch; `alone`: on one device of this process."""
        if alone != self._alone:
            jax.block_until_ready(self._pending)
            self._pending.clear()
            self._alone = alone

    def launched(self, token: Any) -> None:
        """After it."""
        self._pending.append(token)
        if len(self._pending) > _MOST_PENDING:
            self._pending = [each for each in self._pending if not each.is_ready()]


_turns = Turns()
"""Of this process, whose steps may be launched in turn."""


def in_turn(program: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """A compiled program, whose last result is its token, that keeps the order; itself where it need not."""
    if all_here(devices) or not any_here(devices) or devices[0].platform != "cpu":
        return program
    alone = sum(map(is_here, devices)) == 1

    def run(*arrays: Any) -> Any:
        _turns.take(alone=alone)
        results = program(*arrays)
        _turns.launched(results[-1])
        return results

    return run
