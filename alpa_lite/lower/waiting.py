"""Values that must not be made too early: what the backward pass computes again starts when it is its turn.

XLA sees no reason to wait with a recomputation, whose operands are there from the forward pass on: only a barrier that
it shares with a result of the op before it is one. The CPU backend drops barriers before it looks for common
subexpressions, and would keep the first results instead; there the value also depends on the result, by a choice:

    x if r = r or r ≠ r else 0        r: the first element of the result                            (`once_there`)

which is always x, but XLA does not reason about NaN.
"""

from __future__ import annotations

import jax
from jax import lax


def once_there(x: jax.Array, result: jax.Array, *, barriers_stay: bool) -> jax.Array:
    """`x`, available after `result`, a float array with elements. `barriers_stay`: whether XLA keeps barriers."""
    first = lax.reshape(lax.slice(result, (0,) * result.ndim, (1,) * result.ndim), ())
    if barriers_stay:
        return lax.optimization_barrier((x, first))[0]
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = once_there(jax.random.key_data(x), result, barriers_stay=False)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    there = (first == first) | (first != first)
    return lax.select(there, x, lax.full_like(x, 0))
