"""Match the values of two programs of one step between which JAX wrote a few ops differently.

The ops of both programs are compared in order. Two ops match when they have the same primitive, source line and
shapes, and no operands that are already matched to different values (`_Aligner.alike`); ops that exist in only one
program are skipped (`_Aligner.skip`). The operands and results of matched ops are matched with each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from alpa_lite.program.ir import Graph, Op, Wiring, wiring_of

Same = dict[Graph, tuple[Graph, dict[int, int]]]
"""Each matched graph of the first program → its counterpart in the second, and its value ids → theirs."""

#: The most unmatched ops (in both programs together) between two matches, and how many ops must match in a row after
#: them. The run avoids a match by chance: single elementwise ops look alike all over a program.
_WINDOW, _RUN = 24, 3


def align(one: Graph, other: Graph, inputs: Mapping[int, int]) -> Same:
    """Return the matched values of two programs, bodies included, as a mapping from values of the first.

    `inputs` are pairs that are equal by assumption, for example the arguments.
    """
    aligner = _Aligner(one, other, inputs)
    aligner.run()
    return {one: (other, aligner.same), **aligner.below}


class _Aligner:
    """Match two graphs in one pass over both op lists."""

    def __init__(self, one: Graph, other: Graph, inputs: Mapping[int, int]) -> None:
        self.one, self.other = one, other
        self.same = dict(inputs)
        # Each value of the second program is the counterpart of one value at most.
        self.taken = set(inputs.values())
        self.below: Same = {}
        self.looks = [[_look(g, op) for op in g.ops] for g in (one, other)]

    def run(self) -> None:
        """Match both op lists to their ends."""
        i = j = 0
        while i < len(self.one.ops) and j < len(self.other.ops):
            if self.alike(i, j):
                self._meet(self.one.ops[i], self.other.ops[j])
                i, j = i + 1, j + 1
            else:
                i, j = self.skip(i, j)

    def alike(self, i: int, j: int) -> bool:
        """Return whether op i of the first graph and op j of the second may be the same op."""
        if i >= len(self.one.ops) or j >= len(self.other.ops) or self.looks[0][i] != self.looks[1][j]:
            return False
        a, b = self.one.ops[i], self.other.ops[j]
        if a.bodies:
            # The order and number of a loop's operands may differ; `_meet_bodies` matches them one by one.
            return True
        return all(self.same.get(v, w) == w for v, w in zip(a.operands, b.operands, strict=True))

    def skip(self, i: int, j: int) -> tuple[int, int]:
        """Return the next pair of op numbers that match, skipping as few ops as possible.

        Offsets are tried by increasing total, so the cost of a mismatch is O(_WINDOW²) whatever the program's size.
        """
        for total in range(1, _WINDOW + 1):
            for own in range(total + 1):
                start = (i + own, j + total - own)
                # Reaching both ends at once counts as a match, so that unlike tails are skipped.
                ends = start == (len(self.one.ops), len(self.other.ops))
                if ends or all(self._alike_or_over(start[0] + k, start[1] + k) for k in range(_RUN)):
                    return start
        # Without a match in the window this pair is given up; the next one may match again.
        return i + 1, j + 1

    def _alike_or_over(self, i: int, j: int) -> bool:
        return self.alike(i, j) or (i >= len(self.one.ops) and j >= len(self.other.ops))

    def _meet(self, a: Op, b: Op) -> None:
        wiring = wiring_of(a), wiring_of(b)
        if wiring[0] is not None and wiring[1] is not None:
            self._meet_bodies(a, b, wiring[0], wiring[1])
            return
        self._pair(a.operands, b.operands)
        self._pair(a.results, b.results)

    def _pair(self, values: Sequence[int], others: Sequence[int]) -> None:
        for v, w in zip(values, others, strict=True):
            if v not in self.same and w not in self.taken and _kind(self.one, v) == _kind(self.other, w):
                self.same[v] = w
                self.taken.add(w)

    def _meet_bodies(self, a: Op, b: Op, wiring: Wiring, others: Wiring) -> None:
        """Match the bodies of two ops and, through the body outputs, their results.

        Body inputs are matched where they receive matched operands; results are matched where the body values that they
        return are.
        """
        partner = self._partners(a, b)
        pairs: dict[int, int] = {}
        for n, (body, inner) in enumerate(zip(a.bodies, b.bodies, strict=True)):
            place = {operand: v for operand, v in zip(others.inputs[n], inner.inputs, strict=True)}
            entering = {
                v: place[partner[operand]]
                for operand, v in zip(wiring.inputs[n], body.inputs, strict=True)
                if partner.get(operand) in place
            }
            found = align(body, inner, {v: w for v, w in entering.items() if _kind(body, v) == _kind(inner, w)})
            self.below.update(found)
            made = _in_order(inner.outputs, others.outputs[n])
            for v, r in zip(body.outputs, wiring.outputs[n], strict=True):
                results = made.get(found[body][1].get(v, -1))
                other = results.pop() if results else None
                if r is not None and other is not None:
                    # All branches of a conditional return the same results: the first one that matches decides.
                    pairs.setdefault(r, other)
        self._pair([a.results[r] for r in pairs], [b.results[r] for r in pairs.values()])

    def _partners(self, a: Op, b: Op) -> dict[int, int]:
        """Return operand numbers of `a` → operand numbers of `b` with the same value, each used once, in order."""
        # Mostly the operands correspond one by one, even where some of them are not matched yet.
        if len(a.operands) == len(b.operands) and all(
            self.same.get(v, w) == w for v, w in zip(a.operands, b.operands, strict=True)
        ):
            return {i: i for i in range(len(a.operands))}
        free = _in_order(b.operands, range(len(b.operands)))
        found: dict[int, int] = {}
        for i, v in enumerate(a.operands):
            places = free.get(self.same.get(v, -1))
            if places:
                found[i] = places.pop()
        return found


T = TypeVar("T")


def _in_order(values: Sequence[int], items: Sequence[T]) -> dict[int, list[T]]:
    """Return for each value its items in reverse order, so that `pop` yields the first; values may repeat."""
    table: dict[int, list[T]] = {}
    for v, item in reversed(list(zip(values, items, strict=True))):
        table.setdefault(v, []).append(item)
    return table


def _kind(graph: Graph, v: int) -> Hashable:
    value = graph.values[v]
    return value.shape, value.dtype


def _look(graph: Graph, op: Op) -> Hashable:
    """Return a key that is equal for ops that may match.

    The key of an op with bodies omits its shapes: two loops may carry different values and still be the same loop.
    """
    line = (op.primitive, op.source, op.name_stack)
    if op.bodies:
        return (*line, len(op.bodies))
    return (*line, *(tuple(_kind(graph, v) for v in values) for values in (op.operands, op.results)))
