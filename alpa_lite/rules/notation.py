"""Rules written as one line of text.

    rule_from("b t d, d -> b t d", whole="d")       words are factors; operands and results are separated by commas

The notation is that of `sharding_rule` in JAX's `custom_partitioning`, with one word per dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from alpa_lite.errors import RuleError
from alpa_lite.rules.registry import FactorKind, OpView, Rule, RuleBuilder, RuleFunction


def rule_from(text: str, *, whole: str = "", summed: str = "", flops: float | None = None) -> RuleFunction:
    """Return a rule function from one line of text, for `al.register_rule`.

    Args:
        text: the dims of the operands and, behind an arrow, of the results, such as `"b t d, d -> b t d"`. Dims of one
            name are split together.
        whole: names of dims that must not be split.
        summed: names of dims over which the op sums; a device that has a part of them computes a part of the sum.
        flops: floating-point operations of the whole call; default: what the kernel says, or one per element.

    Raises:
        RuleError: the text has no arrow, or its words do not fit the arrays of an op.
    """
    if text.count("->") != 1:
        raise RuleError(f"The rule {text!r} has no arrow: write the operands, ->, and the results.")
    operands, results = ([tuple(array.split()) for array in side.split(",")] for side in text.split("->"))
    kinds = dict.fromkeys(whole.split(), FactorKind.REPLICATED) | dict.fromkeys(summed.split(), FactorKind.REDUCTION)

    def rule(view: OpView) -> Rule:
        return _Named(text, view, (operands, results), kinds).rule(flops)

    # The plan cache must not take a rule of the user's for one of this package (`registry.only_own_rules`).
    rule.__module__ = "a rule of the user"
    return rule


class _Named:
    """One op whose dims have names."""

    def __init__(
        self,
        text: str,
        view: OpView,
        named: tuple[Sequence[tuple[str, ...]], Sequence[tuple[str, ...]]],
        kinds: Mapping[str, FactorKind],
    ) -> None:
        self.text, self.view, self.named, self.kinds = text, view, named, kinds
        self.sizes: dict[str, int] = {}
        for names, values in zip(named, (view.operands, view.results), strict=True):
            fits = len(names) == len(values) and all(len(n) == v.rank for n, v in zip(names, values, strict=True))
            pairs = [p for n, v in zip(names, values, strict=False) for p in zip(n, v.shape, strict=False)]
            if not fits or any(self.sizes.setdefault(name, n) != n for name, n in pairs):
                shapes = [list(v.shape) for v in (*view.operands, *view.results)]
                raise RuleError(
                    f"The rule {text!r} of {self.called} does not fit its operands and results, of the shapes {shapes}."
                    " Give one word for each dim, and one word for dims of equal size that are split together."
                )

    @property
    def called(self) -> str:
        """The name of the kernel or primitive."""
        return str(self.view.params.get("name") or self.view.primitive)

    def rule(self, flops: float | None) -> Rule:
        """Return the rule."""
        b = RuleBuilder()
        factors: dict[str, tuple[int, ...]] = {}
        for name, n in self.sizes.items():
            kind = self.kinds.get(name, FactorKind.PASS)
            blocks = n if kind is FactorKind.REPLICATED else self.blocks(name)
            split = (b.factor(blocks, kind),)
            factors[name] = split if blocks == n else (*split, b.factor(n // blocks, FactorKind.REPLICATED))
        operands, results = (tuple(tuple(factors[n] for n in names) for names in side) for side in self.named)
        given = self.view.params.get("flops", float(sum(v.num_elements for v in self.view.results)))
        has_products = bool(self.view.params.get("has_products"))
        return b.build(
            operands,
            results,
            flops=given if flops is None else flops,
            work_kind="attention" if has_products else "elementwise",
        )

    def blocks(self, name: str) -> int:
        """Return into how many blocks the dims of a name can be split.

        Raises `RuleError` for a kernel on a grid without an axis that walks over just these dims.
        """
        splits: Sequence[Any] | None = self.view.params.get("splits")
        if splits is None:
            return self.sizes[name]

        def dims(arrays: Sequence[tuple[str, ...]]) -> tuple[int | None, ...]:
            return tuple(names.index(name) if name in names else None for names in arrays)

        wanted = tuple(map(dims, self.named))
        sizes = zip(splits, self.view.params["sizes"], strict=True)
        found = [size for split, size in sizes if (split["operands"], split["results"]) == wanted]
        if not found:
            raise RuleError(
                f"The rule {self.text!r} lets {name!r} of {self.called} be split, but no axis of the kernel's grid "
                f"walks over just the dims of this name. Add it to whole=…, or give the kernel such an axis."
            )
        return prod(found[:1])
