"""The numba kernels of `elimination`: fill all tables of one problem, which are small and many, one after the other.

    values[k]     the costs of nodes and edges, followed by space for each M_v
    J_v           the sum of v's tables t over (v, *N_v): values[table_offset[t] + sum of axis a's strategy * stride]

Most axes have few strategies, so entries are added up one by one: rows are too short for vectorisation to pay.
"""

# Kernels are typed for readers. Pyright cannot infer the types of functions that numba compiles, nor of array elements.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportReturnType=false
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import FloatArray, IntArray
from alpa_lite.program.kernel import kernel


class FlatTables(NamedTuple):
    """The tables in elimination order k: the node, its neighbours, its tables and its M_k.

    ``start`` arrays have one entry more than there are nodes. ``strides`` has, for each table, one entry for the node
    and one for each of its neighbours: 0 where the table does not depend on it. ``message_start[k]`` is the offset of
    M_k in ``values``.
    """

    sizes: IntArray
    order: IntArray
    scope_start: IntArray
    scope_node: IntArray
    table_start: IntArray
    table_offset: IntArray
    strides: IntArray
    message_start: IntArray


@kernel
def eliminate_all(
    layout: FlatTables, values: FloatArray, best: NDArray[np.int32], choices: IntArray, halt: IntArray
) -> float:
    """Fill in each M, write the cheapest choices, and return their cost: inf where every choice is forbidden.

    ``best`` receives, for each entry of each M, the first minimising strategy. After a ``halt`` the result is nan,
    without choices.
    """
    total, stride = 0.0, 0
    for turn in range(layout.order.size):
        if halt[0]:
            return np.nan
        stride = _minimise(layout, values, best, turn, stride)
        if layout.scope_start[turn] == layout.scope_start[turn + 1]:
            total += values[layout.message_start[turn]]
    for turn in range(layout.order.size - 1, -1, -1):
        entry = 0
        for axis in range(layout.scope_start[turn], layout.scope_start[turn + 1]):
            node = layout.scope_node[axis]
            entry = entry * layout.sizes[node] + choices[node]
        choices[layout.order[turn]] = best[layout.message_start[turn] - layout.message_start[0] + entry]
    return total


@kernel
def _minimise(layout: FlatTables, values: FloatArray, best: NDArray[np.int32], turn: int, stride: int) -> int:
    """Fill in one M.

    ``stride`` is the offset of the strides of its tables; the result is the offset for the next node.
    """
    scope = layout.scope_node[layout.scope_start[turn] : layout.scope_start[turn + 1]]
    offsets = layout.table_offset[layout.table_start[turn] : layout.table_start[turn + 1]].copy()
    strides = layout.strides[stride : stride + offsets.size * (scope.size + 1)].reshape(offsets.size, scope.size + 1)
    at = np.zeros(scope.size, dtype=np.int64)  # the strategies of the neighbours
    for entry in range(layout.message_start[turn], layout.message_start[turn + 1]):
        least, where = np.inf, 0
        for i in range(layout.sizes[layout.order[turn]]):
            joint = 0.0
            for table in range(offsets.size):
                joint += values[offsets[table] + i * strides[table, 0]]
            if joint < least:
                least, where = joint, i
        values[entry], best[entry - layout.message_start[0]] = least, where
        for axis in range(scope.size - 1, -1, -1):  # advance to the next entry like an odometer
            at[axis] += 1
            wrapped = at[axis] == layout.sizes[scope[axis]]
            step = 1 - at[axis] if wrapped else 1
            for table in range(offsets.size):
                offsets[table] += step * strides[table, axis + 1]
            if not wrapped:
                break
            at[axis] = 0
    return stride + strides.size
