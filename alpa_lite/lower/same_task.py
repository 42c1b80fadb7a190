"""When two tasks are the same program, so that one executable does for both: equal layers of a pipeline mostly are.

    form(task) = (ports, ops, results), values numbered as they come up                           `task_form`

The form holds all that `emit_task` reads: of each op its primitive, the equation's parameters, its operands and
results, its placement, phase and rule; of each value its shape, dtype, batch dim, size in the full batch and the phase
that makes it; literals by content. It holds no numbers of the traced graph, no names and no source lines. Two tasks of
equal forms on logical meshes of one shape are traced and lowered once.

What has no content to compare (functions among the parameters) counts as the same only where it is one object.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.lower.slices import Port, TaskSpec
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.wiring import wiring_of
from alpa_lite.rules.op_info import free_values, op_classes


def task_form(
    task: TaskSpec,
    step: StepGraph,
    equations: Sequence[Equation],
    placements: Mapping[int, OpPlacement],
    sizes: Mapping[str, int],
    donated: Sequence[int],
) -> Hashable:
    """What equals that of another task exactly when both are the same program; see the module docstring."""
    form = _Form(step, equations, placements)
    inputs = tuple([(form.fresh(p.value), p.spec) for p in task.inputs])
    for op_id in task.ops:
        form.add(step.graph.ops[op_id])
    resolved = tuple([(form.number(value), stored, wanted) for value, stored, wanted in task.resolved])
    buckets = tuple([tuple([form.number(value) for value in bucket]) for bucket in task.buckets])
    ports = (inputs, form.ports(task.outputs), form.ports(task.sums), resolved, buckets)
    return tuple(sizes.items()), step.num_microbatches, tuple(donated), task.keeps_gathered, ports, tuple(form.ops)


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object without content to compare; it is kept, so that no other comes to lie in its place."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Form:
    """Numbers the values of a task in the order in which they come up."""

    def __init__(self, step: StepGraph, equations: Sequence[Equation], placements: Mapping[int, OpPlacement]) -> None:
        self.step, self.graph = step, step.graph
        self.equations, self.placements = equations, placements
        self.free, self.classes = free_values(step.graph), op_classes(step.graph)
        self.numbers: dict[int, int] = {}
        self.added: set[int] = set()
        self.ops: list[Hashable] = []

    def ports(self, ports: Sequence[Port]) -> Hashable:
        """Values that leave the task, with their specs."""
        return tuple([(self.number(p.value), p.spec, self.step.combined.get(p.value)) for p in ports])

    def fresh(self, v: int) -> Hashable:
        """What is known of a value that comes up for the first time."""
        self.numbers[v] = len(self.numbers)
        value, producer = self.graph.values[v], self.graph.producer[v]
        phase = None if producer is None else self.step.phases[producer]
        free = v in self.free
        return value.shape, value.dtype, free, phase, self.step.batch_dims[v], self.step.full_shapes[v]

    def number(self, v: int) -> Hashable:
        """How the form speaks of a value; free ones that no op of the task made come up with the op that does."""
        value = self.graph.values[v]
        if value.literal is not None:
            return value.dtype, value.shape, content(value.literal)
        producer = self.graph.producer[v]
        if v not in self.numbers and producer is not None:
            self.add(self.graph.ops[producer])
        return self.numbers[v]

    def add(self, op: Op) -> None:
        """One more op, after those that it needs."""
        if op.id in self.added:
            return
        self.added.add(op.id)
        operands = tuple([self.number(v) for v in op.operands])
        results = tuple([self.fresh(v) for v in op.results])
        once = tuple([v in op.once for v in op.operands])
        facts = (self.step.phases[op.id], once, op.own_columns, op.effectful)
        placement = self.placements.get(op.id)
        placed = None if placement is None else _placed(placement)
        equation = self.equations[op.id]
        # Classes of control flow are not shared, and nothing reads their rule.
        kind = None if op.bodies else self.classes[op.id]
        bodies = tuple(
            [_body(b, e, self.step) for b, e in zip(op.bodies, equation.bodies, strict=True)] if op.bodies else ()
        )
        self.ops.append((op.primitive, _params(op, equation), operands, results, facts, placed, kind, bodies))


def _params(op: Op, equation: Equation) -> Hashable:
    """The parameters that lowering reads: of loops and branches their plain ones, as their bodies are looked at."""
    return content(op.params if wiring_of(op) is not None else equation.params)


def _placed(placement: OpPlacement) -> Hashable:
    bodies = tuple([tuple([(i, _placed(p)) for i, p in sorted(body.items())]) for body in placement.bodies])
    return placement.factors, placement.partial, placement.results, bodies, placement.body_operands


def _body(graph: Graph, equations: Sequence[Equation], step: StepGraph) -> Hashable:
    """A body of control flow, whose numbers are its own."""
    scope = step.bodies.get(graph)
    scoped = None if scope is None else (scope.full_shapes, scope.batch_dims)
    values = tuple([(v.shape, v.dtype, content(v.literal)) for v in graph.values])
    ops = tuple(
        [
            (
                op.primitive,
                _params(op, equation),
                op.operands,
                op.results,
                op.effectful,
                op.once,
                op.own_columns,
                tuple([_body(b, e, step) for b, e in zip(op.bodies, equation.bodies, strict=True)]),
            )
            for op, equation in zip(graph.ops, equations, strict=True)
        ]
    )
    return values, graph.inputs, graph.outputs, ops, scoped


def content(value: Any) -> Hashable:
    """Something hashable that is equal for equal content, and only there; numbers of two types are not equal."""
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple([content(item) for item in value])
    if isinstance(value, Mapping):
        return "mapping", tuple([(key, content(value[key])) for key in sorted(value, key=str)])
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), value.tobytes()
    if value is None or isinstance(value, (str, bytes, enum.Enum)):
        return value
    try:
        hash(value)
    except TypeError:
        return _Object(value)
    return type(value), value
