"""Stacked arrays in parts: the same numbers, cut where loops over layers read them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_lite.cli.models.train import with_master_weights
from alpa_lite.program.ir import verify
from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.passes.split_stacked import PartedProgram, SplitStacked
from tests.trace.test_from_jaxpr import evaluate

L, B, D = 6, 4, 8
_rng = np.random.default_rng(0)
X = _rng.normal(size=(B, D)).astype(np.float32)
PARAMS = {
    "w": 0.3 * _rng.normal(size=(L, D, D)).astype(np.float32),
    "b": 0.1 * _rng.normal(size=(L, D)).astype(np.float32),
    "head": _rng.normal(size=(D, L)).astype(np.float32),
    "bias": _rng.normal(size=(L,)).astype(np.float32),  # as long as there are layers, by chance
}
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def _loss(p: Any, x: Any, body: Callable[..., Any], dtype: Any = None, reverse: bool = False) -> Any:
    stacked = {"w": p["w"], "b": p["b"]}
    if dtype is not None:
        stacked = jax.tree.map(lambda a: a.astype(dtype), stacked)
    h, _ = jax.lax.scan(body, x, stacked, reverse=reverse)
    return jnp.mean((h @ p["head"] + p["bias"]) ** 2)


def _body(h: Any, layer: Any) -> tuple[Any, Any]:
    return jnp.tanh(h @ layer["w"] + layer["b"]).astype(h.dtype), jnp.sum(h)


def _train(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def _weight_read_whole_too(p: Any, x: Any) -> Any:
    return _loss(p, x, _body) + 1e-2 * jnp.sum(jnp.linalg.norm(p["w"].reshape(L * D, D), axis=1))


def _neighbours_correlated(p: Any, x: Any) -> Any:
    """Biases of neighbouring layers meet in a convolution along the layers, which parts cannot do one by one."""
    b, numbers = p["b"], ("0NC", "0IO", "0NC")
    lags = jax.lax.conv_general_dilated(b[:, None, :], b[:, :, None], (1,), [(1, 1)], dimension_numbers=numbers)
    return _loss(p, x, _body) + 1e-2 * jnp.sum(lags * jnp.arange(3.0)[:, None, None])


def _rows_by_number(state: Any, x: Any) -> Any:
    """A frozen layer, one with a rate of its own, rows looked up, and one overwritten at a computed place."""
    params, opt_state = state

    def loss(p: Any) -> Any:
        looked_up = jnp.sum(p["w"][jnp.array([3, 1])] ** 2) + jnp.sum(jnp.take(p["b"], jnp.array([5, 0]), axis=0))
        return _loss(p, x, _body) + 1e-2 * looked_up

    value, grads = jax.value_and_grad(loss)(params)
    grads["w"] = grads["w"].at[0].set(0.0).at[4].multiply(3.0)
    grads["b"] = grads["b"].at[jnp.array([2, 5])].add(1.0)
    updates, opt_state = TX.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    place = (jnp.abs(value) * 0).astype(int) + 3
    params["w"] = jax.lax.dynamic_update_index_in_dim(params["w"], params["w"][1], place, 0)
    return (params, opt_state), value


def _loop_across_parts(p: Any, x: Any) -> Any:
    """A loop over some rows of what comes in parts, which no part has all of."""
    decayed, _ = jax.lax.scan(lambda total, row: (0.5 * total + jnp.sin(row), None), jnp.zeros(D), (2 * p["b"])[1:5])
    return _loss(p, x, _body) + 1e-2 * jnp.sum(decayed)


STEPS: dict[str, Callable[..., Any]] = {
    "scan": _train(lambda p, x: _loss(p, x, _body)),
    "reverse": _train(lambda p, x: _loss(p, x, _body, reverse=True)),
    "cast": _train(lambda p, x: _loss(p, x, _body, jnp.bfloat16)),
    "remat": _train(lambda p, x: _loss(p, x, jax.checkpoint(_body))),
    "read whole too": _train(_weight_read_whole_too),
    "loop across parts": _train(_loop_across_parts),
    "neighbours correlated": _train(_neighbours_correlated),
    "rows by number": _rows_by_number,
}
STATE = (PARAMS, TX.init(PARAMS))


def _parts(step: Callable[..., Any], num_parts: int, *args: Any, batched: int = 1) -> PartedProgram:
    leaves, tree = jax.tree.flatten(args)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    closed = jax.make_jaxpr(lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(tree, flat))))(*leaves)
    program = from_jaxpr(closed, names, num_parts=num_parts)
    data = frozenset(program.graph.inputs[len(leaves) - batched : len(leaves)])
    return SplitStacked(of_samples=data, num_parts=num_parts).apply(PartedProgram.of(program))


def _take(leaf: Any, rows: tuple[int, int] | None) -> Any:
    return leaf if rows is None else leaf[rows[0] : rows[1]]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("name", STEPS)
def test_parts_compute_what_the_whole_computes(name: str, num_parts: int) -> None:
    parted = _parts(STEPS[name], num_parts, STATE, X)
    verify(parted.program.graph)
    leaves = jax.tree.leaves((STATE, X))
    num_constants = len(parted.program.constants)
    parts = parted.input_parts[: len(parted.input_parts) - num_constants]
    got = evaluate(parted.program, [_take(leaves[part.leaf], part.rows) for part in parts])
    want = jax.tree.leaves(jax.jit(STEPS[name])(STATE, X))
    for part, array in zip(parted.output_parts, got, strict=True):
        expected = np.asarray(_take(want[part.leaf], part.rows))
        assert array.dtype == expected.dtype
        np.testing.assert_allclose(array, expected, rtol=1e-3 if name == "cast" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in STEPS if name != "rows by number"])
def test_weights_and_their_optimizer_state_are_cut_and_nothing_else(name: str) -> None:
    parted = _parts(STEPS[name], 3, STATE, X)
    values = parted.program.graph.values
    cut: dict[int, list[Any]] = {}
    for v, part in zip(parted.program.graph.inputs, parted.input_parts, strict=True):
        if part.rows is not None:
            cut.setdefault(part.leaf, []).append(part.rows)
            assert values[v].name.endswith(f"[{part.rows[0]}:{part.rows[1]}]")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((STATE, X))]
    assert {names[leaf] for leaf in cut} == {n for n in names if n.endswith(("['w']", "['b']"))}
    assert all(rows == [(0, 2), (2, 4), (4, 6)] for rows in cut.values())
    # What comes back is cut as what came in.
    cut_outputs = {part.leaf for part in parted.output_parts if part.rows is not None}
    assert cut_outputs == set(cut)


def test_the_update_of_a_part_reads_no_other_part() -> None:
    parted = _parts(STEPS["scan"], 3, STATE, X)
    graph = parted.program.graph
    assert not any(op.primitive == "concatenate" for op in graph.ops)
    whole = {v.id for v in graph.values if v.shape == (L, D, D)}
    assert not whole & {v for op in graph.ops for v in op.operands}


@pytest.mark.parametrize("num_parts", [2, 3, 6])
def test_copies_of_weights_that_no_loop_reads_are_reduced_in_parts(num_parts: int) -> None:
    """The loop reads float16 weights; Adafactor scales by the size of float32 copies, over all layers together."""
    optimizer = with_master_weights(optax.adafactor(1e-2, min_dim_size_to_factor=4))

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda p: _loss(p, x, _body))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.tree.map(lambda a: a.astype(np.float16), PARAMS)
    parted = _parts(step, num_parts, (params, optimizer.init(params)), X.astype(np.float16))
    graph = verify(parted.program.graph)
    joins = [op for op in graph.ops if op.primitive == "concatenate"]
    assert not [op.source for op in joins if len(op.operands) == num_parts]
    cut = {part.leaf for part in parted.input_parts if part.rows is not None}
    state = enumerate(jax.tree.leaves((params, optimizer.init(params))))
    assert cut >= {i for i, leaf in state if leaf.ndim > 1 and leaf.shape[0] == L}
    sums = [op for op in graph.ops if op.primitive == "reduce_sum" and graph.values[op.results[0]].rank == 0]
    assert {graph.values[op.operands[0]].shape for op in sums} >= {(L // num_parts, D, D), (L // num_parts, D)}


def test_a_weight_that_is_read_whole_is_put_together_where_it_is_read() -> None:
    graph = _parts(STEPS["read whole too"], 3, STATE, X).program.graph
    joins = [op for op in graph.ops if op.primitive == "concatenate"]
    assert len(joins) == 1 and len(joins[0].operands) == 3


def test_batches_are_never_cut() -> None:
    def over_time(p: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ p + x), None), jnp.zeros((B, D)), xs)[0]

    parted = _parts(over_time, 3, PARAMS["w"][0], _rng.normal(size=(L, B, D)).astype(np.float32))
    assert all(part.rows is None for part in (*parted.input_parts, *parted.output_parts))


def test_rows_of_a_batch_are_cut_where_the_batch_is_read() -> None:
    def scaled(w: Any, x: Any) -> Any:
        first = jnp.sin(w[0, 0])
        scaled_rows = w * x  # the batch has as many samples as there are layers, by chance
        return first + sum(jnp.sum(w[i]) * jnp.sum(scaled_rows[i]) for i in range(L))

    graph = _parts(scaled, 3, PARAMS["b"], _rng.normal(size=(L, D)).astype(np.float32)).program.graph
    products = {op.source for op in graph.ops if op.primitive == "mul" and graph.values[op.results[0]].rank == 2}
    cuts = {op.source for op in graph.ops if op.primitive == "slice" and graph.results(op)[0].shape == (L // 3, D)}
    assert len(products) == 1 and cuts == products
