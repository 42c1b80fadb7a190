"""What recomputations and loops wait for: the backward pass so far; recomputations not for what was just made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.awaited import awaited_result, awaited_values
from alpa_lite.trace.from_jaxpr import from_jaxpr

NUM_LAYERS, WIDTH = 5, 16


def graph_of(function: Any, *shapes: tuple[int, ...]) -> Graph:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return from_jaxpr(jax.make_jaxpr(function)(*avals), [""] * len(shapes)).graph


@pytest.mark.parametrize(
    ("function", "position"),
    [
        (jnp.sin, 0),
        (lambda x: lax.top_k(x, 2), 0),
        (lambda x: lax.sort((x > 0, x), num_keys=1), 1),
        (lambda x: x > 0, None),
        (lambda x: jnp.argmax(x, axis=1), None),
        (lambda x: lax.slice(x, (0, 0), (4, 0)), None),
        (lambda x: x + jnp.full(x.shape, 2.0) * jnp.zeros(()), 0),
    ],
    ids=("sin", "top_k", "sort", "booleans", "numbers", "empty", "free first"),
)
def test_what_other_values_wait_for_is_of_floating_point_numbers(function: Any, position: int | None) -> None:
    graph = graph_of(function, (4, 6))
    assert awaited_result(graph, graph.ops[-1]) == position
    assert all((awaited_result(graph, op) is None) for op in graph.ops[:-1])


def step(weights: Any, x: Any) -> Any:
    """Written-out layers of two products and a scale each, which are computed again."""

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w["up"]) @ w["down"] * w["scale"]

    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = layer(h, w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def arguments() -> tuple[Any, Any]:
    weights = {"up": jnp.ones((WIDTH, 4 * WIDTH)), "down": jnp.ones((4 * WIDTH, WIDTH)), "scale": jnp.ones(WIDTH)}
    return [weights] * NUM_LAYERS, jnp.ones((8, WIDTH))


@pytest.fixture(scope="module")
def traced() -> StepGraph:
    return al.parallelize(step, batch_argnums=(1,)).trace(*arguments()).step(1).step


def test_recomputations_wait_for_the_gradients_of_the_layer_before_the_last(traced: StepGraph) -> None:
    """The first of a layer for what the layer above it handed on, and for all gradients of the one above that."""
    graph = traced.graph
    awaited = awaited_values(traced, range(len(graph.ops)))
    gradients = [v for _, v in sorted((graph.producer[v] or 0, v) for v in _gradients(traced))]
    assert len(gradients) == 3 * NUM_LAYERS
    per_layer = [set(gradients[3 * i : 3 * i + 3]) for i in range(NUM_LAYERS)]
    older = [set(values[1:]) for values in awaited.values() if len(values) > 1]
    assert older == per_layer[: NUM_LAYERS - 2]
    for op_id, values in awaited.items():
        producers = [graph.producer[v] for v in values]
        assert all(p is not None and p < op_id and traced.phases[p] is Phase.BACKWARD for p in producers)
        assert producers[0] == max(p for p in producers if p is not None)


def _gradients(traced: StepGraph) -> set[int]:
    """Values that the backward pass makes for the update."""
    graph = traced.graph
    return {
        v
        for op in graph.ops
        for v in op.results
        if traced.phases[op.id] is Phase.BACKWARD
        and graph.consumers[v]
        and all(traced.phases[c] is Phase.UPDATE for c in graph.consumers[v])
    }


def looped(weights: Any, x: Any) -> Any:
    """Two loops of layers, one of them of two outputs per trip, between products, with the loss."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), jnp.sum(h, axis=1)

    def loss(weights: Any) -> Any:
        first, second, between, head = weights
        h = lax.scan(layer, x, first)[0] @ between
        h, rows = lax.scan(jax.checkpoint(layer), h, second)
        return jnp.mean(h @ head) + jnp.mean(rows)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), value


def test_loops_wait_for_all_that_was_made_before_them() -> None:
    stack, matrix = jnp.ones((NUM_LAYERS, WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH))
    arguments = (stack, stack, matrix, matrix), jnp.ones((8, WIDTH))
    made = al.parallelize(looped, batch_argnums=(1,)).trace(*arguments).step(1).step
    graph = made.graph
    loops = [op.id for op in graph.ops if op.bodies and made.phases[op.id] is Phase.BACKWARD]
    awaited = awaited_values(made, range(len(graph.ops)))
    assert sorted(awaited) == loops and len(loops) == 2
    gradients = [v for v in _gradients(made) if graph.values[v].shape == (WIDTH, WIDTH)]
    sums = [v for op in graph.ops if op.primitive == "reduce_sum" for v in op.results]
    of_head, of_between = sorted(gradients, key=lambda v: graph.producer[v] or 0)
    # Before the loop that runs first, the gradient of the head and the parts of the loss wait to be read.
    for loop, others in zip(loops, ([*sums, of_head], [of_between]), strict=True):
        latest, *unread = awaited[loop]
        assert unread == others
        # What the product before the loop hands on to it.
        assert latest in graph.ops[loop].operands and graph.producer[latest] == loop - 1
