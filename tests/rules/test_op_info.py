"""Ops that look alike are one class, in all graphs; what a rule or a price could tell apart is not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.plan.pricing import price_classes
from alpa_lite.program.ir import Graph
from alpa_lite.rules.op_info import op_class, rule_of_op
from alpa_lite.trace.from_jaxpr import from_jaxpr


def graph_of(function: Any, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Graph:
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return from_jaxpr(jax.make_jaxpr(function)(*avals), [""] * len(shapes)).graph


def test_ops_that_look_alike_share_their_rule() -> None:
    first = graph_of(lambda x: jnp.sin(jnp.sin(x)) * 2.0, (4, 6))
    second = graph_of(lambda x, y: jnp.sin(x + y), (4, 6), (4, 6))
    assert op_class(first, 0) is op_class(first, 1) is op_class(second, 1)
    assert rule_of_op(first, 0) is rule_of_op(second, 1)


@pytest.mark.parametrize(
    "other",
    [
        graph_of(lambda x: jnp.cos(x), (4, 6)),
        graph_of(lambda x: x + 1.0, (4, 6)),
        graph_of(lambda x: x + 2.0, (4, 7)),
        graph_of(lambda x: x + 2.0, (4, 6), dtype=jnp.bfloat16),
        graph_of(lambda x: x + x, (4, 6)),
    ],
    ids=("primitive", "number", "shape", "dtype", "operand"),
)
def test_what_differs_is_another_class(other: Graph) -> None:
    assert op_class(graph_of(lambda x: x + 2.0, (4, 6)), 0) is not op_class(other, 0)


def test_parameters_count() -> None:
    rows, columns = (graph_of(lambda x, d=d: jnp.cumsum(x, axis=d), (4, 4)) for d in (0, 1))
    assert op_class(rows, 0) is not op_class(columns, 0)


def test_what_is_written_costs_something_else_than_what_is_fused() -> None:
    graph = graph_of(lambda x: jnp.sin(jnp.sin(x)), (4, 6))
    assert op_class(graph, 0) is op_class(graph, 1)
    first, second = price_classes(graph)
    assert first is not second
