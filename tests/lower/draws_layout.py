"""Drawn calls that move elements without computing."""

from __future__ import annotations

from math import prod

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.lower.pick import ANY, FLOATS, INTEGERS, MOVED, Pick, call, drawn
from tests.rules.row import Row


@drawn("broadcast_in_dim")
def broadcast_in_dim(pick: Pick, name: str) -> Row:
    """New dims anywhere, dims of size 1 expanded."""
    shape = pick.shape(0, 4)
    kept = sorted(pick.some(range(len(shape))))
    # The identity is no equation.
    shape = (2, *shape) if len(kept) == len(shape) else shape
    x = pick.array([1 if pick.integer(0, 3) == 3 else shape[d] for d in kept], pick.one_of(MOVED))
    return call(
        name,
        lambda v: lax.broadcast_in_dim_p.bind(v, shape=shape, broadcast_dimensions=tuple(kept), sharding=None),
        x,
        oracle="broadcast_in_dim",
    )


@drawn("transpose")
def transpose(pick: Pick, name: str) -> Row:
    """Any order."""
    shape = pick.shape(1, 4)
    order = pick.order(range(len(shape)))
    return call(
        name,
        lambda v: lax.transpose_p.bind(v, permutation=tuple(order)),
        pick.array(shape, pick.one_of(MOVED)),
        oracle="transpose",
    )


@drawn("squeeze")
def squeeze(pick: Pick, name: str) -> Row:
    """Some of the dims of size 1."""
    shape = list(pick.shape(0, 3))
    for _ in range(pick.integer(1, 2)):
        shape.insert(pick.integer(0, len(shape)), 1)
    ones = [d for d, n in enumerate(shape) if n == 1]
    gone = tuple(sorted(pick.some(ones, least=1)))
    x = pick.array(shape, pick.one_of(MOVED))
    return call(name, lambda v: lax.squeeze_p.bind(v, dimensions=gone), x, oracle="reshape")


def _factorisation(pick: Pick, total: int) -> tuple[int, ...]:
    """Dims whose product is `total`, ones among them."""
    dims: list[int] = []
    while total > 1:
        dims.append(pick.one_of([n for n in range(2, total + 1) if total % n == 0]))
        total //= dims[-1]
    for _ in range(pick.integer(0, 1)):
        dims.insert(pick.integer(0, len(dims)), 1)
    return tuple(dims)


@drawn("reshape")
def reshape(pick: Pick, name: str) -> Row:
    """Between any two factorisations of a number, the operand transposed before or not."""
    total = pick.one_of((64, 8, 16, 24, 32, 48, 60, 72, 96, 128, 36, 1, 2))
    source, target = _factorisation(pick, total), _factorisation(pick, total)
    # JAX cannot transpose keys while it reshapes them.
    dtype = pick.one_of(MOVED)
    order = tuple(pick.order(range(len(source)))) if pick.integer(0, 3) == 3 and dtype != "key" else None
    x = pick.array(source, dtype)
    run = lambda v: lax.reshape_p.bind(v, new_sizes=target, dimensions=order, sharding=None)  # noqa: E731
    return call(name, run, x, oracle="" if order else "reshape")


@drawn("slice")
def slice_(pick: Pick, name: str) -> Row:
    """Starts, limits and strides; some dims whole."""
    shape = pick.shape()
    starts, limits, strides = [], [], []
    for n in shape:
        part = pick.flag()
        starts.append(pick.integer(0, n - 1) if part else 0)
        limits.append(pick.integer(starts[-1] + 1, n) if part else n)
        strides.append(pick.integer(1, 3) if part else 1)
    strides = None if set(strides) == {1} and pick.flag() else strides
    x = pick.array(shape, pick.one_of(MOVED))
    return call(
        name,
        lambda v: lax.slice_p.bind(
            v,
            start_indices=tuple(starts),
            limit_indices=tuple(limits),
            strides=None if strides is None else tuple(strides),
        ),
        x,
        oracle="slice",
    )


