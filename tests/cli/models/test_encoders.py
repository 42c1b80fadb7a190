"""BERT and the translator: sizes, that every weight is used, and what words see."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.encoders import BERT, Translator
from tests.cli.models.draws import drawn

BERT_TINY = BERT(vocab_size=16, num_layers=2, hidden=8, num_heads=2, inner=16, seq_len=6, num_masked=2, num_segments=2)


@pytest.fixture(scope="module")
def bert_params():
    return jax.tree.map(jnp.asarray, drawn(BERT_TINY.init, 0.3))


@pytest.fixture(scope="module")
def bert_batch():
    return {**draw_batch(BERT_TINY, 4), "present": np.ones((4, 6), np.int32), "positions": np.array([[1, 4]] * 4)}


@pytest.fixture(scope="module")
def loss(bert_params):
    return jax.jit(lambda bert_batch: BERT_TINY.loss_fn(bert_params, bert_batch))


def test_published_size_of_bert():
    # Hugging Face, BertForPreTraining of bert-large-uncased; without the heads it is 335,141,888 (BertModel).
    large = BERT()
    assert large.parameter_count() == 336_226_108
    heads = jax.eval_shape(large.init, jax.random.key(0))
    assert sum(x.size for name in ("words", "follows") for x in jax.tree.leaves(heads[name])) == 1_084_220
    assert 336_226_108 - 1_084_220 == 335_141_888


def test_every_weight_of_bert_is_used(bert_params, bert_batch):
    value, grads = jax.jit(jax.value_and_grad(BERT_TINY.loss_fn))(bert_params, bert_batch)
    assert jnp.isfinite(value)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_words_see_both_sides_but_no_padding(bert_params, bert_batch):
    hidden = jax.jit(lambda bert_batch: BERT_TINY.hidden_states(bert_params, bert_batch))
    other = bert_batch["tokens"].copy()
    other[:, 5] = (other[:, 5] + 1) % 16
    before, after = hidden(bert_batch), hidden({**bert_batch, "tokens": other})
    assert np.abs(before - after)[:, 0].min() < np.abs(before - after)[:, 0].max() > 1e-4  # the last word is seen
    present = bert_batch["present"].copy()
    present[:, 5] = 0
    without = [hidden({**bert_batch, "tokens": tokens, "present": present}) for tokens in (bert_batch["tokens"], other)]
    np.testing.assert_array_equal(without[0][:, :5], without[1][:, :5])


def test_predictions_of_weight_zero_do_not_count(loss, bert_batch):
    weights = bert_batch["weights"].copy()
    weights[:, 1] = 0.0
    targets = bert_batch["targets"].copy()
    targets[:, 1] = (targets[:, 1] + 3) % 16
    assert loss({**bert_batch, "weights": weights}) == loss({**bert_batch, "weights": weights, "targets": targets})
    assert loss(bert_batch) != loss({**bert_batch, "targets": targets})


def test_the_loss_of_words_is_their_weighted_mean(loss, bert_batch):
    def alone(row, place):
        weights = np.zeros_like(bert_batch["weights"])
        weights[row, place] = 1.0
        return float(loss({**bert_batch, "weights": weights}))

    weights = bert_batch["weights"]
    singles = np.array([[alone(row, place) for place in range(2)] for row in range(4)])
    assert float(loss(bert_batch)) == pytest.approx(np.sum(weights * singles) / np.sum(weights), rel=1e-4)


def test_segments_compute_the_same(bert_params, bert_batch):
    joined = {**bert_params, "layers": [jax.tree.map(lambda *parts: np.concatenate(parts), *bert_params["layers"])]}
    value = jax.jit(replace(BERT_TINY, num_segments=1).loss_fn)(joined, bert_batch)
    assert value == pytest.approx(float(jax.jit(BERT_TINY.loss_fn)(bert_params, bert_batch)), rel=1e-5)


def test_dropout_draws_masks_only_with_a_key(bert_params, bert_batch):
    loss_fn = jax.jit(BERT_TINY.loss_fn)
    keys = jax.random.split(jax.random.key(0))
    assert loss_fn(bert_params, bert_batch, keys[0]) != loss_fn(bert_params, bert_batch, keys[1])


def test_sizes_that_do_not_fit_are_a_sentence():
    with pytest.raises(ValueError, match="multiple of num_heads"):
        BERT(hidden=10, num_heads=3)
    with pytest.raises(ValueError, match="between 1 and 2"):
        replace(BERT_TINY, num_segments=3)


TRANSLATOR_TINY = Translator(source_vocab=12, target_vocab=10, num_layers=2, hidden=6, source_len=4, target_len=5)


@pytest.fixture(scope="module")
def params():
    return drawn(TRANSLATOR_TINY.init, 0.5)


@pytest.fixture(scope="module")
def batch():
    return {**draw_batch(TRANSLATOR_TINY, 3), "source_weights": np.ones((3, 4), np.float32)}


def test_published_sizes_of_the_translator():
    # Sutskever et al. 2014, section 3.4: "384M parameters of which 64M are pure recurrent connections", no biases.
    plain = Translator(attention=False, source_vocab=160_000, target_vocab=80_000)
    biases = 8 * 4000 + 80_000
    assert plain.parameter_count() == 384_000_000 + biases
    shapes = jax.eval_shape(plain.init, jax.random.key(0))
    cells = [*shapes["encoder"], *shapes["decoder"]]
    assert sum(cell[name].size for cell in cells for name in ("w_x", "w_h")) == 64_000_000
    # Luong et al. 2015: three arrays of 50K words, the cells, what input feeding adds to one, attention, biases.
    assert Translator().parameter_count() == 150_000_000 + 64_000_000 + 4_000_000 + 3_000_000 + 8 * 4000 + 50_000


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _by_hand(params, batch, attention):
    """Word by word, in double precision."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)

    def cell(w, state, x):
        i, f, g, o = np.split(x @ w["w_x"] + state[0] @ w["w_h"] + w["b"], 4)
        c = _sigmoid(f) * state[1] + _sigmoid(i) * np.tanh(g)
        return _sigmoid(o) * np.tanh(c), c

    logits = []
    for row in range(3):
        states = [(np.zeros(6), np.zeros(6)) for _ in range(2)]
        memory = []
        for word in batch["source"][row]:
            x = p["source_embedding"][word]
            for n in range(2):
                states[n] = cell(p["encoder"][n], states[n], x)
                x = states[n][0]
            memory.append(x)
        seen, memory = np.zeros(6), np.array(memory)
        for word in batch["inputs"][row]:
            x = p["target_embedding"][word]
            x = np.concatenate([x, seen]) if attention else x
            for n in range(2):
                states[n] = cell(p["decoder"][n], states[n], x)
                x = states[n][0]
            if attention:
                scores = np.exp(memory @ (x @ p["w_score"])) * batch["source_weights"][row]
                context = scores / scores.sum() @ memory
                x = seen = np.tanh(np.concatenate([context, x]) @ p["w_combine"])
            logits.append(x @ p["head"]["w"] + p["head"]["b"])
    return np.array(logits).reshape(3, 5, 10)


