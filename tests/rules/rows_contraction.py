"""Products and linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row, floats, integers, positive, row


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


ROWS = (*_contraction(),)
