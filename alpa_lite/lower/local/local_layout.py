"""Lower layout ops to blocks, by replacing parameters that name global sizes, and element-wise ops that XLA cannot
split.

The upper half of an integer product is an operation that XLA cannot yet compile for several devices, so it is computed
from products of half-words (`mulhi`): with x = x1 · 2^h + x0, y = y1 · 2^h + y0 and words of 2h bits

    x · y >> 2h  =  x1 · y1 + (m >> h) + (n >> h),    m = x1 · y0 + (x0 · y0 >> h),  n = x0 · y1 + (m mod 2^h)

for unsigned words; a negative x counts as x + 2^2h, which adds y to the upper half, and y likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from alpa_lite.lower.local.block import LocalOp, local_lowering


@local_lowering("mulhi")
def mulhi(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Return the upper half of the product of integers."""
    x, y = jnp.broadcast_arrays(*operands)
    bits = 8 * x.dtype.itemsize
    word = jnp.dtype(f"uint{bits}")
    half, mask = word.type(bits // 2), word.type(2 ** (bits // 2) - 1)
    a, b = (lax.bitcast_convert_type(v, word) for v in (x, y))
    a1, a0, b1, b0 = a >> half, a & mask, b >> half, b & mask
    middle = a1 * b0 + ((a0 * b0) >> half)
    rest = a0 * b1 + (middle & mask)
    high = a1 * b1 + (middle >> half) + (rest >> half)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        zero = jnp.zeros_like(high)
        high = high - jnp.where(x < 0, b, zero) - jnp.where(y < 0, a, zero)
    return [lax.bitcast_convert_type(high, x.dtype)]


@local_lowering("reshape")
def reshape(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Reshape blocks to blocks: a split factor is the major one on both sides."""
    return op.bind(operands, new_sizes=op.local_result(0))


@local_lowering("broadcast_in_dim", "empty")
def broadcast_in_dim(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Broadcast to the block's shape."""
    return op.bind(operands, shape=op.local_result(0))


@local_lowering("iota")
def iota(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Count from the start of the block."""
    dim = op.params["dimension"]
    start = op.result_start(0, dim)
    if isinstance(start, int) and start == 0:
        return op.bind(operands, shape=op.local_result(0))
    # Counted in integers and converted once: in a narrow float, start + i would round twice.
    counts = lax.broadcasted_iota(jnp.int32, op.local_result(0), dim) + start
    return [counts.astype(op.params["dtype"])]


@local_lowering("slice")
def slice_(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Slice unsplit dims; a split dim is spanned whole, up to the block's size."""
    limits = tuple(
        local if axes else limit
        for limit, local, axes in zip(
            op.params["limit_indices"], op.local_operand(0), op.operand_specs[0].dims, strict=True
        )
    )
    return op.bind(operands, limit_indices=limits)


@local_lowering("tile")
def tile(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Repeat the block as often as the device's share of the result needs."""
    columns = zip(op.params["reps"], op.local_result(0), op.local_operand(0), strict=True)
    reps = tuple(local // n if n else rep for rep, local, n in columns)
    return op.bind(operands, reps=reps)


@local_lowering("sharding_constraint", "device_put", "layout_constraint")
def identity(_: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Return the operands: these ops only request a placement, which the plan has decided."""
    return list(operands)
