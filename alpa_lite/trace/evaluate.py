"""Run graphs on arrays with JAX: op by op, with JAX control flow around the bodies of loops and branches.

`evaluate` runs a graph on whole arrays: it computes the hoisted part of a step, and is the reference in tests. Lowering
uses `run_control_flow` alone, on the local blocks of a device. There every device takes the same branch and the same
number of trips, because predicates are replicated; collectives inside the bodies therefore match across devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite._jax import Array
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph, Op, Wiring, is_one_trip_loop, wiring_of

Arrays = tuple[Any, ...]
"""The values that a loop carries: arrays on devices, or on the host before the first trip."""

Body = Callable[[int, Mapping[int, Any]], tuple[jax.Array, ...]]
"""A function that runs body `number`; the mapping replaces operands, by number, with their values in this trip."""


def run_control_flow(op: Op, wiring: Wiring, body: Body, operands: Sequence[Array]) -> list[jax.Array]:
    """Return the results of a control-flow op (`scan`, `while`, `cond`) on operands; `body` runs one of its bodies."""
    if op.primitive == "scan":
        return _scan(op, wiring, body, operands)
    if op.primitive == "while":
        return _while(wiring, body, operands)
    # `partial` binds the number now: a closure would run the last branch in all places.
    branches = [partial(lambda number, *_: body(number, {}), number) for number in range(len(op.bodies))]
    return list(lax.switch(operands[0], branches))


def _scan(op: Op, wiring: Wiring, body: Body, operands: Sequence[Array]) -> list[jax.Array]:
    """Run a scan with JAX's own, whose carry and rows are the carried and scanned operands."""
    carried, scanned = list(wiring.carried.values()), sorted(wiring.scanned)
    if is_one_trip_loop(op):
        # As XLA removes the loop. Written out, what its body waits for may be made outside of it.
        rows = {i: lax.index_in_dim(operands[i], 0, keepdims=False) for i in scanned}
        outputs = body(0, {**{i: operands[i] for i in carried}, **rows})
        return [*outputs[: len(carried)], *(lax.expand_dims(x, (0,)) for x in outputs[len(carried) :])]

    def trip(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        # The results of a scan body are the new carry, followed by one row of each stack.
        outputs = body(0, {**dict(zip(carried, carry, strict=True)), **dict(zip(scanned, slices, strict=True))})
        return outputs[: len(carried)], outputs[len(carried) :]

    last, stacks = lax.scan(
        trip,
        tuple(operands[i] for i in carried),
        tuple(operands[i] for i in scanned),
        length=op.params["length"],
        reverse=op.params["reverse"],
        unroll=op.params["unroll"],
    )
    return [*last, *stacks]


def _while(wiring: Wiring, body: Body, operands: Sequence[Array]) -> list[jax.Array]:
    """Run a `while` loop; body 0 is its condition, body 1 its trip."""
    carried = list(wiring.carried.values())

    def goes_on(carry: Arrays) -> jax.Array:
        return body(0, dict(zip(carried, carry, strict=True)))[0]

    def trip(carry: Arrays) -> Arrays:
        return body(1, dict(zip(carried, carry, strict=True)))

    return list(lax.while_loop(goes_on, trip, tuple(operands[i] for i in carried)))


def evaluate(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Return the outputs of a graph for the given inputs, in order."""
    values = all_values(graph, equations, inputs)
    return tuple(values[v] for v in graph.outputs)


def all_values(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Array]) -> dict[int, Array]:
    """Return every value of a graph by its id, for the given inputs."""
    values: dict[int, Array] = dict(zip(graph.inputs, inputs, strict=True))
    # `jax.numpy.dtype` knows bfloat16 and the 8-bit floats by name, and NumPy does not.
    values |= {v.id: np.asarray(v.literal, jax.numpy.dtype(v.dtype)) for v in graph.values if v.literal is not None}
    for op, equation in zip(graph.ops, equations, strict=True):
        operands, wiring = [values[v] for v in op.operands], wiring_of(op)
        if wiring is None:
            results = _jax.bind(equation.primitive, dict(equation.params), operands)
        else:
            results = run_control_flow(op, wiring, _body_on_arrays(op, equation, wiring, operands), operands)
        values.update(zip(op.results, results, strict=True))
    return values


def _body_on_arrays(op: Op, equation: Equation, wiring: Wiring, operands: Sequence[Array]) -> Body:
    """Return a function that evaluates a body of a control-flow op."""

    def body(number: int, arrays: Mapping[int, Array]) -> tuple[jax.Array, ...]:
        entering = [arrays.get(i, operands[i]) for i in wiring.inputs[number]]
        outputs = evaluate(op.bodies[number], equation.bodies[number], entering)
        # JAX's control flow accepts no NumPy arrays among the results of its bodies.
        return tuple(jax.numpy.asarray(x) for x in outputs)

    return body
