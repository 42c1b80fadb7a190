"""Products, linear algebra, reductions, running reductions, sorting, windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row, floats, integers, of, positive, row, truths


def _dot(lhs: Any, rhs: Any, *, contract: Any, batch: Any = ((), ())) -> Callable[..., Any]:
    return lambda a, b: lax.dot_general(a, b, (contract, batch))


def _whole(*shape: int) -> Any:
    """Numbers that are exact in narrow formats, as are their products."""
    return integers(3, *shape, low=-3).astype(jnp.float32)


def _scaled(*, batched: bool = False) -> Callable[..., Any]:
    numbers = (((2,), (1,)), ((0,), (0,))) if batched else (((1,), (0,)), ((), ()))
    options = dict(dimension_numbers=numbers, preferred_element_type=jnp.dtype("float32"))
    return lambda *v: jax_primitives()["scaled_dot"].bind(*v, **options)


def _contraction() -> list[Row]:
    a, b = floats(4, 8), floats(8, 16)
    attention = floats(4, 8, 2, 4), floats(4, 16, 2, 4)
    sizes = jnp.asarray([3, 1, 0, 7], jnp.int32)
    one = jnp.ones((8, 1, 4), jnp.float32)
    ragged = floats(16, 4), floats(4, 4, 8), sizes
    rows = [
        row("dot_general", _dot(a, b, contract=((1,), (0,))), a, b, oracle="dot_general"),
        row(
            "dot_general integers",
            _dot(a, b, contract=((1,), (0,))),
            integers(9, 4, 8),
            integers(9, 8, 4),
            oracle="dot_general",
        ),
        row(
            "dot_general batched",
            _dot(*attention, contract=((3,), (3,)), batch=((0, 2), (0, 2))),
            *attention,
            oracle="dot_general",
        ),
        row(
            "dot_general two contracted",
            _dot(a, b, contract=((0, 1), (1, 0))),
            floats(4, 8, 2),
            floats(8, 4, 4),
            oracle="dot_general",
        ),
        row("dot_general vector", _dot(a, b, contract=((0,), (0,))), floats(8), b, oracle="dot_general"),
        row("scaled_dot", _scaled(), _whole(4, 32), _whole(32, 8), 2.0 ** _whole(4, 8), 2.0 ** _whole(16, 8)),
        row("scaled_dot batched", _scaled(batched=True), _whole(8, 4, 8), _whole(8, 8, 4), 2.0 ** _whole(8, 4, 4), one),
        row("ragged_dot_general", lax.ragged_dot, *ragged),
        row("ragged_dot_general full", lax.ragged_dot, *ragged[:2], sizes.at[3].add(5)),
        row(
            "ragged_dot_general to rows",
            lambda w, c, s: jax.linear_transpose(lambda x: lax.ragged_dot(x, w, s), ragged[0])(c)[0],
            ragged[1],
            floats(16, 8),
            sizes,
        ),
        row(
            "ragged_dot_general to weights",
            lambda x, c, s: jax.linear_transpose(lambda w: lax.ragged_dot(x, w, s), ragged[1])(c)[0],
            ragged[0],
            floats(16, 8),
            sizes,
        ),
    ]
    # Eigenvalues well apart: their order and the signs of the factors are then settled.
    matrix = floats(4, 3, 3)
    pivots = jnp.asarray([[0, 1, 2], [1, 1, 2], [2, 2, 2], [1, 2, 2]], jnp.int32)
    definite = matrix @ matrix.mT + 3 * jnp.eye(3)
    rows += [
        row("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), definite),
        row(
            "triangular_solve",
            lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True, lower=True),
            definite,
            floats(4, 3, 8),
        ),
        row("lu", lax.linalg.lu, definite),
        row("qr", lambda x: lax.linalg.qr(x), definite),
        row("householder_product", lax.linalg.householder_product, matrix, floats(4, 3)),
        row("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 3), pivots),
        row("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), definite),
        row("svd", lambda x: lax.linalg.svd(x, compute_uv=False), definite),
        row(
            "tridiagonal_solve",
            lax.linalg.tridiagonal_solve,
            positive(4, 3),
            4 + positive(4, 3),
            positive(4, 3),
            floats(4, 3, 2),
        ),
    ]
    return rows


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
        row("reduce_max complex", table["reduce_max"], lax.complex(floats(8, 4, 3), floats(8, 4, 3)), oracle="reduce"),
        row("reduce_min complex", table["reduce_min"], lax.complex(floats(8, 4, 3), floats(8, 4, 3)), oracle="reduce"),
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


ROWS = (*_contraction(), *_reductions())
