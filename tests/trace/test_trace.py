"""Tracing: names, shapes and pytrees of arguments; which of them are state and which hold the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite.trace.trace as trace_module
from alpa_lite.errors import BatchError, TraceError
from alpa_lite.trace.call import ArgumentRoles, NamedArguments
from alpa_lite.trace.trace import Traced, match_state, trace

W, X, Y = np.ones((8, 4), np.float32), np.ones((16, 8), np.float32), np.ones((16, 4), np.float32)


def _loss(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ p["w"] - y) ** 2)


def _step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(p, x, y)
    return jax.tree.map(lambda a, g: a - g, p, grads), loss


def _batched(traced: Traced) -> set[str]:
    return {name for name, batched in zip(traced.inputs.names, traced.batch.dims, strict=True) if batched is not None}


# --- leaves and names -------------------------------------------------------------------------------------------------


def test_leaves_are_named_by_argument_and_path() -> None:
    def step(state: Any, batch: Any, *more: Any, rate: Any) -> Any:
        return state

    traced = trace(step, ({"a": [X, {"b": W}]}, (Y,), X), {"rate": 0.1})
    assert traced.inputs.names == ("state/a/0", "state/a/1/b", "batch/0", "argument 2", "rate")
    assert [leaf.shape for leaf in traced.inputs.leaves] == [(16, 8), (8, 4), (16, 4), (16, 8), ()]
    assert traced.name == "step"


def test_structs_arrays_and_numbers_are_equally_good() -> None:
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ({"w": W}, X, Y))
    a, b = trace(_step, ({"w": W}, X, Y)), trace(_step, structs)
    assert a.inputs.leaves == b.inputs.leaves and a.outputs.leaves == b.outputs.leaves and str(a.jaxpr) == str(b.jaxpr)


def test_python_scalars_keep_their_weak_type() -> None:
    traced = trace(lambda x, rate: x.astype(jnp.bfloat16) * rate, (X, 0.5))
    assert traced.inputs.leaves[1].weak_type
    assert traced.outputs.leaves[0].dtype == jnp.bfloat16


def test_static_arguments_are_no_leaves() -> None:
    traced = trace(
        lambda p, kind, x: (p, x if kind == "a" else -x), (W, "a", X), roles=ArgumentRoles(static=NamedArguments((-2,)))
    )
    assert traced.inputs.names == ("p", "x") and traced.call.static == ((1, str, "a"),)


def test_donation_is_known_per_leaf() -> None:
    traced = trace(_step, ({"w": W}, X, Y), roles=ArgumentRoles(donated=NamedArguments((0, -1))))
    assert traced.inputs.donated == (True, False, True)


@pytest.mark.parametrize("bad", ["text", object(), {1, 2}])
def test_what_is_no_array_is_named(bad: Any) -> None:
    with pytest.raises(TraceError, match="static_argnums"):
        trace(lambda p, extra: p, (W, {"deep": bad}))


def test_the_users_exception_comes_through() -> None:
    def step(p: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        trace(step, (W,))


# --- state ------------------------------------------------------------------------------------------------------------


def _aliases(traced: Traced) -> dict[str, str]:
    return {traced.outputs.names[o]: traced.inputs.names[i] for o, i in traced.aliases.items()}


def test_state_is_what_comes_back_with_equal_structure() -> None:
    traced = trace(_step, ({"w": W}, X, Y))
    assert _aliases(traced) == {"0/w": "p/w"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    params: Any
    opt: Any
    count: Any


def test_a_whole_train_state_is_matched_leaf_by_leaf() -> None:
    optimizer = optax.adam(1e-3)

    def step(state: _State, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(state.params, *batch)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        new = _State(params=optax.apply_updates(state.params, updates), opt=opt, count=state.count + 1)
        return {"metrics": {"loss": loss}, "state": new}

    params = {"w": W}
    traced = trace(step, (_State(params=params, opt=optimizer.init(params), count=np.int32(0)), (X, Y)))
    pairs = _aliases(traced)
    assert len(pairs) == 5 and all(out == f"state/{into.removeprefix('state/')}" for out, into in pairs.items())


def test_optimizer_state_and_parameters_of_equal_shape_are_not_mixed_up() -> None:
    def step(p: Any, m: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(p, x, y)
        m = jax.tree.map(lambda a, g: 0.9 * a + g, m, grads)
        return jax.tree.map(lambda a, b: a - b, p, m), m, loss

    traced = trace(step, ({"w": W}, {"w": W}, X, Y))
    assert _aliases(traced) == {"0/w": "p/w", "1/w": "m/w"}


def test_a_lone_array_is_state_only_as_the_first_output() -> None:
    # Elsewhere predictions may be as wide as the inputs by chance.
    assert trace(lambda p, x: (p.sum(), x * 2), (W, X)).aliases == {}
    assert trace(lambda p, x: (p - 1, x * 2), (W, X)).aliases == {0: 0}


def test_state_of_many_arrays_is_matched_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counted(pairs: Any, first: int, count: int) -> bool:
        nonlocal looked
        looked += count
        return any(number in pairs for number in range(first, first + count))

    monkeypatch.setattr(trace_module, "_holds_any", counted)
    num = 500
    arrays = [jax.ShapeDtypeStruct((8, 8), np.float32)] * num
    assert match_state({"p": arrays, "x": arrays[0]}, (arrays, arrays[0])) == {i: i for i in range(num)}
    each = [{"w": array} for array in arrays]
    assert match_state(dict(enumerate(each)), tuple(each)) == {i: i for i in range(num)}
    assert looked < 8 * num


# --- the batch --------------------------------------------------------------------------------------------------------


def test_the_batch_is_what_is_neither_state_nor_key_nor_scalar() -> None:
    def step(p: Any, batch: Any, key: Any, raw: Any, rate: Any) -> Any:
        del key, raw
        return _step(p, batch["x"], batch["y"])[0], rate

    args = {"w": W}, {"x": X, "y": Y}, jax.random.key(0), jax.random.PRNGKey(0), 0.1
    traced = trace(step, args)
    assert _batched(traced) == {"batch/x", "batch/y"} and traced.batch.size == 16


def test_a_batch_in_keywords_is_found_and_can_be_named() -> None:
    step = lambda p, **batch: _step(p, **batch)  # noqa: E731
    for batch_argnums in (None, ("x", "y")):
        traced = trace(step, ({"w": W},), {"x": X, "y": Y}, batch_argnums=batch_argnums)
        assert _batched(traced) == {"x", "y"} and traced.batch.size == 16


def test_naming_the_batch_settles_what_shapes_leave_open() -> None:
    table = np.ones((16, 4), np.float32)
    step = lambda p, table, x, y: (_step(p, x, y)[0], table.sum())  # noqa: E731
    open_question = trace(step, ({"w": W}, table, X, Y))
    assert _batched(open_question) == {"table", "x", "y"}
    settled = trace(step, ({"w": W}, table, X, Y), batch_argnums=(2, -1))
    assert _batched(settled) == {"x", "y"}


def test_arguments_that_disagree_leave_the_batch_unknown() -> None:
    traced = trace(lambda p, x, y: p, ({"w": W}, X, Y[:8]))
    assert traced.batch.size is None and set(traced.batch.dims) == {None}
    with pytest.raises(BatchError, match=r"x \[16, 8\], y \[8, 4\].*batch_argnums"):
        traced.require_batch()


def test_an_empty_batch_is_no_batch() -> None:
    assert trace(lambda p, x: (p, x.sum()), ({"w": W}, X[:0])).batch.size is None


def test_other_batch_sizes_are_traced_without_the_array() -> None:
    traced = trace(_step, ({"w": W}, X, Y))
    small = traced.at_batch_size(4)
    assert [v.shape for v in small.in_avals] == [(8, 4), (4, 8), (4, 4)]
    assert traced.at_batch_size(4) is small and traced.at_batch_size(16) is traced.jaxpr


def test_the_batch_of_a_static_step_shifts_with_its_position() -> None:
    traced = trace(
        lambda kind, p, x, y: _step(p, x, y),
        ("a", {"w": W}, X, Y),
        roles=ArgumentRoles(static=NamedArguments((0,))),
        batch_argnums=(2, 3),
    )
    assert _batched(traced) == {"x", "y"}


def test_the_batch_of_a_function_that_returns_no_argument_is_what_outputs_lead_with() -> None:
    params = {"w": W, "v": W.T}
    assert _batched(trace(lambda p, x, y: (x @ p["w"] - y).sum(), (params, X, Y))) == {"x", "y"}
    alone = trace(lambda w, x: x @ w, (W, X))
    assert _batched(alone) == {"x"} and alone.batch.size == 16
    square = np.ones((8, 8), np.float32)
    same_shape = trace(lambda params, x: x @ params[0] @ params[1], ([square, square], X))
    assert _batched(same_shape) == {"x"}  # though x comes back in its shape, as state would
    lone = trace(lambda w, x, y: (w - jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w), 0.0), (W, X, Y))
    assert _batched(lone) == {"x", "y"}
    search = trace(lambda w, x, y: (w - 0.1 * (x @ w - y).mean(), 0.0), (W, X, Y))
    assert _batched(search) == {"x", "y"}  # without a gradient; at another size of w it cannot run
    tried = trace(lambda w, x: (x @ w).sum(), (W, X))
    assert _batched(tried) == {"x"}  # at another size of w alone it cannot run
    unclear = trace(lambda x, y: (x * x).sum() + (y * y).sum(), (X, Y[:4]))
    assert unclear.batch.size is None and "batch_argnums" in unclear.batch.problem
