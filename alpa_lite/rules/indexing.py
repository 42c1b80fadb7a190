"""Factor rules of gather, scatter and dynamic slices.

    gather     ([v,d], [b,t,x]) -> ([b,t,d])                    reduction={v}: each device looks up the rows it holds
    scatter    ([v,d], [b,t,x], [b,t,d]) -> ([v,d])             v passes: each device updates the rows that it holds;
               b,t are a reduction for add, sub, mul, min and max, whole for a plain scatter
    dynamic_slice          dims of full size pass, the others are whole
    dynamic_update_slice   ([i,j], [i,u]) -> ([i,j])            i and j pass on operand and result; u is whole

Window dims of full size pass, others must be whole; explicit batching dims (from vmap) pass; the dim of the index
vectors (the last dim of the indices) must be whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from alpa_lite.rules.elementwise import ints, is_key, linear_groups
from alpa_lite.rules.registry import Dims, FactorKind, OpView, Rule, RuleBuilder, opaque_rule, register_rule

#: Modes for indices out of bounds; lowering preserves each of them for split dims.
_MODES = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")
_SCATTERS = {
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    """The roles of the dims of operand, indices and window; gather and scatter differ only in the names.

    window             dims of the result (or the updates) that come from the operand
    hidden             dims of the operand without a window dim
    addressed          dims of the operand at which index vectors point
    operand_batching   batching dims of the operand
    indices_batching   the same of the indices, in the same order
    """

    window: tuple[int, ...]
    hidden: frozenset[int]
    addressed: frozenset[int]
    operand_batching: tuple[int, ...]
    indices_batching: tuple[int, ...]

    def indices_dims(
        self, b: RuleBuilder, shape: tuple[int, ...], operand: Sequence[tuple[int, ...]], kind: FactorKind
    ) -> Dims:
        """Return the dims of the indices: batching dims have the operand's factors, other batch dims are of `kind`."""
        batching = {d: operand[o] for d, o in zip(self.indices_batching, self.operand_batching, strict=True)}
        batch = tuple(batching[d] if d in batching else (b.factor(n, kind),) for d, n in enumerate(shape[:-1]))
        return (*batch, (b.factor(shape[-1], FactorKind.REPLICATED),))


def _roles(view: OpView) -> _Roles:
    numbers: Mapping[str, Any] = view.params["dimension_numbers"]
    gathers = view.primitive == "gather"
    operand_batching = ints(numbers["operand_batching_dims"])
    collapsed = ints(numbers["collapsed_slice_dims" if gathers else "inserted_window_dims"])
    return _Roles(
        window=tuple(sorted(ints(numbers["offset_dims" if gathers else "update_window_dims"]))),
        hidden=frozenset((*collapsed, *operand_batching)),
        addressed=frozenset(ints(numbers["start_index_map" if gathers else "scatter_dims_to_operand_dims"])),
        operand_batching=operand_batching,
        indices_batching=ints(numbers["start_indices_batching_dims" if gathers else "scatter_indices_batching_dims"]),
    )


@register_rule("gather")
def gather(view: OpView) -> Rule:
    """Return the rule of looking up rows by index: if the searched dim is split, masked look-ups are summed."""
    if view.params["mode"] not in _MODES:
        return opaque_rule(view)
    operand, indices = view.operands
    roles = _roles(view)
    b = RuleBuilder()
    searched = FactorKind.REPLICATED if is_key(operand) else FactorKind.REDUCTION
    window = iter(roles.window)
    operand_dims: list[tuple[int, ...]] = []
    result_dims: dict[int, tuple[int, ...]] = {}
    for d, (n, size) in enumerate(zip(operand.shape, ints(view.params["slice_sizes"]), strict=True)):
        passes = d in roles.operand_batching or (size == n and d not in roles.hidden)
        # A single element lies in one block, whose device finds it; longer slices may straddle two blocks.
        found = size == 1 and d in roles.addressed and not passes
        kind = FactorKind.PASS if passes else searched if found else FactorKind.REPLICATED
        operand_dims.append((b.factor(n, kind),))
        if d not in roles.hidden:
            own = operand_dims[d] if passes else (b.factor(size, FactorKind.REPLICATED),)
            result_dims[next(window)] = own
    indices_dims = roles.indices_dims(b, indices.shape, operand_dims, FactorKind.PASS)
    batch = iter(indices_dims[:-1])
    results = tuple(result_dims[d] if d in result_dims else next(batch) for d in range(view.results[0].rank))
    return b.build(
        (tuple(operand_dims), indices_dims),
        (results,),
        reduction="or" if operand.dtype == "bool" else "sum",
        linear=linear_groups(view, (0,)) if _fill_adds_up(view) else (),
        positional=True,
    )


