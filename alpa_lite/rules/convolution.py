"""Convolutions, in every role that differentiation gives them.

    forward                     ([n,c,h,w], [o,c,p,q]) -> ([n,o,x,y])             reduction={c}; h,w,x,y need a halo
    feature groups g            ([n,gc,…], [go,c,…]) -> ([n,go,…])                g passes, c and o are whole
    batch groups g              ([gn,c,…], [go,c,…]) -> ([n,go,…])                reduction={c}; g passes
    weight gradient             the forward rule with other dimension numbers: the batch sits in the feature role c, so
                                it is reduced: the data-parallel all_reduce of the gradient

Spatial dims can be split without a halo in three shapes (spatial_dim), all of stride s and taps within one stride:

    patches                     ([hs], [p]) -> ([h])         stride s, no padding (s = 1, p = 1: the 1×1 convolution)
    input gradient of it        ([h], [p]) -> ([hs])         input dilated by s
    weight gradient of it       ([hs], [h]) -> ([p])         kernel dilated by s; reduction={h}

FLOPs: 2 · (elements of the result) · (taps and channels that each sums), without the zeros of a dilated input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from alpa_lite.rules.elementwise import ints, linear_groups
from alpa_lite.rules.reduction import Window
from alpa_lite.rules.registry import Dims, FactorKind, OpView, Rule, RuleBuilder, register_rule

_Factors = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialDim:
    """One spatial dim: sizes of input, kernel and result, and how the kernel moves (size = taps of the kernel)."""

    input: int
    result: int
    window: Window

    @property
    def is_input_gradient(self) -> bool:
        """Each input element spreads over `base_dilation` results of its own."""
        w = self.window
        step = w.base_dilation
        fits = w.size <= step and (w.low, w.high) == (w.size - 1, step - 1)
        return fits and (w.stride, w.dilation) == (1, 1) and self.result == self.input * step

    @property
    def is_weight_gradient(self) -> bool:
        """Each kernel tap meets `dilation` inputs of its own (a stride may skip the last)."""
        w = self.window
        plain = (w.low, w.base_dilation, w.stride) == (0, 1, 1) and w.high == self.result - w.dilation
        return plain and self.input == w.size * w.dilation and self.result <= w.dilation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    lhs: _Factors
    rhs: _Factors
    out: _Factors


def spatial_dim(b: RuleBuilder, dim: SpatialDim) -> _Mapped:
    """Factors of one spatial dim of input, kernel and result."""
    w = dim.window
    whole = FactorKind.REPLICATED
    if w.is_local(dim.input, dim.result):
        passing = b.factor(dim.result)
        lhs = (passing, b.factor(w.stride, whole)) if w.stride > 1 else (passing,)
        return _Mapped(lhs=lhs, rhs=(b.factor(w.size, whole),), out=(passing,))
    if dim.is_input_gradient:
        passing = b.factor(dim.input)
        out = (passing, b.factor(w.base_dilation, whole))
        return _Mapped(lhs=(passing,), rhs=(b.factor(w.size, whole),), out=out)
    if dim.is_weight_gradient:
        summed = b.factor(w.size, FactorKind.REDUCTION)
        lhs = (summed, b.factor(w.dilation, whole)) if w.dilation > 1 else (summed,)
        return _Mapped(lhs=lhs, rhs=(summed,), out=(b.factor(dim.result, whole),))
    lhs = (b.factor(dim.input, FactorKind.PERMUTATION),)
    # One shared factor when the sizes agree, so that a lowering with halos can split both alike.
    out = lhs if dim.input == dim.result else (b.factor(dim.result, FactorKind.PERMUTATION),)
    return _Mapped(lhs=lhs, rhs=(b.factor(w.size, whole),), out=out)


def _channels(b: RuleBuilder, batch: int, features: int, outputs: int) -> tuple[_Mapped, _Mapped]:
    """Factors of (batch, input features, kernel outputs) without groups: ((n, o, o), (c, c, n)) by role."""
    n, o = (b.factor(batch),), (b.factor(outputs),)
    c = (b.factor(features, FactorKind.REDUCTION),)
    return _Mapped(lhs=n, rhs=o, out=n), _Mapped(lhs=c, rhs=c, out=o)


def _feature_groups(b: RuleBuilder, groups: int, batch: int, features: int, outputs: int) -> tuple[_Mapped, _Mapped]:
    """As `_channels` with groups of features: what is minor to the group on any side is whole."""
    n, g = (b.factor(batch),), b.factor(groups)
    c, o = b.factor(features // groups, FactorKind.REPLICATED), b.factor(outputs // groups, FactorKind.REPLICATED)
    return _Mapped(lhs=n, rhs=(g, o), out=n), _Mapped(lhs=(g, c), rhs=(c,), out=(g, o))


def _batch_groups(b: RuleBuilder, groups: int, batch: int, features: int, outputs: int) -> tuple[_Mapped, _Mapped]:
    """As `_channels` with groups of samples, each with its own kernels."""
    g = b.factor(groups)
    n, o = b.factor(batch // groups, FactorKind.REPLICATED), b.factor(outputs // groups, FactorKind.REPLICATED)
    c = (b.factor(features, FactorKind.REDUCTION),)
    return _Mapped(lhs=(g, n), rhs=(g, o), out=(n,)), _Mapped(lhs=c, rhs=c, out=(g, o))


def _placed(places: Sequence[int], factors: Sequence[_Factors]) -> Dims:
    """Factors given in role order (batch, feature, spatial…), put where the dimension numbers say."""
    dims: list[_Factors] = [()] * len(places)
    for place, factor in zip(places, factors, strict=True):
        dims[place] = factor
    return tuple(dims)


@register_rule("conv_general_dilated")
def conv_general_dilated(view: OpView) -> Rule:
    """Roles come from the dimension numbers; see the module docstring."""
    params = view.params
    numbers: dict[str, Any] = params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = (ints(numbers[name]) for name in ("lhs_spec", "rhs_spec", "out_spec"))
    lhs = [view.operands[0].shape[d] for d in lhs_spec]
    rhs = [view.operands[1].shape[d] for d in rhs_spec]
    out = [view.results[0].shape[d] for d in out_spec]
    b = RuleBuilder()
    feature_groups, batch_groups = int(params["feature_group_count"]), int(params["batch_group_count"])
    if feature_groups > 1:
        first, second = _feature_groups(b, feature_groups, lhs[0], lhs[1], rhs[0])
    elif batch_groups > 1:
        first, second = _batch_groups(b, batch_groups, lhs[0], lhs[1], rhs[0])
    else:
        first, second = _channels(b, lhs[0], lhs[1], rhs[0])
    spatial = [spatial_dim(b, dim) for dim in _spatial_dims(params, lhs[2:], rhs[2:], out[2:])]
    mapped = (first, second, *spatial)
    return b.build(
        (
            _placed(lhs_spec, [m.lhs for m in mapped]),
            _placed(rhs_spec, [m.rhs for m in mapped]),
        ),
        (_placed(out_spec, [m.out for m in mapped]),),
        linear=linear_groups(view, (0,), (1,)),
        flops=2.0 * prod(out) * prod(rhs[1:]) / prod(ints(params["lhs_dilation"])),
        work_kind="convolution",
    )


def _spatial_dims(params: Any, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> list[SpatialDim]:
    columns = zip(
        lhs,
        rhs,
        out,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    return [
        SpatialDim(
            input=n,
            result=m,
            window=Window(size=p, stride=stride, low=low, high=high, base_dilation=base, dilation=dilation),
        )
        for n, p, m, stride, (low, high), base, dilation in columns
    ]
