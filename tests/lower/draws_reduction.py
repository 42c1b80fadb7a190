"""Drawn reductions, running reductions, sorts, transforms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from tests.lower.pick import COMPLEX, FLOATS, INTEGERS, NUMBERS, ORDERED, Pick, call, drawn
from tests.rules.row import Row, of

_REDUCED = {
    "reduce_sum": NUMBERS,
    "reduce_max": ORDERED,
    "reduce_min": ORDERED,
    "reduce_prod": NUMBERS,
    "reduce_and": (*INTEGERS, "bool"),
    "reduce_or": (*INTEGERS, "bool"),
    "reduce_xor": (*INTEGERS, "bool"),
}


@drawn(*_REDUCED)
def reduction(pick: Pick, name: str) -> Row:
    """Any dims of any array, empty ones too."""
    pick.adds = name == "reduce_sum"
    shape, dtype = pick.shape(), pick.one_of(_REDUCED[name])
    axes = tuple(sorted(pick.some(range(len(shape)), least=1)))
    if pick.integer(0, 9) == 9:
        shape = tuple(0 if d == axes[0] else n for d, n in enumerate(shape))
    x = pick.array(shape, dtype)
    if name == "reduce_prod" and dtype not in INTEGERS:
        # Powers of two: a product in any order is exact.
        x = jnp.where(x >= 0, x * 0 + 1, x * 0 - 2) if dtype in FLOATS else jnp.sign(x.real) + 0j
    placed = dict(out_sharding=None) if name in ("reduce_sum", "reduce_max", "reduce_min") else {}
    return call(name, of(getattr(primitives, f"{name}_p"), axes=axes, **placed), x, oracle="reduce")


@drawn("argmax", "argmin")
def argmax(pick: Pick, name: str) -> Row:
    """The first of the largest; NaN counts as largest."""
    shape = pick.shape()
    axis, dtype = pick.axis(len(shape)), pick.one_of(ORDERED)
    index = pick.one_of((jnp.int32, jnp.uint8))
    return call(name, lambda v: getattr(lax, name)(v, axis, index), pick.array(shape, dtype), oracle="reduce")


@drawn("reduce")
def generic(pick: Pick, name: str) -> Row:
    """A function of one's own, on one array or two."""
    shape = pick.shape()
    axes = tuple(pick.some(range(len(shape)), least=1))
    x = pick.array(shape)
    if pick.flag():
        y = pick.integers(shape, 0, 99)
        start = np.float32(-9), np.int32(0)

        def larger(a: tuple[jnp.ndarray, jnp.ndarray], b: tuple[jnp.ndarray, jnp.ndarray]) -> tuple:
            first = a[0] >= b[0]
            return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

        return call(name, lambda v, w: lax.reduce((v, w), start, larger, axes), x, y, oracle="reduce")
    return call(name, lambda v: lax.reduce(v, np.float32(0), lambda p, q: lax.max(p, q * 2), axes), x, oracle="reduce")


@drawn("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(pick: Pick, name: str) -> Row:
    """Forwards and backwards."""
    pick.adds = name == "cumsum"
    shape = pick.shape()
    axis, reverse = pick.axis(len(shape)), pick.flag()
    dtype = pick.one_of(FLOATS if name == "cumlogsumexp" else (*FLOATS, *INTEGERS))
    x = pick.array(shape, dtype, *((0.7, 1.3) if name == "cumprod" else (-2, 2)))
    return call(name, lambda v: getattr(lax, name)(v, axis, reverse=reverse), x)


@drawn("sort")
def sort(pick: Pick, name: str) -> Row:
    """Several arrays by several keys."""
    shape = pick.shape()
    axis, count = pick.axis(len(shape)), pick.integer(1, 3)
    keys = pick.integer(1, count)
    # Few different numbers: many are equal, and later keys decide.
    operands = [pick.array(shape, "int32") // 4, *(pick.array(shape, pick.one_of(ORDERED)) for _ in range(count - 1))]
    operands = pick.order(operands)
    return call(name, lambda *v: lax.sort(v, dimension=axis, is_stable=True, num_keys=keys), *operands, oracle="sort")


@drawn("top_k")
def top_k(pick: Pick, name: str) -> Row:
    """Along any dim."""
    shape = pick.shape()
    axis = pick.axis(len(shape))
    k = pick.integer(1, shape[axis])
    return call(name, lambda v: lax.top_k(v, k, axis=axis), pick.array(shape, pick.one_of((*FLOATS, *INTEGERS))))


@drawn("approx_top_k")
def approx_top_k(pick: Pick, name: str) -> Row:
    """Largest or smallest, whole or in candidates."""
    shape = pick.shape()
    axis = pick.axis(len(shape))
    k, search = pick.integer(1, shape[axis]), pick.one_of((lax.approx_max_k, lax.approx_min_k))
    pick.special = False
    whole = pick.flag()
    return call(name, lambda v: search(v, k, reduction_dimension=axis, aggregate_to_topk=whole), pick.array(shape))


@drawn("fft")
def fft(pick: Pick, name: str) -> Row:
    """All kinds, of up to three dims."""
    pick.special = False
    kind = pick.one_of(["FFT", "IFFT", "RFFT", "IRFFT"])
    shape = pick.shape(1, 4)
    count = pick.integer(1, min(3, len(shape)))
    lengths = shape[len(shape) - count :]
    x = pick.array(shape, "float32" if kind == "RFFT" else COMPLEX[0])
    if kind == "IRFFT":
        lengths = (*lengths[:-1], max(1, 2 * (lengths[-1] - 1) + pick.integer(0, 1)))
    return call(name, lambda v: lax.fft(v, kind, lengths), x, oracle="fft")
