"""Lower matrix products (`dot_general`, `ragged_dot_general`) to blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from alpa_lite.lower.local.block import LocalOp, local_lowering


@local_lowering("dot_general")
def dot_general(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
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


def _folded(array: Any, runs: Sequence[Sequence[int]]) -> tuple[Any, tuple[int, ...]]:
    """Return the array with each run of its dims reshaped to one dim, and the positions of these dims."""
    gone = {dim for run in runs for dim in run[1:]}
    wide = {run[0]: prod(array.shape[dim] for dim in run) for run in runs}
    kept = [dim for dim in range(array.ndim) if dim not in gone]
    return array.reshape([wide.get(dim, array.shape[dim]) for dim in kept]), tuple(kept.index(run[0]) for run in runs)


@local_lowering("ragged_dot_general")
def ragged_dot_general(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
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


def _sizes_within(sizes: Any, offset: Any, num_rows: int) -> Any:
    """Return how many of the rows [offset, offset + num_rows) belong to each group."""
    ends = jnp.cumsum(sizes) - offset
    return jnp.clip(ends, 0, num_rows) - jnp.clip(ends - sizes, 0, num_rows)


def _own_groups(sizes: Any, first: Any, count: int) -> tuple[Any, Any]:
    """Return the sizes of the groups [first, first + count), and the number of rows before them."""
    before = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0))
    return lax.dynamic_slice(sizes, (first,), (count,)), before
