"""Steps that are no sum over their samples, accepted openly: the mean of what micro-batches give by themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import NonAdditiveError, PlanError, TraceError
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


def _by_numpy_numbers(params: Any, batch: Any) -> jax.Array:
    """Captured arrays that follow the batch size: with the dim of the samples, and without."""
    h = batch["x"] @ params[0]
    n = h.shape[0]
    h = (h - h.mean(0)) / (h.std(0) + 1.0)
    return jnp.sum(h * np.full((n, 1), 1 / n, np.float32) + np.full(WIDTH, n, np.float32) * params[1][0])


def _experts_loss(params: Any, batch: Any) -> jax.Array:
    """Cross entropy, and a product of means over the batch that balances experts."""
    gate = jax.nn.softmax(batch["x"] @ params[0])
    load = jax.nn.one_hot(jnp.argmax(gate, -1), WIDTH).mean(0)
    logits = jax.nn.log_softmax(jnp.tanh(batch["x"] @ params[1]) @ params[2])
    picked = jnp.take_along_axis(logits, batch["label"][:, None], 1)
    return -jnp.mean(picked) + jnp.sum(gate.mean(0) * load) * batch["x"].shape[0]


def _normalized_layers_loss(params: Any, batch: Any) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh((h - h.mean(0)) / (1.0 + h.std(0)))
        return h @ w, jnp.sum(h) / h.shape[0]

    h, sums = jax.lax.scan(layer, batch["x"], jnp.stack(params))
    picked = jnp.take_along_axis(jax.nn.log_softmax(h), batch["label"][:, None], 1)
    return jnp.log(-jnp.mean(picked)) + jnp.sum(sums**2)


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [_by_numpy_numbers, _experts_loss, _normalized_layers_loss])
def test_micro_batches_of_one_sample_compute_what_the_code_does_at_one_sample(
    loss: Any, rows: int, devices: Any
) -> None:
    """For which JAX writes another program; a loss that is no sum of its samples is averaged, not computed of means."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    batch = jax.tree.map(lambda x: x[:4], _batch())
    one = dataclasses.replace(eager_cluster(), devices_per_host=1)
    options: dict[str, Any] = {"num_microbatches": 4 // rows, "on_non_additive": "mean_of_means"}
    found = al.parallelize(step, cluster=one, planner=DataParallel(), **options)(_params(), batch)
    parts = [jax.tree.map(lambda x, i=i: x[i : i + rows], batch) for i in range(0, 4, rows)]
    results = [step(_params(), part) for part in parts]
    expected = jax.tree.map(lambda *each: sum(each) / len(each), *results)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_code_that_is_another_at_one_sample_is_to_use_fewer_micro_batches() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["x"]
            return _experts_loss(params, {**batch, "x": jnp.sin(x) if x.shape[0] == 1 else x})

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    options: dict[str, Any] = {"cluster": eager_cluster(), "on_non_additive": "mean_of_means"}
    with pytest.raises(TraceError, match=r"test_mean_of_means\.py:\d+.*: sin differs .* Use fewer micro-batches"):
        al.plan(step, _params(), _batch(), num_microbatches=BATCH, **options)
