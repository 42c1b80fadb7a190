"""Windows that slide along a dim: pooling and its gradient; the geometry is that of convolutions too.

Window w of `size` taps, `dilation` apart, reads the positions

    w · stride - low  …  w · stride - low + reach - 1,    reach = (size - 1) · dilation + 1

of a dim whose inputs lie `base_dilation` apart. When its m windows step over all its n inputs (m · stride =
n · base_dilation), blocks of windows lie on blocks of inputs and both are split alike. A block of windows then reads a
*halo* beyond its own inputs (Window.halo), which neighbours send; beyond the array lies padding:

    before = ⌊low / base_dilation⌋,    after = ⌊(reach - 1 - stride - low) / base_dilation⌋ + 1

pooling             ([i,ws]) -> ([i,w])                 w passes without a halo and permutes with one
its gradient        ([i,w], [i,ws]) -> ([i,ws])         the windows have a halo too: those that reach into the block
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from alpa_lite.rules.elementwise import linear_groups
from alpa_lite.rules.registry import Dims, FactorKind, Halo, OpView, Rule, RuleBuilder, register_rule


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
        """Positions from the first tap to the last."""
        return (self.size - 1) * self.dilation + 1

    def halo(self, length: int, num_windows: int) -> tuple[int, int] | None:
        """Inputs that a block of windows reads before and after its own; None where blocks do not lie side by side."""
        if num_windows * self.stride != length * self.base_dilation:
            return None
        after = (self.reach - 1 - self.stride - self.low) // self.base_dilation + 1
        return max(self.low // self.base_dilation, 0), max(after, 0)

    def padding(self, length: int, num_windows: int, before: int) -> tuple[int, int]:
        """Padding for a block of windows on `length` inputs, of which the first `before` are of its halo."""
        low = self.low - before * self.base_dilation
        covered = (num_windows - 1) * self.stride + self.reach
        return low, covered - low - ((length - 1) * self.base_dilation + 1)

    def reaching(self) -> tuple[int, int]:
        """Windows before and after a block of windows that read some of its inputs (of a window without dilations)."""
        return max((self.reach - 1 - self.low) // self.stride, 0), max(-(-self.low // self.stride), 0)


def shared_factor(b: RuleBuilder, one: int, other: int, kind: FactorKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Factors of two dims that are split alike, as finely as both can be; what is minor to that is whole."""
    shared = b.factor(gcd(one, other), kind)
    first, second = (
        (shared, b.factor(n // b.sizes[shared], FactorKind.REPLICATED)) if n > b.sizes[shared] else (shared,)
        for n in (one, other)
    )
    return first, second


def windows_of(params: Mapping[str, Any]) -> list[Window]:
    """The windows of a pooling op along each dim, from its parameters."""
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
"""(operand, rows before, rows after) that a block reads of its neighbours along one dim."""


def _pooled(
    b: RuleBuilder, wide: Sequence[int], narrow: Sequence[int], reads: Sequence[_Reads | None]
) -> tuple[Dims, Dims, tuple[Halo, ...]]:
    """Factors of a pooled array and of the windows on it; dims are whole where nothing is known of what they read."""
    first, second, halos = list[tuple[int, ...]](), list[tuple[int, ...]](), list[Halo]()
    for dim, (n, m, needed) in enumerate(zip(wide, narrow, reads, strict=True)):
        if needed is None:
            factors = (b.factor(n, FactorKind.PERMUTATION),), (b.factor(m, FactorKind.PERMUTATION),)
        else:
            found = [(operand, *rows) for operand, *rows in needed if any(rows)]
            factors = shared_factor(b, n, m, FactorKind.PERMUTATION if found else FactorKind.PASS)
            halos += [Halo(operand, dim, factors[0][0], before, after) for operand, before, after in found]
        first.append(factors[0])
        second.append(factors[1])
    return tuple(first), tuple(second), tuple(halos)


@register_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add", "reduce_window")
def reduce_window(view: OpView) -> Rule:
    """Pooling of one array or of several alike; operands of rank 0 are what windows start from."""
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
    """Gradient of max-pooling: operands are the cotangent (one per window) and the pooled array."""
    adds = view.primitive == "select_and_scatter_add"
    source, operand = (0, 1) if adds else (1, 0)
    shapes = (view.operands[operand].shape, view.operands[source].shape)
    reads = list[_Reads | None]()
    for window, n, m in zip(windows_of(view.params), *shapes, strict=True):
        before, after = window.reaching()
        last = (after - 1) * window.stride - window.low + window.reach
        needed = (source, before, after), (operand, before * window.stride + window.low, max(last, 0))
        # Windows beyond the array have no cotangent; a function of the user's may make something of none.
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
