"""The perceptron: shapes, and that it learns."""

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cli.models.mlp import MLP
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step


@pytest.mark.parametrize("use_bias", [True, False])
def test_loss_falls(use_bias):
    model = MLP(in_features=8, hidden=16, out_features=4, num_layers=3, use_bias=use_bias)
    optimizer = make_optimizer(1e-2)
    state = init_state(model.init(jax.random.key(0)), optimizer)
    inputs = jax.random.normal(jax.random.key(1), (32, 8))
    batch = {"inputs": inputs, "targets": jnp.tanh(inputs[:, :4])}
    step = jax.jit(make_train_step(model.loss_fn, optimizer))
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


def test_shapes_and_dtypes():
    model = MLP(in_features=8, hidden=16, out_features=4, num_layers=3, dtype=jnp.bfloat16)
    params = model.init(jax.random.key(0))
    assert [layer["w"].shape for layer in params] == [(8, 16), (16, 16), (16, 4)]
    out = model.apply(params, jnp.ones((2, 8)))
    assert out.shape == (2, 4)
    assert out.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="num_layers"):
        MLP(num_layers=0)
