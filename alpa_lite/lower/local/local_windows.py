"""Lower convolutions and pooling to blocks: neighbouring devices exchange the halos of `Rule.halos`, dim by dim.

A dim that was extended by its halo includes the padding: the devices at its ends fill the halo with it (_grown). The
remaining padding lies between dilated inputs (Window.padding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.lower.local.block import LocalOp, block_index, local_lowering
from alpa_lite.rules.convolution import spatial_dims, windows_of


def _grown(op: LocalOp, operands: Sequence[Any], fills: Sequence[Any]) -> list[Any]:
    """Return the operands extended by their halos; beyond the ends of the whole array the halo holds the operand's
    fill.
    """
    grown = list(operands)
    for halo in op.rule.halos:
        axes = op.factor_axes.get(halo.factor, ())
        if not axes:
            continue
        x, fill = grown[halo.operand], fills[halo.operand]
        names, order = _in_order(axes, op.axis_sizes)
        index, size = block_index(axes, op.axis_sizes), x.shape[halo.dim]
        parts = [x]
        if halo.before:
            border = lax.slice_in_dim(x, size - halo.before, size, axis=halo.dim)
            received = lax.ppermute(border, names, list(pairwise(order)))
            parts.insert(0, jnp.where(index == 0, jnp.asarray(fill, x.dtype), received))
        if halo.after:
            border = lax.slice_in_dim(x, 0, halo.after, axis=halo.dim)
            received = lax.ppermute(border, names, list(pairwise(order[::-1])))
            parts.append(jnp.where(index == len(order) - 1, jnp.asarray(fill, x.dtype), received))
        grown[halo.operand] = jnp.concatenate(parts, halo.dim)
    return grown


def _in_order(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], list[int]]:
    """Return mesh axes in the order in which `ppermute` numbers devices (the mesh's), and the device of each block."""
    names = tuple(a for a in sizes if a in axes)
    numbers = np.arange(prod(sizes[a] for a in names)).reshape([sizes[a] for a in names])
    return names, numbers.transpose([names.index(a) for a in axes]).ravel().tolist()


@local_lowering("conv_general_dilated")
def conv_general_dilated(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Convolve the groups of the block and, along spatial dims, its windows."""
    numbers = op.params["dimension_numbers"]
    features, batch = op.params["feature_group_count"], op.params["batch_group_count"]
    if features > 1:
        dim = numbers.lhs_spec[1]
        features = features * op.local_operand(0)[dim] // op.operand_shapes[0][dim]
    if batch > 1:
        dim = numbers.lhs_spec[0]
        batch = batch * op.local_operand(0)[dim] // op.operand_shapes[0][dim]
    lhs, rhs = _grown(op, operands, (0, 0))
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    dims = spatial_dims(op.params, specs, (*op.operand_shapes, *op.result_shapes))
    padding = list(op.params["padding"])
    for i, (dim, place) in enumerate(zip(dims, numbers.lhs_spec[2:], strict=True)):
        if op.operand_specs[0].dims[place] and dim.halo is not None:
            num_windows = dim.num_windows * op.local_operand(0)[place] // dim.input
            padding[i] = dim.window.padding(lhs.shape[place], num_windows, dim.halo[0])
    return op.bind([lhs, rhs], feature_group_count=features, batch_group_count=batch, padding=tuple(padding))


def _fills(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Return for each operand the value that windows beyond the array read: it changes no sum and loses every
    comparison.
    """
    if op.name == "reduce_window":
        inits = operands[len(operands) // 2 :]
        return [*inits, *inits]
    largest = op.name == "reduce_window_max" or getattr(op.params.get("select_prim"), "name", "") == "ge"
    if op.name == "reduce_window_sum":
        return [0]
    extreme = _loser(operands[-1].dtype, largest=largest)
    return [extreme] if len(operands) == 1 else [0, extreme]


def _loser(dtype: Any, *, largest: bool) -> Any:
    """Return the value of a dtype that loses every comparison for the largest (or smallest) element."""
    if dtype == jnp.bool_:
        return not largest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if largest else jnp.iinfo(dtype).max
    return -np.inf if largest else np.inf


@local_lowering("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add", "reduce_window")
def reduce_window(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Pool the block extended by its halo, and drop the windows beyond the block's last."""
    grown = _grown(op, operands, _fills(op, operands))
    shape, local = op.operand_shapes[0], op.local_result(0)
    padding = list(op.params["padding"])
    for d, window in enumerate(windows_of(op.params)):
        halo = window.halo(shape[d], op.result_shapes[0][d])
        if op.operand_specs[0].dims[d] and halo is not None:
            low, high = window.padding(grown[0].shape[d], local[d], halo[0])
            padding[d] = (low, max(high, 0))
    results = op.bind(grown, padding=tuple(padding))
    return [lax.slice(r, [0] * r.ndim, local) for r in results]


@local_lowering("select_and_scatter_add")
def select_and_scatter_add(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Select again in windows of other blocks that overlap this one, and cut off what they select elsewhere."""
    split = [bool(axes) for axes in op.result_specs[0].dims]
    padding = [(0, 0) if on else pad for on, pad in zip(split, op.params["padding"], strict=True)]
    (result,) = op.bind(_grown(op, operands, _fills(op, operands)), padding=tuple(padding))
    starts = [0] * result.ndim
    for halo in op.rule.halos:
        if halo.operand == 1 and split[halo.dim]:
            starts[halo.dim] = halo.before
    local = op.local_result(0)
    return [lax.slice(result, starts, [start + n for start, n in zip(starts, local, strict=True)])]
