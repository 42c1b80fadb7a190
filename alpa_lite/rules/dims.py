"""Equivalence classes of the dims of a step's values, by the factor rules of its ops.

    (v, i) ~ (w, j)     if a rule gives both the same major factor                                     (`DimClasses`)
                        if a body reads v as w, or returns w as v, without the leading dim of scanned arrays
                        if w replaces v in the next step

A dim that is a product of factors is represented by its major factor, along which it can be split. The classes take the
place of dimension names: in a transformer the batch, the positions, the width, the heads and the hidden units of each
layer are one class each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa_lite.program.ir import Graph, Op, Wiring, wiring_of
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.rules.registry import Dims, Rule


def major_factor(rule: Rule, factors: Sequence[int]) -> int | None:
    """Return the factor along which a dim can be split, or None for a dim of size 1."""
    return next((f for f in factors if rule.sizes[f] > 1), None)


class DimClasses:
    """The dim classes of a step, including the bodies of control flow (a union-find structure)."""

    def __init__(self, step: StepGraph) -> None:
        """Compute the classes of all dims of the step."""
        self.graph = step.graph
        self._first: dict[Graph, list[int]] = {}
        self._parents: list[int] = []
        self._add(step.graph)
        for result, argument in step.aliases.items():
            self._join_all(step.graph, argument, step.graph, result, 0, 0)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graph of the step and the graphs of all bodies."""
        return tuple(self._first)

    def of(self, graph: Graph, value: int, dim: int) -> int:
        """Return the class of a dim as a number."""
        return self._root(self._first[graph][value] + dim)

    def of_value(self, graph: Graph, value: int) -> tuple[int, ...]:
        """Return the class of each dim of a value."""
        return tuple(self.of(graph, value, dim) for dim in range(graph.values[value].rank))

    def of_factor(self, graph: Graph, op: Op, factor: int) -> int | None:
        """Return the class of the dims whose major factor in the op's rule is `factor`, or None if there are none."""
        found = (self.of(graph, v, d) for v, d, f in _majors(graph, op) if f == factor)
        return next(found, None)

    def _root(self, node: int) -> int:
        while self._parents[node] != node:
            self._parents[node] = self._parents[self._parents[node]]
            node = self._parents[node]
        return node

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        self._parents[max(a, b)] = min(a, b)

    def _join_all(self, graph: Graph, v: int, other: Graph, w: int, skip: int, skip_other: int) -> None:
        """Join the dims of two values pairwise, after skipping `skip` and `skip_other` leading dims."""
        first, second = self._first[graph][v] + skip, self._first[other][w] + skip_other
        for dim in range(graph.values[v].rank - skip):
            self._join(first + dim, second + dim)

    def _add(self, graph: Graph) -> None:
        if graph in self._first:
            return
        places = self._first[graph] = []
        for value in graph.values:
            places.append(len(self._parents))
            self._parents.extend(range(len(self._parents), len(self._parents) + value.rank))
        for op in graph.ops:
            wiring = wiring_of(op)
            if wiring is not None:
                self._enter(graph, op, wiring)
                continue
            seen: dict[int, int] = {}
            for v, dim, factor in _majors(graph, op):
                node = places[v] + dim
                self._join(seen.setdefault(factor, node), node)

    def _enter(self, graph: Graph, op: Op, wiring: Wiring) -> None:
        for body, inputs, outputs in zip(op.bodies, wiring.inputs, wiring.outputs, strict=True):
            self._add(body)
            for inner, i in zip(body.inputs, inputs, strict=True):
                self._join_all(graph, op.operands[i], body, inner, int(i in wiring.scanned), 0)
            for inner, r in zip(body.outputs, outputs, strict=True):
                if r is not None:
                    self._join_all(graph, op.results[r], body, inner, int(r in wiring.stacked), 0)
        for r, i in wiring.carried.items():
            self._join_all(graph, op.operands[i], graph, op.results[r], 0, 0)


def _majors(graph: Graph, op: Op) -> Iterator[tuple[int, int, int]]:
    """Yield (value id, dim, major factor) for each dim of the operands and results of an op without bodies."""
    rule = rule_of_op(graph, op.id)
    tensors: tuple[Dims, ...] = (*rule.operands, *rule.results)
    for v, dims in zip((*op.operands, *op.results), tensors, strict=True):
        for dim, factors in enumerate(dims):
            factor = major_factor(rule, factors)
            if factor is not None:
                yield v, dim, factor
