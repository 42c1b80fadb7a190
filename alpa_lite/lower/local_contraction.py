"""Grouped products on blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from alpa_lite.lower.block import LocalOp, local_lowering


@local_lowering("ragged_dot_general")
def ragged_dot_general(op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """Rows sorted by group: a device finds, in the whole group sizes, the rows of its block and of its groups."""
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
        (rolled,) = op.bind([jnp.roll(lhs, -before, rows), rhs, own])
        row = jnp.arange(rolled.shape[0])
        # Rows of no group are undefined in a grouped product.
        return [jnp.roll(jnp.where((row < jnp.sum(own))[:, None], rolled, 0), before, 0)]
    if op.result_specs[0].dims[0]:
        own, before = _own_groups(sizes, op.result_offset(0, 0), op.local_result(0)[0])
        return op.bind([jnp.roll(lhs, -before, rows), jnp.roll(rhs, -before, rhs_contract[0]), own])
    return op.bind([lhs, rhs, sizes])


def _sizes_within(sizes: Any, offset: Any, num_rows: int) -> Any:
    """How many of the rows [offset, offset + num_rows) belong to each group."""
    ends = jnp.cumsum(sizes) - offset
    return jnp.clip(ends, 0, num_rows) - jnp.clip(ends - sizes, 0, num_rows)


def _own_groups(sizes: Any, first: Any, count: int) -> tuple[Any, Any]:
    """Sizes of the groups [first, first + count), and the number of rows before them."""
    before = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0))
    return lax.dynamic_slice(sizes, (first,), (count,)), before
