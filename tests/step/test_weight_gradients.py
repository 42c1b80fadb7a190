"""The part of a stage's backward pass that nothing waits for."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_lite.program.phases import Phase, StepGraph, weight_gradient_ops
from alpa_lite.trace.trace import trace
from tests.step.splitting import split_step

WIDTH = 8


def _step(depth: int) -> StepGraph:
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return [w - g for w, g in zip(params, grads, strict=True)], value

    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return split_step(trace(step, ([shape] * depth, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32))), 2).step


def _backward_products(step: StepGraph) -> list[int]:
    return [op.id for op in step.graph.ops if op.primitive == "dot_general" and step.phases[op.id] is Phase.BACKWARD]


def _reach(step: StepGraph, op: int, inside: frozenset[int]) -> bool:
    """Whether anything in the loop outside of a set of ops reads what an op makes, through ops of the set."""
    for result in step.graph.ops[op].results:
        for reader in step.graph.consumers[result]:
            if not step.phases[reader].in_loop:
                continue
            if reader not in inside or _reach(step, reader, inside):
                return True
    return False


def test_of_a_middle_stage_the_products_with_weights_are_awaited_and_those_for_weights_are_not() -> None:
    step = _step(3)
    backward = [op.id for op in step.graph.ops if step.phases[op.id] is Phase.BACKWARD]
    # The backward pass goes from the last layer to the first: the middle layer's gradient of its input comes after
    # the last layer's, and is read by the first layer's backward ops.
    products = _backward_products(step)
    assert len(products) == 5  # two for each layer but the first, whose input needs no gradient
    borders = [op for op in backward if step.graph.ops[op].primitive == "dot_general"]
    middle = [op for op in backward if borders[1] < op <= borders[3]]
    weights = weight_gradient_ops(step, middle)
    assert weights and weights < set(middle)
    for op in middle:
        assert (op in weights) != _reach(step, op, frozenset(middle))


def test_nothing_of_the_first_stage_is_awaited_and_forward_ops_have_no_part() -> None:
    step = _step(2)
    everything = range(len(step.graph.ops))
    backward = {op for op in everything if step.phases[op] is Phase.BACKWARD}
    assert weight_gradient_ops(step, everything) == backward
    assert weight_gradient_ops(step, [op for op in everything if op not in backward]) == frozenset()
