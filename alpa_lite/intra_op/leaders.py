"""Who decides: which ops choose for themselves, and which operand the others follow."""

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
    """Answers about the ops of a stage while it is laid out, in order."""

    def __init__(
        self, view: StageView, scopes: Sequence[StageScope], sums: PartialSums, offers: Mapping[Key, Offer]
    ) -> None:
        """`scopes` and `offers` grow while the stage is laid out."""
        self.view = view
        self.scopes = scopes
        self.sums = sums
        self.offers = offers
        self.computed: set[int] = set()  # nodes that decide values of the loop rather than parameters
        self._extents: dict[Key, int] = {}  # least elements on the way from the decision to a value that follows it

    def _ranked(self, scope: int, graph: Graph, op: Op) -> list[int]:
        """Positions of the operands that somebody decided on."""
        ranked = ranked_values(graph)
        return [i for i, v in enumerate(op.operands) if v in ranked and (scope, v) in self.offers]

    def leads(self, scope: int, graph: Graph, op: Op, rule: Rule) -> bool:
        """True for an op that decides for itself, whatever its operands are in."""
        if rule.work_kind != "elementwise" or op.primitive == "gather" or op.primitive.startswith("scatter"):
            return True
        ranked = self._ranked(scope, graph, op)
        if ranked and (self._is_shared(scope, graph, op) or self.sums.adds_sums(scope, op)):
            return True
        if not self.sums.in_loop(scope, op) or op.primitive not in ADDITIONS:
            return not ranked
        # Zeros are a partial sum too: the first addition of a loop whose body runs once.
        return len(ranked) + sum(is_zero(graph, v) for i, v in enumerate(op.operands) if i not in ranked) >= 2

    def _is_shared(self, scope: int, graph: Graph, op: Op) -> bool:
        """True for samples that several contractions of this stage read: moved for all of them, they are moved once.

        Weights are better gathered by each that wants them.
        """
        if len(op.results) != 1 or self.scopes[scope].batch_dims[op.results[0]] is None:
            return False
        readers = {c for c in graph.consumers[op.results[0]] if scope > 0 or c in self.view.op_set}
        return sum(rule_of_op(graph, c).work_kind != "elementwise" for c in readers) > 1

    def follow(self, scope: int, graph: Graph, op: Op) -> int:
        """The number of the operand that an op follows.

        It is one that a leader computed before one that came in, then the larger, then the later. What was broadcast
        counts as large as it was before: its specs split nothing of what it was broadcast over.
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
