"""The policy of device placements: its distribution, and its gradient against that of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.inter_op.placement_policy import PlacementPolicy, PolicyShape

SHAPE = PolicyShape(num_devices=3, embedding=4, hidden=6, tanh_constant=1.5, temperature=1.3)


def _lstm(w: dict[str, Any], name: str, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
    i, f, o, g = jnp.split(x @ w[f"{name}/u"] + h @ w[f"{name}/v"] + w[f"{name}/b"], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _log_probability(w: dict[str, Any], embeddings: Any, placement: Any) -> Any:
    """Log p of one placement, from the formulas of the module."""
    h = c = jnp.zeros(SHAPE.hidden)
    memory = []
    for row in embeddings:
        h, c = _lstm(w, "encoder", row, h, c)
        memory.append(h)
    memory = jnp.stack(memory)
    total, last = 0.0, SHAPE.num_devices
    for row, device in zip(memory, placement, strict=True):
        h, c = _lstm(w, "decoder", w["devices"][last] + row, h, c)
        context = jax.nn.softmax(memory @ (h @ w["attention"])) @ memory
        logits = SHAPE.tanh_constant * jnp.tanh(jnp.concatenate([h, context]) @ w["logits"] / SHAPE.temperature)
        total += jax.nn.log_softmax(logits)[device]
        last = device
    return total


def _case() -> tuple[PlacementPolicy, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    policy = PlacementPolicy.initial(SHAPE, random, "float64")
    # Far from the start, where all probabilities are about equal and little would be seen.
    weights = {name: 3 * each for name, each in policy.weights.items()}
    return PlacementPolicy(shape=SHAPE, weights=weights), random.standard_normal((5, 4))


def test_the_gradient_is_that_of_jax() -> None:
    policy, embeddings = _case()
    samples = policy.sample(embeddings, 3, np.random.default_rng(1))
    factors = np.array([0.7, -1.1, 0.4])
    with jax.enable_x64(True):

        def weighted(w: dict[str, Any]) -> Any:
            each = [_log_probability(w, jnp.asarray(embeddings), row) for row in samples.devices.tolist()]
            return jnp.asarray(factors) @ jnp.stack(each)

        wanted = jax.grad(weighted)(policy.weights)
        logs = [_log_probability(policy.weights, embeddings, row) for row in samples.devices.tolist()]
    np.testing.assert_allclose(samples.log_probability, logs, rtol=1e-10)
    found = policy.gradient(samples, factors)
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_placements_come_as_often_as_they_are_probable() -> None:
    policy, embeddings = _case()
    samples = policy.sample(embeddings[:2], 20_000, np.random.default_rng(2))
    for placement in [(0, 0), (1, 2), (2, 1)]:
        share = float((samples.devices == placement).all(1).mean())
        probability = float(np.exp(_log_probability(policy.weights, embeddings[:2], placement)))
        assert share == pytest.approx(probability, abs=4 * np.sqrt(probability / 20_000))


def test_noise_moves_probabilities_and_one_seed_gives_the_same() -> None:
    policy, embeddings = _case()
    quiet, noisy, again = (
        policy.sample(embeddings, 4, np.random.default_rng(3), noise=noise) for noise in (0.0, 0.5, 0.5)
    )
    np.testing.assert_array_equal(noisy.devices, again.devices)
    np.testing.assert_array_equal(noisy.log_probability, again.log_probability)
    assert not np.array_equal(quiet.log_probability, noisy.log_probability)
