"""One graph written again: its values keep their numbers, copies and barriers are added, ops are numbered anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from alpa_lite.program.ir import Graph, Op, Value

Row = TypeVar("Row")


class Origin(NamedTuple):
    """An op of the step as it was traced."""

    graph: Graph
    op: int


class Copier:
    """Collects the values and ops of a graph that is written again."""

    def __init__(self, graph: Graph) -> None:
        """All values of the graph are there from the start; one that no op makes any more is left unread."""
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.origins: list[Origin | None] = []
        # For each value the one that it stands for: itself, or in which graph and where.
        self.like: list[tuple[Graph, int]] = [(graph, v.id) for v in graph.values]

    def new_value(self, graph: Graph, like: int) -> int:
        """A value like one of a graph."""
        self.values.append(replace(graph.values[like], id=len(self.values), name=""))
        self.like.append((graph, like))
        return len(self.values) - 1

    def emit(self, op: Op, operands: Iterable[int], results: Iterable[int], origin: Origin | None) -> None:
        """Append an op like another."""
        self.ops.append(op.numbered(len(self.ops), tuple(operands), tuple(results)))
        self.origins.append(origin)

    def barrier(self, value: int, source: str) -> int:
        """The value behind an `optimization_barrier`."""
        held = self.new_value(*self.like[value])
        op = Op(id=0, primitive="optimization_barrier", operands=(), results=(), params={}, source=source)
        self.emit(op, (value,), (held,), None)
        return held

    def finished(self, inputs: Iterable[int], outputs: Iterable[int]) -> Graph:
        """The graph as it was written."""
        return Graph(values=tuple(self.values), ops=tuple(self.ops), inputs=tuple(inputs), outputs=tuple(outputs))

    def table(self, rows_of: Callable[[Graph], Sequence[Row]]) -> tuple[Row, ...]:
        """A table about the values of the graph as it was written, from those of the graphs that they come from."""
        return tuple(rows_of(graph)[v] for graph, v in self.like)


def closure(graph: Graph, roots: Iterable[int], is_made_again: Callable[[Value], bool]) -> dict[int, None]:
    """The ops that compute the values among `roots` that are made again, from values that are not; in no order."""
    found, queue = dict[int, None](), list(roots)
    while queue:
        v = queue.pop()
        producer = graph.producer[v]
        if producer is None or producer in found or not is_made_again(graph.values[v]):
            continue
        found[producer] = None
        queue += graph.ops[producer].operands
    return found
