"""Move parts of a program into or out of its loops.

`SinkFreeValues` moves constants into the loops that read them. JAX hoists what a loop body computes from constants
alone (masks, positions) out of the loop, which then reads whole arrays. Inside the body, such a value needs no sharding
of its own, is never communicated, and is fused with its readers. XLA does the same ("while loop constant sinking").

`HoistValues` moves the part of a step that depends on data alone out of the loop over micro-batches, so that it is
computed for the whole batch before:

    loss = Σ_i m_i c_i(params) / Σ_i m_i       the second sum reads no parameter

Inside the loop, each micro-batch would divide by its own number of tokens. Hoisted, that number is one more input of
the step, and the rest is a sum over samples again. The same holds for permutations of the data, returns computed by a
reverse scan over rewards, and statistics that normalise the data: these hold the batch dim, and each micro-batch takes
its rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from alpa_lite._jax import Array
from alpa_lite.program.editor import ProgramEditor, without_dead_ops
from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.identity import FirstUses, SameObject
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.phases import LeafPart
from alpa_lite.rules.op_info import free_values, op_class
from alpa_lite.trace.evaluate import evaluate
from alpa_lite.trace.passes.split_stacked import PartedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFreeValues:
    """The pass after which scans, at any depth, make the constant free values that they read.

    Free values are those that cost nothing to compute (`alpa_lite.rules.op_info.free_values`).
    """

    name = "sink free values"

    def apply(self, program: PartedProgram) -> PartedProgram:
        """Return the program with such values made in the scans."""
        return replace(program, program=_sunk_program(program.program, {}))


_Memo = dict[tuple[object, ...], GraphWithEquations]
"""Rewritten bodies by original body, sunk inputs and their recipe, so that loops that share a body still share one."""


def _sunk_program(program: GraphWithEquations, memo: _Memo) -> GraphWithEquations:
    """Return a graph with equations whose scans are rewritten, memoized in `memo`."""
    graph = program.graph
    if not any(op.primitive == "scan" for op in graph.ops):
        return program
    editor = ProgramEditor(graph)
    for op in graph.ops:
        made, equation = _sunk(graph, program.equations, op, memo)
        editor.emit(made, made.operands, made.results, equation)
    return without_dead_ops(editor.program(graph.inputs, graph.outputs, program.constants))


def _sunk(graph: Graph, equations: Sequence[Equation], op: Op, memo: _Memo) -> tuple[Op, Equation]:
    """Return a scan without its free constants, and its equation; other ops are returned unchanged."""
    equation = equations[op.id]
    if op.primitive != "scan":
        return op, equation
    (body,), (inner,) = op.bodies, equation.bodies
    free = free_values(graph) & _constants(graph)
    # A value that enters a body twice is sunk for its first operand only: `into` holds one body input per value.
    sunk = [i for i in range(op.params["num_consts"]) if op.operands[i] in free.difference(op.operands[:i])]
    needed = _makers(graph, {op.operands[i] for i in sunk})
    into = {op.operands[i]: body.inputs[i] for i in sunk}
    key = (body, tuple(into.values()), _recipe(graph, equations, needed, into))
    if key not in memo:
        made = GraphWithEquations(graph=body, equations=inner)
        if sunk:
            editor, places = ProgramEditor(body), dict(into)
            for maker in needed:
                editor.carry_over(graph, maker, places, equations[maker.id])
            for each in body.ops:
                editor.emit(each, each.operands, each.results, inner[each.id])
            for v in into.values():
                editor.values[v] = replace(editor.values[v], name="")  # it is no input of the body any longer
            made = editor.program([v for i, v in enumerate(body.inputs) if i not in sunk], body.outputs)
        # A loop inside the body may read the sunk value, which is now a constant of this body.
        memo[key] = _sunk_program(made, memo)
    below = memo[key]
    if not sunk and below.graph is body:
        return op, equation
    # The operands of a scan are its constants, the carry and the scanned arrays: the first number moves the others.
    num_consts = op.params["num_consts"] - len(sunk)
    operands = tuple(v for i, v in enumerate(op.operands) if i not in sunk)
    params = {**op.params, "num_consts": num_consts}
    moved = replace(op, operands=operands, params=params, bodies=(below.graph,))
    named = {**equation.params, "num_consts": num_consts}
    return moved, replace(equation, params=named, bodies=(below.equations,))


def _constants(graph: Graph) -> frozenset[int]:
    """Return the values computed from literals alone.

    Values that depend on a scalar argument are excluded: computing them in every trip would not be free.
    """
    found = {v.id for v in graph.values if v.literal is not None}
    for op in graph.ops:
        # Loops stay outside: they would take their time again in every trip.
        if not op.bodies and found.issuperset(op.operands):
            found.update(op.results)
    return frozenset(found)


def _makers(graph: Graph, values: set[int]) -> list[Op]:
    """Return the ops that compute the given free values from literals, in program order."""
    found, queue = set[int](), list(values)
    while queue:
        producer = graph.producer[queue.pop()]
        if producer is not None and producer not in found:
            found.add(producer)
            queue += graph.ops[producer].operands
    # The id of an op is its place in the program.
    return [graph.ops[number] for number in sorted(found)]


def _recipe(graph: Graph, equations: Sequence[Equation], ops: Sequence[Op], into: dict[int, int]) -> tuple[object, ...]:
    """Return a key that is equal for op sequences that compute the same values, wherever they stand in the graph."""
    # Sunk values get negative numbers by body input, others numbers by first occurrence.
    number = FirstUses[int]({v: -1 - slot for v, slot in into.items()})
    return tuple(
        (
            op_class(graph, op.id),
            SameObject(equations[op.id].params),
            tuple([number[v] for v in op.operands]),
            tuple([number[v] for v in op.results]),
            op.source,
            op.name_stack,
        )
        for op in ops
    )


@dataclass(frozen=True, kw_only=True)
class Precomputed:
    """The hoisted part of a step: computes further inputs of the step from its inputs.

    Attributes:
        program: the ops to run once per step.
        leaves: for each input of `program` the number of the step input that it reads.
    """

    program: GraphWithEquations
    leaves: tuple[int, ...]

    def __call__(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Return the further inputs of the step, from its flat arguments followed by captured arrays."""
        return self._compiled(*(inputs[leaf] for leaf in self.leaves))

    @cached_property
    def _compiled(self) -> Callable[..., tuple[Array, ...]]:
        return jax.jit(self.run)

    def run(self, *arrays: jax.Array) -> tuple[Array, ...]:
        """Return the further inputs of the step, from the inputs with numbers `leaves`."""
        return evaluate(self.program.graph, self.program.equations, arrays)


