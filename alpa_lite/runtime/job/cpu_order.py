"""Preserve the launch order of programs that span processes on XLA's CPU client.

Launches on one device of this process stay in order among themselves, and so do launches on several. But a launch on
one device does not wait for one on several, or vice versa (docs/decisions/0005): it may overtake, and messages of two
programs to the same devices of other processes get mixed up. So before a launch of the other kind, all earlier launches
are awaited. This cannot deadlock: all processes launch in one order, and no launch needs a later one.

Other platforms run programs that share a device in the order of their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_lite.runtime.job.processes import all_here, any_here, is_here

_MOST_PENDING = 64


class Turns:
    """Allows launches of only one kind at a time."""

    def __init__(self) -> None:
        """Start without launches."""
        self._alone = False
        self._pending: list[Any] = []

    def take(self, *, alone: bool) -> None:
        """Prepare for a launch; `alone`: on one device of this process."""
        if alone != self._alone:
            jax.block_until_ready(self._pending)
            self._pending.clear()
            self._alone = alone

    def launched(self, token: Any) -> None:
        """Record the token of a launch."""
        self._pending.append(token)
        if len(self._pending) > _MOST_PENDING:
            # Tokens of finished launches are dropped now and then, so that the list stays short.
            self._pending = [each for each in self._pending if not each.is_ready()]


_launches = Turns()
"""The launches of this process, shared by all its steps."""


def in_turn(program: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """Return a compiled program that respects the order, unchanged where none is needed.

    The last result of the program must be its token.
    """
    if all_here(devices) or not any_here(devices) or devices[0].platform != "cpu":
        return program
    alone = sum(map(is_here, devices)) == 1

    def run(*arrays: Any) -> Any:
        _launches.take(alone=alone)
        results = program(*arrays)
        _launches.launched(results[-1])
        return results

    return run
