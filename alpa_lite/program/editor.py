"""Write a program anew: the one place that numbers values and ops, and keeps what belongs to them in step.

A rewriting starts from nothing or from the values of a graph (which then retain their ids), and adds ops in the order
in which they are to run, each with its equation or with its origin, by which the equation is found later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import TO_DEVICE, TO_HOST, Graph, Op, Value

Row = TypeVar("Row")


class Origin(NamedTuple):
    """An op of the step as it was traced: its graph or body, and its id there."""

    graph: Graph
    op: int


class ProgramEditor:
    """Collect the values and ops of a program, with the equation or the origin of each op."""

    def __init__(self, start: Graph | None = None) -> None:
        """Start with all values of a graph, if any; values whose producer is not emitted remain without readers."""
        self.start = start
        self.values: list[Value] = [] if start is None else list(start.values)
        self.ops: list[Op] = []
        self.equations: list[Equation] = []
        self.origins: list[Origin | None] = []
        # Originals of copies, by id of the copy.
        self._like: dict[int, tuple[Graph, int]] = {}

    def add(self, value: Value) -> int:
        """Append a value like another one and return its id."""
        self.values.append(value.numbered(len(self.values)))
        return len(self.values) - 1

    def copy(self, graph: Graph, value: int) -> int:
        """Append a copy of a value of a graph, which has no name, and return its id."""
        self._like[len(self.values)] = (graph, value)
        return self.add(replace(graph.values[value], name=""))

    def emit(
        self,
        op: Op,
        operands: Iterable[int],
        results: Iterable[int],
        equation: Equation | None = None,
        origin: Origin | None = None,
    ) -> tuple[int, ...]:
        """Append a copy of an op with these operands and results, and return the results.

        equation: its equation; all ops of a program have one, or none.
        origin: the traced op that it is or repeats.
        """
        made = op.numbered(len(self.ops), tuple(operands), tuple(results))
        self.ops.append(made)
        self.origins.append(origin)
        if equation is not None:
            self.equations.append(equation)
        return made.results

    def carry_over(
        self,
        graph: Graph,
        op: Op,
        places: MutableMapping[int, int],
        equation: Equation | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Append a copy of an op of another graph; `equation` and `origin` as in `emit`.

        places: value of that graph → value here; values without an entry are copied, and get one.
        """
        for v in (*op.operands, *op.results):
            if v not in places:
                places[v] = self.copy(graph, v)
        operands, results = ([places[v] for v in values] for values in (op.operands, op.results))
        self.emit(op, operands, results, equation, origin)

    def barrier(self, value: int, source: str) -> int:
        """Append an `optimization_barrier` for a value and return the id of its result."""
        assert self.start is not None, "barriers are put into a program that exists"
        held = self.copy(*self._like.get(value, (self.start, value)))
        op = Op(id=0, primitive="optimization_barrier", operands=(), results=(), params={}, source=source)
        return self.emit(op, (value,), (held,))[0]

    def move(self, value: int, *, on_host: bool, source: str, result: int | None = None) -> int:
        """Append an op that copies a value to the host, or from there, and return its result.

        The result is a new value, or `result`, whose place is then changed.
        """
        assert self.start is not None, "values are moved in a program that exists"
        moved = self.copy(*self._like.get(value, (self.start, value))) if result is None else result
        self.values[moved] = replace(self.values[moved], on_host=on_host)
        primitive = TO_HOST if on_host else TO_DEVICE
        return self.emit(
            Op(id=0, primitive=primitive, operands=(), results=(), params={}, source=source), (value,), (moved,)
        )[0]

    def rest_on_host(self, value: int) -> None:
        """Let a value, such as an input, lie on the host."""
        self.values[value] = replace(self.values[value], on_host=True)

    def graph(self, inputs: Iterable[int], outputs: Iterable[int]) -> Graph:
        """Return the graph of all that was added."""
        return Graph(values=tuple(self.values), ops=tuple(self.ops), inputs=tuple(inputs), outputs=tuple(outputs))

    def program(
        self, inputs: Iterable[int], outputs: Iterable[int], constants: tuple[Any, ...] = ()
    ) -> GraphWithEquations:
        """Return the graph with the equation of each op; `constants` are the captured arrays, its last inputs."""
        graph = self.graph(inputs, outputs)
        return GraphWithEquations(graph=graph, equations=tuple(self.equations), constants=constants)

    def table(self, rows_of: Callable[[Graph], Sequence[Row]]) -> tuple[Row, ...]:
        """Return a table with a row per value, from those of the graphs; for editors of what they and copies hold."""
        assert self.start is not None, "tables are carried along from a graph"
        places = (self._like.get(v.id, (self.start, v.id)) for v in self.values)
        return tuple(rows_of(graph)[v] for graph, v in places)


def without_dead_ops(program: GraphWithEquations) -> GraphWithEquations:
    """Return the program without dead ops (no effect, no result that is read), with values and ops renumbered.

    The program itself is returned if it has no dead ops and no unused values.
    """
    graph, needed, kept = program.graph, set(program.graph.outputs), list[Op]()
    for op in reversed(graph.ops):
        if op.effectful or any(r in needed for r in op.results):
            needed.update(op.operands)
            kept.append(op)
    # Inputs stay even if nothing reads them, since callers pass them by position; ops have a fixed number of results.
    needed.update(graph.inputs, *(op.results for op in kept))
    alive = [v for v in graph.values if v.id in needed]
    if len(kept) == len(graph.ops) and len(alive) == len(graph.values):
        return program
    editor = ProgramEditor()
    number = {v.id: editor.add(v) for v in alive}
    for op in reversed(kept):
        # Lists are faster than generators here, and this runs for each op.
        operands, results = [number[v] for v in op.operands], [number[v] for v in op.results]
        editor.emit(op, operands, results, program.equations[op.id])
    inputs, outputs = ([number[v] for v in values] for values in (graph.inputs, graph.outputs))
    return editor.program(inputs, outputs, program.constants)
