"""Merge the programs of a step at the full batch and at the size of a micro-batch: micro-batches run the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import Graph, Op
from alpa_lite.step.interpreter import BodyMarks, Marks

_Body = tuple[Graph, tuple[Equation, ...]]
"""A graph or body with the equations of its ops."""

_OpWithEquation = tuple[Op, Equation]


def merge(full: GraphWithEquations, small: GraphWithEquations, marks: Mapping[int, Marks]) -> GraphWithEquations:
    """Return the program that runs once per micro-batch, with the marks of `additivity.prove` applied.

    An op that has the same shapes at both sizes is taken from the full batch, with its parameters: `decay ** B` is one
    number, whatever a micro-batch holds. Literals are those of the full batch throughout, such as the 1 / B of a mean.
    """
    one, other = (full.graph, full.equations), (small.graph, small.equations)
    graph, equations = _merged(one, other, tuple(marks.items()), {})
    return GraphWithEquations(graph=graph, equations=equations, constants=full.constants)


def _merged(at_full: _Body, at_small: _Body, marks: BodyMarks, memo: dict[object, _Body]) -> _Body:
    """Merge a graph or body at both sizes; merged bodies are memoized in `memo`."""
    (full, of_full), (small, of_small), marked = at_full, at_small, dict(marks)
    pairs = zip(full.values, small.values, strict=True)
    # Scalars have the same shape at both sizes, so that literals are those of the full batch.
    values = tuple([v if v.shape == w.shape else w for v, w in pairs])
    ops: list[Op] = []
    equations: list[Equation] = []
    pairs_at_full, pairs_at_small = zip(full.ops, of_full, strict=True), zip(small.ops, of_small, strict=True)
    for one, other in zip(pairs_at_full, pairs_at_small, strict=True):
        op, mark = one[0], marked.get(one[0].id)
        if op.bodies and mark is not None:
            made = _with_bodies(one, other, mark, memo)
        # An op with bodies and without marks does not run in micro-batches (`Marks.looked_into`).
        elif op.bodies or not _touches(full, small, op):
            made = one
        else:
            made = other
        ops.append(_marked(made[0], mark) if mark is not None else made[0])
        equations.append(made[1])
    return Graph(values=values, ops=tuple(ops), inputs=full.inputs, outputs=full.outputs), tuple(equations)


def _touches(full: Graph, small: Graph, op: Op) -> bool:
    """Return whether an operand or result of an op has another shape at the other size."""
    return any(full.values[v].shape != small.values[v].shape for v in (*op.operands, *op.results))


def _marked(op: Op, mark: Marks) -> Op:
    """Return an op with its marks as fields."""
    if not mark.once and not mark.own_columns:
        return op
    return replace(op, once=frozenset(op.operands[i] for i in mark.once), own_columns=mark.own_columns)


def _with_bodies(
    one: _OpWithEquation, other: _OpWithEquation, mark: Marks, memo: dict[object, _Body]
) -> _OpWithEquation:
    """Return the op of the micro-batch (`other`), with bodies merged with those of the full batch, and its equation."""
    bodies: list[_Body] = []
    for number, inner_marks in enumerate(mark.bodies):
        at_full, at_small = ((op.bodies[number], equation.bodies[number]) for op, equation in (one, other))
        # Loops that share their body at both sizes, with equal marks, go on sharing one.
        key = (at_full[0], at_small[0], inner_marks)
        if key not in memo:
            memo[key] = _merged(at_full, at_small, inner_marks, memo)
        bodies.append(memo[key])
    merged = replace(other[0], bodies=tuple(graph for graph, _ in bodies))
    return merged, replace(other[1], bodies=tuple(equations for _, equations in bodies))


def bodies_apart(full: GraphWithEquations, small: GraphWithEquations) -> GraphWithEquations:
    """Return the full program in which two ops share a body only if they also share it at the other batch size."""
    graph, equations = _apart(full.graph, small.graph, full.equations, {})
    return replace(full, graph=graph, equations=equations)


def _apart(full: Graph, small: Graph, equations: Sequence[Equation], memo: dict[object, _Body]) -> _Body:
    """Separate the bodies of a graph; results are memoized by pairs of bodies in `memo`."""
    ops: list[Op] = []
    for op, other, equation in zip(full.ops, small.ops, equations, strict=True):
        bodies: list[Graph] = []
        for number, pair in enumerate(zip(op.bodies, other.bodies, strict=True)):
            if pair not in memo:
                memo[pair] = _apart(*pair, equation.bodies[number], memo)
            bodies.append(memo[pair][0])
        ops.append(replace(op, bodies=tuple(bodies)) if bodies else op)
    return replace(full, ops=tuple(ops)), tuple(equations)
