"""Answers are asked for once, and die with what they are about."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp

from alpa_lite.plan.pricing import price_classes
from alpa_lite.program.memo import memoized
from alpa_lite.rules.op_info import free_values
from alpa_lite.trace.from_jaxpr import from_jaxpr


class Subject:
    """Anything with a `__dict__`."""


def test_equal_questions_are_asked_once() -> None:
    asked: list[tuple[int, int]] = []

    @memoized
    def answer(subject: Subject, number: int, *, option: int = 0) -> int:
        asked.append((number, option))
        return number + option

    one, other = Subject(), Subject()
    found = [answer(one, 1), answer(one, 1), answer(one, 1, option=2), answer(one, 2), answer(other, 1)]
    assert found == [1, 1, 3, 2, 1]
    assert asked == [(1, 0), (1, 2), (2, 0), (1, 0)]


def test_graphs_that_facts_were_found_of_are_let_go() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ y), x)

    graph = from_jaxpr(jax.make_jaxpr(step)(jnp.ones((4, 4))), ["x"]).graph
    for inner in {inner for inner, _ in graph.walk()}:
        price_classes(inner)
        free_values(inner)
    graphs = [weakref.ref(inner) for inner, _ in graph.walk()]
    del graph, inner
    gc.collect()
    assert all(graph() is None for graph in graphs)
