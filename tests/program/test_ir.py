"""Values, ops and graphs."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.plan.pricing import price_classes
from alpa_lite.program.ir import Graph, Op, Value, item_bytes
from alpa_lite.program.memo import memoized
from alpa_lite.rules.op_info import free_values
from alpa_lite.trace.from_jaxpr import from_jaxpr


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float64", 8),
        ("bool", 1),
        ("int4", 1),
        ("uint8", 1),
        ("float8_e4m3fn", 1),
        ("complex64", 8),
        ("float0", 0),
        ("key<fry>", 8),
        ("key<rbg>", 16),
        ("key<urbg>", 16),
        ("key<fry4>", 16),
        ("key<phx2>", 4),
    ],
)
def test_bytes_per_element(dtype: str, size: int) -> None:
    assert item_bytes(dtype) == size


def _graph() -> Graph:
    values = tuple(Value(id=i, shape=(4, 2), dtype="float32") for i in range(4))
    body = Graph(
        values=values[:2],
        ops=(Op(id=0, primitive="sin", operands=(0,), results=(1,), params={}),),
        inputs=(0,),
        outputs=(1,),
    )
    ops = (
        Op(id=0, primitive="mul", operands=(0, 0), results=(2,), params={}),
        Op(id=1, primitive="scan", operands=(2, 1), results=(3,), params={"length": 3}, bodies=(body,)),
    )
    return Graph(values=values, ops=ops, inputs=(0, 1), outputs=(3, 2))


def test_producers_and_consumers() -> None:
    graph = _graph()
    assert graph.producer == (None, None, 0, 1)
    assert graph.consumers == ((0,), (1,), (1,), ())
    assert [v.id for v in graph.operands(graph.ops[1])] == [2, 1]
    assert [v.id for v in graph.results(graph.ops[1])] == [3]


def test_walks_visit_bodies_after_their_op() -> None:
    assert [op.primitive for _, op in _graph().walk()] == ["mul", "scan", "sin"]


def test_sizes_of_values() -> None:
    value = Value(id=3, shape=(4, 2), dtype="bfloat16")
    assert (value.rank, value.num_elements, value.bytes, value.is_float) == (2, 8, 16, True)
    assert not Value(id=0, shape=(), dtype="int32").is_float
    assert not Value(id=0, shape=(3,), dtype="float0").is_float


def test_values_print_readably() -> None:
    assert str(Value(id=3, shape=(4, 2), dtype="float32")) == "%3:float32[4,2]"
    assert str(Value(id=3, shape=(), dtype="float32", literal=0.5)) == "0.5:float32"


def test_graphs_compare_by_identity() -> None:
    assert _graph() != _graph()
    assert len({_graph(), _graph()}) == 2


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
