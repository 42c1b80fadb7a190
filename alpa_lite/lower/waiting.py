"""Delay values that must not be computed too early, as those that the backward pass computes again.

XLA has no reason to delay a recomputation whose operands are available since the forward pass; only a barrier shared
with a result of the preceding op delays it. The CPU backend drops barriers before it eliminates common subexpressions,
and would store the first results instead; there the value also depends on the result, by a select:

    x if r = r or r ≠ r else 0        r: the first element of the result                            (`once_there`)

The result is always x, but XLA does not reason about NaN.
"""

from __future__ import annotations

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
