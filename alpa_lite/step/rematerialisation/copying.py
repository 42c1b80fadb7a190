"""Rewrite a graph with copies and barriers added: values retain their ids, ops are renumbered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from alpa_lite.program.ir import Graph, Op, Value

Row = TypeVar("Row")


class Origin(NamedTuple):
    """An op of the step as it was traced: its graph or body, and its id there."""

    graph: Graph
    op: int


class Copier:
    """Collect the values and ops of a rewritten graph."""

    def __init__(self, graph: Graph) -> None:
        """Start with all values of the graph; values whose producer is not emitted remain without readers."""
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.origins: list[Origin | None] = []
        # For each value its original: (graph, value id), which is the value itself unless it is a copy.
        self.like: list[tuple[Graph, int]] = [(graph, v.id) for v in graph.values]

    def new_value(self, graph: Graph, like: int) -> int:
        """Append a copy of a value of `graph` and return its id."""
        self.values.append(replace(graph.values[like], id=len(self.values), name=""))
        self.like.append((graph, like))
        return len(self.values) - 1

    def emit(self, op: Op, operands: Iterable[int], results: Iterable[int], origin: Origin | None) -> None:
        """Append a copy of an op with these operands and results; `origin` is the traced op that it is or repeats."""
        self.ops.append(op.numbered(len(self.ops), tuple(operands), tuple(results)))
        self.origins.append(origin)

    def barrier(self, value: int, source: str) -> int:
        """Append an `optimization_barrier` for a value and return the id of its result."""
        held = self.new_value(*self.like[value])
        op = Op(id=0, primitive="optimization_barrier", operands=(), results=(), params={}, source=source)
        self.emit(op, (value,), (held,), None)
        return held

    def finished(self, inputs: Iterable[int], outputs: Iterable[int]) -> Graph:
        """Return the rewritten graph."""
        return Graph(values=tuple(self.values), ops=tuple(self.ops), inputs=tuple(inputs), outputs=tuple(outputs))

    def table(self, rows_of: Callable[[Graph], Sequence[Row]]) -> tuple[Row, ...]:
        """Return a table with one row per value of the rewritten graph, from the tables of the original graphs."""
        return tuple(rows_of(graph)[v] for graph, v in self.like)


def closure(graph: Graph, roots: Iterable[int], is_made_again: Callable[[Value], bool]) -> dict[int, None]:
    """Return the ops that must run to recompute `roots` from values that are not recomputed, in no particular order.

    Args:
        graph: the graph.
        roots: value ids.
        is_made_again: whether a value is recomputed.
    """
    found, queue = dict[int, None](), list(roots)
    while queue:
        v = queue.pop()
        producer = graph.producer[v]
        if producer is None or producer in found or not is_made_again(graph.values[v]):
            continue
        found[producer] = None
        queue += graph.ops[producer].operands
    return found
