"""Sums over samples of what a step draws or counts itself: over the whole batch, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto, DataParallel, Pipeline, Planner
from tests.end_to_end.cases import assert_same, eager_cluster

BATCH, WIDTH, BUCKETS = 32, 8, 4


def _loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2, axis=1)


def by_features_kept(w: Any, history: Any, x: Any, key: Any) -> Any:
    """Gradients are divided by how often each feature was kept."""
    kept = jax.random.bernoulli(key, 0.5, x.shape).astype(jnp.float32)
    grad = jax.grad(lambda w: jnp.sum(_loss(w, x * kept)))(w)
    return w - 0.1 * grad / jnp.maximum(kept.sum(0), 1)[:, None], history, kept.sum(0)


def by_drawn_bucket(w: Any, history: Any, x: Any, key: Any) -> Any:
    """The mean loss of each bucket that samples were drawn into is kept in the state."""
    bucket = jax.random.randint(key, (x.shape[0],), 0, BUCKETS)

    def loss(w: Any) -> Any:
        errors = _loss(w, x)
        return jnp.mean(errors), errors

    grad, errors = jax.grad(loss, has_aux=True)(w)
    count = jax.ops.segment_sum(jnp.ones_like(errors), bucket, BUCKETS)
    mean = jax.ops.segment_sum(errors, bucket, BUCKETS) / jnp.maximum(count, 1)
    return w - 0.1 * grad, 0.9 * history + 0.1 * mean, count


def by_position(w: Any, history: Any, x: Any, key: Any) -> Any:
    """Nothing is drawn: samples are counted, and dealt out in turn."""
    grad = jax.grad(lambda w: jnp.mean(_loss(w, x)))(w)
    dealt = jax.nn.one_hot(jnp.arange(x.shape[0]) % 3, 3).sum(0)
    return w - grad / jnp.ones(x.shape).sum(0)[:, None], history, dealt * 2


PLANS: dict[str, tuple[Planner, int]] = {
    "data parallel": (DataParallel(), 4),
    "pipeline": (Pipeline(pipeline=2), 8),
    "search": (Auto(manual=()), 2),
}


@pytest.mark.parametrize("way", PLANS)
@pytest.mark.parametrize("function", [by_features_kept, by_drawn_bucket, by_position])
def test_they_are_those_of_the_whole_batch(function: Callable[..., Any], way: str, devices: Any) -> None:
    rng = np.random.default_rng(0)
    arguments = (
        (0.5 * rng.normal(size=(WIDTH, WIDTH))).astype(np.float32),
        np.zeros(BUCKETS, np.float32),
        rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        jax.random.key(1),
    )
    planner, num_microbatches = PLANS[way]
    run = al.parallelize(
        function,
        cluster=eager_cluster(),
        planner=planner,
        num_microbatches=num_microbatches,
        batch_argnums="x",
    )
    assert_same(run(*arguments), jax.jit(function)(*arguments))
