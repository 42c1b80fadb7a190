"""Which values of two programs of one step are the same, where JAX wrote a few ops otherwise.

Two traces of a step are gone through side by side. Ops meet when they are the same primitive of the same line on arrays
of the same shapes, and read nothing that is known to differ (_Aligner.alike); ops that only one program has are skipped
(_Aligner.skip). Ops that met make, and read, the same values.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.wiring import Wiring, wiring_of

Same = dict[Graph, tuple[Graph, dict[int, int]]]
"""Graph of the one program → the graph of the other that it meets, and its values → those of the other."""

#: How many ops may stand in one program without a partner before the next pair, and how many must then meet in a row.
_WINDOW, _RUN = 24, 3


def align(one: Graph, other: Graph, inputs: Mapping[int, int]) -> Same:
    """The values that two programs share, bodies included; `inputs`: those that are known to be the same."""
    aligner = _Aligner(one, other, inputs)
    aligner.run()
    return {one: (other, aligner.same), **aligner.below}


class _Aligner:
    def __init__(self, one: Graph, other: Graph, inputs: Mapping[int, int]) -> None:
        self.one, self.other = one, other
        self.same = dict(inputs)
        self.taken = set(inputs.values())
        self.below: Same = {}
        self.looks = [[_look(g, op) for op in g.ops] for g in (one, other)]

    def run(self) -> None:
        """Go through both programs to their ends."""
        i = j = 0
        while i < len(self.one.ops) and j < len(self.other.ops):
            if self.alike(i, j):
                self._meet(self.one.ops[i], self.other.ops[j])
                i, j = i + 1, j + 1
            else:
                i, j = self.skip(i, j)

    def alike(self, i: int, j: int) -> bool:
        """Whether two ops are the same, as far as is known."""
        if i >= len(self.one.ops) or j >= len(self.other.ops) or self.looks[0][i] != self.looks[1][j]:
            return False
        a, b = self.one.ops[i], self.other.ops[j]
        if a.bodies:
            return True
        return all(self.same.get(v, w) == w for v, w in zip(a.operands, b.operands, strict=True))

    def skip(self, i: int, j: int) -> tuple[int, int]:
        """The next two ops from which on the programs go together again, over the fewest ops that do not."""
        for total in range(1, _WINDOW + 1):
            for own in range(total + 1):
                start = (i + own, j + total - own)
                ends = start == (len(self.one.ops), len(self.other.ops))
                if ends or all(self._alike_or_over(start[0] + k, start[1] + k) for k in range(_RUN)):
                    return start
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
        """Bodies share what enters them as the same operand; results are what bodies make, where that is shared."""
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
                    pairs.setdefault(r, other)
        self._pair([a.results[r] for r in pairs], [b.results[r] for r in pairs.values()])

    def _partners(self, a: Op, b: Op) -> dict[int, int]:
        """Numbers of the operands of `a` → those of `b` that are the same values, each once and in order."""
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
    """Per value its items, the first one last: one value may be handed over several times."""
    table: dict[int, list[T]] = {}
    for v, item in reversed(list(zip(values, items, strict=True))):
        table.setdefault(v, []).append(item)
    return table


def _kind(graph: Graph, v: int) -> Hashable:
    value = graph.values[v]
    return value.shape, value.dtype


def _look(graph: Graph, op: Op) -> Hashable:
    """What ops have in common that may meet; loops may hand on different values and still be the same loop."""
    line = (op.primitive, op.source, op.name_stack)
    if op.bodies:
        return (*line, len(op.bodies))
    return (*line, *(tuple(_kind(graph, v) for v in values) for values in (op.operands, op.results)))
