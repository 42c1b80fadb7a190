"""The convolutional network: shapes, and that it learns."""

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.cnn import CNN
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step

MODEL = CNN(image_size=16, channels=4, num_blocks=2, num_classes=3)


def test_shapes():
    params = jax.eval_shape(MODEL.init, jax.random.key(0))
    assert [block["w"].shape for block in params["blocks"]] == [(3, 3, 4, 8), (3, 3, 8, 16)]
    assert jax.eval_shape(MODEL.apply, params, jnp.ones((2, 16, 16, 3))).shape == (2, 3)


def test_loss_falls_and_accuracy_rises():
    optimizer = make_optimizer(1e-2)
    state = init_state(jax.jit(MODEL.init)(jax.random.key(0)), optimizer)
    labels = jnp.arange(24) % 3
    images = jax.random.normal(jax.random.key(1), (24, 16, 16, 3)) + 2.0 * jax.nn.one_hot(labels, 3)[:, None, None]
    batch = {"images": images, "labels": labels}
    step = jax.jit(make_train_step(MODEL.loss_and_metrics, optimizer, has_aux=True))
    history = []
    for _ in range(20):
        state, metrics = step(state, batch)
        history.append(metrics)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert history[-1]["accuracy"] > 0.9
