"""Phases of a step: by JAX's marks and the data flow, and by the data flow alone where there are no marks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite import _jax
from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.phases import (
    Phase,
    StepGraph,
    assign_phases,
    batch_dims,
    check_same_structure,
    forward_or_backward,
    with_own_bodies,
)
from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.trace import trace
from tests.end_to_end.cases import MODELS as ZOO
from tests.end_to_end.cases import Training, make_batch
from tests.end_to_end.programs import PARAMS, X, Y, descend, squared
from tests.step.splitting import split_step


def _step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    return descend(p, grads), loss


def _split(fun: Any, args: Any, num_microbatches: int = 1) -> StepGraph:
    return split_step(trace(fun, args), num_microbatches).step


def _gpt_args(model: str, **changes: Any) -> tuple[Any, Any]:
    training = Training(model=model, **changes)
    return training.step(), (training.start(), make_batch(ZOO[model], 0), jax.random.key(0))


# --- batch dims -------------------------------------------------------------------------------------------------------


def _graph_of(fun: Any, *args: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(fun)(*args), [f"leaf {i}" for i in range(len(args))]).graph


def test_the_dim_that_differs_holds_the_batch() -> None:
    fun = lambda x, w: ((x @ w).T, jnp.sum(x), x.reshape(-1))  # noqa: E731
    full, small = (_graph_of(fun, jnp.ones((n, 3)), jnp.ones((3, 5))) for n in (8, 2))
    dims = batch_dims(full, small)
    assert [dims[v] for v in full.inputs] == [0, None]
    assert [dims[v] for v in full.outputs] == [1, None, 0]


def test_programs_of_different_structure_are_told_apart() -> None:
    full, small = _graph_of(jnp.sin, jnp.ones(8)), _graph_of(lambda x: jnp.sin(jnp.cos(x)), jnp.ones(2))
    with pytest.raises(TraceError, match="changes with its batch size"):
        check_same_structure(full, small)


def test_bodies_of_its_own_for_each_loop() -> None:
    rows = jax.jit(lambda x: jax.lax.scan(lambda c, r: (c + r, None), 0.0, x)[0])
    graph = _graph_of(lambda x: rows(x) + rows(x), jnp.ones(3))
    first, second = (op.bodies[0] for op in graph.ops if op.bodies)
    own, other = (op.bodies[0] for op in with_own_bodies(graph).ops if op.bodies)
    assert first is second
    assert own is not other
    assert own.ops == first.ops


# --- phases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("model", ["mlp", "gpt", "gpt_scan", "gpt_remat", "cnn"])
def test_phases_follow_each_other(model: str, num_microbatches: int) -> None:
    step = _split(*_gpt_args(model, optimizer="adamw+clip"), num_microbatches)
    order = {Phase.INVARIANT: 0, Phase.FORWARD: 1, Phase.BACKWARD: 2, Phase.UPDATE: 3}
    graph = step.graph
    for op in graph.ops:
        for v in op.operands:
            producer = graph.producer[v]
            if producer is not None:
                assert order[step.phases[producer]] <= order[step.phases[op.id]], op
    assert set(step.phases) >= {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_phases_of_an_mlp_are_those_of_the_textbook(num_microbatches: int) -> None:
    step = _split(_step, (PARAMS, X, Y), num_microbatches)
    products = [step.phases[op.id] for op in step.graph.ops if op.primitive == "dot_general"]
    # Three forward products; two for each layer in the backward pass but the first, whose input needs no gradient.
    assert products == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 5
    updates = [op.primitive for op in step.graph.ops if step.phases[op.id] is Phase.UPDATE]
    assert Counter(updates)["sub"] == 3


@pytest.fixture
def no_name_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax, "name_stack", lambda eqn: "")


@pytest.mark.usefixtures("no_name_stacks")
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_without_marks_the_data_flow_gives_the_same_phases_of_an_mlp(num_microbatches: int) -> None:
    blank = _split(_step, (PARAMS, X, Y), num_microbatches)
    assert all(op.name_stack == "" for op in blank.graph.ops)
    products = [blank.phases[op.id] for op in blank.graph.ops if op.primitive == "dot_general"]
    assert products.count(Phase.BACKWARD) in (5, 6) and products[:2] == [Phase.FORWARD] * 2
    assert Counter(blank.phases)[Phase.UPDATE] == Counter(_split(_step, (PARAMS, X, Y), 4).phases)[Phase.UPDATE]


@pytest.mark.usefixtures("no_name_stacks")
@pytest.mark.parametrize("model", ["gpt", "gpt_scan", "gpt_remat", "cnn"])
def test_without_marks_no_forward_op_follows_a_backward_one(model: str) -> None:
    step = _split(*_gpt_args(model), 4)
    backward: set[int] = set()
    for op in step.graph.ops:
        if step.phases[op.id] is Phase.FORWARD:
            assert backward.isdisjoint(op.operands)
        if step.phases[op.id] is Phase.BACKWARD:
            backward.update(op.results)
    assert backward


def test_a_vjp_by_hand_is_cut_alike() -> None:
    def by_hand(p: Any, x: Any, y: Any) -> Any:
        loss, pull = jax.vjp(lambda p: squared(p, x, y), p)
        return descend(p, pull(jnp.float32(1))[0]), loss

    a, b = _split(by_hand, (PARAMS, X, Y), 4), _split(_step, (PARAMS, X, Y), 4)
    count = lambda step: Counter((op.primitive, step.phases[op.id]) for op in step.graph.ops)  # noqa: E731
    assert count(a) == count(b)


def test_a_step_whose_batch_is_unknown_is_cut_by_its_marks() -> None:
    step = _split(lambda p, x, y: _step(p, x, y[:8].repeat(2, 0)), (PARAMS, X, np.ones((24, 4), np.float32)))
    assert step.batch.size is None
    assert set(step.phases) >= {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}


def test_a_step_without_gradients_has_a_forward_pass_alone() -> None:
    step = split_step(trace(lambda p, x: x @ p["w1"], (PARAMS, X), batch_argnums=1), 4).step
    assert set(step.phases) == {Phase.FORWARD}


# --- hand-made graphs -------------------------------------------------------------------------------------------------


def _hand_made(*ops: tuple[str, tuple[int, ...], int, str], num_inputs: int) -> Graph:
    """Ops as (primitive, operands, result, name stack)."""
    count = max(result for _, _, result, _ in ops) + 1
    return Graph(
        values=tuple(Value(id=i, shape=(4,), dtype="float32") for i in range(count)),
        ops=tuple(
            Op(id=i, primitive=p, operands=o, results=(r,), params={}, name_stack=s)
            for i, (p, o, r, s) in enumerate(ops)
        ),
        inputs=tuple(range(num_inputs)),
        outputs=(count - 1,),
    )


def test_marks_decide_and_the_data_flow_corrects_them() -> None:
    graph = _hand_made(
        ("mul", (0, 1), 2, "jvp()"),
        ("sin", (2,), 3, "jvp()"),
        ("mul", (3, 1), 4, "transpose(jvp())"),
        ("neg", (4,), 5, ""),  # reads a cotangent: backward, whatever its mark
        ("add", (5, 3), 6, "jvp()"),
        num_inputs=2,
    )
    found = forward_or_backward(graph, set(range(5)))
    assert [found[i] for i in range(5)] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 3


def test_an_op_between_backward_ones_hands_the_mark_on() -> None:
    graph = _hand_made(
        ("mul", (0, 1), 2, "jvp()"),
        ("mul", (2, 1), 3, "transpose(jvp())"),
        ("neg", (3,), 4, ""),  # outside the loop
        ("mul", (4, 2), 5, ""),
        num_inputs=2,
    )
    found = forward_or_backward(graph, {0, 1, 3})
    assert found == {0: Phase.FORWARD, 1: Phase.BACKWARD, 3: Phase.BACKWARD}


def test_what_the_loop_reaches_is_update_and_the_rest_invariant() -> None:
    graph = _hand_made(
        ("sin", (1,), 2, ""),
        ("mul", (0, 2), 3, "jvp()"),
        ("mul", (3, 1), 4, "transpose(jvp())"),
        ("sub", (1, 4), 5, ""),
        ("add", (5, 2), 6, ""),
        num_inputs=2,
    )
    expected = (Phase.INVARIANT, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.UPDATE)
    assert assign_phases(graph, {1, 2}) == expected
