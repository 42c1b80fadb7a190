"""The shared losses, against the definition and at the edges of the float range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.losses import cross_entropy, reduce_losses


def test_cross_entropy_equals_the_definition():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 7))
    labels = jax.random.randint(jax.random.key(1), (3, 4), 0, 7)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log((probs * np.eye(7)[np.asarray(labels)]).sum(-1))
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-5)


def test_cross_entropy_is_stable_and_float32():
    logits = jnp.array([[3e4, 0.0], [-3e4, 0.0]], jnp.bfloat16)
    losses = cross_entropy(logits, jnp.array([0, 1]))
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, 0.0)


def test_reductions():
    losses = jnp.arange(6.0).reshape(2, 3)
    assert reduce_losses(losses, "mean") == 2.5
    assert reduce_losses(losses, "sum") == 15.0
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        reduce_losses(losses, "max")  # type: ignore[arg-type]
