"""Lower calls of hand-written kernels to blocks.

A `pallas_call` runs its kernel unchanged on a smaller grid: along a split axis, a device has the grid steps whose
blocks it holds. A `custom_partitioning` runs the program that its partition function returns for the shardings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from alpa_lite.errors import VerificationError
from alpa_lite.lower.run_local import LocalOp, block_index, local_lowering
from alpa_lite.sharding.specs import Spec
from alpa_lite.trace.kernels.grid_split import GridAxis, grid_axes


@local_lowering("pallas_call")
def pallas_call(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Run the kernel on the steps of the device's blocks."""
    if not op.factor_axes:
        return op.bind(operands)
    old = op.params["grid_mapping"]
    grid, arrays, cuts = list(old.grid), list(operands), 1
    axes = grid_axes(op.params, frozenset(range(len(op.result_shapes))))
    for factor, mesh_axes in op.factor_axes.items():
        axis = _axis_of(op, factor, axes)
        count = prod(op.axis_sizes[a] for a in mesh_axes)
        grid[axis.axis] //= count
        cuts *= count
        first = block_index(mesh_axes, op.axis_sizes) * (axis.size // count)
        for rolled in axis.rolled:
            arrays[rolled.operand] = jnp.roll(arrays[rolled.operand], -first * rolled.rows, rolled.dim)
    num_leading = len(operands) - old.num_inputs
    shapes = [op.local_operand(num_leading + i) for i in range(old.num_inputs)]
    results = [op.local_result(i) for i in range(old.num_outputs)]
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(old.block_mappings, (*shapes, *results), strict=True)
    )
    avals = tuple(aval.update(shape=shape) for aval, shape in zip(op.params["out_avals"], results, strict=True))
    return op.bind(
        arrays,
        grid_mapping=old.replace(grid=tuple(grid), block_mappings=blocks),
        out_avals=avals,
        cost_estimate=_share(op.params["cost_estimate"], cuts),
    )


def _axis_of(op: LocalOp, factor: int, axes: Sequence[GridAxis]) -> GridAxis:
    """Return the grid axis that splits just the dims with a factor. Raises `VerificationError` if there is none."""

    def dims(tensors: Sequence[Any]) -> tuple[int | None, ...]:
        return tuple(next((d for d, held in enumerate(t) if factor in held), None) for t in tensors)

    wanted = dims(op.rule.operands), dims(op.rule.results)
    found = next((axis for axis in axes if (axis.operands, axis.results) == wanted), None)
    if found is None or found.size % prod(op.axis_sizes[a] for a in op.factor_axes[factor]):
        raise VerificationError(
            f"The rule {op.rule} of the kernel {op.params.get('name')!r} splits the dims {wanted[0]} of its operands "
            f"and {wanted[1]} of its results together, but no axis of its grid {op.params['grid_mapping'].grid} walks "
            "over just these. State another rule for the kernel, or give its blocks index maps that do so."
        )
    return found


def _share(estimate: Any, cuts: int) -> Any:
    """Return the cost estimate of one device."""
    if estimate is None:
        return None
    numbers = {f.name: getattr(estimate, f.name) for f in dataclasses.fields(estimate)}
    return dataclasses.replace(estimate, **{k: n // cuts for k, n in numbers.items() if isinstance(n, int)})


@local_lowering("custom_partitioning")
def custom_partitioning(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Run what the partition function returns for the shardings of operands and results."""
    params = op.params
    if not op.factor_axes:
        return list(jaxpr_as_fun(params["call"])(*operands))
    mesh = AbstractMesh(tuple(op.axis_sizes.values()), tuple(op.axis_sizes))

    def described(avals: Sequence[Any], specs: Sequence[Spec]) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(avals, specs, strict=True)
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_sharding(mesh, spec)) for a, spec in pairs]

    call = params["call"]
    given = described(call.in_avals, op.operand_specs), described(call.out_avals, op.result_specs)
    _, function, results, arguments = params["partition"](
        *params["static_args"], mesh, params["in_tree"].unflatten(given[0]), params["out_tree"].unflatten(given[1])
    )
    for wanted, arrays in zip((arguments, results), given, strict=True):
        for sharding, array in zip(jax.tree.leaves(wanted), arrays, strict=True):
            if not sharding.is_equivalent_to(array.sharding, len(array.shape)):
                raise VerificationError(
                    f"The partition function of a custom_partitioning asks for the sharding {sharding.spec} where its "
                    f"sharding rule {op.rule} leads to {array.sharding.spec}. Change the rule, or accept this sharding "
                    "in the function."
                )
    return jax.tree.leaves(function(*params["in_tree"].unflatten(operands)))


def _sharding(mesh: AbstractMesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec.dims)))
