"""Recognise tasks that are the same program, so that one executable serves all: most layers of a pipeline are equal.

    form(task) = (ports, ops, results), values numbered in the order of their first use           `task_form`

The form contains everything that `emit_task` reads: for each op its primitive, the equation's parameters, its operands
and results, its placement, phase and rule; for each value its shape, dtype, batch dim, size in the full batch and the
phase that makes it; literals by content. It contains no numbers of the traced graph, no names and no source lines. Two
tasks with equal forms on logical meshes of one shape are traced and lowered once.

Objects without comparable content (functions among the parameters) are equal only if they are the same object.
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
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.op_info import free_values, op_classes


def task_form(
    task: TaskSpec,
    step: StepGraph,
    equations: Sequence[Equation],
    placements: Mapping[int, OpPlacement],
    sizes: Mapping[str, int],
    donated: Sequence[int],
) -> Hashable:
    """Return a hashable form of a task, equal for two tasks exactly if both are the same program (see the module
    docstring).

    `sizes`: size of each mesh axis. `donated`: numbers of the inputs whose buffers may be reused.
    """
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
    """An object compared by identity. It holds a reference, so that no later object can get the same address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Form:
    """Builder of a task's form: numbers the values of the task in the order of their first use."""

    def __init__(self, step: StepGraph, equations: Sequence[Equation], placements: Mapping[int, OpPlacement]) -> None:
        self.step, self.graph = step, step.graph
        self.equations, self.placements = equations, placements
        self.free, self.classes = free_values(step.graph), op_classes(step.graph)
        self.numbers: dict[int, int] = {}
        self.added: set[int] = set()
        self.ops: list[Hashable] = []

    def ports(self, ports: Sequence[Port]) -> Hashable:
        """Return the form of values that leave the task: number, spec and how micro-batches are combined."""
        return tuple([(self.number(p.value), p.spec, self.step.combined.get(p.value)) for p in ports])

    def fresh(self, v: int) -> Hashable:
        """Number a value at its first use and return its properties."""
        self.numbers[v] = len(self.numbers)
        value, producer = self.graph.values[v], self.graph.producer[v]
        phase = None if producer is None else self.step.phases[producer]
        free = v in self.free
        return value.shape, value.dtype, free, phase, self.step.batch_dims[v], self.step.full_shapes[v]

    def number(self, v: int) -> Hashable:
        """Return the form's reference to a value: its number, or the content of a literal.

        Free values that no op of the task has made so far are added together with their op.
        """
        value = self.graph.values[v]
        if value.literal is not None:
            return value.dtype, value.shape, content(value.literal)
        producer = self.graph.producer[v]
        if v not in self.numbers and producer is not None:
            self.add(self.graph.ops[producer])
        return self.numbers[v]

    def add(self, op: Op) -> None:
        """Add an op, after the ops that produce its operands."""
        if op.id in self.added:
            return
        self.added.add(op.id)
        operands = tuple([self.number(v) for v in op.operands])
        results = tuple([self.fresh(v) for v in op.results])
        # Positions instead of value ids, which differ between equal tasks.
        once = tuple([v in op.once for v in op.operands])
        facts = (self.step.phases[op.id], once, op.own_columns, op.effectful)
        placement = self.placements.get(op.id)
        placed = None if placement is None else _placed(placement)
        equation = self.equations[op.id]

        # Two ops in one class share their factor rule, so the class represents the rule in the form.
        kind = None if op.bodies else self.classes[op.id]
        bodies = tuple(
            [_body(b, e, self.step) for b, e in zip(op.bodies, equation.bodies, strict=True)] if op.bodies else ()
        )
        self.ops.append((op.primitive, _params(op, equation), operands, results, facts, placed, kind, bodies))


def _params(op: Op, equation: Equation) -> Hashable:
    """Return the parameters that lowering reads. Bodies of known control flow are compared op by op instead."""
    return content(op.params if wiring_of(op) is not None else equation.params)


def _placed(placement: OpPlacement) -> Hashable:
    """Return a hashable form of a placement, nested bodies included."""
    bodies = tuple([tuple([(i, _placed(p)) for i, p in sorted(body.items())]) for body in placement.bodies])
    return placement.factors, placement.partial, placement.results, bodies, placement.body_operands


def _body(graph: Graph, equations: Sequence[Equation], step: StepGraph) -> Hashable:
    """Return a hashable form of a body of control flow; its value numbers are local, so they need no renumbering."""
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
    """Return a hashable value that is equal only for equal content; numbers of different types are not equal."""
    # repr and not ==: 0.0 == -0.0 and 1 == True, but they compile to different programs; nan is equal to nan here.
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
