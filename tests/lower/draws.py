"""Drawn examples: a valid call of a primitive, a mesh, and assignments of its axes to what the rule lets be split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from hypothesis import strategies as st

from alpa_lite.rules import Rule
from tests.lower import (
    draws_contraction,
    draws_convolution,
    draws_elementwise,
    draws_gather,
    draws_kernels,
    draws_layout,
    draws_linalg,
    draws_random,
    draws_reduction,
    draws_scatter,
    draws_window,
)
from tests.lower.blocks import Placement
from tests.lower.pick import CALLS, Pick
from tests.rules.row import Case, Row

FAMILIES = (
    draws_elementwise,
    draws_contraction,
    draws_linalg,
    draws_convolution,
    draws_reduction,
    draws_window,
    draws_layout,
    draws_gather,
    draws_scatter,
    draws_random,
    draws_kernels,
)
MESHES = ((8,), (2, 4), (2, 2, 2))
_PARTIAL = -1


@dataclass(frozen=True, kw_only=True)
class Example:
    """One drawn call and placements of it on a mesh of some sizes (axes x, y, z)."""

    row: Row
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def case(self) -> Case:
        """The equation."""
        return self.row.case

    def __repr__(self) -> str:
        """The equation and where it is put."""
        view, params = self.case.view, {k: v for k, v in self.case.params.items() if "jaxpr" not in k}
        values = [f"{v.dtype}{list(v.shape)}" for v in (*view.operands, *view.results)]
        return f"{view.primitive} {' '.join(values)} {params} as {self.case.rule} on {self.mesh}: {self.placements}"


def axis_sizes(mesh: tuple[int, ...]) -> dict[str, int]:
    """The axes of a mesh."""
    return dict(zip("xyz", mesh, strict=False))


def placement(pick: Pick, rule: Rule, sizes: dict[str, int], *, may_be_partial: bool) -> Placement:
    """Any assignment of mesh axes, in any order, to shardable factors and to a linear group."""
    factors: dict[int, tuple[str, ...]] = {}
    group: tuple[int, ...] = ()
    partial: tuple[str, ...] = ()
    for axis in pick.order(list(sizes)):
        split = {f: sizes[axis] * prod(sizes[a] for a in factors.get(f, ())) for f in rule.shardable}
        options = [f for f in rule.shardable if rule.splits_into(f, split[f])]
        options += [_PARTIAL] if may_be_partial and rule.linear and not partial else []
        if not options or pick.integer(0, 4) == 4:
            continue
        chosen = pick.one_of(options)
        if chosen == _PARTIAL:
            group, partial = pick.one_of(rule.linear), (axis,)
        else:
            factors[chosen] = (*factors.get(chosen, ()), axis)
    return Placement(factors=factors, group=group, partial=partial)


@cache
def calls(primitive: str) -> st.SearchStrategy[Row]:
    """Calls of a primitive alone."""

    @st.composite
    def draw_call(draw: Any) -> Row:
        return CALLS[primitive](Pick(draw=draw), primitive)

    return draw_call()


@cache
def examples(primitive: str, count: int = 2) -> st.SearchStrategy[Example]:
    """Examples of a primitive, each with `count` placements at most."""

    @st.composite
    def draw_example(draw: Any) -> Example:
        pick = Pick(draw=draw)
        # Sums of infinities in pieces are not their sum: a call has special numbers or partial sums, not both.
        pick.special = pick.integer(0, 3) == 3
        row = CALLS[primitive](pick, primitive)
        mesh = pick.one_of(MESHES)
        sizes = axis_sizes(mesh)
        rule = row.case.rule
        found: list[Placement] = []
        for _ in range(count):
            one = placement(pick, rule, sizes, may_be_partial=not pick.special)
            if (one.factors or one.partial) and one not in found:
                found.append(one)
        return Example(row=row, mesh=mesh, placements=tuple(found))

    return draw_example()
