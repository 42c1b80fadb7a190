"""Drawn calls of matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.lower.pick import COMPLEX, FLOATS, INTEGERS, Pick, call, drawn
from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row

_SMALL = (8, 4, 2, 1, 6, 3, 16)


@drawn("dot_general")
def dot_general(pick: Pick, name: str) -> Row:
    """Any number of batch, contracted and free dims, in any order on both sides; results of a wider dtype."""
    pick.adds = True
    dims: dict[str, list[int]] = {}
    for role, most in (("batch", 2), ("contracted", 2), ("left", 2), ("right", 2)):
        dims[role] = [pick.dim(_SMALL) for _ in range(pick.integer(0, most))]
    shared = [("b", i) for i in range(len(dims["batch"]))] + [("c", i) for i in range(len(dims["contracted"]))]
    sizes = {("b", i): n for i, n in enumerate(dims["batch"])} | {("c", i): n for i, n in enumerate(dims["contracted"])}
    sizes |= {("l", i): n for i, n in enumerate(dims["left"])} | {("r", i): n for i, n in enumerate(dims["right"])}
    left = pick.order([*shared, *(("l", i) for i in range(len(dims["left"])))])
    right = pick.order([*shared, *(("r", i) for i in range(len(dims["right"])))])
    roles = [[key for key in pick.order(shared) if key[0] == role] for role in "cb"]
    numbers = tuple(tuple(tuple(side.index(key) for key in keys) for side in (left, right)) for keys in roles)
    dtype = pick.one_of((*FLOATS, *INTEGERS, *COMPLEX, "int8"))
    wider = {"bfloat16": "float32", "int8": "int32", "uint8": "int32"}.get(dtype) if pick.flag() else None
    operands = [pick.array([sizes[key] for key in side], dtype) for side in (left, right)]
    preferred = None if wider is None else jnp.dtype(wider)
    run = lambda x, y: lax.dot_general(x, y, numbers, preferred_element_type=preferred)  # noqa: E731
    return call(name, run, *operands, oracle="dot_general")


@drawn("scaled_dot")
def scaled_dot(pick: Pick, name: str) -> Row:
    """Blocks of 2 to all numbers, in any dims; batches."""
    pick.special, pick.adds = False, True
    rank = pick.integer(2, 3)
    roles = [pick.order(["k", "free", "b"][:rank]) for _ in range(2)]
    k, batch = 4 * pick.one_of((8, 4, 2, 1, 3)), pick.dim((8, 4, 2, 1))
    shapes = [[k if r == "k" else batch if r == "b" else pick.dim(_SMALL) for r in side] for side in roles]
    scales = []
    for side, shape in zip(roles, shapes, strict=True):
        count = k // pick.one_of([n for n in (4, 2, 8, 12, k) if k % n == 0])
        scales.append([count if r == "k" else n for r, n in zip(side, shape, strict=True)])
    at = lambda role: tuple((side.index(role),) if role in side else () for side in roles)  # noqa: E731
    numbers = (at("k"), at("b"))
    operands = [pick.array(shape, pick.one_of(("bfloat16", "float8_e4m3fn"))) for shape in shapes]
    # Scales are powers of two.
    operands += [jnp.exp2(jnp.floor(pick.array(shape))).astype("float8_e8m0fnu") for shape in scales]
    bind = jax_primitives()[name].bind
    preferred = pick.one_of((jnp.dtype("bfloat16"), jnp.dtype("float32")))
    run = lambda *v: bind(*v, dimension_numbers=numbers, preferred_element_type=preferred)  # noqa: E731
    return call(name, run, *operands)


@drawn("scaled_matmul_wrapper")
def scaled_matmul(pick: Pick, name: str) -> Row:
    """One, some or all blocks of 32 numbers on a device; batches."""
    pick.special, pick.adds = False, True
    batch, k, shapes = pick.dim((4, 2, 1)), 32 * pick.one_of((8, 4, 2, 1)), [pick.dim(_SMALL) for _ in range(2)]
    numbers = [pick.array([batch, n, k], "float8_e4m3fn") for n in shapes]
    scales = [jnp.exp2(jnp.floor(pick.array([batch, n, k // 32]))).astype("float8_e8m0fnu") for n in shapes]
    bind = jax_primitives()[name].bind
    run = lambda *v: bind(*v, preferred_element_type=jnp.dtype("float32"))  # noqa: E731
    return call(name, run, *numbers, *scales)


def _group_sizes(pick: Pick, rows: int, groups: int) -> Any:
    """Sizes of groups that hold all rows or some."""
    cuts = sorted(pick.integer(0, rows) for _ in range(groups))
    ends = [*cuts[:-1], rows] if pick.flag() else cuts
    return jnp.diff(jnp.asarray([0, *ends], jnp.int32))


@drawn("ragged_dot_general")
def ragged_dot_general(pick: Pick, name: str) -> Row:
    """Forward, and both gradients."""
    pick.adds = True
    m, k, n, g = pick.dim((8, 16, 4, 12)), pick.dim(_SMALL), pick.dim(_SMALL), pick.dim((4, 8, 2, 1, 3))
    sizes = _group_sizes(pick, m, g)
    dtype = pick.one_of(FLOATS)
    pick.special = False  # rows of no group are undefined, so a number times them is too
    x, w, c = pick.array((m, k), dtype), pick.array((g, k, n), dtype), pick.array((m, n), dtype)
    form = pick.one_of(["forward", "to rows", "to weights"])
    if form == "forward":
        return call(name, lax.ragged_dot, x, w, sizes)
    if form == "to rows":
        run = lambda w, c, s: jax.linear_transpose(lambda v: lax.ragged_dot(v, w, s), x)(c)[0]  # noqa: E731
        return call(name, run, w, c, sizes)
    run = lambda x, c, s: jax.linear_transpose(lambda v: lax.ragged_dot(x, v, s), w)(c)[0]  # noqa: E731
    return call(name, run, x, c, sizes)
