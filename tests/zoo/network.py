"""A network of three layers and its data, which several families share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tests.zoo.registry import BATCH, normal, weights

X, Y = normal(BATCH, 8, seed=1), normal(BATCH, 4, seed=2)


def init(seed: int = 0) -> Any:
    """Weights of three layers."""
    return weights({"a": (8, 16), "b": (16, 16), "c": (16, 4)}, seed)


def forward(params, x):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]


def loss_fn(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)
