"""Lower random bits to blocks: each device draws exactly its part of the full array.

Element n (in row-major order) of a threefry draw is the cipher of the 64-bit counter n under the key

    bits(n) = threefry2x32(key, (n >> 32, n mod 2^32))       64 bits: both words; 32: their xor; fewer: its low bits

so a block needs the counters of its elements only (block_counters). For any other generator each device draws the full
array and cuts out its block. The full array is that of the full batch when micro-batches draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry2x32_p

from alpa_lite.lower.local.block import LocalOp, local_lowering

_WORD = 2**32


def block_counters(block: Sequence[int], starts: Sequence[Array | int], full: Sequence[int]) -> tuple[Array, Array]:
    """Return the (high, low) 32-bit words of the row-major positions of a block's elements in an array of shape `full`.

    The block of shape `block` starts at the position `starts` (integers, traced or not) of the full array.
    """
    high = jnp.zeros(tuple(block), jnp.uint32)
    low = jnp.zeros(tuple(block), jnp.uint32)
    is_wide = prod(full) > _WORD
    for dim, (size, start) in enumerate(zip(block, starts, strict=True)):
        index = lax.iota(jnp.uint32, size) + jnp.asarray(start).astype(jnp.uint32)
        index = lax.broadcast_in_dim(index, tuple(block), (dim,))
        step_high, step_low = _wide_product(index, prod(full[dim + 1 :]))
        low = low + step_low
        if is_wide:
            # An unsigned sum below one of its addends has wrapped: carry.
            high = high + step_high + (low < step_low).astype(jnp.uint32)
    return high, low


def _wide_product(x: Array, factor: int) -> tuple[Array, Array]:
    """Return the (high, low) words of x · factor for 32-bit x and a factor of up to 64 bits, modulo 2^64."""
    low = x * jnp.uint32(factor % _WORD)
    x0, x1 = x & jnp.uint32(0xFFFF), x >> jnp.uint32(16)
    f0, f1 = jnp.uint32(factor & 0xFFFF), jnp.uint32((factor >> 16) & 0xFFFF)
    sixteen, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    # Schoolbook product in 16-bit digits; `middle` cannot overflow.
    middle = x1 * f0 + ((x0 * f0) >> sixteen)
    middle_low = x0 * f1 + (middle & mask)
    high = x1 * f1 + (middle >> sixteen) + (middle_low >> sixteen)
    return high + x * jnp.uint32(factor >> 32), low


@local_lowering("random_bits")
def random_bits(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Encrypt the block's counters under each key of the block; other generators draw the full array and cut out the
    block.
    """
    (keys,) = operands
    if _draws_all(op, 0, keys.ndim):
        return op.bind(operands)
    full = _full_shape(op, 0)[keys.ndim :]
    partitionable = getattr(jax.config, "jax_threefry_partitionable", True)
    # Only partitionable threefry derives every element from a counter of its own.
    if str(keys.dtype) != "key<fry>" or not partitionable:
        return [_own_block(op, 0, op.bind(operands, shape=full)[0], keys.ndim)]
    shape = op.local_result(0)
    drawn = range(keys.ndim, len(shape))
    starts = [op.result_start(0, d) for d in drawn]
    counters = block_counters(shape[keys.ndim :], starts, full)
    words = jax.random.key_data(keys)

    def over_block(x: Array, dims: range) -> Array:
        return lax.broadcast_in_dim(x, shape, tuple(dims))

    first, second = threefry2x32_p.bind(
        over_block(words[..., 0], range(keys.ndim)),
        over_block(words[..., 1], range(keys.ndim)),
        *(over_block(counter, drawn) for counter in counters),
    )
    return [_of_width(first, second, op.params["bit_width"])]


def _of_width(first: Array, second: Array, bit_width: int) -> Array:
    """Return random words of `bit_width` bits, from the two words of the cipher, as JAX combines them."""
    if bit_width == 64:
        return (first.astype(jnp.uint64) << jnp.uint64(32)) | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{bit_width}")


@local_lowering("random_split")
def random_split(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Split keys on every device, since they are few, and return the device's own."""
    (keys,) = operands
    if _draws_all(op, 0, keys.ndim):
        return op.bind(operands)
    return [_own_block(op, 0, op.bind(operands, shape=_full_shape(op, 0)[keys.ndim :])[0], keys.ndim)]


@local_lowering("rng_bit_generator")
def rng_bit_generator(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Draw the full array and cut out the block: the next key depends on how much is drawn."""
    if _draws_all(op, 1, 0):
        return op.bind(operands)
    key, bits = op.bind(operands, shape=_full_shape(op, 1))
    return [key, _own_block(op, 1, bits, 0)]


def _draws_all(op: LocalOp, index: int, first_drawn: int) -> bool:
    """Return True if the dims that are drawn are not split and not part of a larger array."""
    return op.origins[index] is None and not any(op.result_specs[index].dims[first_drawn:])


def _full_shape(op: LocalOp, index: int) -> tuple[int, ...]:
    return op.full_shapes[index] or op.result_shapes[index]


def _own_block(op: LocalOp, index: int, full: Array, first_drawn: int) -> Array:
    """Return the block cut out of the full array; leading dims (a batch of keys) are local already."""
    shape = op.local_result(index)
    starts = [op.result_start(index, d) if d >= first_drawn else 0 for d in range(len(shape))]
    return lax.dynamic_slice(full, [jnp.asarray(s, jnp.int32) for s in starts], shape)
