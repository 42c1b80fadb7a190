"""Running a graph on whole arrays, op by op: what is computed before a step's loop, and the reference in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph
from alpa_lite.program.wiring import wiring_of
from alpa_lite.trace.local_control_flow import run_control_flow


def evaluate(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a graph, from its inputs."""
    values = all_values(graph, equations, inputs)
    return tuple(values[v] for v in graph.outputs)


def all_values(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> dict[int, Any]:
    """Every value of a graph, from its inputs."""
    values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    values |= {v.id: np.asarray(v.literal, jax.numpy.dtype(v.dtype)) for v in graph.values if v.literal is not None}
    for op, equation in zip(graph.ops, equations, strict=True):
        operands, wiring = [values[v] for v in op.operands], wiring_of(op)
        if wiring is None:
            results = _jax.bind(equation.primitive, dict(equation.params), operands)
        else:

            def body(
                number: int,
                arrays: Mapping[int, Any],
                bodies: Sequence[Graph] = op.bodies,
                inner: Sequence[Sequence[Equation]] = equation.bodies,
                places: Sequence[Sequence[int]] = wiring.inputs,
                outside: Sequence[Any] = operands,
            ) -> tuple[Any, ...]:
                entering = [arrays.get(i, outside[i]) for i in places[number]]
                outputs = evaluate(bodies[number], inner[number], entering)
                return tuple(jax.numpy.asarray(x) for x in outputs)

            results = run_control_flow(op, wiring, body, operands)
        values.update(zip(op.results, results, strict=True))
    return values
