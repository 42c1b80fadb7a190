"""Weights from shapes, and losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.model_parts import (
    cross_entropy,
    draw_weights,
    reduce_losses,
    segment_sizes,
    stacked_shapes,
)
from alpa_lite.cli.models.sequential_networks import CNN

SHAPES = {"w": (3, 4), "layers": [{"w_up": (5, 2), "b_up": (5, 2), "norm": {"scale": (5, 2)}}]}


def test_stacked():
    assert stacked_shapes([{"w": (2,)}, {"w": ()}], 7) == [{"w": (7, 2)}, {"w": (7,)}]


@pytest.mark.parametrize(
    "total, segments, sizes",
    [(5, 1, (5,)), (6, 3, (2, 2, 2)), (7, 3, (2, 3, 2)), (9, 4, (2, 3, 2, 2)), (3, 3, (1, 1, 1))],
)
def test_longer_segments_are_in_the_middle(total, segments, sizes):
    assert segment_sizes(total, segments) == sizes


def test_segments_are_parts_of_the_same_weights():
    whole = draw_weights(jax.random.key(0), SHAPES, jnp.float32, 1)
    parts = draw_weights(jax.random.key(0), SHAPES, jnp.float32, 2)
    assert [len(part[0]["w_up"]) for part in parts["layers"]] == [3, 2]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts["layers"])
    jax.tree.map(np.testing.assert_array_equal, joined, whole["layers"][0])


def test_names_say_how_weights_are_drawn():
    (layer,) = draw_weights(jax.random.key(0), SHAPES, jnp.bfloat16, 1)["layers"][0]
    assert (layer["b_up"] == 0).all() and (layer["norm"]["scale"] == 1).all()
    assert 0 < jnp.std(layer["w_up"].astype(jnp.float32)) < 0.1
    assert {leaf.dtype for leaf in jax.tree.leaves(layer)} == {jnp.dtype(jnp.bfloat16)}


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


@pytest.mark.parametrize(
    "model",
    [
        GPT(vocab_size=8, num_layers=1, num_heads=1, hidden=4, seq_len=3),
        CNN(image_size=4, channels=2, num_blocks=1, num_classes=3),
    ],
)
def test_the_sum_of_the_losses_of_a_classifier_is_their_mean_times_the_number_of_labels(model):
    params, batch = model.init(jax.random.key(0)), draw_batch(model, 2)
    mean, total = (model.loss_fn(params, batch, reduction=reduction) for reduction in ("mean", "sum"))
    np.testing.assert_allclose(total, batch[model.labels].size * mean, rtol=1e-5)
    loss, metrics = model.loss_and_metrics(params, batch)
    correct = np.argmax(model.logits(params, batch[model.inputs]), axis=-1) == batch[model.labels]
    assert loss == mean and metrics["accuracy"] == pytest.approx(np.mean(correct))
