"""BERT: published size, what padding and weights of predictions leave out, and that every weight is used."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.bert import BERT
from tests.cli.models.draws import drawn

TINY = BERT(vocab_size=16, num_layers=2, hidden=8, num_heads=2, inner=16, seq_len=6, num_masked=2, num_segments=2)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, drawn(TINY.init, 0.3))


@pytest.fixture(scope="module")
def batch():
    return {**draw_batch(TINY, 4), "present": np.ones((4, 6), np.int32), "positions": np.array([[1, 4]] * 4)}


@pytest.fixture(scope="module")
def loss(params):
    return jax.jit(lambda batch: TINY.loss_fn(params, batch))


def test_published_size():
    # Hugging Face, BertForPreTraining of bert-large-uncased; without the heads it is 335,141,888 (BertModel).
    large = BERT()
    assert large.parameter_count() == 336_226_108
    heads = jax.eval_shape(large.init, jax.random.key(0))
    assert sum(x.size for name in ("words", "follows") for x in jax.tree.leaves(heads[name])) == 1_084_220
    assert 336_226_108 - 1_084_220 == 335_141_888


def test_every_weight_is_used(params, batch):
    value, grads = jax.jit(jax.value_and_grad(TINY.loss_fn))(params, batch)
    assert jnp.isfinite(value)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_words_see_both_sides_but_no_padding(params, batch):
    hidden = jax.jit(lambda batch: TINY.hidden_states(params, batch))
    other = batch["tokens"].copy()
    other[:, 5] = (other[:, 5] + 1) % 16
    before, after = hidden(batch), hidden({**batch, "tokens": other})
    assert np.abs(before - after)[:, 0].min() < np.abs(before - after)[:, 0].max() > 1e-4  # the last word is seen
    present = batch["present"].copy()
    present[:, 5] = 0
    without = [hidden({**batch, "tokens": tokens, "present": present}) for tokens in (batch["tokens"], other)]
    np.testing.assert_array_equal(without[0][:, :5], without[1][:, :5])


def test_predictions_of_weight_zero_do_not_count(loss, batch):
    weights = batch["weights"].copy()
    weights[:, 1] = 0.0
    targets = batch["targets"].copy()
    targets[:, 1] = (targets[:, 1] + 3) % 16
    assert loss({**batch, "weights": weights}) == loss({**batch, "weights": weights, "targets": targets})
    assert loss(batch) != loss({**batch, "targets": targets})


def test_the_loss_of_words_is_their_weighted_mean(loss, batch):
    def alone(row, place):
        weights = np.zeros_like(batch["weights"])
        weights[row, place] = 1.0
        return float(loss({**batch, "weights": weights}))

    weights = batch["weights"]
    singles = np.array([[alone(row, place) for place in range(2)] for row in range(4)])
    assert float(loss(batch)) == pytest.approx(np.sum(weights * singles) / np.sum(weights), rel=1e-4)


def test_segments_compute_the_same(params, batch):
    joined = {**params, "layers": [jax.tree.map(lambda *parts: np.concatenate(parts), *params["layers"])]}
    value = jax.jit(replace(TINY, num_segments=1).loss_fn)(joined, batch)
    assert value == pytest.approx(float(jax.jit(TINY.loss_fn)(params, batch)), rel=1e-5)


def test_dropout_draws_masks_only_with_a_key(params, batch):
    loss_fn = jax.jit(TINY.loss_fn)
    keys = jax.random.split(jax.random.key(0))
    assert loss_fn(params, batch, keys[0]) != loss_fn(params, batch, keys[1])


def test_sizes_that_do_not_fit_are_a_sentence():
    with pytest.raises(ValueError, match="multiple of num_heads"):
        BERT(hidden=10, num_heads=3)
    with pytest.raises(ValueError, match="between 1 and 2"):
        replace(TINY, num_segments=3)
