"""Describe one op on one device's blocks: the arguments of a local lowering, and the block's position in the whole
array.

Factors are split over mesh axes; the specs of operands and results say which (LocalOp.factor_axes). The device at
coordinates c_a holds, of a dim split over axes a1, a2 (major first), block number

    c_a1 · |a2| + c_a2                                                     (block_index)

Lowerings register by decorator, keyed on the primitive's name; all other primitives run unchanged on blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import Array, lax

from alpa_lite import _jax
from alpa_lite.errors import VerificationError
from alpa_lite.rules.registry import FactorKind, Rule
from alpa_lite.sharding.specs import Spec, local_shape


@dataclass(frozen=True, kw_only=True)
class LocalOp:
    """One op and the shapes and specs of its arrays.

    `params` are the equation's own, for the global shapes. `origins` and `full_shapes` are for ops that create arrays
    without operands inside a micro-batch: the position of this program's array inside the full batch's array, and the
    shape of the latter; None where the array is the full one.
    """

    primitive: Any
    params: Mapping[str, Any]
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
        return self._offset(self.operand_specs[index].dims[dim], self.local_operand(index)[dim])

    def result_offset(self, index: int, dim: int) -> Array | int:
        """Return the position of the block's first element along a dim of the whole result."""
        return self._offset(self.result_specs[index].dims[dim], self.local_result(index)[dim])

    def result_start(self, index: int, dim: int) -> Array | int:
        """Return `result_offset`, counted from the start of the full batch's array."""
        origin = self.origins[index]
        offset = self.result_offset(index, dim)
        return offset if origin is None else origin[dim] + offset

    def _offset(self, axes: tuple[str, ...], block: int) -> Array | int:
        return block_index(axes, self.axis_sizes) * block if axes else 0

    def bind(self, operands: Sequence[Array], **changes: Any) -> list[Array]:
        """Run the primitive with some parameters changed."""
        return _jax.bind(self.primitive, {**self.params, **changes}, operands)


def block_index(axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
    """Return the number of this device's block along a dim split over `axes`, major first."""
    index: Any = 0
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
    return _LOWERINGS.get(primitive, LocalOp.bind)
