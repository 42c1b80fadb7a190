"""A graph as stable text, one line per op with loop bodies indented, for golden tests and for reading."""

from __future__ import annotations

from collections.abc import Iterator

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import StepGraph


def show(graph: Graph, *, step: StepGraph | None = None) -> str:
    """Return lines such as `%5:float32[8,16] = dot_general(%0, %3)  # forward  model.py:12 (loss)`.

    With `step`, each line names the phase of its op. Only those op parameters are shown that change shapes.
    """
    return "\n".join(_lines(graph, step, indent=""))


def _lines(graph: Graph, step: StepGraph | None, indent: str) -> Iterator[str]:
    yield f"{indent}inputs {', '.join(str(graph.values[v]) for v in graph.inputs)}"
    for op in graph.ops:
        phase = f"{step.phases[op.id].value}  " if step is not None else ""
        yield f"{indent}{_head(graph, op)}  # {phase}{op.source}"
        for body in op.bodies:
            # The ops of a body have no phases of their own.
            yield from _lines(body, None, indent + "  ")
    yield f"{indent}outputs {', '.join(_operand(graph, v) for v in graph.outputs)}"


def _head(graph: Graph, op: Op) -> str:
    results = ", ".join(map(str, graph.results(op)))
    # A loop without stacked arrays would not show its trip count otherwise.
    length = f" × {op.params['length']}" if op.primitive == "scan" else ""
    return f"{results} = {op.primitive}{length}({', '.join(_operand(graph, v) for v in op.operands)})"


def _operand(graph: Graph, value: int) -> str:
    # A literal has no producer to look up; its value says more than its number.
    literal = graph.values[value].literal
    return f"%{value}" if literal is None else str(literal)
