"""Values that two programs share, found where ops were put in, left out, or written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.program.ir import Graph
from alpa_lite.trace.alignment import align
from alpa_lite.trace.from_jaxpr import from_jaxpr


def _graph(fun: Callable[..., Any]) -> Graph:
    x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    return from_jaxpr(jax.make_jaxpr(fun)(x, x), ["x", "y"]).graph


def _block(x: Any, y: Any, detour: Callable[[Any], Any]) -> Any:
    h = jnp.sin(x) * y
    return jnp.cos(detour(h)) + jnp.exp(y)


def _made(graph: Graph, primitive: str) -> list[int]:
    return [r for op in graph.ops if op.primitive == primitive for r in op.results]


def _aligned(one: Graph, other: Graph) -> dict[int, int]:
    return align(one, other, dict(zip(one.inputs, other.inputs, strict=True)))[one][1]


def test_a_program_is_the_same_as_itself() -> None:
    graph = _graph(lambda x, y: _block(x, y, jnp.tanh))
    same = _aligned(graph, graph)
    assert same == {v: v for v in same} and set(_made(graph, "add")) <= set(same)


def test_ops_that_one_program_has_alone_are_skipped() -> None:
    plain, longer = _graph(lambda x, y: _block(x, y, lambda h: h)), _graph(lambda x, y: _block(x, y, jnp.tanh))
    for one, other in ((plain, longer), (longer, plain)):
        same = _aligned(one, other)
        for primitive in ("sin", "mul", "exp"):
            assert [same[v] for v in _made(one, primitive)] == _made(other, primitive)
        assert not {same.get(v) for v in _made(one, "tanh")} - {None}


def test_values_that_differ_are_not_paired() -> None:
    one = _graph(lambda x, y: (jnp.sin(x), jnp.sin(y)))
    other = _graph(lambda x, y: (jnp.sin(y),))
    same, (first, second), (only,) = _aligned(one, other), _made(one, "sin"), _made(other, "sin")
    assert same.get(first) != only and same.get(second, only) == only


def test_bodies_of_loops_are_gone_through_where_they_hand_on_other_values() -> None:
    def loop(x: Any, y: Any, detour: Callable[[Any], Any]) -> Any:
        def trip(h: Any, row: Any) -> Any:
            new = _block(h, row, detour)
            return new, (new, detour(new))

        return jax.lax.scan(trip, x, jnp.stack([y, y]))

    one, other = (_graph(lambda x, y, f=f: loop(x, y, f)) for f in (lambda h: h[0], lambda h: jnp.tanh(h)[0]))
    found = align(one, other, dict(zip(one.inputs, other.inputs, strict=True)))
    ((body, (inner, same)),) = [item for item in found.items() if item[0] is not one]
    for primitive in ("sin", "mul", "exp"):
        assert [same[v] for v in _made(body, primitive)] == _made(inner, primitive)
    scans = [next(op for op in g.ops if op.primitive == "scan") for g in (one, other)]
    assert found[one][1][scans[0].results[0]] == scans[1].results[0]
