"""Broken graphs are found; whole ones pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import VerificationError
from alpa_lite.program.ir import Graph, verify
from alpa_lite.trace.from_jaxpr import from_jaxpr


@pytest.fixture(scope="module")
def graph() -> Graph:
    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
        return jnp.sum(y * 2.0)

    return from_jaxpr(jax.make_jaxpr(loop)(jnp.ones((4, 4)), jnp.ones((2, 4))), ["w", "x"]).graph


def test_a_traced_graph_is_well_formed(graph: Graph):
    assert verify(graph) is graph


def test_ops_in_the_wrong_order_are_found(graph: Graph):
    swapped = [replace(op, id=i) for i, op in enumerate(reversed(graph.ops))]
    with pytest.raises(VerificationError, match="before they are made"):
        verify(replace(graph, ops=tuple(swapped)))


def test_a_value_made_twice_is_found(graph: Graph):
    last = graph.ops[-1]
    again = replace(last, id=len(graph.ops))
    with pytest.raises(VerificationError, match="exist already"):
        verify(replace(graph, ops=(*graph.ops, again)))


def test_a_lost_output_is_found(graph: Graph):
    with pytest.raises(VerificationError, match="never made"):
        verify(replace(graph, ops=graph.ops[:-1]))


def test_numbers_must_be_dense(graph: Graph):
    with pytest.raises(VerificationError, match="has the number"):
        verify(replace(graph, ops=graph.ops[1:]))


def test_a_broken_loop_body_is_found(graph: Graph):
    number = next(op.id for op in graph.ops if op.primitive == "scan")
    body = graph.ops[number].bodies[0]
    broken = replace(graph.ops[number], bodies=(replace(body, ops=body.ops[:-1]),))
    with pytest.raises(VerificationError, match="never made"):
        verify(replace(graph, ops=(*graph.ops[:number], broken, *graph.ops[number + 1 :])))
