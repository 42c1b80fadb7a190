"""The translator: published sizes, its cells in NumPy, what it may see, and that every weight is used."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.seq2seq import Translator
from tests.cli.models.draws import drawn

TINY = Translator(source_vocab=12, target_vocab=10, num_layers=2, hidden=6, source_len=4, target_len=5)


@pytest.fixture(scope="module")
def params():
    return drawn(TINY.init, 0.5)


@pytest.fixture(scope="module")
def batch():
    return {**draw_batch(TINY, 3), "source_weights": np.ones((3, 4), np.float32)}


def test_published_sizes():
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
    model = replace(TINY, attention=attention)
    params = drawn(model.init, 0.5)
    shorter = {**batch, "source_weights": np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], np.float32)}
    np.testing.assert_allclose(jax.jit(model.logits)(params, shorter), _by_hand(params, shorter, attention), atol=1e-5)


def test_every_weight_is_used(params, batch):
    loss, grads = jax.jit(jax.value_and_grad(TINY.loss_fn))(params, batch)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.any(grad != 0.0), jax.tree_util.keystr(path)


def test_a_word_is_predicted_from_those_before(params, batch):
    logits, inputs = jax.jit(TINY.logits), batch["inputs"].copy()
    inputs[:, 3] = (inputs[:, 3] + 1) % 10
    before, after = logits(params, batch), logits(params, {**batch, "inputs": inputs})
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before - after)[:, 3:].min(axis=(0, 2)).max() > 0


def test_words_of_weight_zero_do_not_count(params, batch):
    weights, targets = batch["weights"].copy(), batch["targets"].copy()
    weights[:, 4], targets[:, 4] = 0.0, (targets[:, 4] + 1) % 10
    loss = jax.jit(TINY.loss_fn)
    some = {**batch, "weights": weights}
    assert loss(params, some) == loss(params, {**some, "targets": targets})
    assert loss(params, batch) != loss(params, {**batch, "targets": targets})
