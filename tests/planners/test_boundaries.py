"""What passes from one stage to the next: a value that is read far above counts at every boundary below that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite.layers import make_layers
from alpa_lite.planners.planner import boundary_values

WIDTH, BATCH = 8, 16


def _with_a_skip(weights: Any, x: Any) -> Any:
    """Training of four blocks of which the last also reads what the first gives."""

    def loss(weights: Any) -> Any:
        first, *between, last = weights
        h = kept = jnp.tanh(x @ first)
        for w in between:
            h = jnp.tanh(h @ w)
        return jnp.mean(jnp.tanh(h @ last + kept) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_a_skip_counts_at_every_boundary_that_it_crosses() -> None:
    weights = [np.ones((WIDTH, WIDTH), np.float32)] * 4
    step = al.parallelize(_with_a_skip).trace(weights, np.ones((BATCH, WIDTH), np.float32)).step(2).step
    layers = make_layers(step, 4)
    assert layers.of_input == (0, 1, 2, 3, 0)
    sizes = [[value.bytes for value in boundary_values(step, layers, first)] for first in (1, 2, 3)]
    one = BATCH // 2 * WIDTH * 4
    assert sizes == [[one], [one, one], [one, one]]
