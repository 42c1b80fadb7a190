"""Run one op of a graph on local blocks, inside `shard_map`.

Factors are split over mesh axes; the specs of operands and results say which (LocalOp.factor_axes). The device at
coordinates c_a holds, of a dim split over axes a1, a2 (major first), block number

    c_a1 · |a2| + c_a2                                                     (block_index)

The rule of an op promises that any of its shardable factors can be split. Local lowerings, which register by decorator
and are keyed on the primitive's name, implement the promise: parameters that name global sizes are made local, indices
are shifted to the block and sources produce their block of the whole array (local_indexing), and windows receive what
they read of other blocks (local_contraction). All other primitives run unchanged on blocks. Sums over a split factor
stay partial; other reductions are combined at once (combine), by the collective over mesh axes that `walk.combination`
names:

    sum          psum                             max, min     pmax, pmin on ordered integers
    and, or      pmin, pmax of booleans           prod, xor and bitwise and, or: all_gather, then reduce
                                                  max, min of complex numbers: the same

A maximum over devices must propagate NaN, as a maximum on one device does, but the collectives of CPUs and GPUs drop
it. Floats are therefore compared as integers in the same order, with NaN beyond infinity (ordered_integers): the same
number of bytes, and -0 < +0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from alpa_lite import _jax
from alpa_lite.errors import VerificationError
from alpa_lite.plan.walk import combination
from alpa_lite.rules.registry import FactorKind, Params, Rule
from alpa_lite.sharding.specs import Spec, local_shape


@dataclass(frozen=True, kw_only=True)
class LocalOp:
    """One op and the shapes and specs of its arrays.

    `params` are the equation's own, for the global shapes. `origins` and `full_shapes` are for ops that create arrays
    without operands inside a micro-batch: the position of this program's array inside the full batch's array, and the
    shape of the latter; None where the array is the full one.
    """

    primitive: Primitive
    params: Params
    rule: Rule
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    axis_sizes: Mapping[str, int]
    origins: tuple[tuple[Array | int, ...] | None, ...]
    full_shapes: tuple[tuple[int, ...] | None, ...]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.primitive.name)

    @cached_property
    def factor_axes(self) -> dict[int, tuple[str, ...]]:
        """The mesh axes that split each split factor.

        Raises `VerificationError` if the specs do not come from one assignment of mesh axes to factors.
        """
        found: dict[int, tuple[str, ...]] = {}
        tensors = zip((*self.rule.operands, *self.rule.results), (*self.operand_specs, *self.result_specs), strict=True)
        for dims, spec in tensors:
            for factors, axes in zip(dims, spec.dims, strict=True):
                # At most one factor of a dim can be split: the major one.
                split = [f for f in factors if f in self.rule.shardable]
                if (axes and not split) or (split and found.setdefault(split[0], axes) != axes):
                    operands, results = map(str, self.operand_specs), map(str, self.result_specs)
                    raise VerificationError(
                        f"The specs ({', '.join(operands)}) -> ({', '.join(results)}) of {self.name} do not come from "
                        f"one assignment of mesh axes to the factors of its rule {self.rule}."
                    )
        return {factor: axes for factor, axes in found.items() if axes}

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """The mesh axes over which each device computes a partial result."""
        reduced = (axes for f, axes in self.factor_axes.items() if self.rule.kinds[f] is FactorKind.REDUCTION)
        return tuple(axis for axes in reduced for axis in axes)

    def local_operand(self, index: int) -> tuple[int, ...]:
        """Return the shape of the block of an operand."""
        return local_shape(self.operand_specs[index], self.operand_shapes[index], self.axis_sizes)

    def local_result(self, index: int) -> tuple[int, ...]:
        """Return the shape of the block of a result."""
        return local_shape(self.result_specs[index], self.result_shapes[index], self.axis_sizes)

    def operand_offset(self, index: int, dim: int) -> Array | int:
        """Return the position of the block's first element along a dim of the whole operand."""
        # All blocks of a dim have the same size, so that the number of the block gives its position.
        return self._offset(self.operand_specs[index].dims[dim], self.local_operand(index)[dim])

    def result_offset(self, index: int, dim: int) -> Array | int:
        """Return the position of the block's first element along a dim of the whole result."""
        return self._offset(self.result_specs[index].dims[dim], self.local_result(index)[dim])

    def result_start(self, index: int, dim: int) -> Array | int:
        """Return `result_offset`, counted from the start of the full batch's array."""
        origin = self.origins[index]
        # Counted in two steps: the micro-batch starts at `origin` of the full batch, and the block at `offset` of it.
        offset = self.result_offset(index, dim)
        return offset if origin is None else origin[dim] + offset

    def _offset(self, axes: tuple[str, ...], block: int) -> Array | int:
        return block_index(axes, self.axis_sizes) * block if axes else 0

    def bind(self, operands: Sequence[Array], **changes: object) -> list[Array]:
        """Run the primitive with some parameters changed."""
        return _jax.bind(self.primitive, {**self.params, **changes}, operands)


