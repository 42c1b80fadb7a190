"""Describe calls of hand-written kernels as plain data, from which their factor rules are made.

pallas_call           the grid axes that can be split (`grid_split`), the work, and a digest of the kernel
custom_partitioning   the factors of its sharding rule; a call without one is inlined
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jaxlib.mlir import ir

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph
from alpa_lite.trace.kernels.grid_split import grid_axes
from alpa_lite.trace.kernels.kernel_work import kernel_work

#: Primitives that run on the platforms alone for which they were written.
_OF_PLATFORMS = frozenset(
    "pallas_call mpmd_map custom_partitioning scaled_matmul_wrapper dot_product_attention_fwd_wrapper "
    "dot_product_attention_bwd_wrapper".split()
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def is_kernel(primitive: str) -> bool:
    """Return whether calls of a primitive are described by `kernel_params`."""
    return primitive in _FORMS


def kernel_params(primitive: str, params: Mapping[str, Any], unread: frozenset[int]) -> Mapping[str, Any] | None:
    """Return the plain parameters of a kernel's call, None if it must be inlined; nothing reads results `unread`."""
    return _FORMS[primitive](params, unread)


def check_platform(graph: Graph, equations: Sequence[Equation], platform: str) -> None:
    """Check that the kernels of a graph can be lowered for a platform, such as "cpu", "cuda" or "tpu".

    Raises:
        PlanError: JAX refuses a kernel; the message names the user's line.
    """
    seen: set[tuple[str, str]] = set()
    for op, equation in zip(graph.ops, equations, strict=True):
        for body, below in zip(op.bodies, equation.bodies, strict=True):
            check_platform(body, below, platform)
        values = graph.operands(op)
        key = (op.primitive, repr((sorted(op.params.items()), [(v.shape, v.dtype) for v in values])))
        if op.primitive not in _OF_PLATFORMS or key in seen or equation.params.get("interpret"):
            continue
        seen.add(key)
        structs = [_jax.struct(v.shape, v.dtype) for v in values]
        run = partial(_bound, equation)
        try:
            jax.jit(run).trace(*structs).lower(lowering_platforms=(platform,))
        except Exception as error:  # every platform raises another type
            raise PlanError(
                f"{op.source or 'an unknown line'}: the kernel {op.params.get('name') or op.primitive} cannot run on "
                f"the devices of this process ({platform}): {str(error).rstrip('.')}. "
                "Give the cluster that it is written for, as in "
                "al.plan(…, cluster='dgx-h100'), or use an implementation for this platform (interpret=True in a "
                "pallas_call, implementation='xla' in jax.nn.dot_product_attention)."
            ) from error


def _bound(equation: Equation, *operands: Any) -> list[Any]:
    return _jax.bind(equation.primitive, dict(equation.params), operands)


def unread_results(eqn: Any, jaxpr: Any) -> frozenset[int]:
    """Return the numbers of the results of an equation that nothing in its jaxpr reads."""
    read = {id(v) for e in jaxpr.eqns for v in e.invars} | {id(v) for v in jaxpr.outvars}
    return frozenset(i for i, v in enumerate(eqn.outvars) if id(v) not in read)


def _pallas_call(params: Mapping[str, Any], unread: frozenset[int]) -> Mapping[str, Any]:
    """Return the description of a `pallas_call`.

    `splits` are the grid axes whose index maps allow a split and `sizes` their numbers of blocks: in a micro-batch,
    only `sizes` and `flops` differ.
    """
    axes = grid_axes(params, unread)
    work, grid = kernel_work(params), params["grid_mapping"]
    # The size of an axis that walks over a dim of an array follows from the array's shape.
    implied = {a.axis for a in axes if any(dim is not None for dim in (*a.operands, *a.results))}
    steps = [None if a in implied else str(n) for a, n in enumerate(grid.grid)]
    blocks = [(str(b.block_shape), str(b.index_map_jaxpr), str(b.transforms)) for b in grid.block_mappings]
    text = repr((str(params["jaxpr"]), steps, blocks, str(params.get("compiler_params")), str(grid.scratch_avals)))
    splits = [
        {
            "granule": a.granule,
            "operands": a.operands,
            "results": a.results,
            "rolled": tuple((r.operand, r.dim, r.rows) for r in a.rolled),
            "proven": a.proven,
        }
        for a in axes
    ]
    return {
        "name": str(params.get("name") or ""),
        "kernel": hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:16],
        "splits": tuple(splits),
        "unread": tuple(sorted(unread)),
        "sizes": tuple(a.size for a in axes),
        "flops": work.flops,
        "has_products": work.has_products,
    }


def _custom_partitioning(params: Mapping[str, Any], unread: frozenset[int]) -> Mapping[str, Any] | None:
    """Return the factors of a call's sharding rule: per array and dim their names, and the names that may be split."""
    rule = _sharding_rule(params)
    if rule is None:
        return None
    call = params["call"]
    split = {*_names(rule.operand_mappings), *_names(rule.result_mappings)}
    split -= {*rule.reduction_factors, *rule.need_replication_factors, *rule.permutation_factors}
    text = repr((str(call), str(rule)))
    return {
        "kernel": hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:16],
        "operands": _factors(rule.operand_mappings, call.in_avals),
        "results": _factors(rule.result_mappings, call.out_avals),
        "given": tuple(sorted(rule.factor_sizes.items())),
        "split": tuple(sorted(split)),
    }


def _sharding_rule(params: Mapping[str, Any]) -> Any | None:
    """Return the sharding rule of a `custom_partitioning`, None if it has none.

    A rule has mappings of its operands and results to factor names, and lists of factors that must not be split.
    """
    rule, call = params.get("sharding_rule"), params["call"]
    if not callable(rule):
        return rule
    with mlir.make_ir_context(), ir.Location.unknown():
        operands, results = (
            [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(np.dtype(a.dtype))) for a in avals]
            for avals in (call.in_avals, call.out_avals)
        )
        made: Any = rule(*params["static_args"], jax.sharding.AbstractMesh((), ()), operands, results)
    text, options = made if isinstance(made, (list, tuple)) else (made, {})
    # JAX reads the text where it is registered.
    parsed: Any = custom_partitioning(lambda *arrays: arrays)
    parsed.def_partition(partition=None, sharding_rule=text, **options)
    return parsed.sharding_rule


def _names(mappings: Sequence[Any]) -> list[str]:
    return [name for mapping in mappings for dim in mapping for name in ((dim,) if isinstance(dim, str) else dim)]


def _factors(mappings: Sequence[Any], avals: Sequence[Any]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the factor names of each dim of each array; `...` in front stands for as many dims as are left."""
    found: list[tuple[tuple[str, ...], ...]] = []
    for mapping, aval in zip(mappings, avals, strict=True):
        dims = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping]
        if dims and dims[0][0].startswith("…"):
            group = dims[0][0][1:] or "0"
            leading = len(aval.shape) - len(dims) + 1
            dims[:1] = [(f"…{group}.{i}",) for i in range(leading)]
        found.append(tuple(dims))
    return tuple(found)


_FORMS: Mapping[str, Callable[[Mapping[str, Any], frozenset[int]], Mapping[str, Any] | None]] = {
    "pallas_call": _pallas_call,
    "custom_partitioning": _custom_partitioning,
}
