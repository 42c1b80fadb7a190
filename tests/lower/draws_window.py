"""Drawn windows: pooling, its gradient and its tangent."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from tests.lower.pick import FLOATS, Pick, call, drawn
from tests.rules.row import Row


def _windows(pick: Pick, shape: tuple[int, ...], *, dilated: bool) -> dict[str, Any]:
    """Windows along every dim: patches, windows that overlap and step over the whole dim, or anything that fits."""
    columns: dict[str, list[Any]] = {key: [] for key in ("sizes", "strides", "padding", "base", "dilation")}
    for n in shape:
        size = pick.one_of([s for s in (1, 2, 3, 4) if s <= n])
        stride, padding, base, dilation = pick.one_of([s for s in (1, 2, 4) if s >= size] or [size]), (0, 0), 1, 1
        form = pick.one_of(("patches", "halo", "any"))
        if form == "halo" and (fitting := [s for s in (1, 2) if s <= size and n % s == 0]):
            stride = pick.one_of(fitting)
            low = pick.integer(0, size - stride)
            padding = (low, size - stride - low)
        elif form == "any":
            stride, padding = pick.integer(1, 3), (pick.integer(0, size - 1), pick.integer(0, size - 1))
            if dilated:
                base, dilation = pick.one_of((1, 1, 2)), pick.one_of((1, 1, 2))
                dilation = dilation if (size - 1) * dilation + 1 <= n else 1
        for key, value in zip(columns, (size, stride, padding, base, dilation), strict=True):
            columns[key].append(value)
    found: dict[str, Any] = {
        "window_dimensions": tuple(columns["sizes"]),
        "window_strides": tuple(columns["strides"]),
        "padding": tuple(columns["padding"]),
    }
    if dilated:
        found |= {"base_dilation": tuple(columns["base"]), "window_dilation": tuple(columns["dilation"])}
    return found


_KINDS: dict[str, tuple[float, Any]] = {
    "reduce_window_sum": (0, lax.add),
    "reduce_window_max": (-np.inf, lax.max),
    "reduce_window_min": (np.inf, lax.min),
    "reduce_window": (1, lax.mul),
}


@drawn(*_KINDS)
def reduce_window(pick: Pick, name: str) -> Row:
    """Sums, extremes, and a product, which has no primitive of its own."""
    pick.adds = name == "reduce_window_sum"
    start, combine = _KINDS[name]
    shape = pick.shape()
    windows = _windows(pick, shape, dilated=True)
    x = pick.array(shape, pick.one_of(FLOATS))
    first = np.asarray(start, x.dtype)
    return call(name, lambda v: lax.reduce_window(v, first, combine, **windows), x, oracle="reduce_window")


@drawn("select_and_scatter_add", "select_and_gather_add")
def of_max_pooling(pick: Pick, name: str) -> Row:
    """Gradient and tangent of the largest (or smallest) in each window."""
    pick.special, pick.adds = False, True
    shape = pick.shape(1, 3)
    windows = _windows(pick, shape, dilated=False)
    extreme, start = pick.one_of([(lax.max, -np.inf), (lax.min, np.inf)])
    pool = lambda v: lax.reduce_window(v, np.float32(start), extreme, **windows)  # noqa: E731
    x = pick.array(shape)
    selects = lax.ge_p if extreme is lax.max else lax.le_p
    if name == "select_and_gather_add":
        ones = (1,) * len(shape)
        bind = primitives.select_and_gather_add_p.bind
        run = lambda t, v: bind(t, v, select_prim=selects, base_dilation=ones, window_dilation=ones, **windows)  # noqa: E731
        return call(name, run, pick.array(shape), x)
    source = pick.array(jax.eval_shape(pool, x).shape)
    bind = primitives.select_and_scatter_add_p.bind
    return call(name, lambda s, v: bind(s, v, select_prim=selects, **windows), source, x, oracle="select_and_scatter")


@drawn("select_and_scatter")
def select_and_scatter(pick: Pick, name: str) -> Row:
    """As its sum, with functions of one's own."""
    pick.special = False
    shape = pick.shape(1, 3)
    windows = _windows(pick, shape, dilated=False)
    pool = lambda v: lax.reduce_window(v, np.float32(-np.inf), lax.max, **windows)  # noqa: E731
    x = pick.array(shape)
    source = pick.array(jax.eval_shape(pool, x).shape)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    select, scatter = (jax.make_jaxpr(f)(scalar, scalar) for f in (lax.ge, lax.add))

    def run(v: Any, s: Any, start: Any) -> Any:
        return primitives.select_and_scatter_p.bind(
            v,
            s,
            start,
            select_jaxpr=select.jaxpr,
            select_consts=tuple(select.consts),
            scatter_jaxpr=scatter.jaxpr,
            scatter_consts=tuple(scatter.consts),
            **windows,
        )

    return call(name, run, x, source, pick.array((), low=0, high=0.001) * 0, oracle="select_and_scatter")
