"""Reductions, running reductions, windows, sorting: ops that look along a dim.

reduce_*            ([i,j]) -> ([i])                      reduction={j}, combined by sum, max, min, prod, and, or, xor
argmax, argmin      ([i,j]) -> ([i])                      j whole: (value, index) pairs have no collective
cumsum, sort, fft   ([i,j]) -> ([i,j])                    j whole
top_k               ([i,j]) -> ([i,k])                    j and k whole
windows             ([i,ws]) -> ([i,w])                   stride s ≥ window, no padding: the windows w pass (window_dim)
                    ([i,j]) -> ([i,k])                    overlapping windows need a halo: permutation
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, prod

from alpa_lite.rules.elementwise import ints, linear_groups
from alpa_lite.rules.registry import Dims, FactorKind, OpView, Rule, RuleBuilder, register_rule

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
    """Kept dims pass, reduced dims are reductions; only the sum may stay partial."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["axes"])), FactorKind.REDUCTION)
    linear = linear_groups(view, (0,)) if view.primitive == "reduce_sum" else ()
    flops = float(view.operands[0].num_elements)
    return b.build((dims,), (kept,), reduction=_COMBINER[view.primitive], linear=linear, flops=flops)


@register_rule("argmax", "argmin")
def argmax(view: OpView) -> Rule:
    """The searched dim must be whole."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["axes"])), FactorKind.REPLICATED)
    return b.build((dims,), (kept,), flops=float(view.operands[0].num_elements))


@register_rule("reduce")
def reduce_generic(view: OpView) -> Rule:
    """A reduction by a function of the user's has no collective: reduced dims must be whole."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["dimensions"])), FactorKind.REPLICATED)
    half = len(view.operands) // 2
    operands = (*(dims for _ in range(half)), *(() for _ in range(half)))
    flops = float(sum(v.num_elements for v in view.operands[:half]))
    return b.build(operands, tuple(kept for _ in view.results), flops=flops)


def _along(view: OpView, axes: frozenset[int], *, flops: float, linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """Operands and results of one rank, alike but for the dims in `axes`, which are whole and may change size."""
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
    """The scanned dim must be whole."""
    linear = linear_groups(view, (0,)) if view.primitive == "cumsum" else ()
    return _along(view, frozenset([view.params["axis"]]), flops=float(view.operands[0].num_elements), linear=linear)


@register_rule("sort")
def sort(view: OpView) -> Rule:
    """The sorted dim must be whole; n log n comparisons."""
    axis = int(view.params["dimension"])
    length = view.operands[0].shape[axis]
    flops = view.operands[0].num_elements * max(1.0, log2(max(length, 1)))
    return _along(view, frozenset([axis]), flops=flops)


@register_rule("top_k", "approx_top_k")
def top_k(view: OpView) -> Rule:
    """The searched dim and the k found must be whole."""
    axis = int(view.params.get("axis", view.params.get("reduction_dimension", -1)))
    length = view.operands[0].shape[axis]
    flops = view.operands[0].num_elements * max(1.0, log2(max(length, 1)))
    return _along(view, frozenset([axis % view.operands[0].rank]), flops=flops)


@register_rule("fft")
def fft(view: OpView) -> Rule:
    """Transformed (trailing) dims must be whole; 5 n log2 n operations."""
    lengths = ints(view.params["fft_lengths"])
    rank = view.operands[0].rank
    flops = 5.0 * view.operands[0].num_elements * max(1.0, log2(max(prod(lengths), 1)))
    axes = frozenset(range(rank - len(lengths), rank))
    # Both the real and the complex transforms are linear over the reals.
    return _along(view, axes, flops=flops, linear=linear_groups(view, (0,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window along one dim: `size` taps `dilation` apart, moved by `stride` over `low` + dilated input + `high`."""

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base_dilation: int = 1
    dilation: int = 1

    def is_local(self, length: int, num_windows: int) -> bool:
        """True when window w sees only the inputs [w · stride, (w + 1) · stride) and these are all inputs."""
        reach = (self.size - 1) * self.dilation + 1
        unpadded = (self.low, self.high, self.base_dilation) == (0, 0, 1)
        return unpadded and reach <= self.stride and length == num_windows * self.stride


def window_dim(
    b: RuleBuilder, window: Window, length: int, num_windows: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Factors of a windowed dim of the input and of the output."""
    if not window.is_local(length, num_windows):
        # One shared factor when the sizes agree, so that a lowering with halos can split both alike.
        source = (b.factor(length, FactorKind.PERMUTATION),)
        return source, source if length == num_windows else (b.factor(num_windows, FactorKind.PERMUTATION),)
    passing = b.factor(num_windows)
    if window.stride == 1:
        return (passing,), (passing,)
    return (passing, b.factor(window.stride, FactorKind.REPLICATED)), (passing,)


def _windows(view: OpView) -> list[Window]:
    params = view.params
    rank = len(params["window_dimensions"])
    ones = (1,) * rank
    return [
        Window(size=size, stride=stride, low=low, high=high, base_dilation=base, dilation=dilation)
        for size, stride, (low, high), base, dilation in zip(
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params.get("base_dilation", ones),
            params.get("window_dilation", ones),
            strict=True,
        )
    ]


def _window_dims(b: RuleBuilder, view: OpView, wide: tuple[int, ...], narrow: tuple[int, ...]) -> tuple[Dims, Dims]:
    pairs = [window_dim(b, w, n, m) for w, n, m in zip(_windows(view), wide, narrow, strict=True)]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


@register_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add", "reduce_window")
def reduce_window(view: OpView) -> Rule:
    """Pooling: windows that do not overlap or reach into padding pass."""
    b = RuleBuilder()
    wide, narrow = _window_dims(b, view, view.operands[0].shape, view.results[0].shape)
    linear = linear_groups(view, (0,)) if view.primitive in ("reduce_window_sum", "select_and_gather_add") else ()
    taps = prod(view.params["window_dimensions"])
    return b.build(
        tuple(wide if v.rank else () for v in view.operands),
        tuple(narrow for _ in view.results),
        linear=linear,
        flops=float(view.results[0].num_elements * taps),
    )


@register_rule("select_and_scatter_add", "select_and_scatter")
def select_and_scatter(view: OpView) -> Rule:
    """Gradient of max-pooling: operands are the cotangent (one per window) and the pooled array."""
    b = RuleBuilder()
    source, operand = view.operands[:2] if view.primitive == "select_and_scatter_add" else view.operands[1::-1]
    wide, narrow = _window_dims(b, view, operand.shape, source.shape)
    operands = (narrow, wide) if view.primitive == "select_and_scatter_add" else (wide, narrow)
    taps = prod(view.params["window_dimensions"])
    return b.build(
        (*operands, *(() for _ in view.operands[2:])),
        (wide,),
        linear=linear_groups(view, (0,)) if view.primitive == "select_and_scatter_add" else (),
        flops=float(source.num_elements * taps),
    )
