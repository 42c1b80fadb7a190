"""The literals of an extrapolated program are those that the code computes at its size, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph
from alpa_lite.trace.extrapolation import at_size
from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.own_numbers import with_own_numbers

W = jnp.ones((4, 5))


def _graph(loss: Callable[..., Any], size: int) -> Any:
    x = jax.ShapeDtypeStruct((size, 4), jnp.float32)
    return from_jaxpr(jax.make_jaxpr(jax.value_and_grad(loss))(W, x), ["w", "x"])


def _with_own(loss: Callable[..., Any], size: int) -> Graph:
    sizes = {n: _graph(loss, n) for n in (8, 4)}
    made, own = at_size(size, sizes).graph, _graph(loss, size).graph
    inputs = dict(zip(own.inputs, made.inputs, strict=True))
    return with_own_numbers(made, own, inputs, (sizes[4].graph, sizes[8].graph))


def _picked(w: Any, x: Any) -> Any:
    h = x @ w
    h = h - h.mean(0)
    return jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h), jnp.argmax(h, 1)[:, None], 1)) * 7.0 ** -x.shape[0]


def _scanned(w: Any, x: Any) -> Any:
    def layer(h: Any, row: Any) -> Any:
        return jnp.tanh(h - h.mean(0)) @ row, jnp.sum(h) * 7.0 ** -x.shape[0]

    return jnp.sum(jax.lax.scan(layer, x, jnp.stack([jnp.eye(4)] * 3) * w[0, 0])[1])


def _literals(graph: Graph) -> list[Any]:
    inner = [number for op in graph.ops for body in op.bodies for number in _literals(body)]
    return inner + [v.literal for v in graph.values if v.literal is not None]


@pytest.mark.parametrize("loss", [_picked, _scanned])
@pytest.mark.parametrize("size", [1, 2])
def test_literals_are_those_of_the_traced_program(loss: Any, size: int) -> None:
    found = _literals(_with_own(loss, size))
    numbers = [n for n in found if isinstance(n, float)]
    assert any(abs(n - 7.0**-size) < 1e-6 for n in numbers)
    assert not any(abs(n - 7.0**-other) < 1e-6 * 7.0**-other for n in numbers for other in (4, 8))


def test_jax_writes_another_program_for_one_sample() -> None:
    """What the matching of ops is for."""
    ops = [[op.primitive for op in _graph(_picked, size).graph.ops] for size in (1, 2, 4)]
    assert ops[1] == ops[2] != ops[0]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w, x: _picked(w, jnp.sin(x) if x.shape[0] == 1 else x), "(cos|sin) differs"),
        (lambda w, x: _picked(w, x) if x.shape[0] > 1 else jnp.max(x @ w), "differs in the program"),
        (lambda w, x: _picked(w, x) * w[0 if x.shape[0] == 1 else 3, 0], "slice differs"),
    ],
)
def test_code_that_is_another_at_this_size_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        _with_own(loss, 1)
    assert _with_own(loss, 2)
