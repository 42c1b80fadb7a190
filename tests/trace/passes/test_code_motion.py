"""Masks and positions are made inside the loops that read them: the same numbers, smaller loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite import _jax
from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import Graph, Op, verify
from alpa_lite.rules.op_info import free_values
from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.passes.code_motion import SinkFreeValues
from alpa_lite.trace.passes.split_stacked import PartedProgram
from tests.end_to_end.cases import PLANNERS, assert_same, eager_cluster

LAYERS, BATCH, SEQ, WIDTH = 3, 16, 8, 4
_rng = np.random.default_rng(0)
W = (0.5 * _rng.normal(size=(LAYERS, WIDTH, WIDTH))).astype(np.float32)
X = _rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)


def sink_free_values(program: GraphWithEquations) -> GraphWithEquations:
    """The program after the pass."""
    return SinkFreeValues().apply(PartedProgram.of(program)).program


def _layer(x: Any, w: Any) -> tuple[Any, None]:
    visible = jnp.tril(jnp.ones((SEQ, SEQ), bool))
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    return x + jax.nn.softmax(jnp.where(visible, scores, -1e9)) @ x, None


def _loss(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(_layer, x, w)[0] ** 2)


def train_step(w: Any, x: Any) -> Any:
    """JAX makes the mask in front of both loops, forward and backward."""
    loss, grad = jax.value_and_grad(_loss)(w, x)
    return w - 0.1 * grad, loss


def nested(w: Any, x: Any) -> Any:
    """The mask of the outermost program is read two loops below."""
    visible, positions = jnp.tril(jnp.ones((SEQ, SEQ))), jnp.cos(jnp.arange(SEQ * 1.0))

    def inner(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(visible @ x @ w + positions[:, None]), None

    return lax.scan(lambda x, _: (lax.scan(inner, x * positions[:, None], w)[0], jnp.sum(x)), x, None, length=2)


def handed_out(w: Any, x: Any) -> Any:
    """A loop may hand out what it was given, or read it alone."""
    table = jnp.arange(SEQ * 1.0)[:, None] + jnp.arange(WIDTH * 1.0)
    return lax.scan(lambda x, w: (jnp.tanh(x @ w + table), table), x, w)


def twice(w: Any, x: Any) -> Any:
    """One mask under two names, as a function is called that reads two."""
    visible = jnp.tril(jnp.ones((SEQ, SEQ)))

    @jax.jit
    def run(left: Any, right: Any, x: Any, w: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(left @ x @ w) + right @ x, None), x, w)[0]

    return run(visible, visible, x, w)


def evaluate(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> list[Any]:
    """Run the equations in order, loops trip by trip on their graphs."""
    values = {v.id: np.asarray(v.literal, jnp.dtype(v.dtype)) for v in graph.values if v.literal is not None}
    values |= dict(zip(graph.inputs, inputs, strict=True))
    for op, equation in zip(graph.ops, equations, strict=True):
        operands = [values[v] for v in op.operands]
        if op.primitive == "scan":
            results = run_loop(op, equation, operands)
        else:
            results = _jax.bind(equation.primitive, dict(equation.params), operands)
        values.update(zip(op.results, results, strict=True))
    return [values[v] for v in graph.outputs]


def run_loop(op: Op, equation: Equation, operands: Sequence[Any]) -> list[Any]:
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    fixed, carried, scanned = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    trips, rows = range(op.params["length"]), list[list[Any]]()
    for trip in reversed(trips) if op.params["reverse"] else trips:
        made = evaluate(op.bodies[0], equation.bodies[0], [*fixed, *carried, *(x[trip] for x in scanned)])
        carried = made[:carries]
        rows.append(made[carries:])
    rows = rows[::-1] if op.params["reverse"] else rows
    return [*carried, *map(np.stack, zip(*rows, strict=True))]


PROGRAMS = (train_step, nested, handed_out, twice)


def program_of(function: Callable[..., Any]) -> GraphWithEquations:
    return from_jaxpr(jax.make_jaxpr(function)(W, X), ["w", "x"])


def loops(graph: Graph) -> list[tuple[Graph, Op]]:
    return [(g, op) for g, op in graph.walk() if op.primitive == "scan"]


def free_bytes(graph: Graph) -> int:
    """What loops take in, although they could make it."""
    return sum(g.values[v].bytes for g, op in loops(graph) for v in set(op.operands) & free_values(g))


@pytest.mark.parametrize("function", PROGRAMS)
def test_loops_make_their_free_values(function: Callable[..., Any]) -> None:
    before = program_of(function)
    after = sink_free_values(before)
    verify(after.graph)
    assert free_bytes(before.graph) > 0
    assert free_bytes(after.graph) == (4 * SEQ * SEQ if function is twice else 0)
    assert len(loops(after.graph)) == len(loops(before.graph))
    for (_, old), (_, new) in zip(loops(before.graph), loops(after.graph), strict=True):
        assert new.results and len(new.operands) <= len(old.operands)
        assert new.params["num_consts"] == len(new.operands) - (len(old.operands) - old.params["num_consts"])
    for got, want in zip(evaluate(after.graph, after.equations, [W, X]), jax.tree.leaves(function(W, X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_depends_on_arrays_stays_where_it_is() -> None:
    program = program_of(lambda w, x: lax.scan(lambda y, v: (jnp.tanh(y @ v + x[0]), None), x, w)[0])
    assert sink_free_values(program) is not program
    (loop,) = (op for _, op in loops(sink_free_values(program).graph))
    assert loop.params["num_consts"] == 1


def with_scalars(w: Any, key: Any, rate: Any, x: Any) -> Any:
    """One mask for all trips, a table that a rate scales, and a vector of a sum over weights: all hang on scalars."""
    kept = jax.random.bernoulli(jax.random.split(key)[1], 0.8, (SEQ, WIDTH))
    table = jnp.exp(-rate * jnp.arange(SEQ * 1.0))[:, None]

    def loss(w: Any) -> Any:
        shift = jnp.broadcast_to(jnp.mean(w), (WIDTH,))
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w + shift) * kept + table, None), x, w)[0] ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


SCALARS = jax.random.key(3), jnp.float32(0.5)


def test_what_depends_on_scalars_stays_outside() -> None:
    jaxpr = jax.make_jaxpr(with_scalars)(W, *SCALARS, X)
    after = sink_free_values(from_jaxpr(jaxpr, ["w", "key", "rate", "x"]))
    verify(after.graph)
    assert free_bytes(after.graph) > 0


@pytest.mark.parametrize(
    ("planner", "num_microbatches"),
    [("fsdp", 1), ("megatron", 4), ("pipeline_2", 4), ("data_parallel", 2), ("auto", 1)],
)
def test_what_depends_on_scalars_computes_what_jit_computes(planner: str, num_microbatches: int, devices: Any) -> None:
    step = al.parallelize(
        with_scalars, cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    assert_same(step(W, *SCALARS, X), jax.jit(with_scalars)(W, *SCALARS, X))


def test_programs_without_loops_stay_the_same_object() -> None:
    program = program_of(lambda w, x: jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), x @ x.transpose(0, 2, 1), 0.0))
    assert sink_free_values(program) is program


@pytest.mark.parametrize(("planner", "num_microbatches"), [("fsdp", 1), ("megatron", 4), ("data_parallel", 2)])
def test_sunk_masks_compute_what_jit_computes(planner: str, num_microbatches: int, devices: Any) -> None:
    step = al.parallelize(
        train_step, cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    assert_same(step(W, X), jax.jit(train_step)(W, X))


def test_nested_loops_compute_what_jit_computes(devices: Any) -> None:
    step = al.parallelize(nested, cluster=eager_cluster(), planner=PLANNERS["auto"], num_microbatches=1)
    assert_same(step(W, X), jax.jit(nested)(W, X))
