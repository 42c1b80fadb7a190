"""U-Net: published size, how many pixels get a label, what is cropped, and that every weight is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.unet import UNet
from tests.cli.models.draws import drawn

TINY = UNet(image_size=44, channels=2, depth=2)


def test_published_size():
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
def test_every_weight_is_used(padding):
    model = UNet(image_size=44, channels=2, depth=2, padding=padding)
    params, batch = drawn(model.init, 0.3), draw_batch(model, 2)
    assert batch["labels"].shape == (2, *(44 if padding == "SAME" else 4,) * 2)
    loss, grads = jax.jit(jax.value_and_grad(model.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_what_crosses_is_cropped_in_the_middle():
    """With symmetric kernels the network of a mirrored image is the mirror image: nothing is off by a pixel."""
    params = jax.tree.map(lambda w: (w + w[::-1]) / 2 if w.ndim == 4 else w, drawn(TINY.init, 0.3))
    images, logits = draw_batch(TINY, 2)["images"], jax.jit(TINY.logits)
    np.testing.assert_allclose(logits(params, images[:, ::-1]), logits(params, images)[:, ::-1], atol=1e-5)


def test_weights_of_pixels_count():
    params, batch = drawn(TINY.init, 0.3), draw_batch(TINY, 1)
    loss = jax.jit(lambda weights: TINY.loss_fn(params, {**batch, "weights": weights}))
    assert loss(2 * batch["weights"]) == pytest.approx(2 * float(loss(batch["weights"])), rel=1e-6)


def test_sizes_that_cannot_be_halved_are_a_sentence():
    with pytest.raises(ValueError, match="at level 1 it has 17 pixels"):
        UNet(image_size=46, channels=2, depth=2)
    with pytest.raises(ValueError, match="Nothing is left"):
        UNet(image_size=16, channels=2, depth=2)
