"""Prepare arguments for a trial step: copies of the caller's, random ones where only shapes are given, and perturbed
ones.

The caller's arrays are never changed. Random arguments depend on the seed alone:

    floats, complex   normal with deviation 0.1, like weights and normalised data (or absolute values: see `draw`)
    integers          0 or 1: indices and labels that are in range wherever there are two rows or classes
    booleans          either
    keys              proper keys, typed or as pairs of uint32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.trace.batch import is_key

_WIDTH = 0.1


def is_inexact(leaf: Any) -> bool:
    """Return True if a leaf holds floats or complex numbers."""
    return isinstance(leaf, (float, complex)) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_drawn(leaf: Any) -> bool:
    """Return True if a leaf is a shape alone, for which values have to be drawn."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def draw(shape: jax.ShapeDtypeStruct, rng: np.random.Generator, *, positive: bool) -> Any:
    """Return a random array for a shape. `positive`: absolute values of floats, for steps that take roots of their
    arguments.
    """
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        key = jax.random.key(int(rng.integers(2**31)), impl=_jax.key_implementation(str(shape.dtype)))
        return jax.random.split(key, shape.shape)
    if is_key(shape):
        return jnp.asarray(rng.integers(0, 2**32, shape.shape, dtype=np.uint32))
    if shape.dtype == np.bool_:
        return jnp.asarray(rng.integers(0, 2, shape.shape).astype(bool))
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        return jnp.asarray(rng.integers(0, 2, shape.shape), shape.dtype)
    values = _WIDTH * rng.normal(size=shape.shape)
    if jnp.issubdtype(shape.dtype, jnp.complexfloating):
        values = values + 1j * _WIDTH * rng.normal(size=shape.shape)
    values = np.abs(values) if positive else values
    return _weak(jnp.asarray(values, shape.dtype), shape)


def held(leaves: Sequence[Any], device: Any, seed: int, *, positive: bool = False) -> list[Any]:
    """Return the leaves with values, on one device: copies of arrays, random values for shapes."""
    rng = np.random.default_rng(seed)
    return [draw(leaf, rng, positive=positive) if is_drawn(leaf) else _on_one(leaf, device) for leaf in leaves]


def _on_one(leaf: Any, device: Any) -> Any:
    """Return a leaf on one device; a leaf that is no JAX array is returned as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if len(leaf.sharding.device_set) > 1:  # through the host: the array's type may name mesh axes
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(words, impl=_jax.key_implementation(str(leaf.dtype)))
        leaf = _weak(jnp.asarray(np.asarray(leaf)), leaf)
    return jax.device_put(leaf, device)


def copied(leaf: Any) -> Any:
    """Return a copy of a leaf, which may be donated."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def perturbed(leaf: Any, unit: float, ulps: float, rng: np.random.Generator) -> Any:
    """Return a leaf of floats with every number moved up or down by `ulps` units in the last place.

    The last place is that of numbers of relative precision `unit`, or of the leaf's own where that is coarser. Leaves
    without floats, zeros and numbers that are not finite stay as they are.
    """
    if not is_inexact(leaf):
        return leaf
    own = jnp.result_type(leaf)
    relative = ulps * max(unit, float(jnp.finfo(own).eps))
    wide = np.complex128 if jnp.issubdtype(own, jnp.complexfloating) else np.float64
    values = np.asarray(leaf).astype(wide)
    if wide is np.complex128:
        moved = _moved(values.real, relative, rng) + 1j * _moved(values.imag, relative, rng)
    else:
        moved = _moved(values, relative, rng)
    if isinstance(leaf, (float, complex)):
        return type(leaf)(moved[()])
    with np.errstate(over="ignore"):
        narrow = moved.astype(own)
    narrow = np.where(np.isfinite(narrow), narrow, values.astype(own))
    return _weak(jnp.asarray(narrow), leaf) if isinstance(leaf, jax.Array) else narrow


def _moved(values: Any, relative: float, rng: np.random.Generator) -> Any:
    """Return real numbers, each moved by a multiple of the last place: 2^exponent · relative precision."""
    values = np.asarray(values)
    with np.errstate(invalid="ignore"):
        exponents = np.frexp(values)[1]
    places = np.where(np.isfinite(values) & (values != 0), np.ldexp(relative, exponents - 1), 0.0)
    return values + places * rng.choice((-1.0, 1.0), values.shape)


def _weak(array: jax.Array, like: Any) -> jax.Array:
    return _jax.weak(array, array.aval.update(weak_type=True)) if getattr(like, "weak_type", False) else array
