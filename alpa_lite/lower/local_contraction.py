"""Lower matrix products (`dot_general`, `ragged_dot_general`), convolutions and pooling to blocks.

For convolutions and pooling, neighbouring devices exchange the halos of `Rule.halos`, dim by dim. A dim that was
extended by its halo includes the padding: the devices at its ends fill the halo with it (_grown). The remaining padding
lies between dilated inputs (Window.padding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from alpa_lite.lower.run_local import LocalOp, block_index, local_lowering
from alpa_lite.rules.convolution import spatial_dims, windows_of


@local_lowering("dot_general")
def dot_general(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Fold adjacent dims that are contracted (or shared) together into one dim of the product.

    XLA brings every product to three dims by transposing first and folding then. On CPU it writes the transposed dims
    one element at a time, together with everything that it fuses into the transposition: the gradient of an expert
    weight took 3 times as long. Folding first costs nothing.
    """
    ((left, right), (left_batch, right_batch)) = op.params["dimension_numbers"]
    contracted, shared = _runs(left, right), _runs(left_batch, right_batch)
    if all(len(run) == 1 for run in (*contracted, *shared)):
        return op.bind(operands)
    lhs, lhs_at = _folded(operands[0], [[dim for dim, _ in run] for run in (*contracted, *shared)])
    rhs, rhs_at = _folded(operands[1], [[dim for _, dim in run] for run in (*contracted, *shared)])
    count = len(contracted)
    numbers = ((lhs_at[:count], rhs_at[:count]), (lhs_at[count:], rhs_at[count:]))
    (product,) = op.bind([lhs, rhs], dimension_numbers=numbers)
    return [product.reshape(op.local_result(0))]


def _runs(left: Sequence[int], right: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pairs of dims, grouped where they are adjacent in both operands."""
    runs: list[list[tuple[int, int]]] = []
    for pair in zip(left, right, strict=True):
        if runs and pair == (runs[-1][-1][0] + 1, runs[-1][-1][1] + 1):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs


def _folded(array: Array, runs: Sequence[Sequence[int]]) -> tuple[Array, tuple[int, ...]]:
    """Return the array with each run of its dims reshaped to one dim, and the positions of these dims."""
    gone = {dim for run in runs for dim in run[1:]}
    wide = {run[0]: prod(array.shape[dim] for dim in run) for run in runs}
    kept = [dim for dim in range(array.ndim) if dim not in gone]
    # The dims of a run are adjacent, so that the reshape moves no data.
    return array.reshape([wide.get(dim, array.shape[dim]) for dim in kept]), tuple(kept.index(run[0]) for run in runs)


@local_lowering("ragged_dot_general")
def ragged_dot_general(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Multiply rows sorted by group: each device derives the rows of its block and groups from all group sizes."""
    lhs, rhs, sizes = operands
    numbers = op.params["ragged_dot_dimension_numbers"]
    ((_, rhs_contract), _) = numbers.dot_dimension_numbers
    rows = numbers.lhs_ragged_dimensions[0]
    if op.operand_specs[0].dims[rows]:
        sizes = _sizes_within(sizes, op.operand_offset(0, rows), op.local_operand(0)[rows])
    if numbers.rhs_group_dimensions:
        groups = numbers.rhs_group_dimensions[0]
        if not op.operand_specs[1].dims[groups]:
            return op.bind([lhs, rhs, sizes])
        own, before = _own_groups(sizes, op.operand_offset(1, groups), op.local_operand(1)[groups])
        # A grouped product starts with group 0 at row 0: roll the rows of the device's first group there, and back.
        (rolled,) = op.bind([jnp.roll(lhs, -before, rows), rhs, own])
        row = jnp.arange(rolled.shape[0])
        # Rows of no group are undefined in a grouped product.
        return [jnp.roll(jnp.where((row < jnp.sum(own))[:, None], rolled, 0), before, 0)]
    if op.result_specs[0].dims[0]:
        own, before = _own_groups(sizes, op.result_offset(0, 0), op.local_result(0)[0])
        return op.bind([jnp.roll(lhs, -before, rows), jnp.roll(rhs, -before, rhs_contract[0]), own])
    return op.bind([lhs, rhs, sizes])


def _sizes_within(sizes: Array, offset: Array | int, num_rows: int) -> Array:
    """Return how many of the rows [offset, offset + num_rows) belong to each group."""
    # Ends of the groups relative to the block: clipping leaves no rows to groups that lie outside of it.
    ends = jnp.cumsum(sizes) - offset
    return jnp.clip(ends, 0, num_rows) - jnp.clip(ends - sizes, 0, num_rows)


def _own_groups(sizes: Array, first: Array | int, count: int) -> tuple[Array, Array]:
    """Return the sizes of the groups [first, first + count), and the number of rows before them."""
    before = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0))
    return lax.dynamic_slice(sizes, (first,), (count,)), before


def _grown(op: LocalOp, operands: Sequence[Array], fills: Sequence[Array | float]) -> list[Array]:
    """Return the operands extended by their halos, which hold the fill beyond the ends of the whole array."""
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
            # The first device receives nothing, for which `ppermute` gives zeros: it takes the fill instead.
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
def conv_general_dilated(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Convolve the groups of the block and, along spatial dims, its windows."""
    numbers = op.params["dimension_numbers"]
    features, batch = op.params["feature_group_count"], op.params["batch_group_count"]
    if features > 1:
        dim = numbers.lhs_spec[1]
        # The block has the groups of its own features only.
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


def _fills(op: LocalOp, operands: Sequence[Array]) -> list[Array | float]:
    """Return the value that windows read beyond each array: it changes no sum and loses every comparison."""
    if op.name == "reduce_window":
        inits = operands[len(operands) // 2 :]
        # One fill for each operand, in the order of the op: first the arrays, then their initial values.
        return [*inits, *inits]
    largest = op.name == "reduce_window_max" or getattr(op.params.get("select_prim"), "name", "") == "ge"
    if op.name == "reduce_window_sum":
        return [0]
    extreme = _loser(operands[-1].dtype, largest=largest)
    # Of two operands the first is summed or gathered, and the second is compared.
    return [extreme] if len(operands) == 1 else [0, extreme]


def _loser(dtype: DTypeLike, *, largest: bool) -> float:
    """Return the value of a dtype that loses every comparison for the largest (or smallest) element."""
    if dtype == jnp.bool_:
        return not largest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if largest else jnp.iinfo(dtype).max
    return -np.inf if largest else np.inf


@local_lowering("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add", "reduce_window")
def reduce_window(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
    """Pool the block extended by its halo, and drop the windows beyond the block's last."""
    grown = _grown(op, operands, _fills(op, operands))
    shape, local = op.operand_shapes[0], op.local_result(0)
    padding = list(op.params["padding"])
    for d, window in enumerate(windows_of(op.params)):
        halo = window.halo(shape[d], op.result_shapes[0][d])
        if op.operand_specs[0].dims[d] and halo is not None:
            low, high = window.padding(grown[0].shape[d], local[d], halo[0])
            # Windows beyond the block are cut off below instead of by a negative padding.
            padding[d] = (low, max(high, 0))
    results = op.bind(grown, padding=tuple(padding))
    return [lax.slice(r, [0] * r.ndim, local) for r in results]


@local_lowering("select_and_scatter_add")
def select_and_scatter_add(op: LocalOp, operands: Sequence[Array]) -> list[Array]:
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
