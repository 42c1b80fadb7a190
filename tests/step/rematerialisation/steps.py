"""Steps that are computed again in the tests, and an evaluator of steps that knows nothing of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph, wiring_of
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.recomputation import Remat
from alpa_lite.step.rematerialisation import LayeredStep, rematerialise
from alpa_lite.step.split import TracedStep
from alpa_lite.trace.evaluate import run_control_flow
from alpa_lite.trace.trace import Traced, trace
from tests.end_to_end.cases import MODELS, Training, make_batch
from tests.step.splitting import split_step

ROWS, COLUMNS, WIDE = 16, 8, 32


def blocks(num_layers: int, *, scan: bool, own: bool = False) -> Traced:
    """A step of blocks h → tanh(h up) down; `own`: the user recomputes each."""

    def block(h: Any, weights: Any) -> Any:
        up, down = weights
        return jnp.tanh(h @ up) @ down

    again = jax.checkpoint(block) if own else block

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            if scan:
                h, _ = lax.scan(lambda h, w: (again(h, w), None), x, weights)
            else:
                h = x
                for w in zip(*weights, strict=True):
                    h = again(h, w)
            return jnp.sum(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    def f32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    if scan:
        weights: Any = f32(num_layers, COLUMNS, WIDE), f32(num_layers, WIDE, COLUMNS)
    else:
        weights = [f32(COLUMNS, WIDE)] * num_layers, [f32(WIDE, COLUMNS)] * num_layers
    return trace(step, (weights, f32(ROWS, COLUMNS)), batch_argnums=(1,))


@cache
def traced_model(model: str, loop_parts: int = 0, num_microbatches: int = 1) -> TracedStep:
    """A step of one of the end-to-end models."""
    training = Training(model=model)
    args = training.start(), make_batch(MODELS[model], 0), jax.random.key(0)
    return split_step(trace(training.step(), args), num_microbatches, loop_parts=loop_parts)


def again(made: TracedStep, policies: Sequence[Remat]) -> LayeredStep:
    """The step in as many layers as there are policies."""
    return rematerialise(made.step, make_layers(made.step, len(policies)).of_op, policies)


def inputs_of(made: TracedStep) -> list[Any]:
    """Random values for the inputs of a step; whole numbers are small, so that they address rows that exist."""
    rng, found = np.random.default_rng(0), list[Any]()
    graph = made.step.graph
    captured = graph.inputs[len(graph.inputs) - len(made.constants) :]
    constants = dict(zip(captured, made.constants, strict=True))
    for v in graph.inputs:
        value = graph.values[v]
        if v in constants:
            found.append(constants[v])
        elif value.dtype.startswith("key<"):
            found.append(jax.random.key(3))
        elif value.is_float:
            found.append(jnp.asarray(0.3 * rng.normal(size=value.shape), value.dtype))
        else:
            found.append(jnp.asarray(rng.integers(0, 8, size=value.shape), value.dtype))
    return found


def evaluated(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a graph, op by op."""
    known: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for value in graph.values:
        if value.literal is not None:
            known[value.id] = jnp.asarray(value.literal, value.dtype)
    for op, equation in zip(graph.ops, equations, strict=True):
        operands = [known[v] for v in op.operands]
        results = _run(op, equation, operands)
        known.update(zip(op.results, results, strict=True))
    return [known[v] for v in graph.outputs]


def _run(op: Any, equation: Equation, operands: list[Any]) -> Sequence[Any]:
    wiring = wiring_of(op)
    if wiring is None:
        return _jax.bind(equation.primitive, dict(equation.params), operands)

    def body(number: int, replaced: Mapping[int, Any]) -> tuple[Any, ...]:
        inputs = [replaced.get(i, operands[i]) for i in wiring.inputs[number]]
        return tuple(evaluated(op.bodies[number], equation.bodies[number], inputs))

    return run_control_flow(op, wiring, body, operands)


def outputs_of(made: TracedStep, changed: LayeredStep | None = None) -> list[Any]:
    """What a step makes of `inputs_of`, as it is or with values that are computed again."""

    if changed is None:
        return evaluated(made.step.graph, made.equations, inputs_of(made))
    equations = changed.equations(made.step.graph, made.equations)
    return evaluated(changed.step.graph, equations, inputs_of(made))
