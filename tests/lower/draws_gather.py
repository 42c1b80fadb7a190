"""Drawn gathers and dynamic slices: dims of the operand in every role, indices in and out of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.lower.pick import MOVED, Pick, call, drawn
from tests.rules.row import Row

#: What indices may do to a dim of the operand, and whether its window is whole, a part, or one element.
ROLES = ("collapsed", "whole", "one", "part", "whole addressed", "batching", "part unaddressed")
INDEX_TYPES = ("int32", "int32", "uint8", "int8", "uint32")


def roles_of(pick: Pick, rank: int) -> list[str]:
    """A role for every dim: mostly looked-up dims and whole windows."""
    likely = ("collapsed", "whole", *ROLES)
    return [pick.one_of(likely) for _ in range(rank)]


def window_of(pick: Pick, shape: Sequence[int], roles: Sequence[str]) -> list[int]:
    """Elements taken along every dim."""
    found: list[int] = []
    for n, role in zip(shape, roles, strict=True):
        if role.startswith("part"):
            found.append(pick.integer(1, n))
        else:
            found.append(n if role.startswith("whole") else 1)
    return found


def dims_with(roles: Sequence[str], *wanted: str) -> list[int]:
    """Dims of some roles."""
    return [d for d, role in enumerate(roles) if role in wanted]


def addressed_by(pick: Pick, roles: Sequence[str]) -> list[int]:
    """The dims that the columns of the index vectors address."""
    return pick.order(dims_with(roles, "collapsed", "one", "part", "whole addressed"))


def index_vectors(
    pick: Pick, batch: Sequence[int], shape: Sequence[int], window: Sequence[int], dims: Sequence[int], *, safe: bool
) -> Any:
    """An index per dim; unless `safe`, some are out of bounds. Many repeat."""
    dtype = pick.one_of(INDEX_TYPES)
    low, margin = (0, 0) if safe or dtype.startswith("uint") else (-2, 2)
    margin = 0 if safe else 2
    random = pick.numbers()
    columns = [random.integers(low, shape[d] - window[d] + 1 + margin, tuple(batch)) for d in dims]
    stacked = np.stack(columns, -1) if columns else np.zeros((*batch, 0))
    if not safe and dtype == "uint32" and stacked.size:
        stacked = np.where(random.random(stacked.shape) < 0.1, 2**32 - 1, stacked)
    return jnp.asarray(stacked.astype(np.int64), dtype)


def index_batch(pick: Pick, shape: Sequence[int], batching: Sequence[int]) -> tuple[list[int], list[int]]:
    """Batch dims of the indices, and where among them those of the operand lie."""
    dims: list[tuple[int, int]] = [(pick.one_of((4, 8, 2, 1, 3)), -1) for _ in range(pick.integer(0, 2))]
    for d in batching:
        dims.insert(pick.integer(0, len(dims)), (shape[d], d))
    places = [next(i for i, (_, o) in enumerate(dims) if o == d) for d in batching]
    return [n for n, _ in dims], places


@drawn("gather")
def gather(pick: Pick, name: str) -> Row:
    """Any dimension numbers; what `take_along_axis` and a batch of dynamic slices make of them."""
    form = pick.one_of(["any", "any", "any", "along axis", "slices"])
    if form == "along axis":
        return _along_axis(pick, name)
    if form == "slices":
        return _slices(pick, name)
    shape = pick.shape(1, 4)
    roles = roles_of(pick, len(shape))
    window = window_of(pick, shape, roles)
    batching, dims = dims_with(roles, "batching"), addressed_by(pick, roles)
    batch, places = index_batch(pick, shape, batching)
    kept = len(shape) - len(dims_with(roles, "collapsed", "batching"))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(sorted(pick.some(range(len(batch) + kept), kept, kept))),
        collapsed_slice_dims=tuple(dims_with(roles, "collapsed")),
        start_index_map=tuple(dims),
        operand_batching_dims=tuple(batching),
        start_indices_batching_dims=tuple(places),
    )
    mode = pick.one_of(("fill", "clip", "promise_in_bounds"))
    indices = index_vectors(pick, batch, shape, window, dims, safe=mode == "promise_in_bounds")
    operand = pick.array(shape, pick.one_of((*MOVED, "int8")))
    is_key = jnp.issubdtype(operand.dtype, jax.dtypes.prng_key)
    fill = pick.one_of((None, 0, 3)) if mode == "fill" and not is_key else None
    run = lambda v, i: lax.gather(v, i, numbers, tuple(window), mode=mode, fill_value=fill)  # noqa: E731
    return call(name, run, operand, indices, oracle="gather")


def _along_axis(pick: Pick, name: str) -> Row:
    shape = pick.shape()
    axis = pick.axis(len(shape))
    count = pick.one_of((1, 2, 4))
    indices = pick.integers([*shape[:axis], count, *shape[axis + 1 :]], 0, shape[axis])
    mode = pick.one_of((None, "clip", "fill"))
    return call(
        name, lambda v, i: jnp.take_along_axis(v, i, axis, mode=mode), pick.array(shape), indices, oracle="gather"
    )


def _slices(pick: Pick, name: str) -> Row:
    shape = pick.shape(2, 3)
    sizes = [pick.integer(1, n) for n in shape[1:]]
    starts = [pick.integers(shape[:1], -2, n + 2) for n in shape[1:]]
    one = lambda v, *s: lax.dynamic_slice_p.bind(v, *s, slice_sizes=tuple(sizes))  # noqa: E731
    axes = (0 if pick.flag() else None, *(0 for _ in starts))
    operand = pick.array(shape if axes[0] == 0 else shape[1:])
    return call(name, jax.vmap(one, axes), operand, *starts, oracle="gather")


def _start(pick: Pick, length: int, size: int) -> Any:
    dtype = pick.one_of(INDEX_TYPES)
    low = 0 if dtype.startswith("uint") else -2
    if dtype == "uint32" and pick.integer(0, 4) == 4:
        return np.uint32(2**32 - 1)
    return jnp.asarray(pick.integer(low, length - size + 2), dtype)


@drawn("dynamic_slice")
def dynamic_slice(pick: Pick, name: str) -> Row:
    """Starts in and out of bounds, of any integer dtype."""
    shape = pick.shape()
    sizes = tuple(n if pick.flag() else pick.integer(1, n) for n in shape)
    starts = [_start(pick, n, size) for n, size in zip(shape, sizes, strict=True)]
    starts = [jnp.asarray(s, starts[0].dtype) for s in starts]
    run = lambda v, *s: lax.dynamic_slice_p.bind(v, *s, slice_sizes=sizes)  # noqa: E731
    return call(name, run, pick.array(shape, pick.one_of(MOVED)), *starts, oracle="dynamic_slice")


@drawn("dynamic_update_slice")
def dynamic_update_slice(pick: Pick, name: str) -> Row:
    """As above."""
    shape, dtype = pick.shape(), pick.one_of(MOVED)
    sizes = tuple(n if pick.flag() else pick.integer(1, n) for n in shape)
    starts = [_start(pick, n, size) for n, size in zip(shape, sizes, strict=True)]
    starts = [jnp.asarray(s, starts[0].dtype) for s in starts]
    operands = pick.array(shape, dtype), pick.array(sizes, dtype)
    run = lambda v, u, *s: lax.dynamic_update_slice_p.bind(v, u, *s)  # noqa: E731
    return call(name, run, *operands, *starts, oracle="dynamic_update_slice")
