"""Reductions, running reductions, sorting, windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.rules.row import Row, floats, integers, of, positive, row, truths


def _reductions() -> list[Row]:
    x = positive(8, 4, 3)
    table = {
        "reduce_sum": lambda v: lax.reduce_sum_p.bind(v, axes=(0, 2), out_sharding=None),
        "reduce_max": of(lax.reduce_max_p, axes=(0, 2), out_sharding=None),
        "reduce_min": of(lax.reduce_min_p, axes=(1,), out_sharding=None),
        "reduce_prod": of(lax.reduce_prod_p, axes=(0,)),
    }
    rows = [row(name, fn, x, oracle="reduce") for name, fn in table.items()]
    rows += [
        row("reduce_max not a number", table["reduce_max"], x.at[3, 1, 2].set(jnp.nan), oracle="reduce"),
        row("reduce_min not a number", table["reduce_min"], x.at[3, 1, 2].set(jnp.nan), oracle="reduce"),
        row("reduce_max signed", table["reduce_max"], floats(8, 4, 3), oracle="reduce"),
        row("reduce_max bfloat16", table["reduce_max"], floats(8, 4, 3).astype(jnp.bfloat16), oracle="reduce"),
        row("reduce_max integers", table["reduce_max"], integers(99, 8, 4, 3, low=-99), oracle="reduce"),
        row("reduce_sum integers", table["reduce_sum"], integers(99, 8, 4, 3), oracle="reduce"),
        row("reduce_and", of(lax.reduce_and_p, axes=(0,)), truths(8, 4), oracle="reduce"),
        row("reduce_or", of(lax.reduce_or_p, axes=(0, 1)), truths(8, 4), oracle="reduce"),
        row("reduce_xor", of(lax.reduce_xor_p, axes=(0,)), truths(8, 4), oracle="reduce"),
        row("reduce_and integers", of(lax.reduce_and_p, axes=(0,)), integers(99, 8, 4), oracle="reduce"),
        row("argmax", lambda v: lax.argmax(v, 1, jnp.int32), floats(8, 4), oracle="reduce"),
        row("argmin", lambda v: lax.argmin(v, 0, jnp.int32), floats(8, 4), oracle="reduce"),
        row(
            "reduce",
            lambda v: lax.reduce(v, jnp.float32(0), lambda p, q: lax.max(p, q * 2), (0,)),
            positive(8, 4),
            oracle="reduce",
        ),
        row("cumsum", lambda v: lax.cumsum(v, 1), floats(8, 4)),
        row("cumsum integers", lambda v: lax.cumsum(v, 1, reverse=True), integers(9, 8, 4)),
        row("cumprod", lambda v: lax.cumprod(v, 0), floats(4, 8)),
        row("cummin", lambda v: lax.cummin(v, 1), floats(4, 8)),
        row("cummax", lambda v: lax.cummax(v, 0), floats(4, 8)),
        row("cumlogsumexp", lambda v: lax.cumlogsumexp(v, 0), floats(4, 8)),
        row("sort", lambda v, w: lax.sort((v, w), dimension=1), floats(8, 4), floats(8, 4), oracle="sort"),
        row("top_k", lambda v: lax.top_k(v, 2), floats(8, 4)),
        row("approx_top_k", lambda v: lax.approx_max_k(v, 2), floats(8, 4)),
        row("fft", lambda v: lax.fft(v, "FFT", (4,)), lax.complex(floats(8, 4), floats(8, 4)), oracle="fft"),
        row("fft real", lambda v: lax.fft(v, "RFFT", (4,)), floats(8, 4), oracle="fft"),
    ]
    return rows + _windows()


def _windows() -> list[Row]:
    image = floats(2, 8, 8, 4)
    pool = dict(window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1))
    overlapping = dict(window_dimensions=(1, 3, 3, 1), window_strides=(1, 1, 1, 1))
    total = lambda **kw: lambda v: lax.reduce_window(v, 0.0, lax.add, padding="VALID", **kw)  # noqa: E731
    largest = lambda **kw: lambda v: lax.reduce_window(v, -jnp.inf, lax.max, padding="SAME", **kw)  # noqa: E731
    transposed = lambda v, c: jax.vjp(largest(**pool), v)[1](c)[0]  # noqa: E731
    overlapped = lambda v, c: jax.vjp(largest(**overlapping), v)[1](c)[0]  # noqa: E731
    halved = dict(window_dimensions=(1, 3, 3, 1), window_strides=(1, 2, 2, 1))
    strided = lambda v, c: jax.vjp(largest(**halved), v)[1](c)[0]  # noqa: E731
    tangent = lambda v, t: jax.jvp(largest(**pool), (v,), (t,))[1]  # noqa: E731
    return [
        row("reduce_window_sum", total(**pool), image, oracle="reduce_window"),
        row("reduce_window_sum overlapping", total(**overlapping), image, oracle="reduce_window"),
        row("reduce_window_max", largest(**pool), image, oracle="reduce_window"),
        row("reduce_window_min", lambda v: lax.reduce_window(v, jnp.inf, lax.min, padding="VALID", **pool), image),
        row("reduce_window_max overlapping", largest(**overlapping), image, oracle="reduce_window"),
        row(
            "reduce_window",
            lambda v: lax.reduce_window(v, 1.0, lax.mul, padding="VALID", **pool),
            image,
            oracle="reduce_window",
        ),
        row("select_and_scatter_add", transposed, image, floats(2, 4, 4, 4), oracle="select_and_scatter"),
        row("select_and_scatter_add overlapping", overlapped, image, floats(2, 8, 8, 4)),
        row("select_and_scatter_add strided", strided, floats(1, 16, 16, 2), floats(1, 8, 8, 2)),
        row("select_and_gather_add", tangent, image, floats(2, 8, 8, 4)),
    ]


ROWS = (*_reductions(),)
