"""A layout that is given for the values of a step, or some of them; `wanted` keeps the search to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alpa_lite.program.ir import Graph

Wanted = tuple[tuple[str, int | None], ...]
"""Pairs of a mesh axis and the dim that it must split; None: no dim."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenLayout:
    """What is wanted of each value of a graph, bodies too; `exempt`: ops that need not keep to it, by their number."""

    values: Mapping[Graph, Sequence[Wanted]] = field(default_factory=dict[Graph, Sequence[Wanted]])
    exempt: Mapping[Graph, frozenset[int]] = field(default_factory=dict[Graph, frozenset[int]])

    def of(self, graph: Graph, v: int) -> Wanted:
        """What is wanted of a value."""
        return self.values[graph][v] if graph in self.values else ()


NO_LAYOUT = GivenLayout()
