"""From a jaxpr to a graph, checked by running the graph's equations one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_lite import _jax
from alpa_lite.program.equations import GraphWithEquations
from alpa_lite.program.ir import Graph
from alpa_lite.trace.from_jaxpr import from_jaxpr
from tests.end_to_end.cases import MODELS, make_batch
from tests.end_to_end.programs import PROGRAMS


def _convert(fun: Any, *args: Any, num_parts: int = 0) -> GraphWithEquations:
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *flat: fun(*jax.tree.unflatten(tree, flat)))(*leaves)
    return from_jaxpr(closed, [f"leaf {i}" for i in range(len(leaves))], num_parts=num_parts)


def evaluate(program: GraphWithEquations, inputs: Sequence[Any]) -> list[Any]:
    """Run the equations of a graph in order."""
    graph = program.graph
    values = {v.id: np.asarray(v.literal, jnp.dtype(v.dtype)) for v in graph.values if v.literal is not None}
    values |= dict(zip(graph.inputs, [*inputs, *program.constants], strict=True))
    for op, equation in zip(graph.ops, program.equations, strict=True):
        results = _jax.bind(equation.primitive, dict(equation.params), [values[v] for v in op.operands])
        values.update(zip(op.results, results, strict=True))
    return [values[v] for v in graph.outputs]


def assert_well_formed(graph: Graph) -> None:
    """Dense numbers, single assignment, nothing read before it is written, bodies too."""
    assert [v.id for v in graph.values] == list(range(len(graph.values)))
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    known = set(graph.inputs) | {v.id for v in graph.values if v.literal is not None}
    for op in graph.ops:
        assert set(op.operands) <= known, op
        assert known.isdisjoint(op.results), op
        known.update(op.results)
        for body in op.bodies:
            assert_well_formed(body)
    assert set(graph.outputs) <= known


@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_of_all_programs_compute_what_the_function_computes(name: str) -> None:
    program = PROGRAMS[name]
    converted = _convert(program.step, *program.args)
    assert_well_formed(converted.graph)
    got = evaluate(converted, jax.tree.leaves(program.args))
    for a, b in zip(got, jax.tree.leaves(jax.jit(program.step)(*program.args)), strict=True):
        assert np.shape(a) == b.shape and np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_parts", [0, 128])
def test_loops_over_layers_can_be_written_out(num_parts: int) -> None:
    model = MODELS["gpt_scan"]
    args = model.init(jax.random.key(0)), make_batch(model, 0)
    step = jax.value_and_grad(model.loss_fn)
    converted = _convert(step, *args, num_parts=num_parts)
    assert_well_formed(converted.graph)
    assert ("scan" in {op.primitive for op in converted.graph.ops}) != bool(num_parts)
    got = jax.jit(lambda *leaves: evaluate(converted, leaves))(*jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_long_loops_and_loops_without_contractions_stay_loops() -> None:
    w = jnp.ones((4, 4))
    count = lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]  # noqa: E731
    long = lambda x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=1000)[0]  # noqa: E731
    for fun in (count, long):
        assert [op.primitive for op in _convert(fun, w, num_parts=128).graph.ops] == ["scan"]


@pytest.mark.parametrize(("num_parts", "loops"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (7, 0), (12, 0)])
@pytest.mark.parametrize("reverse", [False, True])
def test_loops_in_parts_keep_the_order_of_scanned_values(reverse: bool, num_parts: int, loops: int) -> None:
    w = np.arange(16, dtype=np.float32).reshape(4, 4) / 16

    def fun(c: Any, xs: Any) -> Any:
        body = lambda c, x: (jnp.tanh(c @ w + x), (c, x * 2))  # noqa: E731
        return jax.lax.scan(body, c, xs, reverse=reverse)

    args = np.ones((4, 4), np.float32), np.arange(48, dtype=np.float32).reshape(12, 4)
    converted = _convert(fun, *args, num_parts=num_parts)
    assert_well_formed(converted.graph)
    lengths = [op.params["length"] for op in converted.graph.ops if op.primitive == "scan"]
    assert len(lengths) == loops and sum(lengths) in (0, 12)
    assert not loops or max(lengths) - min(lengths) == (12 % loops > 0)
    got = evaluate(converted, args)
    for a, b in zip(got, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        assert np.allclose(a, b, rtol=1e-6)


def test_the_backward_loop_reads_what_the_forward_loop_saved_part_by_part() -> None:
    """Nothing that only the parts hand to each other is put together."""

    def loss(ws: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0])

    args = np.ones((6, 4, 4), np.float32), np.ones((2, 4), np.float32)
    ops = [op.primitive for op in _convert(jax.grad(loss), *args, num_parts=3).graph.ops]
    # The weights are read by parts in both passes, and their gradients put together.
    assert ops.count("scan") == 6 and ops.count("slice") <= 6 and ops.count("concatenate") == 1


@pytest.mark.parametrize(("num_parts", "loops"), [(2, 2), (3, 3)])
def test_sums_of_what_all_trips_share_begin_anew_in_each_part(num_parts: int, loops: int) -> None:
    """A gradient that went from part to part would be a sum over the batch that a loop over samples takes in."""

    def loss(w: Any, xs: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs)[0])

    args = np.eye(4, dtype=np.float32) / 2, np.arange(48, dtype=np.float32).reshape(6, 2, 4) / 48
    converted = _convert(jax.grad(loss), *args, num_parts=num_parts)
    graph = converted.graph
    assert_well_formed(graph)
    backward = [op for op in graph.ops if op.primitive == "scan" and "transpose(" in op.name_stack]
    made = {v for op in backward for v in op.results if graph.values[v].shape == (4, 4)}
    assert len(backward) == len(made) == loops
    assert not made & {v for op in backward for v in op.operands}
    (got,) = evaluate(converted, args)
    assert np.allclose(got, jax.jit(jax.grad(loss))(*args), rtol=1e-5)


def test_lines_are_those_that_call_a_library() -> None:
    layer, optimizer = nn.Dense(8), optax.adam(1e-3)
    params = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((4, 8)))
    state = jax.eval_shape(optimizer.init, params)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: layer.apply(params, x).sum())(params)
        return optimizer.update(grads, state, params)

    closed = jax.make_jaxpr(step)(params, state, jnp.ones((4, 8)))
    graph = from_jaxpr(closed, [f"leaf {i}" for i in range(len(closed.in_avals))]).graph
    lines = {op.source.rpartition(" ")[2] for op in graph.ops if op.source}
    assert {op.source.rpartition("/")[2].partition(":")[0] for op in graph.ops if op.source} == {"test_from_jaxpr.py"}
    here = "test_lines_are_those_that_call_a_library.<locals>.step"
    assert lines == {f"({here})", f"({here}.<locals>.<lambda>)"}


def test_calls_are_inlined_and_keep_their_source_lines() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jax.nn.gelu(x) * 2

    graph = _convert(lambda x: inner(inner(x)), np.ones(3, np.float32)).graph
    assert not {op.primitive for op in graph.ops} & {"jit", "pjit", "custom_jvp_call"}
    assert all("test_from_jaxpr.py" in op.source for op in graph.ops)


def test_name_stacks_are_paths_down_the_nesting() -> None:
    def loss(x: Any) -> Any:
        with jax.named_scope("outer"):
            return jnp.sum(jax.jit(jnp.sin)(x) ** 2)

    graph = _convert(jax.grad(loss), np.ones(3, np.float32)).graph
    stacks = {op.name_stack for op in graph.ops}
    assert any("transpose(jvp(outer))" in s for s in stacks) and any(s.startswith("jvp(outer)") for s in stacks)


def test_recomputed_regions_sit_behind_barriers() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w)))(x))

    graph = _convert(jax.grad(loss), np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)).graph
    assert sum(op.primitive == "optimization_barrier" for op in graph.ops) >= 1


def test_dead_equations_go() -> None:
    def fun(x: Any) -> Any:
        jnp.sin(x) @ jnp.ones((3, 3))
        return x + 1

    assert [op.primitive for op in _convert(fun, np.ones(3, np.float32)).graph.ops] == ["add"]


def test_captured_arrays_become_inputs_and_scalars_literals() -> None:
    table = np.arange(3, dtype=np.float32)
    converted = _convert(lambda x: jax.jit(lambda y: y * table)(x) + 2.5, np.ones(3, np.float32))
    assert len(converted.graph.inputs) == 2 and np.array_equal(converted.constants[0], table)
    assert [v.literal for v in converted.graph.values if v.literal is not None] == [2.5]


def test_constant_outputs_are_arrays() -> None:
    converted = _convert(lambda x: (x, 1.5, True, np.arange(2)), np.ones(3, np.float32))
    got = evaluate(converted, [np.ones(3, np.float32)])
    assert [np.asarray(a).tolist() for a in got] == [[1.0] * 3, 1.5, True, [0, 1]]


def test_loops_keep_their_bodies_and_trip_counts() -> None:
    w = np.ones((4, 4), np.float32)
    fun = lambda c: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), c, None, length=7)[0]  # noqa: E731
    graph = _convert(fun, w).graph
    (scan,) = graph.ops
    assert scan.params["length"] == 7
    assert [op.primitive for op in scan.bodies[0].ops] == ["dot_general", "sin"]
    # The array that the body captured is a constant of the loop.
    assert scan.params["num_consts"] == 1 and len(graph.inputs) == 2


def test_parameters_are_plain_data() -> None:
    graph = _convert(
        lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ()))), np.ones((2, 3)), np.ones((3, 2))
    ).graph
    params = graph.ops[0].params
    assert params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    assert repr(sorted(params))  # nothing in it needs JAX to print


def test_weak_and_strong_types_make_the_same_graph() -> None:
    """A weak type that becomes a strong one is no op; a number is rounded to its dtype."""

    def average(ema: Any, x: Any) -> Any:
        return 0.9 * ema + 0.1 * x

    graphs = [
        from_jaxpr(
            jax.make_jaxpr(average)(jax.ShapeDtypeStruct((), jnp.float32, weak_type=weak), jnp.ones(3)), ("e", "x")
        )
        for weak in (True, False)
    ]
    weak, strong = ([(op.primitive, op.operands, op.results) for op in found.graph.ops] for found in graphs)
    assert weak == strong
    assert [v.literal for v in graphs[0].graph.values] == [v.literal for v in graphs[1].graph.values]
