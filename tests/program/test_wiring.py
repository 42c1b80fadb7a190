"""Loops: what is carried, what is scanned, and what is only added to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite.program.ir import accumulators, wiring_of
from alpa_lite.trace.from_jaxpr import from_jaxpr

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)


def _scan(body: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.scan(body, jnp.zeros(3), x)


def _fori(body: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, x.shape[0] + (x[0, 0] > 0), lambda i, c: body(c, x[i]), jnp.zeros(3))


def _number_of_accumulators(function: Callable[[Any], Any]) -> int:
    graph = from_jaxpr(jax.make_jaxpr(function)(X), ["x"]).graph
    (op,) = [op for op in graph.ops if op.primitive in ("scan", "while")]
    wiring = wiring_of(op)
    assert wiring is not None
    found = accumulators(op, wiring)
    for operand, addition in found.items():
        body = op.bodies[-1]
        assert body.ops[addition].primitive in ("add", "add_any")
        assert body.inputs[wiring.inputs[-1].index(operand)] in body.ops[addition].operands
    return len(found)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        pytest.param(lambda c, row: (c + jnp.sin(row), row), 1, id="added to"),
        pytest.param(lambda c, row: (jnp.sin(row) + c, None), 1, id="from the right"),
        pytest.param(lambda c, row: (c * row, None), 0, id="multiplied"),
        pytest.param(lambda c, row: (c + row, c), 0, id="handed out before"),
        pytest.param(lambda c, row: ((total := c + row), total), 0, id="handed out after"),
        pytest.param(lambda c, row: (c + row * c, None), 0, id="read beside"),
        pytest.param(lambda c, row: (row, None), 0, id="replaced"),
    ],
)
def test_what_a_loop_only_adds_to(body: Callable[[Any, Any], Any], number: int) -> None:
    assert _number_of_accumulators(_scan(body)) == number


def test_the_counter_of_a_while_is_read_by_its_condition() -> None:
    # The counter is added to as well, but decides when the loop ends.
    assert _number_of_accumulators(_fori(lambda c, row: c + row)) == 1
