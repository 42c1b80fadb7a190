"""Reshape, transpose, slice and others that move elements; gather, scatter, dynamic slices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.row import Row, floats, integers, row, truths


def _layout() -> list[Row]:
    x = floats(8, 4)
    reshape = lambda *shape: lambda v: lax.reshape(v, shape)  # noqa: E731
    zero, one = np.float32(0), np.float32(1)
    return [
        row("broadcast_in_dim", lambda v: lax.broadcast_in_dim(v, (2, 8, 4), (1, 2)), x, oracle="broadcast_in_dim"),
        row(
            "broadcast_in_dim expanding",
            lambda v: lax.broadcast_in_dim(v, (8, 4, 4), (0, 2)),
            floats(1, 4),
            oracle="broadcast_in_dim",
        ),
        row(
            "broadcast_in_dim scalar",
            lambda v: lax.broadcast_in_dim(v, (8, 4), ()),
            jnp.float32(3),
            oracle="broadcast_in_dim",
        ),
        row("transpose", lambda v: lax.transpose(v, (2, 0, 1)), floats(8, 4, 2), oracle="transpose"),
        row("squeeze", lambda v: lax.squeeze(v, (1,)), floats(8, 1, 4), oracle="reshape"),
        row("reshape merge", reshape(32, 2), floats(8, 4, 2), oracle="reshape"),
        row("reshape split", reshape(8, 4, 2), floats(32, 2), oracle="reshape"),
        row("reshape mixed", reshape(8, 12), floats(6, 16), oracle="reshape"),
        row("reshape without common major", reshape(3, 8), floats(4, 6), oracle="reshape"),
        row("reshape coprime", reshape(5, 3, 4), floats(3, 5, 4), oracle="reshape"),
        row("reshape ones", reshape(1, 8, 1, 4), floats(8, 1, 4), oracle="reshape"),
        row("reshape heads", reshape(4, 8, 2, 4), floats(4, 8, 8), oracle="reshape"),
        row("reshape permuted", lambda v: lax.reshape(v, (32, 2), dimensions=(1, 0, 2)), floats(4, 8, 2)),
        row("reshape to scalar", reshape(), floats(1, 1), oracle="reshape"),
        row("slice", lambda v: lax.slice(v, (0, 1), (8, 3)), x, oracle="slice"),
        row("slice strided", lambda v: lax.slice(v, (1, 0), (8, 4), (2, 1)), x, oracle="slice"),
        row("pad", lambda v: lax.pad(v, zero, ((0, 0, 0), (1, 2, 0))), x, oracle="pad"),
        row("pad interior", lambda v: lax.pad(v, one, ((0, 0, 1), (0, 0, 0))), x, oracle="pad"),
        row("pad negative", lambda v: lax.pad(v, zero, ((0, 0, 0), (-1, 1, 0))), x, oracle="pad"),
        row("pad value", lambda v, p: lax.pad(v, p, ((0, 0, 0), (1, 2, 0))), x, jnp.float32(2), oracle="pad"),
        row("rev", lambda v: lax.rev(v, (1,)), x, oracle="reverse"),
        row("concatenate", lambda v, w: lax.concatenate((v, w), 1), x, floats(8, 3), oracle="concatenate"),
        row("concatenate alike", lambda v, w: lax.concatenate((v, w), 0), x, x, oracle="concatenate"),
        row("split", lambda v: lax.split(v, (1, 3), 1), x),
        row("tile", lambda v: lax.tile(v, (1, 4)), x),
        row("tile new major", lambda v: lax.tile(v, (2, 1)), x),
        row("stack", lambda v, w: jnp.stack([v, w], 1), x, x, primitive="stack"),
        row("unstack", lambda v: jnp.unstack(v, axis=1), x, primitive="unstack"),
        row("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 4), 0)),
        row("iota bfloat16", lambda: lax.broadcasted_iota(jnp.bfloat16, (512, 4), 0)),
        row("empty", lambda: lax.empty((8, 4), jnp.float32)),
    ]


def _indexing() -> list[Row]:
    table = floats(8, 4)
    ids = jnp.asarray([[3, 0, 7, 2], [-1, 5, 8, 1], [0, 0, 99, 6], [7, 7, -9, 4]], jnp.int32)
    modes = ("fill", "clip", "promise_in_bounds")
    take = lambda mode: lambda v, i: _gathered(v, i, mode=mode)  # noqa: E731
    safe = {mode: jnp.clip(ids, 0, 7) if mode == "promise_in_bounds" else ids for mode in modes}
    rows = [row(f"gather {mode}", take(mode), table, safe[mode][..., None], oracle="gather") for mode in modes]
    pairs = jnp.stack([ids, ids[::-1]], -1)
    rows += [
        row(
            "gather fill value",
            lambda v, i: _gathered(v, i, mode="fill", fill_value=-3),
            table,
            ids[..., None],
            oracle="gather",
        ),
        row("gather unsigned", take("fill"), table, ids.astype(jnp.uint32)[..., None], oracle="gather"),
        row("gather integers", take("fill"), integers(99, 8, 4), ids[..., None], oracle="gather"),
        row("gather truths", take("fill"), truths(8, 4), ids[..., None], oracle="gather"),
        row(
            "gather window of one",
            lambda v, i: _gathered(v, i, mode="fill", collapsed=(), offset=(2, 3)),
            table,
            ids[..., None],
            oracle="gather",
        ),
        row(
            "gather along axis",
            lambda v, i: jnp.take_along_axis(v, i, 1),
            table,
            jnp.abs(ids[:, :2] % 4).repeat(2, 0),
            primitive="gather",
            oracle="gather",
        ),
        row(
            "gather two dims",
            lambda v, i: _gathered(v, i, mode="fill", collapsed=(0, 1), offset=(2,), window=(1, 1, 4), dims=(0, 1)),
            floats(8, 8, 4),
            pairs,
            oracle="gather",
        ),
        row(
            "gather part",
            lambda v, i: _gathered(v, i, mode="clip", collapsed=(), offset=(2, 3), window=(2, 4)),
            table,
            ids[..., None],
            oracle="gather",
        ),
        row(
            "dynamic_slice",
            lambda v, i: lax.dynamic_slice(v, (i, 0), (3, 4)),
            table,
            jnp.int32(6),
            oracle="dynamic_slice",
        ),
        row(
            "dynamic_update_slice",
            lambda v, u, i: lax.dynamic_update_slice(v, u, (i, 1)),
            table,
            floats(3, 2),
            jnp.int32(2),
            oracle="dynamic_update_slice",
        ),
        row(
            "dynamic_slice of rows from beyond",
            lambda v, i: lax.dynamic_slice(v, (0, i), (8, 3)),
            table,
            jnp.int32(9),
            oracle="dynamic_slice",
        ),
        row(
            "dynamic_update_slice from below",
            lambda v, u, i: lax.dynamic_update_slice_p.bind(v, u, i, i),
            table,
            floats(1, 1),
            jnp.int32(-1),
            oracle="dynamic_update_slice",
        ),
        row(
            "dynamic_update_slice clamped",
            lambda v, u, i: lax.dynamic_update_slice(v, u, (i, 0)),
            table,
            floats(5, 4),
            jnp.int32(7),
            oracle="dynamic_update_slice",
        ),
        row(
            "dynamic_update_slice whole",
            lambda v, u, i: lax.dynamic_update_slice(v, u, (i, 3)),
            table,
            floats(8, 4),
            jnp.int32(7),
            oracle="dynamic_update_slice",
        ),
    ]
    return rows + _scatters(table, ids)


def _gathered(
    v: Any,
    indices: Any,
    *,
    mode: str,
    collapsed: Any = (0,),
    offset: Any = (2,),
    window: Any = (1, 4),
    dims: Any = (0,),
    fill_value: Any = None,
) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=offset, collapsed_slice_dims=collapsed, start_index_map=dims)
    return lax.gather(v, indices, numbers, window, mode=mode, fill_value=fill_value)


def _scatters(table: Any, ids: Any) -> list[Row]:
    numbers = lax.ScatterDimensionNumbers((2,), (0,), (0,))
    scatters = {
        "scatter-add": lax.scatter_add,
        "scatter-mul": lax.scatter_mul,
        "scatter-min": lax.scatter_min,
        "scatter-max": lax.scatter_max,
        "scatter-sub": lax.scatter_sub,
    }
    index, updates = ids[..., None], floats(4, 4, 4)
    once = jnp.asarray([[3, 0, 7, 2], [-1, 5, 8, 1]], jnp.int32)[..., None]
    rows = [
        row(name, lambda v, i, u, f=f: f(v, i, u, numbers, mode="fill"), table, index, updates, oracle="scatter")
        for name, f in scatters.items()
    ]
    batched = lax.ScatterDimensionNumbers(
        (), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,)
    )
    kept = lax.ScatterDimensionNumbers((2, 3), (), (0,))
    rows += [
        row(
            "scatter-add clip",
            lambda v, i, u: lax.scatter_add(v, i, u, numbers, mode="clip"),
            table,
            index,
            updates,
            oracle="scatter",
        ),
        row(
            "scatter-add integers",
            lambda v, i, u: lax.scatter_add(v, i, u, numbers, mode="drop"),
            integers(9, 8, 4),
            index,
            integers(9, 4, 4, 4),
            oracle="scatter",
        ),
        row(
            "scatter-add batched",
            lambda v, i, u: lax.scatter_add(v, i, u, batched),
            table,
            jnp.abs(ids[:, :2, None] % 4).repeat(2, 0),
            floats(8, 2),
            oracle="scatter",
        ),
        row(
            "scatter-add part",
            lambda v, i, u: lax.scatter_add(v, i, u, kept, mode="clip"),
            table,
            index,
            floats(4, 4, 2, 4),
            oracle="scatter",
        ),
        row(
            "scatter",
            lambda v, i, u: lax.scatter(v, i, u, numbers, mode="fill"),
            table,
            once,
            floats(2, 4, 4),
            oracle="scatter",
        ),
        row(
            "scatter one",
            lambda v, i, u: lax.scatter(v, i, u, lax.ScatterDimensionNumbers((0,), (0,), (0,)), mode="fill"),
            table,
            jnp.asarray([3], jnp.int32),
            floats(4),
            oracle="scatter",
        ),
        row(
            "scatter of a function",
            lambda v, i: lax.scatter_apply(v, i, jnp.sin, numbers, update_shape=(2, 4, 4), mode="fill"),
            table,
            once,
            oracle="scatter",
        ),
        row(
            "scatter unsigned",
            lambda v, i, u: lax.scatter(v, i, u, numbers, mode="fill"),
            table,
            once.astype(jnp.uint32),
            floats(2, 4, 4),
            oracle="scatter",
        ),
        row(
            "scatter promised",
            lambda v, i, u: lax.scatter(v, i, u, numbers, mode="promise_in_bounds", unique_indices=True),
            table,
            once[:1],
            floats(1, 4, 4),
            oracle="scatter",
        ),
    ]
    return rows


ROWS = (*_layout(), *_indexing())
