"""Names of dims are found from the structure alone, in models of several kinds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import CNN
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.rules.dims import DimClasses, dim_names
from tests.end_to_end.transformers import TINY, Training, replace, traced, with_architecture


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
