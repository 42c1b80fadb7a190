"""How far the result of a program may lie from that of `jax.jit`: per leaf, by what rounding alone does to it.

A float32 leaf may differ by `TOLERANCE`. Where a program computes in low precision, a leaf may differ by twice as much
as `jax.jit` itself differs from the same step in float32, and by the rounding of one number in low precision.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.end_to_end.cases import TOLERANCE, relative_error
from tests.zoo.registry import PROGRAMS

LOW_PRECISION_FACTOR = 2.0


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(tree: Any) -> Any:
    """All leaves as NumPy arrays; keys by their data."""
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf), tree)


@functools.cache
def reference(name: str) -> tuple[Any, Any]:
    """What `jax.jit` makes of a program, and the relative error that each leaf of it may have."""
    found = PROGRAMS[name]()
    want = to_host(found.run(jax.jit(found.step)))
    allowed = jax.tree.map(lambda _: TOLERANCE, want)
    if found.exact is not None:
        exact = to_host(found.run(jax.jit(found.exact)))
        unit = float(jnp.finfo(found.dtype).eps) / 2
        allowed = jax.tree.map(lambda a, b: max(unit, LOW_PRECISION_FACTOR * relative_error(a, b)), want, exact)
    return want, allowed


def worst(got: Any, name: str) -> tuple[float, str]:
    """The largest quotient of error and allowed error over all leaves, and the path of that leaf.

    Infinity when structures, shapes, dtypes, or leaves that are no floats differ.
    """
    want, allowed = reference(name)
    got = to_host(got)
    if jax.tree.structure(got) != jax.tree.structure(want):
        return float("inf"), "the structure"
    found = (0.0, "")
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b, limit in zip(leaves, jax.tree.leaves(want), jax.tree.leaves(allowed), strict=True):
        where = jax.tree_util.keystr(path)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return float("inf"), f"{where}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if jnp.issubdtype(a.dtype, jnp.inexact):
            quotient = (_error(a, b)) / limit
        else:
            quotient = 0.0 if np.array_equal(a, b) else float("inf")
        found = max(found, (quotient, where))
    return found


def _error(a: np.ndarray, b: np.ndarray) -> float:
    if np.iscomplexobj(a):
        return relative_error(np.stack([a.real, a.imag]), np.stack([b.real, b.imag]))
    return relative_error(a, b)
