"""AlexNet and VGG-16: published sizes, shapes of the arrays in between, and that every weight is used."""

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.convnet import alexnet, vgg16
from tests.cli.models.draws import drawn

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
