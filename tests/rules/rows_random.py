"""Random keys and bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.rules.row import Row, integers, positive, row


def _random_ops() -> list[Row]:
    key, keys = jax.random.key(7), jax.random.split(jax.random.key(7), 4)
    rbg = jax.random.key(7, impl="rbg")
    return [
        row("random_bits", lambda k: jax.random.bits(k, (8, 4)), key),
        row("random_bits keys", lambda k: jax.vmap(lambda one: jax.random.bits(one, (4, 2)))(k), keys),
        row("random_bits 8", lambda k: jax.random.bits(k, (8, 4), jnp.uint8), key),
        row("random_bits 16", lambda k: jax.random.bits(k, (8, 4), jnp.uint16), key),
        row("random_bits rbg", lambda k: jax.random.bits(k, (8, 4)), rbg),
        row("random_split", lambda k: jax.random.split(k, 8), key),
        row("random_fold_in", lambda k, d: jax.vmap(jax.random.fold_in)(k, d), keys, integers(9, 4)),
        row("random_fold_in one", lambda k: jax.random.fold_in(k, 3), key),
        row(
            "random_fold_in unsafe",
            lambda k, d: jax.vmap(jax.random.fold_in)(k, d),
            jax.random.split(jax.random.key(7, impl="unsafe_rbg"), 4),
            integers(9, 4),
        ),
        row("random_clone", jax.random.clone, keys),
        row("random_wrap", jax.random.wrap_key_data, integers(99, 4, 2).astype(jnp.uint32)),
        row("random_unwrap", jax.random.key_data, keys),
        row("random_seed", lambda s: jax.vmap(jax.random.key)(s), integers(99, 4)),
        row("random_gamma", lambda k, a: jax.vmap(jax.random.gamma)(k, a), keys, positive(4)),
        row(
            "rng_bit_generator",
            lambda k: lax.rng_bit_generator(k, (8, 4)),
            integers(99, 4).astype(jnp.uint32),
            oracle="rng_bit_generator",
        ),
    ]


ROWS = (*_random_ops(),)
