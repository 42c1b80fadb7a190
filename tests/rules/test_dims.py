"""Classes of dims and their names come from the structure alone, and so does the way of a batch through a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import CNN
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses, dim_names, follow_batch
from alpa_lite.trace.from_jaxpr import from_jaxpr
from tests.end_to_end.transformers import TINY, Training, replace, traced, with_architecture


def _classes(fun: Any, *args: Any) -> tuple[StepGraph, DimClasses, dict[str, tuple[int, ...]]]:
    step = al.parallelize(fun).trace(*args).step(1).step
    classes = DimClasses(step)
    named = {step.graph.values[v].name: classes.of_value(step.graph, v) for v in step.graph.inputs}
    return step, classes, named


def test_products_join_what_they_sum_over_and_what_passes() -> None:
    step, classes, of = _classes(lambda w, x: (x @ w, x), jnp.ones((4, 6)), jnp.ones((8, 4)))
    assert of["w"][0] == of["x"][1] and len({*of["w"], *of["x"]}) == 3
    assert classes.of_value(step.graph, step.graph.outputs[0]) == (of["x"][0], of["w"][1])


def test_merged_dims_go_by_their_major_part() -> None:
    step, classes, of = _classes(lambda x: x.reshape(6, 8).reshape(12, 4), jnp.ones((2, 3, 8)))
    (out,) = step.graph.outputs
    a, b, c = of["x"]
    assert classes.of(step.graph, out, 0) == a and classes.of(step.graph, out, 1) not in (a, b, c)


def test_loops_join_what_goes_in_with_what_comes_out() -> None:
    def fun(ws: Any, h: Any) -> Any:
        return jax.lax.scan(lambda h, w: (h @ w[0] @ w[1], h.sum(0)), h, ws)

    step, classes, of = _classes(fun, (jnp.ones((3, 4, 6)), jnp.ones((3, 6, 4))), jnp.ones((8, 4)))
    first, second = of["ws/0"], of["ws/1"]
    assert first[1] == second[2] == of["h"][1] and first[2] == second[1] != first[1]
    carried, stacked = step.graph.outputs
    assert classes.of_value(step.graph, carried) == of["h"]
    assert classes.of(step.graph, stacked, 1) == of["h"][1]
    assert classes.of(step.graph, stacked, 0) not in (*of["h"], *first[1:])


def test_state_is_what_it_was_in_the_step_before() -> None:
    """The new state may be made of other dims: from then on they are the same."""
    _, _, of = _classes(
        lambda state, x: ({"w": x @ jnp.ones((5, 4))}, x.sum()), {"w": jnp.ones((8, 4))}, jnp.ones((8, 5))
    )
    assert of["state/w"][0] == of["x"][0]


def _named(step: Any) -> dict[str, set[tuple[str, int]]]:
    """For each name the arguments and their dims that have it."""
    classes, graph = DimClasses(step), step.graph
    return {
        name: {
            (graph.values[v].name.split("params/")[-1], d)
            for v in graph.inputs
            for d, node in enumerate(classes.of_value(graph, v))
            if node in nodes
        }
        for name, nodes in dim_names(step, classes).items()
    }


def test_a_transformer() -> None:
    named = _named(traced(Training(model=with_architecture(TINY, num_kv_heads=None), batch_size=8)).step(1).step)
    assert named["batch"] == {("batch/tokens", 0), ("batch/targets", 0)}
    assert named["sequence"] == {("batch/tokens", 1), ("batch/targets", 1), ("position_embedding", 0)}
    assert named["vocab"] == {("token_embedding", 0)}
    mlp, attention = "layers/0/0/mlp", "layers/0/0/attention"
    assert named["d_ff"] == {(f"{mlp}/w_up", 2), (f"{mlp}/w_down", 1)}
    heads = {(f"{attention}/{w}", 2) for w in ("w_q", "w_k", "w_v")} | {(f"{attention}/w_out", 1)}
    assert heads <= named["heads"] and not any("mlp" in name for name, _ in named["heads"])
    assert {("token_embedding", 1), (f"{mlp}/w_up", 1), (f"{mlp}/w_down", 2)} <= named["d_model"]
    assert "experts" not in named and "height" not in named


def _residual(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x
        for layer in params:
            h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params)), x.sum()


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_a_residual_network(num_layers: int) -> None:
    layer = {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))}
    traced = al.parallelize(_residual, batch_argnums=1).trace([layer] * num_layers, jnp.ones((16, 8)))
    named = _named(traced.step(1).step)
    width = {(f"{i}/up", 0) for i in range(num_layers)} | {(f"{i}/down", 1) for i in range(num_layers)}
    assert named["d_model"] == width | {("x", 1)}
    assert named["d_ff"] == {(f"{i}/{w}", d) for i in range(num_layers) for w, d in (("up", 1), ("down", 0))}


def test_a_mixture_of_experts() -> None:
    model = replace(with_architecture(TINY, num_kv_heads=None), experts=Experts(num_experts=4, top_k=2, group_size=4))
    named = _named(traced(Training(model=model, batch_size=8)).step(1).step)
    experts = "layers/0/0/experts"
    assert named["experts"] == {(f"{experts}/w_up", 1), (f"{experts}/w_down", 1), (f"{experts}/w_router", 2)}
    assert named["d_ff"] == {(f"{experts}/w_up", 3), (f"{experts}/w_down", 2)}
    assert {(f"{experts}/w_up", 2), ("token_embedding", 1)} <= named["d_model"]
    # Groups of tokens are shared by all arrays where these are sent to experts, too, but no weight has them.
    assert all("attention" in name for name, _ in named["heads"])


def test_a_convolutional_network() -> None:
    model = CNN(image_size=8, channels=8)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    batch = {"images": jax.ShapeDtypeStruct((16, 8, 8, 3), jnp.float32), "labels": jax.ShapeDtypeStruct((16,), "int32")}
    step = al.parallelize(
        lambda params, batch: jax.tree.map(jnp.subtract, params, jax.grad(model.loss_fn)(params, batch))
    )
    named = _named(step.trace(shapes, batch).step(1).step)
    assert ("batch/images", 1) in named["height"] and ("batch/images", 2) in named["width"]
    assert not named["height"] & named["width"] and not {"vocab", "heads", "experts"} & {*named}


def _graph(fun: Callable[..., Any], batch_size: int) -> Graph:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch_size, 6, 4), (4, 8)))
    return from_jaxpr(jax.make_jaxpr(fun)(x, w), ["x", "w"]).graph


FUNCTIONS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "elementwise": (lambda x, w: jnp.tanh(x) * 2, 0),
    "product": (lambda x, w: x @ w, 0),
    "transposed": (lambda x, w: jnp.transpose(x @ w, (1, 2, 0)), 2),
    "heads": (lambda x, w: (x @ w).reshape(x.shape[0], 6, 2, 4), 0),
    "heads_behind": (lambda x, w: jnp.transpose(x, (1, 0, 2)).reshape(6, x.shape[0], 2, 2), 1),
    "scanned": (lambda x, w: jax.lax.scan(lambda h, _: (jnp.tanh(h), h), x, None, length=3)[1], 1),
    "gradient": (lambda x, w: jnp.einsum("bsi,bsj->ij", x, x @ w), None),
    "weights": (lambda x, w: jnp.tanh(w)[None], None),
}


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_batch_is_followed_through_every_op(name: str, batch_size: int) -> None:
    fun, want = FUNCTIONS[name]
    graph = _graph(fun, batch_size)
    dims, _ = follow_batch(graph, (0, None))
    assert [dims[v] for v in graph.outputs] == [want]


def test_what_is_known_is_taken_over() -> None:
    graph = _graph(lambda x, w: jnp.tanh(jnp.sum(x, axis=0)[None]), 1)
    (summed,) = (op.results[0] for op in graph.ops if op.primitive == "broadcast_in_dim")
    for known, want in ({}, None), ({graph: {summed: 0}}, 0):
        dims, _ = follow_batch(graph, (0, None), known)
        assert [dims[v] for v in graph.outputs] == [want]
