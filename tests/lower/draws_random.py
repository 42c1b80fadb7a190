"""Drawn calls of random number generators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.lower.pick import Pick, call, drawn
from tests.rules.row import Row

_IMPLEMENTATIONS = ("threefry2x32", "threefry2x32", "rbg", "unsafe_rbg")


def _keys(pick: Pick, low: int = 0, implementations: tuple[str, ...] = _IMPLEMENTATIONS) -> Any:
    shape = tuple(pick.dim((4, 8, 2, 1, 3)) for _ in range(pick.integer(low, 2)))
    one = jax.random.key(pick.integer(0, 2**31), impl=pick.one_of(implementations))
    return jax.random.split(one, shape) if shape else one


def _each(function: Any, rank: int) -> Any:
    for _ in range(rank):
        function = jax.vmap(function)
    return function


@drawn("random_bits")
def random_bits(pick: Pick, name: str) -> Row:
    """Bits of any width under one key or many."""
    keys, shape = _keys(pick), pick.shape(0, 2)
    dtype = pick.one_of((jnp.uint32, jnp.uint8, jnp.uint16))
    return call(name, _each(lambda k: jax.random.bits(k, shape, dtype), keys.ndim), keys)


@drawn("random_split")
def random_split(pick: Pick, name: str) -> Row:
    """Keys from keys."""
    keys, shape = _keys(pick), pick.shape(1, 2)
    return call(name, _each(lambda k: jax.random.split(k, shape), keys.ndim), keys)


@drawn("random_fold_in")
def random_fold_in(pick: Pick, name: str) -> Row:
    """Keys and numbers."""
    keys = _keys(pick)
    numbers = pick.integers(keys.shape, 0, 99, "uint32")
    return call(name, _each(jax.random.fold_in, keys.ndim), keys, numbers)


@drawn("random_clone", "random_unwrap")
def of_keys(pick: Pick, name: str) -> Row:
    """Keys again, or their words."""
    return call(name, jax.random.clone if name == "random_clone" else jax.random.key_data, _keys(pick))


@drawn("random_wrap")
def random_wrap(pick: Pick, name: str) -> Row:
    """Keys from words."""
    words = jax.random.key_data(keys := _keys(pick))
    return call(name, lambda w: jax.random.wrap_key_data(w, impl=str(jax.random.key_impl(keys))), words)


@drawn("random_seed")
def random_seed(pick: Pick, name: str) -> Row:
    """Keys from numbers."""
    shape, implementation = pick.shape(0, 2), pick.one_of(_IMPLEMENTATIONS)
    make = lambda s: jax.random.key(s, impl=implementation)  # noqa: E731
    return call(name, _each(make, len(shape)), pick.integers(shape, 0, 2**31 - 1))


@drawn("random_gamma")
def random_gamma(pick: Pick, name: str) -> Row:
    """One key for all numbers, or one each."""
    pick.special = False
    keys = _keys(pick, implementations=("threefry2x32",))
    shape = pick.shape(0, 1)
    alpha = pick.array((*keys.shape, *shape), low=0.5, high=3)
    logarithm = pick.flag()
    draw = jax.random.loggamma if logarithm else jax.random.gamma
    return call(name, _each(lambda k, a: draw(k, a, shape), keys.ndim), keys, alpha)


@drawn("rng_bit_generator")
def rng_bit_generator(pick: Pick, name: str) -> Row:
    """Every algorithm, narrow and wide bits."""
    algorithm = pick.one_of(list(lax.RandomAlgorithm))
    key = pick.integers((4,), 0, 2**32 - 1, "uint32")
    shape, dtype = pick.shape(), pick.one_of((jnp.uint32, jnp.uint8, jnp.uint16))
    run = lambda k: lax.rng_bit_generator(k, shape, dtype, algorithm=algorithm)  # noqa: E731
    return call(name, run, key, oracle="rng_bit_generator")
