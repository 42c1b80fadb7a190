"""Drawn calls of hand-written kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from tests.lower.pick import Pick, call, drawn
from tests.rules.row import Row
from tests.rules.rows_kernels import cudnn


@drawn("pallas_call")
def pallas_call(pick: Pick, name: str) -> Row:
    """Sums of blocks of two arrays; the axes of the grid walk over the dims in any order, some of a dim's steps
    share a block of the second array, and the steps of another axis may read their place.
    """
    blocks = [pick.one_of((1, 2, 3)) for _ in range(2)]
    steps = [pick.dim((8, 4, 2, 3)) for _ in range(2)]
    shared = [pick.one_of([n for n in (1, 2, steps[d]) if steps[d] % n == 0]) for d in range(2)]
    order = pick.order((0, 1))
    place = pick.one_of((None, 0, 1))

    def kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        made = x_ref[...] + y_ref[...]
        o_ref[...] = made if place is None else made * (1 + pl.program_id(place)).astype(jnp.float32)

    def walk(*divisors: int) -> Any:
        return lambda *step: tuple(step[order.index(d)] // divisors[d] for d in range(2))

    shape = tuple(n * b for n, b in zip(steps, blocks, strict=True))
    few = tuple(n // s * b for n, s, b in zip(steps, shared, blocks, strict=True))
    function = pl.pallas_call(
        kernel,
        grid=tuple(steps[d] for d in order),
        in_specs=[pl.BlockSpec(tuple(blocks), walk(1, 1)), pl.BlockSpec(tuple(blocks), walk(*shared))],
        out_specs=pl.BlockSpec(tuple(blocks), walk(1, 1)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        interpret=True,
    )
    return call(name, function, pick.array(shape), pick.array(few))


@drawn("custom_partitioning")
def partitioned(pick: Pick, name: str) -> Row:
    """Products of each row with a vector, or with one of its own."""
    batched = pick.flag()
    rows, columns = pick.dim(), pick.dim((4, 3, 8))

    def function(x: Any, y: Any) -> Any:
        return jnp.sum(x * y, axis=1)

    wrapped = custom_partitioning(function)
    wrapped.def_partition(
        partition=lambda mesh, args, result: (mesh, function, result.sharding, tuple(a.sharding for a in args)),
        sharding_rule=f"i j, {'i' if batched else 'one'} j -> i",
        need_replication_factors=("j",),
    )
    return call(name, wrapped, pick.array((rows, columns)), pick.array((rows if batched else 1, columns)))


@drawn("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
def attention(pick: Pick, name: str) -> Row:
    """Attention with groups of heads, biases that samples and heads may share, and masks."""
    backward = "bwd" in name
    batch, of_keys, group = pick.dim((4, 8, 2, 1)), pick.dim((4, 8, 2, 1)), pick.one_of((1, 2))
    queries, keys, width = pick.one_of((4, 8)), pick.one_of((4, 6)), pick.one_of((2, 4))
    heads, first = of_keys * group, pick.flag()
    mask = pick.one_of(("NO_MASK", "CAUSAL", "PADDING"))
    has_bias, absent = pick.flag(), jnp.zeros(0, jnp.float32)

    def array(length: int, count: int) -> Any:
        return pick.array((batch, count, length, width) if first else (batch, length, count, width))

    bias = (pick.one_of((batch, 1)), pick.one_of((heads, 1)), queries, keys)
    operands = [array(queries, heads), array(keys, of_keys), array(keys, of_keys)]
    operands += [pick.array(bias) if has_bias else absent]
    padded = mask == "PADDING"
    operands += [pick.integers((batch,), 1, n) if padded else absent for n in (queries, keys)]
    operands += [absent] * 4
    if backward:
        operands += [pick.array((batch, heads, queries)), array(queries, heads), array(queries, heads)]
    options = dict(mask=mask, layout=int(first), variadic_args=(has_bias, has_bias))
    options |= {} if backward else {"training": pick.flag()}
    return call(name, cudnn(backward=backward, **options), *operands)