@pytest.mark.parametrize("attention", [True, False])
def test_it_is_what_the_papers_say(attention, batch):
    model = replace(TRANSLATOR_TINY, attention=attention)
    params = drawn(model.init, 0.5)
    shorter = {**batch, "source_weights": np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], np.float32)}
    np.testing.assert_allclose(jax.jit(model.logits)(params, shorter), _by_hand(params, shorter, attention), atol=1e-5)


def test_every_weight_of_the_translator_is_used(params, batch):
    loss, grads = jax.jit(jax.value_and_grad(TRANSLATOR_TINY.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_a_word_is_predicted_from_those_before(params, batch):
    logits, inputs = jax.jit(TRANSLATOR_TINY.logits), batch["inputs"].copy()
    inputs[:, 3] = (inputs[:, 3] + 1) % 10
    before, after = logits(params, batch), logits(params, {**batch, "inputs": inputs})
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before - after)[:, 3:].min(axis=(0, 2)).max() > 0


def test_words_of_weight_zero_do_not_count(params, batch):
    weights, targets = batch["weights"].copy(), batch["targets"].copy()
    weights[:, 4], targets[:, 4] = 0.0, (targets[:, 4] + 1) % 10
    loss = jax.jit(TRANSLATOR_TINY.loss_fn)
    some = {**batch, "weights": weights}
    assert loss(params, some) == loss(params, {**some, "targets": targets})
    assert loss(params, batch) != loss(params, {**batch, "targets": targets})
