"""Layout constraints from the user: which tensor dim a mesh axis must split, for some or all values of a step.

`layout_constraints` restricts the strategies of a stage to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alpa_lite.program.ir import Graph

Wanted = tuple[tuple[str, int | None], ...]
"""The layout constraint of one value: pairs of a mesh axis and the tensor dim that it must split; None means no dim."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenLayout:
    """The layout constraints of all values of a step, loop bodies included.

    `values` holds one constraint per value id of a graph; `exempt` holds the ids of the ops that need not satisfy the
    constraints of their operands and results.
    """

    values: Mapping[Graph, Sequence[Wanted]] = field(default_factory=dict[Graph, Sequence[Wanted]])
    exempt: Mapping[Graph, frozenset[int]] = field(default_factory=dict[Graph, frozenset[int]])

    def of(self, graph: Graph, v: int) -> Wanted:
        """Return the layout constraint of value `v` of a graph; it is empty if the graph has none."""
        return self.values[graph][v] if graph in self.values else ()


NO_LAYOUT = GivenLayout()
