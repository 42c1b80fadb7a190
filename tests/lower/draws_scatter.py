"""Drawn scatters: as gathers, with repeated indices; functions of one's own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.lower.draws_gather import addressed_by, dims_with, index_batch, index_vectors, roles_of, window_of
from tests.lower.pick import ANY, NUMBERS, ORDERED, Pick, call, drawn
from tests.rules.row import Row

_SCATTERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "scatter": (lax.scatter, ANY),
    "scatter-add": (lax.scatter_add, NUMBERS),
    "scatter-sub": (lax.scatter_sub, NUMBERS),
    "scatter-mul": (lax.scatter_mul, NUMBERS),
    "scatter-min": (lax.scatter_min, ORDERED),
    "scatter-max": (lax.scatter_max, ORDERED),
}


@drawn(*_SCATTERS)
def scatter(pick: Pick, name: str) -> Row:
    """Any dimension numbers."""
    pick.adds = name in ("scatter-add", "scatter-sub")
    function, dtypes = _SCATTERS[name]
    shape, dtype = pick.shape(1, 4), pick.one_of(dtypes)
    # A scatter without any index is wrong in XLA itself.
    roles = [pick.one_of(("collapsed", "one", "part", "whole addressed")), *roles_of(pick, len(shape) - 1)]
    roles = pick.order(roles)
    window = window_of(pick, shape, roles)
    batching, dims = dims_with(roles, "batching"), addressed_by(pick, roles)
    batch, places = index_batch(pick, shape, batching)
    kept = [d for d, role in enumerate(roles) if role not in ("collapsed", "batching")]
    window_dims = tuple(sorted(pick.some(range(len(batch) + len(kept)), len(kept), len(kept))))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window_dims,
        inserted_window_dims=tuple(dims_with(roles, "collapsed")),
        scatter_dims_to_operand_dims=tuple(dims),
        operand_batching_dims=tuple(batching),
        scatter_indices_batching_dims=tuple(places),
    )
    mode = pick.one_of(("fill", "clip", "promise_in_bounds"))
    indices = index_vectors(pick, batch, shape, window, dims, safe=mode == "promise_in_bounds")
    sizes, rest = iter([window[d] for d in kept]), iter(batch)
    update_shape = [next(sizes) if d in window_dims else next(rest) for d in range(len(batch) + len(kept))]
    low, high = (0.7, 1.3) if name == "scatter-mul" else (-2, 2)
    operand, updates = pick.array(shape, dtype, low, high), pick.array(update_shape, dtype, low, high)
    unique = _is_unique(indices) and all(window[d] == 1 for d in dims) and pick.flag()
    if name == "scatter" and dtype == "float32" and pick.flag():
        run = lambda v, i: lax.scatter_apply(v, i, jnp.sin, numbers, update_shape=tuple(update_shape), mode=mode)  # noqa: E731
        return call(name, run, operand, indices, oracle="scatter")
    run = lambda v, i, u: function(v, i, u, numbers, mode=mode, unique_indices=unique)  # noqa: E731
    return call(name, run, operand, indices, updates, oracle="scatter")


def _is_unique(indices: Any) -> bool:
    """True when all index vectors differ."""
    if not indices.size:
        return False
    vectors = np.asarray(indices).reshape(-1, indices.shape[-1])
    return len(np.unique(vectors, axis=0)) == len(vectors)
