"""Sink constants that cost nothing to make into the loops that read them.

JAX hoists what a loop body computes from constants alone (masks, positions) out of the loop, which then reads whole
arrays. `sink_free_values` undoes this: inside the body, such a value needs no sharding of its own, is never
communicated, and is fused with its readers. XLA does the same ("while loop constant sinking").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.program.equations import Equation, GraphWithEquations, without_dead_ops
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.rules.op_info import free_values, op_class


def sink_free_values(program: GraphWithEquations) -> GraphWithEquations:
    """Return the program in which scans, at any depth, make the constant free values that they read.

    Free values are those that cost nothing to compute (`alpa_lite.rules.op_info.free_values`).
    """
    return _sunk_program(program, {})


_Memo = dict[tuple[object, ...], GraphWithEquations]
"""Rewritten bodies by original body, sunk inputs and their recipe, so that loops that share a body still share one."""


def _sunk_program(program: GraphWithEquations, memo: _Memo) -> GraphWithEquations:
    """Return a graph with equations whose scans are rewritten, memoized in `memo`."""
    graph = program.graph
    if not any(op.primitive == "scan" for op in graph.ops):
        return program
    pairs = [_sunk(graph, program.equations, op, memo) for op in graph.ops]
    ops, equations = tuple(op for op, _ in pairs), tuple(equation for _, equation in pairs)
    made = Graph(values=graph.values, ops=ops, inputs=graph.inputs, outputs=graph.outputs)
    return without_dead_ops(replace(program, graph=made, equations=equations))


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
        made, front = body, tuple(equations[o.id] for o in needed)
        if sunk:
            inputs = tuple(v for i, v in enumerate(body.inputs) if i not in sunk)
            made = _with_ops_in_front(graph, needed, into, body, inputs)
        memo[key] = _sunk_program(GraphWithEquations(graph=made, equations=(*front, *inner)), memo)
    below = memo[key]
    if not sunk and below.graph is body:
        return op, equation
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
    return [graph.ops[number] for number in sorted(found)]


def _recipe(graph: Graph, equations: Sequence[Equation], ops: Sequence[Op], into: dict[int, int]) -> tuple[object, ...]:
    """Return a key that is equal for op sequences that compute the same values, wherever they stand in the graph."""
    number = {v: -1 - slot for v, slot in into.items()}

    def local(v: int) -> int:
        return number.setdefault(v, len(number))

    return tuple(
        (
            op_class(graph, op.id),
            _ById(equations[op.id].params),
            tuple(map(local, op.operands)),
            tuple(map(local, op.results)),
            op.source,
            op.name_stack,
        )
        for op in ops
    )


class _ById:
    """A hashable stand-in for an object, compared by identity.

    The reference keeps the id of the object from being reused.
    """

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _with_ops_in_front(
    graph: Graph, ops: Sequence[Op], into: dict[int, int], body: Graph, inputs: tuple[int, ...]
) -> Graph:
    """Return a body preceded by ops of the enclosing graph, which make some of its former inputs.

    Args:
        graph: the enclosing graph.
        ops: its ops to copy, in order.
        into: value id in `graph` → the value id in `body` that was the input.
        body: the body to extend.
        inputs: the inputs that remain.
    """
    values = list(body.values)
    number = dict(into)

    def local(v: int) -> int:
        if v not in number:
            number[v] = len(values)
            values.append(replace(graph.values[v], id=len(values), name=""))
        return number[v]

    moved = [
        replace(op, id=i, operands=tuple(map(local, op.operands)), results=tuple(map(local, op.results)))
        for i, op in enumerate(ops)
    ]
    rest = [replace(op, id=len(ops) + i) for i, op in enumerate(body.ops)]
    named: list[Value] = [replace(v, name="") if v.id in into.values() else v for v in values]
    return Graph(values=tuple(named), ops=(*moved, *rest), inputs=inputs, outputs=body.outputs)
