"""Losses that divide by a number of tokens, which depends on the batch, are exact in micro-batches too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import NonAdditiveError
from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Pipeline, Planner
from alpa_lite.schedule import ZeroBubbleH1
from tests.end_to_end.cases import eager_cluster

WIDTH, LENGTH, BATCH, VOCAB = 16, 6, 16, 12


def _params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "layers": [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys[1:5]],
        "head": jax.random.normal(keys[5], (WIDTH, VOCAB)) / 4,
    }


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, LENGTH + 1, size=(BATCH, 1))
    lengths[: BATCH // 4] = 1  # micro-batches differ much in their numbers of tokens
    return {
        "tokens": rng.integers(0, VOCAB, size=(BATCH, LENGTH + 1)),
        "mask": (np.arange(LENGTH) < lengths).astype(np.float32),
    }


def _losses(params: Any, batch: Any) -> jax.Array:
    h = params["embed"][batch["tokens"][:, :-1]]
    for w in params["layers"]:
        h = h + jnp.tanh(h @ w)
    logits = jax.nn.log_softmax(h @ params["head"])
    return -jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], axis=-1)[..., 0]


def masked_mean(params: Any, batch: Any) -> jax.Array:
    return jnp.sum(_losses(params, batch) * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def labels_to_ignore(params: Any, batch: Any) -> jax.Array:
    """The mask is told by the labels themselves, and the weights of the classes by how often they come."""
    labels = batch["tokens"][:, 1:]
    counted = (labels != 0).astype(jnp.float32)
    counts = jnp.sum(jax.nn.one_hot(labels, VOCAB) * counted[..., None], axis=(0, 1))
    weights = (1.0 / (1.0 + counts))[labels]
    return jnp.sum(_losses(params, batch) * counted * weights) / jnp.sum(counted * weights)


def dropped_tokens(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 0.7, batch["mask"].shape) * batch["mask"]
    return jnp.sum(_losses(params, batch) * kept) / jnp.sum(kept)


def _step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, batch: Any, *key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch, *key)
        metrics = {"loss": value, "tokens": jnp.sum(batch["mask"])}
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), metrics

    return step


PLANS: dict[str, tuple[Planner, int]] = {
    "data parallel": (DataParallel(), 2),
    "pipeline": (Pipeline(pipeline=4), 8),
    "zero bubble": (Hybrid(pipeline=2, schedule=ZeroBubbleH1()), 4),
    "fsdp": (FSDP(), 2),
    "search": (Auto(pipeline=2, manual=()), 4),
    "whole": (Hybrid(pipeline=2, tensor=2), 1),
}


LOSSES = (masked_mean, labels_to_ignore, dropped_tokens)


@pytest.mark.parametrize(
    ("loss", "way"),
    [(LOSSES[(i + more) % 3], way) for i, way in enumerate(PLANS) for more in range(1 + (way == "pipeline"))],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_means_over_tokens_are_those_of_the_whole_batch(loss: Callable[..., jax.Array], way: str, devices: Any) -> None:
    planner, num_microbatches = PLANS[way]
    step, key = _step(loss), [jax.random.key(5)] if loss is dropped_tokens else []
    expected_params, found_params = _params(), _params()
    run = al.parallelize(step, cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
    for _ in range(2):
        expected_params, expected = jax.jit(step)(expected_params, _batch(), *key)
        found_params, found = run(found_params, _batch(), *key)
        assert float(found["tokens"]) == float(expected["tokens"])
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    assert run.last_plan.num_microbatches == num_microbatches
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), found_params, expected_params)


def test_what_depends_on_parameters_is_refused_as_before(devices: Any) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        losses = _losses(params, batch)
        weights = jax.lax.stop_gradient(losses)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    with pytest.raises(NonAdditiveError, match=r"test_ahead\.py:\d+.*on_non_additive"):
        al.parallelize(_step(loss), cluster=eager_cluster(), num_microbatches=4)(_params(), _batch())
