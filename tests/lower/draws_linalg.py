"""Drawn calls of linear algebra: batches of small matrices whose factors are settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.lower.pick import Pick, call, drawn
from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row

linalg = lax.linalg


def _batch(pick: Pick) -> tuple[int, ...]:
    return tuple(pick.dim((8, 4, 2, 1, 3)) for _ in range(pick.integer(0, 2)))


def _definite(pick: Pick, size: int | None = None) -> Any:
    """Symmetric, with eigenvalues well apart."""
    batch, n = _batch(pick), size or pick.one_of((3, 2, 1, 4))
    random = pick.numbers()
    rotation, _ = np.linalg.qr(random.normal(size=(*batch, n, n)))
    values = 1 + 1.5 * np.arange(n) + random.uniform(0, 0.5, (*batch, n))
    return jnp.asarray(rotation * values[..., None, :] @ np.swapaxes(rotation, -1, -2), jnp.float32)


def _rectangle(pick: Pick) -> Any:
    return pick.array((*_batch(pick), pick.one_of((4, 3)), pick.one_of((3, 2))))


_OF_DEFINITE: dict[str, Callable[[Pick], Callable[[Any], Any]]] = {
    "cholesky": lambda pick: lambda x: linalg.cholesky(x, symmetrize_input=False),
    "lu": lambda pick: linalg.lu,
    "eigh": lambda pick: lambda x: linalg.eigh(x, symmetrize_input=False),
    "eig": lambda pick: lambda x: linalg.eig(x, compute_left_eigenvectors=False),
    "svd": lambda pick: _svd(compute_uv=pick.flag(), full_matrices=pick.flag()),
    "schur": lambda pick: linalg.schur,
    "hessenberg": lambda pick: linalg.hessenberg,
    "tridiagonal": lambda pick: _tridiagonal(lower=pick.flag()),
}


def _svd(**options: Any) -> Callable[[Any], Any]:
    return lambda x: linalg.svd(x, **options)


def _tridiagonal(**options: Any) -> Callable[[Any], Any]:
    return lambda x: linalg.tridiagonal(x, **options)


@drawn(*_OF_DEFINITE)
def of_definite(pick: Pick, name: str) -> Row:
    """One symmetric matrix per member of the batch."""
    pick.special = False
    return call(name, _OF_DEFINITE[name](pick), _definite(pick, 3 if name == "hessenberg" else None))


@drawn("qr", "geqrf", "geqp3", "householder_product", "ormqr")
def orthogonal(pick: Pick, name: str) -> Row:
    """The parts of a QR factorisation."""
    pick.special = False
    x = _rectangle(pick)
    if name == "qr":
        full = pick.flag()
        return call(name, lambda v: linalg.qr(v, full_matrices=full), x)
    if name == "geqrf":
        return call(name, lambda v: jax_primitives()[name].bind(v), x)
    if name == "geqp3":
        free = jnp.zeros((*x.shape[:-2], x.shape[-1]), jnp.int32)
        return call(name, lambda v, p: jax_primitives()[name].bind(v, p, use_magma=None), x, free)
    rank = min(x.shape[-2:])
    taus = pick.array((*x.shape[:-2], rank))
    if name == "householder_product":
        return call(name, linalg.householder_product, x, taus)
    left, transposed = pick.flag(), pick.flag()
    m, k = x.shape[-2], pick.one_of((2, 3))
    c = pick.array((*x.shape[:-2], *((m, k) if left else (k, m))))
    return call(name, lambda *v: linalg.ormqr(*v, left=left, transpose=transposed), x, taus, c)


@drawn("triangular_solve")
def triangular_solve(pick: Pick, name: str) -> Row:
    """From either side, with either triangle."""
    pick.special = False
    a = _definite(pick)
    n, k = a.shape[-1], pick.one_of((4, 8, 1, 3))
    left = pick.flag()
    options = dict(left_side=left, lower=pick.flag(), transpose_a=pick.flag(), unit_diagonal=pick.flag())
    b = pick.array((*a.shape[:-2], *((n, k) if left else (k, n))))
    return call(name, lambda x, y: linalg.triangular_solve(x, y, **options), a, b)


@drawn("tridiagonal_solve")
def tridiagonal_solve(pick: Pick, name: str) -> Row:
    """Three diagonals and right-hand sides."""
    pick.special = False
    batch, n = _batch(pick), pick.one_of((3, 4))
    below, above = (pick.array((*batch, n), low=0.1, high=0.9) for _ in range(2))
    diagonal = 4 + pick.array((*batch, n), low=0.1, high=0.9)
    return call(name, linalg.tridiagonal_solve, below, diagonal, above, pick.array((*batch, n, pick.one_of((2, 8)))))


@drawn("symmetric_product")
def symmetric_product(pick: Pick, name: str) -> Row:
    """A · Aᵀ + C."""
    pick.special = False
    a = _rectangle(pick)
    c = pick.array((*a.shape[:-2], a.shape[-2], a.shape[-2]))
    c = c + c.mT
    return call(name, lambda x, y: linalg.symmetric_product(x, y, alpha=2.0, beta=0.5, symmetrize_output=True), a, c)


@drawn("lu_pivots_to_permutation")
def pivots(pick: Pick, name: str) -> Row:
    """Row exchanges."""
    batch, n = _batch(pick), pick.one_of((3, 4, 8))
    first = np.arange(n)
    chosen = first + np.floor(pick.numbers().uniform(size=(*batch, n)) * (n - first)).astype(np.int32)
    return call(name, lambda p: linalg.lu_pivots_to_permutation(p, n + 1), jnp.asarray(chosen, jnp.int32))
