"""Factor rules of reductions, cumulative reductions, sorting and Fourier transforms.

reduce_*            ([i,j]) -> ([i])                      reduction={j}, combined by sum, max, min, prod, and, or, xor
argmax, argmin      ([i,j]) -> ([i])                      j whole: (value, index) pairs have no collective
cumsum, sort, fft   ([i,j]) -> ([i,j])                    j whole
top_k               ([i,j]) -> ([i,k])                    j and k whole
"""

from __future__ import annotations

from math import log2, prod

from alpa_lite.rules.registry import Dims, FactorKind, OpView, Rule, RuleBuilder, ints, linear_groups, register_rule

_COMBINER = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def _reduced(view: OpView, axes: frozenset[int], kind: FactorKind) -> tuple[RuleBuilder, Dims, Dims]:
    b = RuleBuilder()
    dims = tuple((b.factor(n, kind if d in axes else FactorKind.PASS),) for d, n in enumerate(view.operands[0].shape))
    return b, dims, tuple(f for d, f in enumerate(dims) if d not in axes)


@register_rule(*_COMBINER)
def reduce_(view: OpView) -> Rule:
    """Return a rule in which reduced dims are reduction factors and the others pass; only a sum is linear."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["axes"])), FactorKind.REDUCTION)
    linear = linear_groups(view, (0,)) if view.primitive == "reduce_sum" else ()
    flops = float(view.operands[0].num_elements)
    return b.build((dims,), (kept,), reduction=_COMBINER[view.primitive], linear=linear, flops=flops)


@register_rule("argmax", "argmin")
def argmax(view: OpView) -> Rule:
    """Return a rule in which the searched dim is replicated."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["axes"])), FactorKind.REPLICATED)
    return b.build((dims,), (kept,), flops=float(view.operands[0].num_elements))


@register_rule("reduce")
def reduce_generic(view: OpView) -> Rule:
    """Return a rule in which reduced dims are replicated: no collective combines by a user-defined function."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["dimensions"])), FactorKind.REPLICATED)
    # Operands come first, then one initial value for each.
    half = len(view.operands) // 2
    operands = (*(dims for _ in range(half)), *(() for _ in range(half)))
    flops = float(sum(v.num_elements for v in view.operands[:half]))
    return b.build(operands, tuple(kept for _ in view.results), flops=flops)


def _along(view: OpView, axes: frozenset[int], *, flops: float, linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """Return a rule in which the dims in `axes` are replicated, and may change size, and all others pass."""
    b = RuleBuilder()
    shape = view.operands[0].shape
    dims = tuple((b.factor(n, FactorKind.REPLICATED if d in axes else FactorKind.PASS),) for d, n in enumerate(shape))

    def matching(other: tuple[int, ...]) -> Dims:
        return tuple(
            (b.factor(n, FactorKind.REPLICATED),) if d in axes and n != shape[d] else dims[d]
            for d, n in enumerate(other)
        )

    results = tuple(matching(v.shape) for v in view.results)
    return b.build(tuple(dims for _ in view.operands), results, flops=flops, linear=linear)


@register_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(view: OpView) -> Rule:
    """Return a rule in which the accumulated dim is replicated."""
    linear = linear_groups(view, (0,)) if view.primitive == "cumsum" else ()
    return _along(view, frozenset([view.params["axis"]]), flops=float(view.operands[0].num_elements), linear=linear)


@register_rule("sort")
def sort(view: OpView) -> Rule:
    """Return a rule in which the sorted dim is replicated; n log2 n comparisons."""
    axis = int(view.params["dimension"])
    length = view.operands[0].shape[axis]
    flops = view.operands[0].num_elements * max(1.0, log2(max(length, 1)))
    return _along(view, frozenset([axis]), flops=flops)


@register_rule("top_k", "approx_top_k")
def top_k(view: OpView) -> Rule:
    """Return a rule in which the searched dim and the dim of the k results are replicated."""
    # The exact and the approximate op name their parameter differently.
    axis = int(view.params.get("axis", view.params.get("reduction_dimension", -1)))
    length = view.operands[0].shape[axis]
    flops = view.operands[0].num_elements * max(1.0, log2(max(length, 1)))
    return _along(view, frozenset([axis % view.operands[0].rank]), flops=flops)


@register_rule("fft")
def fft(view: OpView) -> Rule:
    """Return a rule in which the transformed (trailing) dims are replicated; 5 n log2 n operations."""
    lengths = ints(view.params["fft_lengths"])
    rank = view.operands[0].rank
    flops = 5.0 * view.operands[0].num_elements * max(1.0, log2(max(prod(lengths), 1)))
    axes = frozenset(range(rank - len(lengths), rank))
    # Both the real and the complex transforms are linear over the reals.
    return _along(view, axes, flops=flops, linear=linear_groups(view, (0,)))
