"""Steps that are no sum over their samples, accepted openly: the mean of what micro-batches give by themselves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import NonAdditiveError, PlanError
from alpa_lite.planners import Auto, DataParallel, Hybrid, Pipeline, Planner
from tests.end_to_end.cases import eager_cluster

WIDTH, BATCH = 8, 32

PLANS: dict[str, tuple[Planner, int]] = {
    "data parallel": (DataParallel(), 4),
    "pipeline": (Pipeline(pipeline=2), 8),
    "hybrid": (Hybrid(pipeline=2, data=2, tensor=2), 4),
    "search": (Auto(manual=()), 2),
}


def _params() -> list[jax.Array]:
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 3 for k in jax.random.split(jax.random.key(0), 4)]


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {"x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32), "label": rng.integers(0, WIDTH, size=BATCH)}


def _loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
    h, means = batch["x"], []
    for w in params:
        h = h @ w
        mean, var = jnp.mean(h, axis=0), jnp.var(h, axis=0)
        h = jnp.tanh((h - mean) * jax.lax.rsqrt(var + 1e-3))
        means.append(mean)
    logits = jax.nn.log_softmax(h)
    picked = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)
    right = jnp.sum(jnp.argmax(logits, axis=1) == batch["label"])
    return -jnp.mean(picked), {"means": means, "right": right, "logits": logits}


def batch_norm_step(params: Any, batch: Any) -> Any:
    (loss, more), grads = jax.value_and_grad(_loss, has_aux=True)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), {"loss": loss, **more}


def _expected(params: Any, batch: Any, num_microbatches: int) -> tuple[Any, Any]:
    """Gradient accumulation by hand: each micro-batch by itself, then the mean of gradients and metrics."""
    parts = [jax.tree.map(lambda x, i=i: np.split(x, num_microbatches)[i], batch) for i in range(num_microbatches)]
    results = [jax.value_and_grad(_loss, has_aux=True)(params, part) for part in parts]
    grads = jax.tree.map(lambda *g: sum(g) / num_microbatches, *(grads for _, grads in results))
    mores = [more for (_, more), _ in results]
    metrics = {
        "loss": sum(loss for (loss, _), _ in results) / num_microbatches,
        "means": jax.tree.map(lambda *m: sum(m) / num_microbatches, *(more["means"] for more in mores)),
        "right": sum(more["right"] for more in mores),
        "logits": jnp.concatenate([more["logits"] for more in mores]),
    }
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), metrics


def _averaged(step: Any, way: str) -> tuple[Any, int]:
    """A step under a plan that averages, and its number of micro-batches."""
    planner, number = PLANS[way]
    options: dict[str, Any] = {"num_microbatches": number, "on_non_additive": "mean_of_means"}
    return al.parallelize(step, cluster=eager_cluster(), planner=planner, **options), number


@pytest.mark.parametrize("way", PLANS)
def test_micro_batches_give_the_mean_of_their_own_results(way: str, devices: Any) -> None:
    step, num_microbatches = _averaged(batch_norm_step, way)
    found = step(_params(), _batch())
    expected = _expected(_params(), _batch(), num_microbatches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert step.last_plan.averaged and "averaged" in str(step.last_plan)


def test_one_micro_batch_is_exact_and_refusing_is_the_default(devices: Any) -> None:
    step = al.parallelize(batch_norm_step, cluster=eager_cluster(), num_microbatches=1, on_non_additive="mean_of_means")
    found, expected = step(_params(), _batch()), jax.jit(batch_norm_step)(_params(), _batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert not step.last_plan.averaged
    with pytest.raises(NonAdditiveError, match=r'test_mean_of_means\.py:\d+.*on_non_additive="mean_of_means"'):
        al.plan(batch_norm_step, _params(), _batch(), cluster=eager_cluster(), num_microbatches=4)


def test_what_is_a_sum_stays_exact(devices: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            h = batch["x"]
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.sum(h * h)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    run = al.parallelize(
        step,
        cluster=eager_cluster(),
        planner=Pipeline(pipeline=2),
        num_microbatches=4,
        on_non_additive="mean_of_means",
    )
    found, expected = run(_params(), _batch()), jax.jit(step)(_params(), _batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert not run.last_plan.averaged


def test_other_words_are_refused() -> None:
    with pytest.raises(PlanError, match=r"on_non_additive='mean'.*refuse.*mean_of_means"):
        al.parallelize(batch_norm_step, on_non_additive="mean")


def _pairs_loss(params: Any, batch: Any) -> jax.Array:
    """Each sample is to be like itself, and unlike the others of the batch."""
    a, b = batch["x"] @ params[0] @ params[1], batch["x"] @ params[2] @ params[3]
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(a @ b.T)))


def _weighted_loss(params: Any, batch: Any) -> jax.Array:
    """A mean by weights whose sum is known ahead; the largest error makes it no sum over its samples."""
    h, weights = batch["x"], 1.0 + batch["label"]
    for w in params:
        h = jnp.tanh(h @ w)
    errors = jnp.mean((h - 1.0) ** 2, axis=1)
    return jnp.sum(errors * weights) / jnp.sum(weights) + jnp.max(errors)


@pytest.mark.parametrize("way", PLANS)
@pytest.mark.parametrize("loss", [_pairs_loss, _weighted_loss])
def test_gradients_are_the_mean_of_those_by_hand(loss: Any, way: str, devices: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)

    run, num_microbatches = _averaged(step, way)
    parts = [jax.tree.map(lambda x, i=i: np.split(x, num_microbatches)[i], _batch()) for i in range(num_microbatches)]
    grads = [jax.grad(loss)(_params(), part) for part in parts]
    expected = jax.tree.map(lambda p, *g: p - 0.3 * sum(g) / num_microbatches, _params(), *grads)
    found = run(_params(), _batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert run.last_plan.averaged
    with pytest.raises(NonAdditiveError):
        al.plan(step, _params(), _batch(), cluster=eager_cluster(), num_microbatches=num_microbatches)
