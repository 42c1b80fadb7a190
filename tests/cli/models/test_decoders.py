"""GPT and Llama: that they learn, that their forms agree, that they look only backwards, and their sizes."""

import functools
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.batches import load_text, text_batches
from alpa_lite.cli.models.decoders import GPT, Llama, stack_layers, unstack_layers
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from tests.cli.models.draws import drawn

GPT_TINY = GPT(num_layers=2, num_heads=2, hidden=16, seq_len=12)


def loss_and_grads(model, params, batch, key=None):
    return jax.jit(jax.value_and_grad(model.loss_fn))(params, batch, key)


def make_key(seed):
    return jax.random.key(seed, impl="unsafe_rbg")  # compiles twice as fast as the default generator


def random_params(model):
    return drawn(model.init)


def assert_trees_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-6), a, b)


@pytest.fixture(scope="module")
def batch():
    (batch,) = text_batches(1, 4, GPT_TINY.seq_len, text=load_text(20_000))
    return batch


@pytest.mark.parametrize("options", [{"scan_layers": True, "remat": True}, {"tied": False, "dropout": 0.1}], ids=str)
def test_gpt_loss_falls(options, batch):
    model = replace(GPT_TINY, **options)
    optimizer = make_optimizer(1e-2, max_grad_norm=1.0)
    state = init_state(random_params(model), optimizer)
    step = jax.jit(make_train_step(model.loss_fn, optimizer))
    losses = []
    for i in range(15):
        state, metrics = step(state, batch, jax.random.key(i))
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - np.log(256)) < 0.2
    assert losses[-1] < 0.75 * losses[0]
    assert int(state.step) == 15


@pytest.fixture(scope="module")
def solved(batch):
    """Loss and gradients of a form of one model with dropout, each compiled once; weights of layers by layer."""
    params = random_params(GPT_TINY)

    @functools.cache
    def of(scan_layers, remat):
        model = replace(GPT_TINY, dropout=0.2, scan_layers=scan_layers, remat=remat)
        weights = stack_layers(params) if scan_layers else params
        loss, grads = loss_and_grads(model, weights, batch, make_key(7))
        return loss, unstack_layers(grads) if scan_layers else grads

    return of


def test_gpt_scanned_equals_unrolled(solved):
    assert_trees_close(solved(False, False), solved(True, False))


def test_both_forms_draw_the_same_weights():
    unrolled = jax.jit(GPT_TINY.init)(jax.random.key(0))
    scanned = jax.jit(replace(GPT_TINY, scan_layers=True).init)(jax.random.key(0))
    assert_trees_close(stack_layers(unrolled), scanned)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_remat_changes_nothing(scan_layers, solved):
    assert_trees_close(solved(scan_layers, True), solved(scan_layers, False))


def test_dropout_needs_a_key(batch):
    params = random_params(GPT_TINY)
    loss_fn = jax.jit(replace(GPT_TINY, dropout=0.5).loss_fn)
    np.testing.assert_allclose(loss_fn(params, batch), jax.jit(GPT_TINY.loss_fn)(params, batch), rtol=1e-6)
    assert loss_fn(params, batch, make_key(0)) != loss_fn(params, batch, make_key(1))


def test_attention_is_causal():
    params = random_params(GPT_TINY)
    tokens = jnp.arange(12)[None] + 60
    logits = jax.jit(GPT_TINY.logits)
    changed, expected = logits(params, tokens.at[0, 6].set(5)), logits(params, tokens)
    np.testing.assert_allclose(changed[:, :6], expected[:, :6], rtol=1e-6, atol=1e-6)
    assert not np.allclose(changed[:, 6:], expected[:, 6:])


def test_dtype_holds_throughout(batch):
    model = replace(GPT_TINY, dtype=jnp.bfloat16, dropout=0.1)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(model.init, key)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(model.hidden_states, params, batch["tokens"], key).dtype == jnp.bfloat16
    assert jax.eval_shape(model.loss_fn, params, batch, key).dtype == jnp.float32


def test_options_are_checked():
    with pytest.raises(ValueError, match="multiple of num_heads"):
        GPT(hidden=10, num_heads=4)
    with pytest.raises(ValueError, match="dropout"):
        GPT(dropout=1.0)


LLAMA_TINY = Llama(
    vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, hidden=16, inner=24, seq_len=12, dtype=jnp.float32
)


def test_llama_loss_falls(batch):
    model = replace(LLAMA_TINY, scan_layers=True)
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
def test_llama_scanned_equals_unrolled(remat, batch):
    params = drawn(LLAMA_TINY.init)
    loss, grads = loss_and_grads(replace(LLAMA_TINY, remat=False), params, batch)
    scanned = replace(LLAMA_TINY, scan_layers=True, remat=remat)
    scan_loss, scan_grads = loss_and_grads(scanned, stack_layers(params), batch)
    np.testing.assert_allclose(loss, scan_loss, rtol=1e-5)
    assert_trees_close(grads, unstack_layers(scan_grads))


def test_looks_only_backwards(batch):
    params = drawn(LLAMA_TINY.init)
    tokens = jnp.asarray(batch["tokens"])
    changed = tokens.at[:, 7:].set(0)
    before, after = (jax.jit(LLAMA_TINY.logits)(params, t) for t in (tokens, changed))
    np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_defaults_are_llama_3_8b():
    shapes = jax.eval_shape(Llama().init, jax.random.key(0))
    assert sum(prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == 8_030_261_248


@pytest.mark.parametrize("sizes", [{"num_heads": 3}, {"num_kv_heads": 3}, {"num_heads": 16}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="got"):
        replace(LLAMA_TINY, **sizes)
