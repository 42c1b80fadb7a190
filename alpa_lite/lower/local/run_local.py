"""Runs one op of a graph on local blocks, inside `shard_map`.

The rule of an op promises that any of its shardable factors can be split; here the promise is kept: parameters that
speak of global shapes are made local (local_layout, local_contraction), indices are shifted to the block
(local_indexing), windows get what they read of other blocks (local_windows), and sources produce their block of the
whole array (local_random). Sums over a split factor stay partial; other reductions are combined at once (combine).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from alpa_lite.errors import VerificationError
from alpa_lite.lower.local import (
    local_contraction,
    local_elementwise,
    local_indexing,
    local_layout,
    local_random,
    local_windows,
)
from alpa_lite.lower.local.block import LocalOp as LocalOp
from alpa_lite.lower.local.block import lowering_of
from alpa_lite.lower.local.combine import combine as combine

LOWERING_MODULES = (local_contraction, local_elementwise, local_indexing, local_layout, local_random, local_windows)
"""The modules that register local lowerings, so that a reader finds them all."""


def bind_local(op: LocalOp, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The blocks of the op's results, from the blocks of its operands.

    Results are partial sums over `op.reduced_axes` when the rule reduces by sum, else already combined.
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
