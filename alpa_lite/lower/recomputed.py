"""The equations of a step that computes values again: those of the ops that its ops are or repeat, and barriers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.graph.equations import Equation
from alpa_lite.graph.ir import Graph
from alpa_lite.rematerialise import Rematerialised


def equations_again(again: Rematerialised, graph: Graph, equations: Sequence[Equation]) -> tuple[Equation, ...]:
    """The equation of each op of `again`, from those of the graph that it was made of."""
    known: dict[Graph, Sequence[Equation]] = {}
    _register(known, graph, equations)
    made = dict[Graph, tuple[Equation, ...]]()

    def of_graph(written: Graph) -> tuple[Equation, ...]:
        if written not in again.origins:
            return tuple(known[written])
        if written not in made:
            found: list[Equation] = []
            for op, origin in zip(written.ops, again.origins[written], strict=True):
                if origin is None:
                    value = written.values[op.operands[0]]
                    eqn = _jax.barrier_equation(_jax.struct(value.shape, value.dtype))
                    found.append(Equation(primitive=eqn.primitive, params=eqn.params))
                    continue
                equation = known[origin.graph][origin.op]
                found.append(replace(equation, bodies=tuple(map(of_graph, op.bodies))) if op.bodies else equation)
            made[written] = tuple(found)
        return made[written]

    return of_graph(again.step.graph)


def _register(known: dict[Graph, Sequence[Equation]], graph: Graph, equations: Sequence[Equation]) -> None:
    if graph in known:
        return
    known[graph] = equations
    for op, equation in zip(graph.ops, equations, strict=True):
        for body, inner in zip(op.bodies, equation.bodies, strict=True):
            _register(known, body, inner)
