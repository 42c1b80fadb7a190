"""Parameters that are stored in parts and gathered where an op reads them: no more of them at a time than planned.

What is gathered for one op is a unit. XLA sees no reason to wait with a gather, whose operand is there from the start
of a task on, and would begin with all of them. Here unit n waits until enough of the units before it have been read:

    b_n + … + b_{j+1} <= 2 · max b      the units after the last one, j, that it waits for      (Gathered.held)

so that the next unit can be on its way while one is read, and small ones further ahead; b are bytes per device.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from alpa_lite.lower.waiting import once_there

AHEAD = 2
"""How many of the largest units may be gathered at a time: one that is read, and one for the next op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GatheredUse:
    """What was gathered for one op, and a result of that op."""

    bytes: float
    result: jax.Array


class Gathered:
    """The units of one pass over a graph, or of one trip of a loop."""

    def __init__(self, *, barriers_stay: bool) -> None:
        """`barriers_stay`: whether XLA keeps barriers to the end."""
        self.barriers_stay = barriers_stay
        self.units: list[_GatheredUse] = []
        self.largest = 0.0
        self.waiting = 0.0  # bytes that are gathered for the next op

    def held(self, array: jax.Array, size_bytes: float) -> jax.Array:
        """An array before it is gathered, into so many bytes per device: not before there is room for them."""
        self.waiting += size_bytes
        self.largest = max(self.largest, self.waiting)
        room = AHEAD * self.largest - self.waiting
        for unit in reversed(self.units):
            room -= unit.bytes
            if room < 0:
                return once_there(array, unit.result, barriers_stay=self.barriers_stay)
        return array

    def read(self, results: list[jax.Array]) -> None:
        """The op for which something was gathered has made these results."""
        floats = [r for r in results if jax.numpy.issubdtype(r.dtype, jax.numpy.floating) and r.size]
        if self.waiting and floats:
            self.units.append(_GatheredUse(bytes=self.waiting, result=floats[0]))
        self.waiting = 0.0
