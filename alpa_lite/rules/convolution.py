"""Factor rules of convolutions, in every role that differentiation gives them, and of pooling.

    forward                     ([n,c,h,w], [o,c,p,q]) -> ([n,o,x,y])             reduction={c}
    feature groups g            ([n,gc,…], [go,c,…]) -> ([n,go,…])                g passes, c and o are whole
    batch groups g              ([gn,c,…], [go,c,…]) -> ([n,go,…])                reduction={c}; g passes
    weight gradient             the forward rule with other dimension numbers: the batch has the feature role c, so
                                it is reduced: the data-parallel all_reduce of the gradient

Windows slide along the spatial dims. Window w of `size` taps, `dilation` apart, reads the positions

    w · stride - low  …  w · stride - low + reach - 1,    reach = (size - 1) · dilation + 1

of a dim whose inputs lie `base_dilation` apart. When its m windows step over all its n inputs (m · stride =
n · base_dilation), blocks of windows lie on blocks of inputs and both are split alike. A block of windows then reads a
*halo* beyond its own inputs (`Window.halo`), which neighbours send; beyond the array lies padding:

    before = ⌊low / base_dilation⌋,    after = ⌊(reach - 1 - stride - low) / base_dilation⌋ + 1

Without a halo (a patch, a 1×1 kernel of stride s) the factor passes:

    forward                     ([hs], [p]) -> ([h])         permutation={h} with a halo
    input gradient              ([h], [p]) -> ([hs])         input dilated by s; permutation={h} with a halo
    weight gradient             ([hs], [h]) -> ([p])         kernel dilated by s; reduction={h}, the input with a halo
    pooling                     ([i,ws]) -> ([i,w])          w passes without a halo and permutes with one
    its gradient                ([i,w], [i,ws]) -> ([i,ws])  windows have a halo too: those that reach into the block

FLOPs: 2 · (elements of the result) · (taps and channels that each sums), without the zeros of a dilated input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from alpa_lite.rules.registry import (
    Dims,
    FactorKind,
    Halo,
    OpView,
    Params,
    Rule,
    RuleBuilder,
    ints,
    linear_groups,
    register_rule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window along one dim: `size` taps `dilation` apart, moved by `stride` over `low` + dilated input + `high`."""

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base_dilation: int = 1
    dilation: int = 1

    @property
    def reach(self) -> int:
        """The number of positions from the first tap to the last."""
        return (self.size - 1) * self.dilation + 1

    def halo(self, length: int, num_windows: int) -> tuple[int, int] | None:
        """Return how many inputs a block of windows reads before and after its own; None if blocks do not align."""
        # Block k of the windows must begin where block k of the inputs does, for every k.
        if num_windows * self.stride != length * self.base_dilation:
            return None
        # The last window of a block begins `stride` before the next block and reaches `reach - 1` further, less `low`.
        after = (self.reach - 1 - self.stride - self.low) // self.base_dilation + 1
        return max(self.low // self.base_dilation, 0), max(after, 0)

    def padding(self, length: int, num_windows: int, before: int) -> tuple[int, int]:
        """Return the padding of a block of windows on `length` inputs, the first `before` of which are its halo."""
        low = self.low - before * self.base_dilation
        # From the first tap of the first window to the last tap of the last one.
        covered = (num_windows - 1) * self.stride + self.reach
        return low, covered - low - ((length - 1) * self.base_dilation + 1)

    def reaching(self) -> tuple[int, int]:
        """Return how many windows before and after a block read some of its inputs; only without dilations."""
        return max((self.reach - 1 - self.low) // self.stride, 0), max(-(-self.low // self.stride), 0)


def shared_factor(b: RuleBuilder, one: int, other: int, kind: FactorKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return factors of two dims that are split in the same way; the factors minor to the shared one are whole."""
    # The greatest common divisor is the finest split into equally many blocks of both.
    shared = b.factor(gcd(one, other), kind)
    first, second = (
        (shared, b.factor(n // b.sizes[shared], FactorKind.REPLICATED)) if n > b.sizes[shared] else (shared,)
        for n in (one, other)
    )
    return first, second


def windows_of(params: Params) -> list[Window]:
    """Return the windows of a pooling op along each dim, from its parameters."""
    ones = (1,) * len(params["window_dimensions"])
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


_Reads = tuple[tuple[int, int, int], ...]
"""(operand, rows before, rows after) for each operand of which a block reads rows of its neighbours along a dim."""


def _pooled(
    b: RuleBuilder, wide: Sequence[int], narrow: Sequence[int], reads: Sequence[_Reads | None]
) -> tuple[Dims, Dims, tuple[Halo, ...]]:
    """Return the factors of a pooled array and of the windows on it, and halos; without `reads` a dim is whole."""
    first, second, halos = list[tuple[int, ...]](), list[tuple[int, ...]](), list[Halo]()
    for dim, (n, m, needed) in enumerate(zip(wide, narrow, reads, strict=True)):
        # Blocks do not align: windows of a block would read inputs of any number of other blocks.
        if needed is None:
            factors = (b.factor(n, FactorKind.PERMUTATION),), (b.factor(m, FactorKind.PERMUTATION),)
        else:
            # Windows that tile the array, as in most pooling, read nothing of other blocks: their dims pass.
            found = [(operand, *rows) for operand, *rows in needed if any(rows)]
            factors = shared_factor(b, n, m, FactorKind.PERMUTATION if found else FactorKind.PASS)
            halos += [Halo(operand, dim, factors[0][0], before, after) for operand, before, after in found]
        first.append(factors[0])
        second.append(factors[1])
    return tuple(first), tuple(second), tuple(halos)


@register_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add", "reduce_window")
def reduce_window(view: OpView) -> Rule:
    """Return the rule of pooling one array or several equal ones; operands of rank 0 are initial values."""
    shapes = (view.operands[0].shape, view.results[0].shape)
    reads = list[_Reads | None]()
    for window, n, m in zip(windows_of(view.params), *shapes, strict=True):
        halo = window.halo(n, m)
        reads.append(halo and tuple((i, *halo) for i, v in enumerate(view.operands) if v.rank))
    b = RuleBuilder()
    wide, narrow, halos = _pooled(b, *shapes, reads)
    return b.build(
        tuple(wide if v.rank else () for v in view.operands),
        tuple(narrow for _ in view.results),
        linear=linear_groups(view, (0,)) if view.primitive in ("reduce_window_sum", "select_and_gather_add") else (),
        flops=float(view.results[0].num_elements * prod(view.params["window_dimensions"])),
        halos=halos,
    )


@register_rule("select_and_scatter_add", "select_and_scatter")
def select_and_scatter(view: OpView) -> Rule:
    """Return the rule of the gradient of max-pooling, whose operands are cotangents of windows and the pooled array."""
    adds = view.primitive == "select_and_scatter_add"
    source, operand = (0, 1) if adds else (1, 0)
    shapes = (view.operands[operand].shape, view.operands[source].shape)
    reads = list[_Reads | None]()
    for window, n, m in zip(windows_of(view.params), *shapes, strict=True):
        before, after = window.reaching()
        # The first and last of these windows read further inputs, with which the maximum is found again.
        last = (after - 1) * window.stride - window.low + window.reach
        needed = (source, before, after), (operand, before * window.stride + window.low, max(last, 0))
        # Windows of a halo beyond the array have no cotangent. Added zeros change nothing; a user's function may not
        # ignore them.
        known = window.halo(n, m) is not None and (adds or not any((*needed[0][1:], *needed[1][1:])))
        reads.append(needed if known else None)
    b = RuleBuilder()
    wide, narrow, halos = _pooled(b, *shapes, reads)
    operands = {source: narrow, operand: wide}
    return b.build(
        tuple(operands.get(i, ()) for i in range(len(view.operands))),
        (wide,),
        linear=linear_groups(view, (0,)) if adds else (),
        flops=float(view.operands[source].num_elements * prod(view.params["window_dimensions"])),
        halos=halos,
    )


_Factors = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialDim:
    """One spatial dim: sizes of input, kernel and result, and the windows on the input.

    `summed`: the kernel steps over the input, as in the gradient of a weight: each of its taps is a window, which reads
    one position for each element of the result.
    """

    input: int
    kernel: int
    result: int
    window: Window
    summed: bool = False

    @property
    def num_windows(self) -> int:
        """The number of windows."""
        return self.kernel if self.summed else self.result

    @property
    def halo(self) -> tuple[int, int] | None:
        """The halo of a block of windows; see `Window.halo`."""
        return self.window.halo(self.input, self.num_windows)

    def turned(self) -> SpatialDim:
        """Return the same dim with kernel and result exchanged."""
        # Result element r reads tap k at position r · stride + k · dilation: the two roles are symmetric.
        w = self.window
        window = replace(w, size=self.result, stride=w.dilation, dilation=w.stride)
        return replace(self, window=window, summed=not self.summed)


def spatial_dims(params: Params, specs: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]) -> list[SpatialDim]:
    """Return the spatial dims of a convolution, in the order of its parameters.

    `specs` and `shapes` are those of input, kernel and result; a spec lists dims by role (batch, feature, spatial…).
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
        # In a weight gradient the kernel is as long as the dim itself: it is split, and the short result is whole.
        turned = dim.turned()
        found.append(turned if turned.halo is not None and (dim.halo is None or p > m) else dim)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """The factors of the dims of input, kernel and result with one role."""

    lhs: _Factors
    rhs: _Factors
    out: _Factors


def _spatial(b: RuleBuilder, dim: SpatialDim) -> _Mapped:
    """Return the factors of one spatial dim."""
    whole, halo = FactorKind.REPLICATED, dim.halo
    if halo is None:
        # Without a halo that aligns, a split would move data between arbitrary blocks, as PERMUTATION says.
        lhs, out = ((b.factor(n, FactorKind.PERMUTATION),) for n in (dim.input, dim.result))
        return _Mapped(lhs=lhs, rhs=(b.factor(dim.kernel, whole),), out=out)
    # Every position of the input is summed over, as the contracted dim of a product is.
    if dim.summed:
        lhs, rhs = shared_factor(b, dim.input, dim.kernel, FactorKind.REDUCTION)
        return _Mapped(lhs=lhs, rhs=rhs, out=(b.factor(dim.result, whole),))
    lhs, out = shared_factor(b, dim.input, dim.result, FactorKind.PERMUTATION if any(halo) else FactorKind.PASS)
    return _Mapped(lhs=lhs, rhs=(b.factor(dim.kernel, whole),), out=out)


def _channels(b: RuleBuilder, batch: int, features: int, outputs: int) -> tuple[_Mapped, _Mapped]:
    """Return the factors of the batch role (n, o, n) and of the feature role (c, c, o), without groups."""
    n, o = (b.factor(batch),), (b.factor(outputs),)
    c = (b.factor(features, FactorKind.REDUCTION),)
    return _Mapped(lhs=n, rhs=o, out=n), _Mapped(lhs=c, rhs=c, out=o)


def _feature_groups(b: RuleBuilder, groups: int, batch: int, features: int, outputs: int) -> tuple[_Mapped, _Mapped]:
    """Return the factors as `_channels` does, with groups of features: factors minor to the group are whole."""
    n, g = (b.factor(batch),), b.factor(groups)
    c, o = b.factor(features // groups, FactorKind.REPLICATED), b.factor(outputs // groups, FactorKind.REPLICATED)
    return _Mapped(lhs=n, rhs=(g, o), out=n), _Mapped(lhs=(g, c), rhs=(c,), out=(g, o))


def _batch_groups(b: RuleBuilder, groups: int, batch: int, features: int, outputs: int) -> tuple[_Mapped, _Mapped]:
    """Return the factors as `_channels` does, with groups of samples, each of which has its own kernels."""
    g = b.factor(groups)
    n, o = b.factor(batch // groups, FactorKind.REPLICATED), b.factor(outputs // groups, FactorKind.REPLICATED)
    c = (b.factor(features, FactorKind.REDUCTION),)
    return _Mapped(lhs=(g, n), rhs=(g, o), out=(n,)), _Mapped(lhs=c, rhs=c, out=(g, o))


def _placed(places: Sequence[int], factors: Sequence[_Factors]) -> Dims:
    """Return factors, given in the order of roles (batch, feature, spatial…), in the order of the dims."""
    dims: list[_Factors] = [()] * len(places)
    for place, factor in zip(places, factors, strict=True):
        dims[place] = factor
    return tuple(dims)


@register_rule("conv_general_dilated")
def conv_general_dilated(view: OpView) -> Rule:
    """Return the rule of a convolution, whose dimension numbers tell the roles of dims; see the module docstring."""
    params = view.params
    specs = [ints(params["dimension_numbers"][name]) for name in ("lhs_spec", "rhs_spec", "out_spec")]
    lhs_spec, rhs_spec, out_spec = specs
    lhs = [view.operands[0].shape[d] for d in lhs_spec]
    rhs = [view.operands[1].shape[d] for d in rhs_spec]
    out = [view.results[0].shape[d] for d in out_spec]
    b = RuleBuilder()
    feature_groups, batch_groups = int(params["feature_group_count"]), int(params["batch_group_count"])
    # XLA allows groups of features or of batches, but not both in one convolution.
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