def _fill_adds_up(view: OpView) -> bool:
    """Return True unless indices out of bounds give a number that a sum over partial sums would multiply."""
    if view.params["mode"] != "FILL_OR_DROP":
        return True
    # NaN stays NaN in a sum, and 0 stays 0. JAX's default is NaN for floats, and an extreme number for integers.
    fill = view.params.get("fill_value")
    if fill is None:
        return view.results[0].is_float
    return fill == 0 or (isinstance(fill, float) and isnan(fill))


@register_rule("scatter", *_SCATTERS)
def scatter(view: OpView) -> Rule:
    """Return the rule of updating rows by index; the operands are array, indices and updates."""
    if view.params["mode"] not in _MODES:
        return opaque_rule(view)
    operand, indices, updates = view.operands[:3]
    roles = _roles(view)
    b = RuleBuilder()
    window = iter(roles.window)
    operand_dims: list[tuple[int, ...]] = []
    update_dims: dict[int, tuple[int, ...]] = {}
    for d, n in enumerate(operand.shape):
        place = None if d in roles.hidden else next(window)
        passes = d in roles.operand_batching or d in roles.addressed if place is None else updates.shape[place] == n
        operand_dims.append((b.factor(n, FactorKind.PASS if passes else FactorKind.REPLICATED),))
        if place is not None:
            own = operand_dims[d] if passes else (b.factor(updates.shape[place], FactorKind.REPLICATED),)
            update_dims[place] = own
    # Booleans cannot be summed over devices, but have a minimum and a maximum.
    adds = view.primitive in _SCATTERS and (operand.dtype != "bool" or _SCATTERS[view.primitive] in ("min", "max"))
    batch_kind = FactorKind.REDUCTION if adds else FactorKind.REPLICATED
    indices_dims = roles.indices_dims(b, indices.shape, operand_dims, batch_kind)
    batch = iter(indices_dims[:-1])
    all_updates = tuple(update_dims[d] if d in update_dims else next(batch) for d in range(updates.rank))
    dims = tuple(operand_dims)
    # A plain scatter may carry a function that combines old and new elements, which need not be linear.
    sets = view.primitive == "scatter" and view.params.get("update_jaxpr", view) is None
    adds_up = sets or view.primitive in ("scatter-add", "scatter-sub")
    linear = linear_groups(view, (0, 2)) if adds_up else ()
    return b.build(
        (dims, indices_dims, all_updates),
        (dims,),
        reduction=_SCATTERS.get(view.primitive, "sum"),
        linear=linear,
        flops=float(updates.num_elements if adds else 0),
        positional=True,
    )


@register_rule("dynamic_slice")
def dynamic_slice(view: OpView) -> Rule:
    """Return a rule in which dims of full size pass; others are whole, since the start is known only at run time."""
    b = RuleBuilder()
    operand, result = view.operands[0], view.results[0]
    operand_dims: list[tuple[int, ...]] = []
    result_dims: list[tuple[int, ...]] = []
    for n, m in zip(operand.shape, result.shape, strict=True):
        operand_dims.append((b.factor(n, FactorKind.PASS if n == m else FactorKind.REPLICATED),))
        result_dims.append(operand_dims[-1] if n == m else (b.factor(m, FactorKind.REPLICATED),))
    starts = tuple(() for _ in view.operands[1:])
    linear = linear_groups(view, (0,))
    return b.build((tuple(operand_dims), *starts), (tuple(result_dims),), linear=linear, positional=True)


@register_rule("dynamic_update_slice")
def dynamic_update_slice(view: OpView) -> Rule:
    """Return a rule in which the dims of the operand pass; a dim of the update that is shorter must be whole.

    Each device overwrites the part of the update that lies in its block.
    """
    b = RuleBuilder()
    operand, update = view.operands[:2]
    dims = b.factors(operand.shape)
    update_dims = tuple(
        dims[d] if n == operand.shape[d] else (b.factor(n, FactorKind.REPLICATED),) for d, n in enumerate(update.shape)
    )
    starts = tuple(() for _ in view.operands[2:])
    return b.build((dims, update_dims, *starts), (dims,), linear=linear_groups(view, (0, 1)), positional=True)
