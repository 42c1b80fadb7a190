"""When two pieces of a program are the same."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.program.identity import FirstUses, SameObject, content, params_texts, structure, value_numbers
from alpa_lite.program.ir import Graph
from alpa_lite.trace.from_jaxpr import from_jaxpr

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)


def graph_of(function: Any, *args: Any) -> Graph:
    """Return the graph of a function of arrays."""
    return from_jaxpr(jax.make_jaxpr(function)(*args), [f"x{i}" for i in range(len(args))]).graph


def looped(factor: float) -> Any:
    return lambda x: lax.scan(lambda c, _: (c * factor, None), x, None, length=3)[0]


def test_structure_tells_apart_what_computes_something_else() -> None:
    functions = {
        "sum": lambda x: jnp.sum(x, axis=0),
        "other axis": lambda x: jnp.sum(x, axis=1),
        "literal": lambda x: x * 2.0,
        "other literal": lambda x: x * 3.0,
        "zero": lambda x: x + 0.0,
        "minus zero": lambda x: x + -0.0,
        "order": lambda x: jnp.sin(jnp.cos(x)),
        "other order": lambda x: jnp.cos(jnp.sin(x)),
        "loop": looped(2.0),
        "other loop": looped(3.0),
    }
    texts = {name: structure(graph_of(function, X)) for name, function in functions.items()}
    assert len(set(texts.values())) == len(functions)
    for name, function in functions.items():
        assert structure(graph_of(function, X)) == texts[name]
    smaller = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert structure(graph_of(looped(2.0), smaller)) != texts["loop"]


def test_texts_of_parameters_are_those_of_each_op() -> None:
    graph = graph_of(lambda x: jnp.transpose(jnp.concatenate([x, x], axis=1)), X)
    assert [eval(text) for text in params_texts(graph)] == [sorted(op.params.items()) for op in graph.ops]


def _equal_by_evaluation(graph: Graph, function: Any, args: list[np.ndarray]) -> dict[int, bytes]:
    """Return the bytes of each value of a graph of ops without bodies, evaluated equation by equation."""
    closed = jax.make_jaxpr(function)(*args)
    found = dict(zip(graph.inputs, (np.asarray(a).tobytes() for a in args), strict=True))
    environment: dict[Any, Any] = dict(zip(closed.jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else environment[v]

    for op, eqn in zip(graph.ops, closed.jaxpr.eqns, strict=True):
        outs = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        environment.update(zip(eqn.outvars, outs, strict=True))
        found.update({r: np.asarray(o).tobytes() for r, o in zip(op.results, outs, strict=True)})
    return found


def test_values_of_one_number_are_equal_and_equal_computations_have_one() -> None:
    def function(x: jax.Array, y: jax.Array) -> Any:
        a, b, c = lax.sin(x), lax.sin(x), lax.sin(y)
        twice = [lax.mul(a, lax.add(b, 2.0)), lax.mul(b, lax.add(a, 2.0)), lax.mul(c, lax.add(a, 2.0))]
        behind = lax.optimization_barrier(a)
        return twice, lax.cos(behind), lax.cos(b), lax.cos(x), lax.sub(x, y), lax.sub(y, x)

    args = [
        np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(4, 3),
        np.linspace(1.1, 2.9, 12, dtype=np.float32).reshape(4, 3),
    ]
    graph = graph_of(function, *args)
    numbers = value_numbers(graph, graph.inputs, FirstUses())
    truth = _equal_by_evaluation(graph, function, args)
    pairs = list(itertools.combinations(truth, 2))
    # In this program, values are equal exactly if they are computed in the same way.
    assert {(v, w) for v, w in pairs if numbers[v] == numbers[w]} == {(v, w) for v, w in pairs if truth[v] == truth[w]}
    assert any(numbers[v] == numbers[w] for v, w in pairs)


def test_functions_among_parameters_have_no_text_so_that_their_ops_are_equal_to_themselves_alone() -> None:
    def function(x: jax.Array) -> Any:
        zero = jnp.float32(0)
        largest = lax.reduce(x, zero, lambda a, b: jnp.maximum(a, b) * 1.0, (0,))
        total = lax.reduce(x, zero, lambda a, b: jnp.logaddexp(a, b), (0,))
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        calls = [jax.pure_callback(f, shape, x) for f in (lambda a: a.sum(), lambda a: a.max())]
        return largest, total, calls

    graph = graph_of(function, X)
    numbers = value_numbers(graph, graph.inputs, FirstUses())
    assert len({numbers[v] for v in graph.outputs}) == 4


def test_numbers_follow_first_use() -> None:
    number = FirstUses[str]()
    assert [number[key] for key in "abacb"] == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        ((1,), [1]),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros((2, 1))),
        ({"a": 1}, {"a": 2}),
        (lambda: 1, lambda: 1),
    ],
)
def test_content_tells_apart(one: object, two: object) -> None:
    assert content(one) != content(two)
    assert content(one) == content(one) and hash(content(one)) == hash(content(one))


def test_content_is_equal_for_equal_content() -> None:
    assert content({"b": [math.nan], "a": np.arange(3)}) == content({"a": np.arange(3), "b": [math.nan]})
    unhashable = set[int]()
    assert content(unhashable) == content(unhashable) == SameObject(unhashable) != content(set[int]())
