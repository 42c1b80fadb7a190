"""Perceptron, small convolutional network, AlexNet and VGG: shapes, sizes, and that they learn."""

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.sequential_networks import CNN, MLP, alexnet, vgg16
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from tests.cli.models.draws import drawn


@pytest.mark.parametrize("use_bias", [True, False])
def test_loss_of_the_mlp_falls(use_bias):
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


def test_shapes_and_dtypes_of_the_mlp():
    model = MLP(in_features=8, hidden=16, out_features=4, num_layers=3, dtype=jnp.bfloat16)
    params = model.init(jax.random.key(0))
    assert [layer["w"].shape for layer in params] == [(8, 16), (16, 16), (16, 4)]
    out = model.apply(params, jnp.ones((2, 8)))
    assert out.shape == (2, 4)
    assert out.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="num_layers"):
        MLP(num_layers=0)


MODEL = CNN(image_size=16, channels=4, num_blocks=2, num_classes=3)


def test_shapes_of_the_cnn():
    params = jax.eval_shape(MODEL.init, jax.random.key(0))
    assert [block["w"].shape for block in params["blocks"]] == [(3, 3, 4, 8), (3, 3, 8, 16)]
    assert jax.eval_shape(MODEL.logits, params, jnp.ones((2, 16, 16, 3))).shape == (2, 3)


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


TINY = alexnet(image_size=64, width=4, dense=16, num_classes=5)


@pytest.mark.parametrize(
    ("model", "weights", "in_convolutions"),
    [(alexnet(), 61_100_840, 2_469_696), (vgg16(), 138_357_544, 14_714_688)],  # torchvision: `alexnet`, `vgg16`
)
def test_published_sizes(model, weights, in_convolutions):
    assert model.parameter_count() == weights
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == weights
    assert sum(x.size for x in jax.tree.leaves(shapes["convolutions"])) == in_convolutions


@pytest.mark.parametrize(("model", "sizes"), [(alexnet(), {55, 27, 13, 6}), (vgg16(), {224, 112, 56, 28, 14, 7})])
def test_images_shrink_as_published(model, sizes):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    closed = jax.make_jaxpr(model.logits)(shapes, model.batch_shapes(2)["images"])
    found = {
        v.aval.shape[1] for eqn in closed.jaxpr.eqns for v in eqn.outvars if v.aval.ndim == 4 and v.aval.shape[0] == 2
    }
    assert found - {224} == sizes - {224}
    assert closed.out_avals[0].shape == (2, 1000)


def test_every_weight_is_used():
    params, batch = drawn(TINY.init, 0.1), draw_batch(TINY, 4)
    loss, grads = jax.jit(jax.value_and_grad(TINY.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_dropout_draws_masks_only_with_a_key():
    params, batch = drawn(TINY.init, 0.1), draw_batch(TINY, 4)
    loss_fn, keys = jax.jit(TINY.loss_fn), jax.random.split(jax.random.key(0))
    assert loss_fn(params, batch, keys[0]) != loss_fn(params, batch, keys[1])
    assert loss_fn(params, batch) == loss_fn(params, batch)
