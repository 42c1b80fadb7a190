"""A small pipeline of equal layers, for tests of what runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from tests.end_to_end.cases import eager_cluster

WIDTH = 16


def step_with(scales: Sequence[float]) -> Any:
    """A training step of as many layers; those of equal scales are equal."""

    def train_step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            h = x
            for w, scale in zip(weights, scales, strict=True):
                h = jnp.tanh(h @ w) * scale + h
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    return train_step


def arguments(num_layers: int, batch: int = 32) -> tuple[list[Any], Any]:
    """Weights and a batch."""
    rng = np.random.default_rng(0)
    weights = [np.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8, np.float32) for _ in range(num_layers)]
    return weights, np.asarray(rng.normal(size=(batch, WIDTH)), np.float32)


def compiled(scales: Sequence[float], planner: Any, num_microbatches: int, **options: Any) -> Any:
    """The step, compiled."""
    step = al.parallelize(
        step_with(scales), cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches, **options
    )
    return step.compiled(*arguments(len(scales)))
