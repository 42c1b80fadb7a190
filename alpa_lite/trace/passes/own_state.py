"""Give every argument that a step replaces a value of its own, made by an op of the step.

Where the weights are updated several times per step, each update makes the state that the next one reads. An argument
that is returned in the place of another one (the weights before the update), or one result in two places (a copy for
checkpoints), would be made by no op, or by an op whose result replaces one argument alone; both are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax.extend.core import primitives

from alpa_lite.program.editor import ProgramEditor
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Op
from alpa_lite.trace.passes.code_motion import TwoSizes
from alpa_lite.trace.passes.split_stacked import PartedProgram

_COPY = Equation(primitive=primitives.copy_p, params={})


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """The pass that copies results so that no two arguments are replaced by one value, or one by another argument.

    Attributes:
        replaced: output leaf → the argument leaf that it replaces.
    """

    replaced: Mapping[int, int]
    name = "own state"

    def apply(self, program: TwoSizes) -> TwoSizes:
        """Return the programs with the copies as their last ops."""
        places = self._places(program.full)
        if not places:
            return program
        return replace(program, full=_copied(program.full, places), other=_copied(program.other, places))

    def _places(self, parted: PartedProgram) -> tuple[int, ...]:
        """Return the indices of the outputs to copy."""
        graph, found, seen = parted.graph, list[int](), set[int]()
        inputs = {(part.leaf, part.rows): v for v, part in zip(graph.inputs, parted.input_parts, strict=True)}
        for i, (v, part) in enumerate(zip(graph.outputs, parted.output_parts, strict=True)):
            into = inputs.get((self.replaced.get(part.leaf, -1), part.rows))
            if into is None or into == v:
                continue
            if v in seen or graph.producer[v] is None:
                found.append(i)
            seen.add(v)
        return tuple(found)


def _copied(parted: PartedProgram, places: tuple[int, ...]) -> PartedProgram:
    """Return the program whose outputs at some indices are copies."""
    program, graph = parted.program, parted.graph
    editor, outputs = ProgramEditor(graph), list(graph.outputs)
    for op in graph.ops:
        editor.emit(op, op.operands, op.results, program.equations[op.id])
    for i in places:
        producer = graph.producer[outputs[i]]
        source = "" if producer is None else graph.ops[producer].source
        op = Op(id=0, primitive="copy", operands=(), results=(), params={}, source=source)
        (outputs[i],) = editor.emit(op, (outputs[i],), (editor.copy(graph, outputs[i]),), _COPY)
    return replace(parted, program=editor.program(graph.inputs, outputs, program.constants))
