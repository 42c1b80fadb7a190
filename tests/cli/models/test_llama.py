"""The Llama: that it learns, that its forms agree, that it looks only backwards, and how large it is."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models import source_text as text
from alpa_lite.cli.models.gpt import stack_layers, unstack_layers
from alpa_lite.cli.models.llama import Llama
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from tests.cli.models.draws import drawn

TINY = Llama(
    vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, hidden=16, inner=24, seq_len=12, dtype=jnp.float32
)


@pytest.fixture(scope="module")
def batch():
    (batch,) = text.batches(1, 4, TINY.seq_len, text=text.load(20_000))
    return batch


def loss_and_grads(model, params, batch):
    return jax.jit(jax.value_and_grad(model.loss_fn))(params, batch)


def assert_trees_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-6), a, b)


def test_loss_falls(batch):
    model = replace(TINY, scan_layers=True)
    optimizer = make_optimizer(1e-2, max_grad_norm=1.0)
    state = init_state(drawn(model.init), optimizer)
    step = jax.jit(make_train_step(model.loss_fn, optimizer))
    losses = []
    for _ in range(15):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - np.log(256)) < 0.2
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("remat", [True, False])
def test_scanned_equals_unrolled(remat, batch):
    params = drawn(TINY.init)
    loss, grads = loss_and_grads(replace(TINY, remat=False), params, batch)
    scanned = replace(TINY, scan_layers=True, remat=remat)
    scan_loss, scan_grads = loss_and_grads(scanned, stack_layers(params), batch)
    np.testing.assert_allclose(loss, scan_loss, rtol=1e-5)
    assert_trees_close(grads, unstack_layers(scan_grads))


def test_looks_only_backwards(batch):
    params = drawn(TINY.init)
    tokens = jnp.asarray(batch["tokens"])
    changed = tokens.at[:, 7:].set(0)
    before, after = (jax.jit(TINY.logits)(params, t) for t in (tokens, changed))
    np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_defaults_are_llama_3_8b():
    shapes = jax.eval_shape(Llama().init, jax.random.key(0))
    assert sum(prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == 8_030_261_248


@pytest.mark.parametrize("sizes", [{"num_heads": 3}, {"num_kv_heads": 3}, {"num_heads": 16}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="got"):
        replace(TINY, **sizes)
