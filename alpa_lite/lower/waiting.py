"""Delay values that XLA would compute or gather too early, although the plan counts on their memory being free.

Recomputed values: XLA has no reason to delay a recomputation whose operands are available since the forward pass; only
a barrier shared with a result of the preceding op delays it. The CPU backend drops barriers before it eliminates common
subexpressions, and would store the first results instead; there the value also depends on the result, by a select:

    x if r = r or r ≠ r else 0        r: the first element of the result                            (`once_there`)

The result is always x, but XLA does not reason about NaN.

Gathered parameters: those that are stored sharded and gathered where an op reads them form a unit per op. XLA would
issue the all-gathers of all units at once, when the task starts. Here unit n waits until enough of the units before it
have been read:

    b_n + … + b_{j+1} <= 2 · max b      the units after unit j, for whose op unit n waits          (Gathered.held)

so that the next unit can be gathered while one is read, and small ones further ahead; b are bytes per device.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax


def once_there(x: jax.Array, result: jax.Array, *, barriers_stay: bool) -> jax.Array:
    """Return `x`, available only after `result`, a float array with at least one element.

    `barriers_stay`: whether XLA keeps optimisation barriers to the end of its pipeline.
    """
    first = lax.reshape(lax.slice(result, (0,) * result.ndim, (1,) * result.ndim), ())
    if barriers_stay:
        return lax.optimization_barrier((x, first))[0]
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        # `select` does not accept typed keys: wait for their words instead.
        data = once_there(jax.random.key_data(x), result, barriers_stay=False)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    there = (first == first) | (first != first)
    return lax.select(there, x, lax.full_like(x, 0))


AHEAD = 2
"""How many of the largest units may be gathered at a time: one that is read, and one for the next op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GatheredUse:
    """The bytes per device that were gathered for one op, and a result of that op to wait for."""

    bytes: float
    result: jax.Array


class Gathered:
    """The units of one pass over a graph, or of one trip of a loop."""

    def __init__(self, *, barriers_stay: bool) -> None:
        """Start without units. `barriers_stay`: whether XLA keeps optimisation barriers to the end."""
        self.barriers_stay = barriers_stay
        self.units: list[_GatheredUse] = []
        self.largest = 0.0
        self.waiting = 0.0  # bytes that are gathered for the next op

    def held(self, array: jax.Array, size_bytes: float) -> jax.Array:
        """Return an array that is about to be gathered, delayed until the earlier units leave enough memory.

        `size_bytes`: size of the gathered array per device, in bytes.
        """
        self.waiting += size_bytes
        self.largest = max(self.largest, self.waiting)
        room = AHEAD * self.largest - self.waiting
        for unit in reversed(self.units):
            room -= unit.bytes
            if room < 0:
                return once_there(array, unit.result, barriers_stay=self.barriers_stay)
        return array

    def read(self, results: list[jax.Array]) -> None:
        """Record `results` of the op that reads everything gathered since the last op."""
        # `once_there` can wait for a float array with elements only; without one, the bytes count for the next op.
        floats = [r for r in results if jax.numpy.issubdtype(r.dtype, jax.numpy.floating) and r.size]
        if self.waiting and floats:
            self.units.append(_GatheredUse(bytes=self.waiting, result=floats[0]))
        self.waiting = 0.0