@drawn("pad")
def pad(pick: Pick, name: str) -> Row:
    """Low, high, negative and interior; by a number or by a variable."""
    shape, dtype = pick.shape(), pick.one_of(ANY)
    config = []
    for n in shape:
        interior = pick.one_of((0, 0, 1, 2))
        spread = n + interior * max(n - 1, 0)
        low, high = pick.integer(-2, 3), pick.integer(-2, 3)
        config.append((0, 0, 0) if pick.flag() or spread + low + high < 1 else (low, high, interior))
    x = pick.array(shape, dtype)
    if pick.flag():
        number = np.asarray(pick.one_of((0, 1)), x.dtype)
        return call(name, lambda v: lax.pad(v, number, config), x, oracle="pad")
    return call(name, lambda v, p: lax.pad(v, p, config), x, pick.array((), dtype), oracle="pad")


@drawn("rev")
def rev(pick: Pick, name: str) -> Row:
    """Some dims."""
    shape = pick.shape()
    dims = tuple(pick.some(range(len(shape)), least=1))
    return call(name, lambda v: lax.rev(v, dims), pick.array(shape, pick.one_of(MOVED)), oracle="reverse")


@drawn("concatenate")
def concatenate(pick: Pick, name: str) -> Row:
    """One to four parts of any size."""
    shape, dtype = pick.shape(), pick.one_of(MOVED)
    axis = pick.axis(len(shape))
    sizes = [pick.one_of((shape[axis], 1, 2, 3, 4)) for _ in range(pick.integer(1, 4))]
    parts = [pick.array([*shape[:axis], n, *shape[axis + 1 :]], dtype) for n in sizes]
    return call(
        name,
        lambda *v: lax.concatenate_p.bind(*v, dimension=axis),
        *parts,
        oracle="concatenate" if len(parts) > 1 else "",
    )


@drawn("split")
def split(pick: Pick, name: str) -> Row:
    """Parts of any size, empty ones too."""
    shape = pick.shape()
    axis = pick.axis(len(shape))
    cuts = sorted(pick.integer(0, shape[axis]) for _ in range(pick.integer(0, 3)))
    sizes = np.diff([0, *cuts, shape[axis]]).tolist()
    return call(name, lambda v: lax.split(v, sizes, axis), pick.array(shape, pick.one_of(MOVED)))


@drawn("stack")
def stack(pick: Pick, name: str) -> Row:
    """Along a new dim."""
    shape, dtype = pick.shape(0, 3), pick.one_of(MOVED)
    axis, count = pick.integer(0, len(shape)), pick.integer(1, 4)
    return call(name, lambda *v: jnp.stack(v, axis), *(pick.array(shape, dtype) for _ in range(count)))


@drawn("unstack")
def unstack(pick: Pick, name: str) -> Row:
    """Along a dim that goes."""
    shape = pick.shape()
    axis = pick.axis(len(shape))
    return call(name, lambda v: jnp.unstack(v, axis=axis), pick.array(shape, pick.one_of(MOVED)))


@drawn("tile")
def tile(pick: Pick, name: str) -> Row:
    """Some dims repeated."""
    shape = pick.shape()
    reps = tuple(pick.one_of((1, 2, 4, 8, 3)) for _ in shape)
    if prod(shape) * prod(reps) > 2**14:
        reps = tuple(min(r, 2) for r in reps)
    return call(name, lambda v: lax.tile_p.bind(v, reps=reps), pick.array(shape, pick.one_of(MOVED)))


@drawn("iota")
def iota(pick: Pick, name: str) -> Row:
    """Along any dim, in dtypes that cannot hold every number."""
    shape = pick.one_of([pick.shape(), (512, 4), (2, 320)])
    axis, dtype = pick.axis(len(shape)), pick.one_of((*INTEGERS, *FLOATS, "float16", "complex64", "int8"))
    return call(name, lambda: lax.broadcasted_iota(jnp.dtype(dtype), shape, axis))


@drawn("empty")
def empty(pick: Pick, name: str) -> Row:
    """Zeros on CPUs."""
    shape, dtype = pick.shape(), pick.one_of(ANY)
    return call(name, lambda: lax.empty(shape, jnp.dtype(dtype)))
