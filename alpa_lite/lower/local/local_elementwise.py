"""Element-wise ops that need other words on several devices.

The upper half of a product has an operation in XLA that programs for several devices cannot hold yet, so it is computed
from products of half-words: with x = x1 · 2^h + x0, y = y1 · 2^h + y0 and words of 2h bits

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
    """Upper half of the product of integers."""
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
