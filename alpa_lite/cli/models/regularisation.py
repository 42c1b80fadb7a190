"""Dropout with masks of one byte per number."""

import jax
import jax.numpy as jnp


def drop(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    """Zero entries at a rate of `rate` (to 1/256) and scale up the others; the identity without a key or rate."""
    if key is None or not rate:
        return x
    threshold = round(256 * rate)
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= threshold
    return jnp.where(keep, x * jnp.asarray(256 / (256 - threshold), x.dtype), jnp.zeros((), x.dtype))
