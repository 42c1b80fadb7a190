"""Residual networks: published sizes, what batch norm normalises, and that every weight is used."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.resnet import ResNet, block_starts
from tests.cli.models.draws import drawn


def make_key(seed):
    return jax.random.key(seed, impl="unsafe_rbg")  # compiles twice as fast as the default generator


TINY = ResNet(image_size=16, channels=4, width_factor=2, num_classes=5, stage_sizes=(1, 2))


@pytest.fixture(scope="module")
def params():
    # Branches that end in a scale of zero, as they are first, would hide all that is in them.
    return jax.tree.map(lambda w: w if w.any() else np.full_like(w, 0.5), drawn(TINY.init, 0.2))


@pytest.fixture(scope="module")
def batch():
    images = jax.random.normal(make_key(1), (4, 16, 16, 3))
    return {"images": images, "labels": jnp.arange(4)}


@pytest.mark.parametrize(
    "sizes, millions",
    [
        ({}, 25.557),  # torchvision, resnet50
        (
            {"channels": 160, "width_factor": 2, "num_classes": 1024},
            254.1,
        ),  # Alpa (OSDI 2022), table 4 and its artifact
        ({"channels": 224, "width_factor": 2, "num_classes": 1024}, 495.0),
        ({"channels": 320, "width_factor": 2, "num_classes": 1024}, 1005.7),
        ({"channels": 448, "width_factor": 2, "num_classes": 1024}, 1965.0),
    ],
)
def test_published_sizes(sizes, millions):
    assert ResNet(**sizes).parameter_count() / 1e6 == pytest.approx(millions, rel=2e-4)


def test_every_weight_is_used(params, batch):
    loss, grads = jax.jit(jax.value_and_grad(TINY.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


@pytest.mark.parametrize("norm_batch", [1, 2])
def test_norm_looks_at_its_own_images(norm_batch, params, batch):
    model = replace(TINY, norm_batch=norm_batch)
    together = jax.jit(model.logits)(params, batch["images"])
    apart = [jax.jit(TINY.logits)(params, part) for part in jnp.split(batch["images"], 4 // norm_batch)]
    np.testing.assert_allclose(together, jnp.concatenate(apart), rtol=1e-4, atol=1e-4)
    assert not np.allclose(together, jax.jit(TINY.logits)(params, batch["images"]), atol=1e-2)


def test_stages_begin_with_a_stride():
    assert [block_starts(i, (3, 4, 6, 3)) for i in range(16)].count(True) == 4
    assert all(block_starts(i, (3, 4, 6, 3)) for i in (0, 3, 7, 13))
    model = ResNet()
    shapes = jax.eval_shape(model.init, make_key(0))
    closed = jax.make_jaxpr(model.logits)(shapes, model.batch_shapes(2)["images"])
    sizes = {eqn.outvars[0].aval.shape[1:] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "jit"}
    assert {(112, 112, 64), (56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048)} <= sizes


def convolutions(jaxpr) -> int:
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == "conv_general_dilated"
        inner = [getattr(v, "jaxpr", v) for v in eqn.params.values()]
        found += sum(convolutions(v) for v in inner if hasattr(v, "eqns"))
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_repeats_every_convolution(recompute, batch):
    """Norms read what each of them gives. Forward: the stem, three of each block, and two projections."""
    shapes = jax.eval_shape(TINY.init, make_key(0))
    closed = jax.make_jaxpr(jax.grad(replace(TINY, recompute=recompute).loss_fn))(shapes, batch)
    forward = 1 + 3 * 3 + 2
    assert convolutions(closed.jaxpr) == forward + 2 * forward - 1 + recompute * forward


def test_recomputation_changes_nothing(params, batch):
    plain, again = (jax.jit(jax.grad(replace(TINY, recompute=r).loss_fn))(params, batch) for r in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)
