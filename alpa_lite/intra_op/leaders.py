"""Decide which ops choose their own placement (leaders), and which operand every other op follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa_lite.intra_op.placements import Key, Offer, StageScope
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.sums import PartialSums
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.wiring import ADDITIONS
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import is_zero, ranked_values, rule_of_op


class Deciding:
    """Classification of the ops of a stage into leaders and followers, in execution order during its layout."""

    def __init__(
        self, view: StageView, scopes: Sequence[StageScope], sums: PartialSums, offers: Mapping[Key, Offer]
    ) -> None:
        """Start with the builder's `scopes` and `offers`, which grow while the stage is laid out."""
        self.view = view
        self.scopes = scopes
        self.sums = sums
        self.offers = offers
        self.computed: set[int] = set()  # nodes of values that the loop computes, in contrast to parameters
        self._extents: dict[Key, int] = {}  # least number of elements from the leader to a value that follows it

    def _ranked(self, scope: int, graph: Graph, op: Op) -> list[int]:
        """Return the positions of the operands of rank 1 and more that have a node."""
        ranked = ranked_values(graph)
        return [i for i, v in enumerate(op.operands) if v in ranked and (scope, v) in self.offers]

    def leads(self, scope: int, graph: Graph, op: Op, rule: Rule) -> bool:
        """Return True for an op that chooses its own placement, independent of the specs of its operands."""
        if rule.work_kind != "elementwise" or op.primitive == "gather" or op.primitive.startswith("scatter"):
            return True
        ranked = self._ranked(scope, graph, op)
        if ranked and (self._is_shared(scope, graph, op) or self.sums.adds_sums(scope, op)):
            return True
        if not self.sums.in_loop(scope, op) or op.primitive not in ADDITIONS:
            return not ranked
        # Zeros count as a partial sum too: the first addition of a loop whose body runs once adds to them.
        return len(ranked) + sum(is_zero(graph, v) for i, v in enumerate(op.operands) if i not in ranked) >= 2

    def _is_shared(self, scope: int, graph: Graph, op: Op) -> bool:
        """Return True for a sample value that several contractions of this stage read.

        As a leader it is resharded once for all of them. Weights are excluded: it is better that each contraction
        gathers them for itself.
        """
        if len(op.results) != 1 or self.scopes[scope].batch_dims[op.results[0]] is None:
            return False
        readers = {c for c in graph.consumers[op.results[0]] if scope > 0 or c in self.view.op_set}
        return sum(rule_of_op(graph, c).work_kind != "elementwise" for c in readers) > 1

    def follow(self, scope: int, graph: Graph, op: Op) -> int:
        """Return the position of the operand that an op follows.

        Operands computed by a leader precede stage inputs, then larger ones precede smaller ones, then later ones
        earlier ones. A broadcast value counts with its size before the broadcast, because its specs split none of the
        broadcast dims.
        """

        def rank(i: int) -> tuple[bool, int, int]:
            value = graph.values[op.operands[i]]
            offer = self.offers[(scope, value.id)]
            return (offer.node in self.computed, self._extent(scope, value), value.id)

        ranked = self._ranked(scope, graph, op)
        main = max(ranked, key=rank) if len(ranked) > 1 else ranked[0]
        extent = self._extent(scope, graph.values[op.operands[main]])
        self._extents.update({(scope, v.id): min(extent, v.num_elements) for v in graph.results(op)})
        return main

    def _extent(self, scope: int, value: Value) -> int:
        return self._extents.get((scope, value.id), value.num_elements)
