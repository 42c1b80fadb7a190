"""Lower layout ops, gather, scatter, dynamic slices and random bits to blocks, and ops that XLA cannot split.

Parameters of layout ops that name global sizes are replaced. Along a split dim that indices address, an index i lies on
this device if offset ≤ i < offset + block, at i - offset. Each mode treats indices outside the *global* bounds as on
one device:

    CLIP                 indices are clipped to the global bounds first
    PROMISE_IN_BOUNDS    any result is right; treated as CLIP by gather, dropped by scatter
    FILL_OR_DROP         gather: the fill value, from one device, so that the sum over devices holds it once;
                         scatter: no device owns the index

Of random bits each device draws exactly its part of the full array. Element n (in row-major order) of a threefry draw
is the cipher of the 64-bit counter n under the key

    bits(n) = threefry2x32(key, (n >> 32, n mod 2^32))       64 bits: both words; 32: their xor; fewer: its low bits

so a block needs the counters of its elements only (block_counters). For any other generator each device draws the full
array and cuts out its block. The full array is that of the full batch when micro-batches draw.

The upper half of an integer product is an operation that XLA cannot yet compile for several devices, so it is computed
from products of half-words (`mulhi`): with x = x1 · 2^h + x0, y = y1 · 2^h + y0 and words of 2h bits

    x · y >> 2h  =  x1 · y1 + (m >> h) + (n >> h),    m = x1 · y0 + (x0 · y0 >> h),  n = x0 · y1 + (m mod 2^h)

for unsigned words; a negative x counts as x + 2^2h, which adds y to the upper half, and y likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from operator import and_

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry2x32_p
from jax.typing import DTypeLike

from alpa_lite import _jax
from alpa_lite.lower.run_local import LocalOp, block_index, local_lowering
from alpa_lite.program.ir import TO_DEVICE, TO_HOST


@local_lowering("mulhi")
def mulhi(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
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
def reshape(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Reshape blocks to blocks: a split factor is the major one on both sides."""
    return op.bind(operands, new_sizes=op.local_result(0))


