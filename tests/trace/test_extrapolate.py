"""The program of one sample from those of larger batches: it computes what JAX computes of one, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite import _jax
from alpa_lite.errors import TraceError
from alpa_lite.program.equations import GraphWithEquations
from alpa_lite.trace.extrapolation import at_size
from alpa_lite.trace.from_jaxpr import from_jaxpr

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)


def _program(fun: Callable[..., Any], size: int) -> GraphWithEquations:
    x = jax.ShapeDtypeStruct((size, 3, 4), jnp.float32)
    return from_jaxpr(jax.make_jaxpr(fun)(W, x), ["w", "x"])


def _at_one(fun: Callable[..., Any], sizes: tuple[int, ...] = (2, 3, 7)) -> GraphWithEquations:
    return at_size(1, {size: _program(fun, size) for size in sizes})


def _run(program: GraphWithEquations, *arrays: Any) -> list[Any]:
    graph = program.graph
    known: dict[int, Any] = {v.id: np.asarray(v.literal, v.dtype) for v in graph.values if v.literal is not None}
    known |= dict(zip(graph.inputs, [*arrays, *program.constants], strict=True))
    for op, equation in zip(graph.ops, program.equations, strict=True):
        results = _jax.bind(equation.primitive, dict(equation.params), [known[v] for v in op.operands])
        known.update(zip(op.results, results, strict=True))
    return [known[v] for v in graph.outputs]


def _log_softmax(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jax.nn.log_softmax(x @ w)[..., 0]))(w)


FUNCTIONS = {
    "log_softmax": _log_softmax,
    "indexed": lambda w, x: jnp.take_along_axis(x @ w, jnp.argmax(x, axis=-1, keepdims=True), axis=-1),
    "flattened": lambda w, x: (x.reshape(-1, 4) @ w).reshape(x.shape[0], -1).T,
    "padded": lambda w, x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))) @ w,
    "several_rows_per_sample": lambda w, x: jnp.repeat(x, 3, axis=0) @ w,
    "drawn": lambda w, x: x * jax.random.uniform(jax.random.key(0), x.shape),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_program_of_one_sample_computes_what_jax_computes(name: str) -> None:
    fun, x = FUNCTIONS[name], jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 4)), jnp.float32)
    (got,), want = _run(_at_one(fun), W, x), fun(W, x)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_jax_writes_another_program_for_one_sample() -> None:
    """What the extrapolation is for: were it not so, this module could go."""
    primitives = [[op.primitive for op in _program(_log_softmax, size).graph.ops] for size in (1, 2, 3)]
    assert primitives[1] == primitives[2] != primitives[0]


def test_bodies_are_extrapolated_too() -> None:
    def scanned(w: Any, x: Any) -> Any:
        start = jnp.zeros((x.shape[0], 5))
        return jax.lax.scan(lambda h, row: (jnp.tanh(h + row @ w), h), start, jnp.swapaxes(x, 0, 1))

    (op,) = [op for op in _at_one(scanned).graph.ops if op.primitive == "scan"]
    shapes = {v.shape for v in op.bodies[0].values}
    assert (1, 4) in shapes and (1, 5) in shapes and not any(n in (2, 3, 7) for shape in shapes for n in shape)


def test_loops_over_samples_run_once() -> None:
    program = _at_one(lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x))
    (scan,) = [i for i, op in enumerate(program.graph.ops) if op.primitive == "scan"]
    assert program.graph.ops[scan].params["length"] == program.equations[scan].params["length"] == 1


COLUMNS = {
    "a column": lambda w, x: x @ w[:, x.shape[0] % 5][:, None],
    "columns of samples": lambda w, x: (x @ w)[:, 1:, x.shape[0] % 5 : x.shape[0] % 5 + 1],
    "a power": lambda w, x: jax.lax.integer_pow(x @ w, x.shape[0]),
    "a window": lambda w, x: jax.lax.dynamic_slice(x @ w, (0, 0, x.shape[0] % 3), (x.shape[0], 3, 2)),
    "padding": lambda w, x: jnp.pad(x @ w, ((0, 0), (x.shape[0] % 3, 2 - x.shape[0] % 3), (0, 0))),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_what_shapes_do_not_imply_is_that_of_the_full_batch(name: str) -> None:
    fun, x = COLUMNS[name], jnp.asarray(np.random.default_rng(1).normal(size=(8, 3, 4)), jnp.float32)
    (want,) = _run(_program(fun, 8), W, x)
    for size in (1, 2, 4):
        made = at_size(size, {n: _program(fun, n) for n in (8, 4)}, full=8)
        for first in range(0, 8, size):
            rows = x[first : first + size]
            np.testing.assert_allclose(_run(made, W, rows)[0], want[first : first + size], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (lambda w, x: jnp.zeros(x.shape[0] ** 2) + jnp.sum(x), r"at batches of 2, 3, 7 samples, .* no affine function"),
        (lambda w, x: x[: x.shape[0] // 2] @ w, "no affine function of the batch size"),
        (lambda w, x: jnp.zeros(x.shape[0] // 5 + 4) + jnp.sum(x), "no affine function of the batch size"),
        (lambda w, x: jnp.ones(3 * x.shape[0] - 5) * w[0, 0], r"would be \[-2\] at one sample"),
        (lambda w, x: jnp.sin(x) if x.shape[0] == 3 else jnp.cos(x), "The step changes with its batch size"),
        (lambda w, x: x.astype("bfloat16" if x.shape[0] == 7 else "float16"), "different kinds of arrays"),
        (lambda w, x: x @ w * jax.lax.reduce_precision(w[0, 0], 8, x.shape[0] ** 2), "no affine function"),
    ],
)
def test_what_is_not_known_at_one_sample_is_refused(fun: Callable[..., Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        _at_one(fun)


def test_callbacks_that_differ_from_size_to_size_are_refused() -> None:
    def called(w: Any, x: Any) -> Any:
        out = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(lambda a: np.float32(a.sum()), out, x)

    with pytest.raises(TraceError, match=r"pure_callback .* known at these sizes alone"):
        _at_one(called)
