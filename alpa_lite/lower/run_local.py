"""Run one op of a graph on local blocks, inside `shard_map`.

The rule of an op promises that any of its shardable factors can be split. Local lowerings implement the promise:
parameters that name global sizes are made local and indices are shifted to the block (local_indexing), windows receive
what they read of other blocks (local_contraction), and sources produce their block of the whole array (local_random).
Sums over a split factor stay partial; other reductions are combined at once (combine), by the collective over mesh axes
that `walk.combination` names:

    sum          psum                             max, min     pmax, pmin on ordered integers
    and, or      pmin, pmax of booleans           prod, xor and bitwise and, or: all_gather, then reduce

A maximum over devices must propagate NaN, as a maximum on one device does, but the collectives of CPUs and GPUs drop
it. Floats are therefore compared as integers in the same order, with NaN beyond infinity (ordered_integers): the same
number of bytes, and -0 < +0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from alpa_lite.errors import VerificationError
from alpa_lite.lower import (
    local_contraction,
    local_indexing,
    local_kernels,
    local_random,
)
from alpa_lite.lower.block import LocalOp, lowering_of
from alpa_lite.plan.walk import combination

_GATHERED: dict[str, Callable[[Array, Array], Array]] = {
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
    if by == "all_gather":
        gathered = lax.all_gather(x, names)
        return reduce(_GATHERED[kind], [gathered[i] for i in range(gathered.shape[0])])
    return _extreme(x, names, item_bytes, largest=kind in ("max", "or"))


def _extreme(x: Array, axes: tuple[str, ...], item_bytes: int, *, largest: bool) -> Array:
    """Return the largest (or smallest) element over devices, propagating NaN in floats."""
    collective = lax.pmax if largest else lax.pmin
    if x.dtype == jnp.bool_:
        return collective(x.astype(jnp.uint8), axes).astype(jnp.bool_)
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


LOWERING_MODULES = (local_contraction, local_indexing, local_kernels, local_random)
"""The modules that register local lowerings; the list also keeps their imports in use."""


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