@local_lowering("broadcast_in_dim", "empty")
def broadcast_in_dim(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Broadcast to the block's shape."""
    return op.bind(operands, shape=op.local_result(0))


@local_lowering("iota")
def iota(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Count from the start of the block."""
    dim = op.params["dimension"]
    start = op.result_start(0, dim)
    if isinstance(start, int) and start == 0:
        return op.bind(operands, shape=op.local_result(0))
    # Counted in integers and converted once: in a narrow float, start + i would round twice.
    counts = lax.broadcasted_iota(jnp.int32, op.local_result(0), dim) + start
    return [counts.astype(op.params["dtype"])]


@local_lowering("slice")
def slice_(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Slice unsplit dims; a split dim is spanned whole, up to the block's size."""
    limits = tuple(
        local if axes else limit
        for limit, local, axes in zip(
            op.params["limit_indices"], op.local_operand(0), op.operand_specs[0].dims, strict=True
        )
    )
    return op.bind(operands, limit_indices=limits)


@local_lowering("tile")
def tile(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Repeat the block as often as the device's share of the result needs."""
    columns = zip(op.params["reps"], op.local_result(0), op.local_operand(0), strict=True)
    # A dim without elements has no quotient.
    reps = tuple(local // n if n else rep for rep, local, n in columns)
    return op.bind(operands, reps=reps)


@local_lowering("sharding_constraint", "device_put", "layout_constraint")
def identity(_: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Return the operands: these ops only request a placement, which the plan has decided."""
    return list(operands)


@local_lowering(TO_HOST)
def to_host(_: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Copy the block of each device to the memory of its host."""
    return [_jax.in_memory(x, on_host=True) for x in operands]


@local_lowering(TO_DEVICE)
def to_device(_: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Copy the block of each device from the memory of its host."""
    return [_jax.in_memory(x, on_host=False) for x in operands]


#: The neutral element of each combining scatter: the operand counts on one device only, the others start from this.
_NEUTRAL = {"scatter-add": 0, "scatter-sub": 0, "scatter-mul": 1}


@local_lowering("gather")
def gather(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Set full window dims to the block's size; look up a split dim where its row lies, and give zeros elsewhere."""
    operand, indices = operands
    numbers = op.params["dimension_numbers"]
    sizes = tuple(
        local if size == n else size
        for size, n, local in zip(op.params["slice_sizes"], op.operand_shapes[0], op.local_operand(0), strict=True)
    )
    found = tuple(
        d for d in numbers.start_index_map if op.params["slice_sizes"][d] == 1 and op.operand_specs[0].dims[d]
    )
    bounds = _Bounds.of(op, numbers.start_index_map, op.params["slice_sizes"])
    if not found or not op.reduced_axes:
        # XLA clips too, but may forget to where the block was just sliced out of a larger array (see _clamped).
        if op.params["mode"].name == "CLIP" and any(op.operand_specs[0].dims):
            indices = bounds.clip(bounds.signed(indices))
        return op.bind([operand, indices], slice_sizes=sizes)
    indices = bounds.signed(indices)
    clipped = bounds.clip(indices)
    here, local = bounds.to_block(op, clipped)
    # Rows of other devices are masked below, so any index in bounds does; CLIP lets XLA skip the fill.
    mode = type(op.params["mode"]).CLIP
    (rows,) = op.bind([operand, local], slice_sizes=sizes, mode=mode, fill_value=None)
    batch_dims = tuple(d for d in range(rows.ndim) if d not in numbers.offset_dims)
    over_rows = partial(lax.broadcast_in_dim, shape=rows.shape, broadcast_dimensions=batch_dims)
    rows = jnp.where(over_rows(here), rows, _zero(rows))
    if op.params["mode"].name == "FILL_OR_DROP":
        first = block_index(op.reduced_axes, op.axis_sizes) == 0
        # On one device only, since the rows of all devices are summed.
        filled = jnp.where(first, _fill_value(op.params["fill_value"], rows.dtype), _zero(rows))
        rows = jnp.where(over_rows(bounds.contain(indices)), rows, filled)
    return [rows]


def _zero(x: Array) -> Array:
    return jnp.zeros((), x.dtype)


def _fill_value(fill: float | None, dtype: DTypeLike) -> Array:
    """Return the documented default of `jnp.take`: NaN, the least signed, the largest unsigned integer, or True."""
    if fill is not None:
        return jnp.asarray(fill, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max, dtype)


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """For each column of the index vectors: the operand dim that it addresses and its largest valid index."""

    dims: tuple[int, ...]
    last: Array

    @staticmethod
    def of(op: LocalOp, dims: Sequence[int], window: Sequence[int]) -> _Bounds:
        """Return the bounds of indices along `dims` for windows of size `window` (one size per operand dim)."""
        last = [op.operand_shapes[0][d] - window[d] for d in dims]
        return _Bounds(dims=tuple(dims), last=jnp.asarray(last, jnp.int32))

    @staticmethod
    def signed(indices: Array) -> Array:
        """Return indices in a signed type, which an offset cannot wrap; too large ones stay out of bounds."""
        if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
            indices = jnp.minimum(indices, jnp.asarray(min(jnp.iinfo(indices.dtype).max, 2**31 - 1), indices.dtype))
        return indices.astype(jnp.int64 if indices.dtype == jnp.int64 else jnp.int32)

    def clip(self, indices: Array) -> Array:
        """Return indices clipped to the global bounds."""
        return jnp.clip(indices, 0, self.last.astype(indices.dtype))

    def contain(self, indices: Array) -> Array:
        """Return for each index vector whether it is in the global bounds."""
        return jnp.all((indices >= 0) & (indices <= self.last.astype(indices.dtype)), axis=-1)

    def to_block(self, op: LocalOp, indices: Array) -> tuple[Array, Array]:
        """Return whether this device holds the element of each index vector, and the vector in the block (clipped)."""
        within: list[Array] = []  # per split dim, whether the index lies in the block
        columns: list[Array] = []
        for column, dim in enumerate(self.dims):
            local = indices[..., column]
            if op.operand_specs[0].dims[dim] and _addresses_one(op, dim):
                local = local - op.operand_offset(0, dim)
                size = op.local_operand(0)[dim]
                within.append((local >= 0) & (local < size))
                local = jnp.clip(local, 0, size - 1)
            columns.append(local)
        return reduce(and_, within), jnp.stack(columns, axis=-1)


def _addresses_one(op: LocalOp, dim: int) -> bool:
    """Return True if indices pick single elements along the dim (a window that spans the dim splits with it)."""
    if op.name == "gather":
        return bool(op.params["slice_sizes"][dim] == 1)
    return dim in op.params["dimension_numbers"].inserted_window_dims


@local_lowering("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Apply the updates that each device holds to the rows that it holds."""
    operand, indices, updates = operands
    if any(op.operand_specs[0].dims):
        # A scatter of one update that is dropped writes back what it reads there, for which XLA looks beyond the block
        # where the block was just sliced out of a larger array (see _clamped).
        operand = lax.optimization_barrier(operand)
    # The others, min and max, may count the operand once per device.
    if op.reduced_axes and op.name in _NEUTRAL:
        first = block_index(op.reduced_axes, op.axis_sizes) == 0
        operand = jnp.where(first, operand, jnp.asarray(_NEUTRAL[op.name], operand.dtype))
    numbers = op.params["dimension_numbers"]
    dims = numbers.scatter_dims_to_operand_dims
    if not any(op.operand_specs[0].dims[d] and _addresses_one(op, d) for d in dims):
        return op.bind([operand, indices, updates])
    bounds = _Bounds.of(op, dims, _update_window(op))
    indices = bounds.signed(indices)
    if op.params["mode"].name == "CLIP":
        indices = bounds.clip(indices)
    here, local = bounds.to_block(op, indices)
    # Unclipped columns keep their meaning; the vectors of other devices' rows are moved out of bounds and dropped.
    outside = jnp.asarray(jnp.iinfo(local.dtype).max, local.dtype)
    local = jnp.where(here[..., None], local, outside)
    mode = type(op.params["mode"]).FILL_OR_DROP
    # Vectors that were moved out of bounds are all equal, and no longer in order.
    return op.bind([operand, local, updates], mode=mode, unique_indices=False, indices_are_sorted=False)


def _update_window(op: LocalOp) -> tuple[int, ...]:
    """Return the size of the updated window along every dim of the operand."""
    numbers = op.params["dimension_numbers"]
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter([op.operand_shapes[2][d] for d in sorted(numbers.update_window_dims)])
    return tuple(1 if d in hidden else next(sizes) for d in range(len(op.operand_shapes[0])))


@local_lowering("dynamic_slice")
def dynamic_slice(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Slice unsplit dims; a split dim is spanned whole by the window, so its start is 0."""
    operand, *starts = operands
    return op.bind([operand, *_clamped(op, starts, op.result_shapes[0])], slice_sizes=op.local_result(0))


def _clamped(op: LocalOp, starts: Sequence[Array], window: Sequence[int]) -> list[Array]:
    """Return the starts clamped to the bounds of the whole array, 0 for dims that the window spans.

    XLA would clamp them too, but where the block was itself just sliced out of a larger array it merges the two slices
    and forgets the inner bounds.
    """
    if not any(op.operand_specs[0].dims):
        return list(starts)
    signed = [_Bounds.signed(jnp.asarray(start)) for start in starts]
    # All starts of a slice must be of one type: int64 where 64 bits are enabled and one of them is.
    dtype = jnp.result_type(*signed)
    columns = zip(signed, op.operand_shapes[0], window, strict=True)
    return [
        jnp.zeros((), dtype) if n == size else jnp.clip(start.astype(dtype), 0, n - size) for start, n, size in columns
    ]


@local_lowering("dynamic_update_slice")
def dynamic_update_slice(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Update split dims by spreading the update over the block and selecting it where it overlaps."""
    operand, update, *starts = operands
    shape, window = op.operand_shapes[0], op.operand_shapes[1]
    starts = _clamped(op, starts, window)
    axes = op.operand_specs[0].dims
    straddled = [d for d in range(operand.ndim) if axes[d] and shape[d] != window[d]]
    if not straddled:
        return op.bind([operand, update, *starts])
    hits: list[Array] = []
    for d in straddled:
        place = op.operand_offset(0, d) + jnp.arange(operand.shape[d]) - starts[d]
        inside = (place >= 0) & (place < window[d])
        hits.append(
            lax.broadcast_in_dim(inside, (operand.shape[d],), (0,)).reshape(
                [-1 if i == d else 1 for i in range(operand.ndim)]
            )
        )
        update = jnp.take(update, jnp.clip(place, 0, window[d] - 1), axis=d)
        starts[d] = jnp.zeros((), starts[d].dtype)
    # Elements that the update does not reach stay as they are.
    current = lax.dynamic_slice(operand, starts, update.shape)
    return op.bind([operand, jnp.where(reduce(and_, hits), update, current), *starts])


_WORD = 2**32


def block_counters(block: Sequence[int], starts: Sequence[Array | int], full: Sequence[int]) -> tuple[Array, Array]:
    """Return the (high, low) 32-bit words of the row-major positions of a block's elements in an array of shape `full`.

    The block of shape `block` starts at the position `starts` (integers, traced or not) of the full array.
    """
    high = jnp.zeros(tuple(block), jnp.uint32)
    low = jnp.zeros(tuple(block), jnp.uint32)
    # Positions below 2^32 have no high word, and its additions are left out.
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
    """Encrypt the block's counters under each of its keys; other generators draw the whole array and cut it."""
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
