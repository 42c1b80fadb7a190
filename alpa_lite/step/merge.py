"""The program of a micro-batch: what touches the batch at its size, all else as the full batch has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import Graph, Op
from alpa_lite.step.interpreter import BodyMarks, Marks

_Body = tuple[Graph, tuple[Equation, ...]]


def merge(full: GraphWithEquations, small: GraphWithEquations, marks: Mapping[int, Marks]) -> GraphWithEquations:
    """The program that runs once per micro-batch, with the marks of `additivity.prove`.

    An op that has the same shapes at both sizes is that of the full batch, with its parameters: `decay ** B` is one
    number, whatever a micro-batch holds. Literals are those of the full batch throughout: the 1 / B of a mean.
    """
    graph, equations = _merged(full.graph, small.graph, full.equations, small.equations, tuple(marks.items()), {})
    return GraphWithEquations(graph=graph, equations=equations, constants=full.constants)


def _merged(
    full: Graph,
    small: Graph,
    of_full: Sequence[Equation],
    of_small: Sequence[Equation],
    marks: BodyMarks,
    known: dict[object, _Body],
) -> _Body:
    marked = dict(marks)
    pairs = zip(full.values, small.values, strict=True)
    values = tuple([v if v.shape == w.shape else w for v, w in pairs])
    ops: list[Op] = []
    equations: list[Equation] = []
    for op, other, equation, inner in zip(full.ops, small.ops, of_full, of_small, strict=True):
        mark = marked.get(op.id)
        if op.bodies and mark is not None:
            made = _with_bodies(op, other, equation, inner, mark, known)
        elif op.bodies or not _touches(full, small, op):
            made = op, equation
        else:
            made = other, inner
        ops.append(_marked(made[0], mark) if mark is not None else made[0])
        equations.append(made[1])
    return Graph(values=values, ops=tuple(ops), inputs=full.inputs, outputs=full.outputs), tuple(equations)


def _touches(full: Graph, small: Graph, op: Op) -> bool:
    return any(full.values[v].shape != small.values[v].shape for v in (*op.operands, *op.results))


def _marked(op: Op, mark: Marks) -> Op:
    if not mark.once and not mark.own_columns:
        return op
    return replace(op, once=frozenset(op.operands[i] for i in mark.once), own_columns=mark.own_columns)


def _with_bodies(
    op: Op, other: Op, equation: Equation, inner: Equation, mark: Marks, known: dict[object, _Body]
) -> tuple[Op, Equation]:
    found: list[_Body] = []
    for number, bodies in enumerate(zip(op.bodies, other.bodies, strict=True)):
        key = (*bodies, mark.bodies[number])
        if key not in known:
            known[key] = _merged(*bodies, equation.bodies[number], inner.bodies[number], mark.bodies[number], known)
        found.append(known[key])
    merged = replace(other, bodies=tuple(graph for graph, _ in found))
    return merged, replace(inner, bodies=tuple(equations for _, equations in found))


def bodies_apart(full: GraphWithEquations, small: GraphWithEquations) -> GraphWithEquations:
    """The full program with bodies that are one object only where the batch enters them alike."""
    graph, equations = _apart(full.graph, small.graph, full.equations, {})
    return replace(full, graph=graph, equations=equations)


def _apart(full: Graph, small: Graph, equations: Sequence[Equation], known: dict[object, _Body]) -> _Body:
    ops: list[Op] = []
    for op, other, equation in zip(full.ops, small.ops, equations, strict=True):
        bodies: list[Graph] = []
        for number, pair in enumerate(zip(op.bodies, other.bodies, strict=True)):
            if pair not in known:
                known[pair] = _apart(*pair, equation.bodies[number], known)
            bodies.append(known[pair][0])
        ops.append(replace(op, bodies=tuple(bodies)) if bodies else op)
    return replace(full, ops=tuple(ops)), tuple(equations)
