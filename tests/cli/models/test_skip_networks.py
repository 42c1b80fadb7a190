"""U-Net and ResNets: published sizes, that every weight is used, crops and norms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.skip_networks import ResNet, UNet, block_starts
from tests.cli.models.draws import drawn

UNET_TINY = UNet(image_size=44, channels=2, depth=2)


def test_published_size_of_the_unet():
    model = UNet()
    # Ronneberger et al. 2015, figure 1, layer by layer: weights and biases of 3×3, 2×2 and 1×1 convolutions.
    widths = (64, 128, 256, 512, 1024)
    down = sum(9 * i * o + o + 9 * o * o + o for i, o in zip((1, *widths), widths, strict=False))
    up = sum(4 * 2 * o * o + o + 9 * 2 * o * o + o + 9 * o * o + o for o in widths[:-1])
    assert model.parameter_count() == down + up + 64 * 2 + 2 == 31_030_658
    assert model.label_size == 388  # the figure: 572 → 388


def test_arrays_have_the_sizes_of_the_figure():
    model = UNet()
    params = jax.eval_shape(model.init, jax.random.key(0))
    closed = jax.make_jaxpr(model.logits)(params, model.batch_shapes(1)["images"])
    convolved = [e.outvars[0].aval.shape[1] for e in closed.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert convolved == [
        570,
        568,
        282,
        280,
        138,
        136,
        66,
        64,
        30,
        28,
        56,
        54,
        52,
        104,
        102,
        100,
        200,
        198,
        196,
        392,
        390,
        388,
        388,
    ]
    assert closed.out_avals[0].shape == (1, 388, 388, 2)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_every_weight_of_the_unet_is_used(padding):
    model = UNet(image_size=44, channels=2, depth=2, padding=padding)
    params, batch = drawn(model.init, 0.3), draw_batch(model, 2)
    assert batch["labels"].shape == (2, *(44 if padding == "SAME" else 4,) * 2)
    loss, grads = jax.jit(jax.value_and_grad(model.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_what_crosses_is_cropped_in_the_middle():
    """With symmetric kernels the network of a mirrored image is the mirror image: nothing is off by a pixel."""
    params = jax.tree.map(lambda w: (w + w[::-1]) / 2 if w.ndim == 4 else w, drawn(UNET_TINY.init, 0.3))
    images, logits = draw_batch(UNET_TINY, 2)["images"], jax.jit(UNET_TINY.logits)
    np.testing.assert_allclose(logits(params, images[:, ::-1]), logits(params, images)[:, ::-1], atol=1e-5)


def test_weights_of_pixels_count():
    params, batch = drawn(UNET_TINY.init, 0.3), draw_batch(UNET_TINY, 1)
    loss = jax.jit(lambda weights: UNET_TINY.loss_fn(params, {**batch, "weights": weights}))
    assert loss(2 * batch["weights"]) == pytest.approx(2 * float(loss(batch["weights"])), rel=1e-6)


def test_sizes_that_cannot_be_halved_are_a_sentence():
    with pytest.raises(ValueError, match="at level 1 it has 17 pixels"):
        UNet(image_size=46, channels=2, depth=2)
    with pytest.raises(ValueError, match="Nothing is left"):
        UNet(image_size=16, channels=2, depth=2)


def make_key(seed):
    return jax.random.key(seed, impl="unsafe_rbg")  # compiles twice as fast as the default generator


RESNET_TINY = ResNet(image_size=16, channels=4, width_factor=2, num_classes=5, stage_sizes=(1, 2))


@pytest.fixture(scope="module")
def params():
    # Branches that end in a scale of zero, as they are first, would hide all that is in them.
    return jax.tree.map(lambda w: w if w.any() else np.full_like(w, 0.5), drawn(RESNET_TINY.init, 0.2))


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
def test_published_sizes_of_resnets(sizes, millions):
    assert ResNet(**sizes).parameter_count() / 1e6 == pytest.approx(millions, rel=2e-4)


def test_every_weight_of_the_resnet_is_used(params, batch):
    loss, grads = jax.jit(jax.value_and_grad(RESNET_TINY.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


@pytest.mark.parametrize("norm_batch", [1, 2])
def test_norm_looks_at_its_own_images(norm_batch, params, batch):
    model = replace(RESNET_TINY, norm_batch=norm_batch)
    together = jax.jit(model.logits)(params, batch["images"])
    apart = [jax.jit(RESNET_TINY.logits)(params, part) for part in jnp.split(batch["images"], 4 // norm_batch)]
    np.testing.assert_allclose(together, jnp.concatenate(apart), rtol=1e-4, atol=1e-4)
    assert not np.allclose(together, jax.jit(RESNET_TINY.logits)(params, batch["images"]), atol=1e-2)


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
    shapes = jax.eval_shape(RESNET_TINY.init, make_key(0))
    closed = jax.make_jaxpr(jax.grad(replace(RESNET_TINY, recompute=recompute).loss_fn))(shapes, batch)
    forward = 1 + 3 * 3 + 2
    assert convolutions(closed.jaxpr) == forward + 2 * forward - 1 + recompute * forward


def test_recomputation_changes_nothing(params, batch):
    plain, again = (jax.jit(jax.grad(replace(RESNET_TINY, recompute=r).loss_fn))(params, batch) for r in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)