def block_index(axes: Sequence[str], sizes: Mapping[str, int]) -> Array | int:
    """Return the number of this device's block along a dim split over `axes`, major first; 0 without axes."""
    index: Array | int = 0
    for axis in axes:
        # Major first, as specs list their axes.
        index = index * sizes[axis] + lax.axis_index(axis)
    return index


LocalLowering = Callable[[LocalOp, Sequence[Array]], list[Array]]
_LOWERINGS: dict[str, LocalLowering] = {}


def local_lowering(*primitives: str) -> Callable[[LocalLowering], LocalLowering]:
    """Register how primitives run on blocks. Raises `ValueError` for a second registration of one name."""

    def register(function: LocalLowering) -> LocalLowering:
        for primitive in primitives:
            if primitive in _LOWERINGS:
                raise ValueError(f"The primitive {primitive!r} has a local lowering already.")
            _LOWERINGS[primitive] = function
        return function

    return register


def lowering_of(primitive: str) -> LocalLowering:
    """Return the registered lowering, or one that binds the primitive with its own parameters."""
    # `LocalOp.bind` has the signature of a lowering: for most primitives, the op on a block is the block of the op.
    return _LOWERINGS.get(primitive, LocalOp.bind)


_GATHERED: Mapping[str, Callable[[Array, Array], Array]] = {
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}


def combine(kind: str, x: Array, axes: Sequence[str]) -> Array:
    """Return the reduction `kind` (sum, max, min, prod, and, or, xor) of `x` over the devices along mesh axes."""
    names = tuple(axes)
    if not names:
        return x
    if kind == "sum":
        return lax.psum(x, names)
    by, item_bytes = combination(kind, str(x.dtype))
    # No collective multiplies, combines bits or compares complex numbers: gather all addends and reduce them on every
    # device.
    if by == "all_gather":
        gathered = lax.all_gather(x, names)
        return reduce(_GATHERED[kind], [gathered[i] for i in range(gathered.shape[0])])
    return _extreme(x, names, item_bytes, largest=kind in ("max", "or"))


def _extreme(x: Array, axes: tuple[str, ...], item_bytes: int, *, largest: bool) -> Array:
    """Return the largest (or smallest) element over devices, propagating NaN in floats."""
    collective = lax.pmax if largest else lax.pmin
    # Bytes have the same order (False < True), and every backend has collectives on them.
    if x.dtype == jnp.bool_:
        return collective(x.astype(jnp.uint8), axes).astype(jnp.bool_)
    # Integers have no NaN, so that the collective itself is right for them.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return collective(x, axes)
    # Widening a float changes no comparison.
    wide = x if x.dtype.itemsize == item_bytes else x.astype(jnp.float32)
    ordered = collective(ordered_integers(wide, nan_is_largest=largest), axes)
    return floats_in_order(ordered, wide.dtype).astype(x.dtype)


def ordered_integers(x: Array, *, nan_is_largest: bool) -> Array:
    """Return integers of the width of the floats `x`, in the same order; NaN lies beyond all other numbers."""
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(integer)
    bits = lax.bitcast_convert_type(x, integer)
    # Negative floats count downwards from the sign bit: flip their magnitude bits.
    ordered = jnp.where(bits < 0, bits ^ integer.type(limits.max), bits)
    return jnp.where(jnp.isnan(x), integer.type(limits.max if nan_is_largest else limits.min), ordered)


def floats_in_order(ordered: Array, dtype: DTypeLike) -> Array:
    """Invert `ordered_integers`, which is its own inverse on the bits; the extreme integers are NaN."""
    largest = ordered.dtype.type(jnp.iinfo(ordered.dtype).max)
    return lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ largest, ordered), dtype)


def bind_local(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Return the blocks of the op's results, from the blocks of its operands.

    Results are partial sums over `op.reduced_axes` if the rule reduces by sum, else already combined. Raises
    `VerificationError` if a lowering returns a block of another shape than the result's spec demands.
    """
    reduced_axes = op.reduced_axes
    results = lowering_of(op.name)(op, operands)
    if op.rule.reduction != "sum":
        results = [combine(op.rule.reduction, result, reduced_axes) for result in results]
    for index, result in enumerate(results):
        if result.shape != op.local_result(index):
            raise VerificationError(
                f"Result {index} of {op.name} has the local shape {result.shape}, but its spec "
                f"{op.result_specs[index]} of {op.result_shapes[index]} demands {op.local_result(index)}."
            )
    return results
