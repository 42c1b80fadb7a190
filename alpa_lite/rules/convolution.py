"""Convolutions, in every role that differentiation gives them.

    forward                     ([n,c,h,w], [o,c,p,q]) -> ([n,o,x,y])             reduction={c}
    feature groups g            ([n,gc,…], [go,c,…]) -> ([n,go,…])                g passes, c and o are whole
    batch groups g              ([gn,c,…], [go,c,…]) -> ([n,go,…])                reduction={c}; g passes
    weight gradient             the forward rule with other dimension numbers: the batch sits in the feature role c, so
                                it is reduced: the data-parallel all_reduce of the gradient

Spatial dims are split where windows step over all inputs (windows.Window.halo), with a halo or without (a patch, a
1×1 kernel, stride s):

    forward                     ([hs], [p]) -> ([h])         permutation={h} with a halo
    input gradient              ([h], [p]) -> ([hs])         input dilated by s; permutation={h} with a halo
    weight gradient             ([hs], [h]) -> ([p])         kernel dilated by s; reduction={h}, the input with a halo

FLOPs: 2 · (elements of the result) · (taps and channels that each sums), without the zeros of a dilated input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from alpa_lite.rules.elementwise import ints, linear_groups
from alpa_lite.rules.registry import Dims, FactorKind, Halo, OpView, Rule, RuleBuilder, register_rule
from alpa_lite.rules.windows import Window, shared_factor

_Factors = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialDim:
    """One spatial dim: sizes of input, kernel and result, and the windows on the input.

    `summed`: the kernel steps over the input (the gradient of a weight), so each of its taps is a window, and the
    windows that it was given are what each of these reads.
    """

    input: int
    kernel: int
    result: int
    window: Window
    summed: bool = False

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return self.kernel if self.summed else self.result

    @property
    def halo(self) -> tuple[int, int] | None:
        """As `Window.halo`."""
        return self.window.halo(self.input, self.num_windows)

    def turned(self) -> SpatialDim:
        """The same dim with kernel and result in each other's place."""
        w = self.window
        window = replace(w, size=self.result, stride=w.dilation, dilation=w.stride)
        return replace(self, window=window, summed=not self.summed)


def spatial_dims(
    params: Mapping[str, Any], specs: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]
) -> list[SpatialDim]:
    """The spatial dims of a convolution, in the order of its parameters.

    `specs`, `shapes`: of input, kernel and result the dims with the roles (batch, feature, spatial…), and the sizes.
    """
    columns = zip(
        *([shape[d] for d in spec[2:]] for spec, shape in zip(specs, shapes, strict=True)),
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    found = list[SpatialDim]()
    for n, p, m, stride, (low, high), base, dilation in columns:
        window = Window(size=p, stride=stride, low=low, high=high, base_dilation=base, dilation=dilation)
        dim = SpatialDim(input=n, kernel=p, result=m, window=window)
        turned = dim.turned()
        found.append(turned if turned.halo is not None and (dim.halo is None or p > m) else dim)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    lhs: _Factors
    rhs: _Factors
    out: _Factors


def _spatial(b: RuleBuilder, dim: SpatialDim) -> _Mapped:
    """Factors of one spatial dim of input, kernel and result."""
    whole, halo = FactorKind.REPLICATED, dim.halo
    if halo is None:
        lhs, out = ((b.factor(n, FactorKind.PERMUTATION),) for n in (dim.input, dim.result))
        return _Mapped(lhs=lhs, rhs=(b.factor(dim.kernel, whole),), out=out)
    if dim.summed:
        lhs, rhs = shared_factor(b, dim.input, dim.kernel, FactorKind.REDUCTION)
        return _Mapped(lhs=lhs, rhs=rhs, out=(b.factor(dim.result, whole),))
    lhs, out = shared_factor(b, dim.input, dim.result, FactorKind.PERMUTATION if any(halo) else FactorKind.PASS)
    return _Mapped(lhs=lhs, rhs=(b.factor(dim.kernel, whole),), out=out)


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
    specs = [ints(params["dimension_numbers"][name]) for name in ("lhs_spec", "rhs_spec", "out_spec")]
    lhs_spec, rhs_spec, out_spec = specs
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
    spatial = spatial_dims(params, specs, [v.shape for v in (*view.operands, *view.results)])
    mapped = (first, second, *(_spatial(b, dim) for dim in spatial))
    halos = [
        Halo(0, d, factors.lhs[0], *dim.halo)
        for d, dim, factors in zip(lhs_spec[2:], spatial, mapped[2:], strict=True)
        if dim.halo is not None and any(dim.halo)
    ]
    return b.build(
        (
            _placed(lhs_spec, [m.lhs for m in mapped]),
            _placed(rhs_spec, [m.rhs for m in mapped]),
        ),
        (_placed(out_spec, [m.out for m in mapped]),),
        linear=linear_groups(view, (0,), (1,)),
        flops=2.0 * prod(out) * prod(rhs[1:]) / prod(ints(params["lhs_dilation"])),
        work_kind="convolution",
        halos=tuple(halos),
    )
