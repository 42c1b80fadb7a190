"""States that checkpoints are tried on."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

ROWS = 8
LARGE = 2**18


@cache
def global_values() -> dict[str, np.ndarray]:
    """The whole arrays of a state that several processes hold parts of; keys as their data."""
    rng = np.random.default_rng(0)
    large = {name: rng.normal(size=(ROWS, LARGE)).astype(np.float32) for name in ("everywhere", "first", "second")}
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7), ROWS)))
    return {**large, "copies": rng.integers(0, 9, (2 * ROWS,), np.int32), "keys": keys}


def numbered(step: int) -> dict[str, np.ndarray]:
    """A state that tells its step in every bit: random numbers of that seed, which do not compress."""
    rng = np.random.default_rng(step)
    return {f"array {i}": rng.integers(0, 256, size, np.uint8) for i, size in enumerate((3, 10_000, 2_000_000))}


def bits(leaf: Any) -> tuple[Any, ...]:
    """All that makes a leaf this leaf: type, shape, dtype and every bit."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "keys", leaf.shape, str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    kind = "array" if isinstance(leaf, jax.Array) else type(leaf)
    return kind, np.shape(leaf), str(getattr(leaf, "dtype", "")), np.asarray(leaf).tobytes()