@dataclass(frozen=True, kw_only=True)
class TwoSizes:
    """The programs of a step at two batch sizes, with the same value ids.

    Attributes:
        full: the program at the full batch.
        other: the program at another batch size.
        precomputed: the hoisted part, whose results both programs take as their last inputs; None if there is none.
    """

    full: PartedProgram
    other: PartedProgram
    precomputed: Precomputed | None = None

    @property
    def graph(self) -> Graph:
        """The graph at the full batch."""
        return self.full.graph


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistValues:
    """The pass that hoists values, which depend on inputs of data alone, out of a step without a hoisted part.

    Attributes:
        values: ids of the values to hoist.
        first_leaf: number of the first leaf behind the arguments and the captured arrays; hoisted values follow these.
    """

    values: tuple[int, ...]
    first_leaf: int
    name = "hoist values"

    def apply(self, program: TwoSizes) -> TwoSizes:
        """Return the step that takes the values as further inputs."""
        full = program.full
        alone = without_dead_ops(replace(full.program, graph=replace(full.graph, outputs=self.values)))
        # Other inputs, parameters above all, need not be passed to the hoisted part.
        read = [i for i, v in enumerate(alone.graph.inputs) if alone.graph.consumers[v] or v in alone.graph.outputs]
        inputs = tuple(alone.graph.inputs[i] for i in read)
        precomputed = Precomputed(
            program=replace(alone, graph=replace(alone.graph, inputs=inputs)),
            leaves=tuple(full.input_parts[i].leaf for i in read),
        )
        parts = tuple(LeafPart(leaf=self.first_leaf + i) for i in range(len(self.values)))
        full, other = (_taking(each, self.values, parts) for each in (full, program.other))
        return TwoSizes(full=full, other=other, precomputed=precomputed)


def _taking(parted: PartedProgram, values: Sequence[int], parts: Sequence[LeafPart]) -> PartedProgram:
    """Return the program with some values as its last inputs instead of results of its ops."""
    program, graph = parted.program, parted.graph
    editor = ProgramEditor(graph)
    # An op may have other results that are still needed. It stays, with fresh ids without readers for hoisted results.
    spare = {v: editor.copy(graph, v) for v in values}
    for op in graph.ops:
        editor.emit(op, op.operands, [spare.get(r, r) for r in op.results], program.equations[op.id])
    rest = without_dead_ops(editor.program((*graph.inputs, *values), graph.outputs, program.constants))
    return replace(parted, program=rest, input_parts=(*parted.input_parts, *parts))


def inputs_of_data(graph: Graph, input_parts: Sequence[LeafPart], batch_leaves: Sequence[int | None]) -> frozenset[int]:
    """Return the inputs that may be read before the loop: data, random keys and captured arrays, but no parameters."""
    found = set[int]()
    for v, part in zip(graph.inputs, input_parts, strict=True):
        # Captured arrays come after the arguments; rows of a stacked array are the weights of some layers.
        captured = part.leaf >= len(batch_leaves)
        if part.rows is None and (captured or _is_key(graph.values[v]) or batch_leaves[part.leaf] is not None):
            found.add(v)
    return frozenset(found)


def _is_key(value: Value) -> bool:
    return value.dtype.startswith("key<") or (value.dtype, value.shape) == ("uint32", (2,))
