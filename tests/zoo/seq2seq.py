"""Encoder and decoder with cross attention, and masked language models; losses over tokens that are no padding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.registry import (
    BATCH,
    EPSILON,
    SEQ,
    Program,
    cross_entropy,
    global_norm,
    integers,
    layer_norm,
    norm_weights,
    program,
    weights,
)

HIDDEN, HEADS, INNER, LAYERS = 24, 3, 32, 1
PAD = 0


def attention_weights(seed: int) -> Any:
    """Weights of one attention; keys have no bias, since no loss depends on it."""
    p = weights({name: (HIDDEN, HEADS, HIDDEN // HEADS) for name in "qkv"}, seed)
    scale = (HIDDEN / HEADS) ** -0.5
    biases = {name: jnp.full((HEADS, HIDDEN // HEADS), 0.1) for name in ("q_bias", "v_bias")}
    p = jax.tree.map(lambda w: scale * w, p)
    return {**p, **biases, "out": weights((HEADS, HIDDEN // HEADS, HIDDEN), seed + 1)}


def feed_forward_weights(seed: int) -> Any:
    """Weights of one feed-forward layer."""
    p = weights({"up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}, seed)
    return {**p, "up_bias": jnp.full(INNER, 0.1), "down_bias": jnp.zeros(HIDDEN)}


def block_weights(seed: int, *, cross: bool) -> Any:
    """Weights of a layer of the encoder or the decoder."""
    p = {"self": attention_weights(seed), "norm_1": norm_weights(HIDDEN), "norm_2": norm_weights(HIDDEN)}
    p["inner"] = feed_forward_weights(seed + 2)
    return {**p, "cross": attention_weights(seed + 4), "norm_3": norm_weights(HIDDEN)} if cross else p


def attend(p, x, memory, mask):
    q = jnp.einsum("bsd,dhk->bshk", x, p["q"]) + p["q_bias"]
    k = jnp.einsum("btd,dhk->bthk", memory, p["k"])
    v = jnp.einsum("btd,dhk->bthk", memory, p["v"]) + p["v_bias"]
    scores = jnp.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhst,bthk,hkd->bsd", probs, v, p["out"])


def feed_forward(p, x):
    return jax.nn.relu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def encode(layers, x, mask):
    for p in layers:
        x = layer_norm(x + attend(p["self"], x, x, mask), p["norm_1"])
        x = layer_norm(x + feed_forward(p["inner"], x), p["norm_2"])
    return x


def decode(layers, x, memory, mask, memory_mask):
    for p in layers:
        x = layer_norm(x + attend(p["self"], x, x, mask), p["norm_1"])
        x = layer_norm(x + attend(p["cross"], x, memory, memory_mask), p["norm_3"])
        x = layer_norm(x + feed_forward(p["inner"], x), p["norm_2"])
    return x


def sinusoids(length, size):
    angles = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(0, size, 2) / size)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def padded(vocab: int, length: int, seed: int) -> jax.Array:
    """Sequences of random length, filled up with padding."""
    tokens, lengths = integers(vocab, BATCH, length, seed=seed, low=1), integers(length, BATCH, seed=seed + 1, low=3)
    return jnp.where(jnp.arange(length) < lengths[:, None], tokens, PAD)


def init(vocab: int) -> Any:
    """Weights of an encoder and a decoder."""
    return {
        "embed": weights((vocab, HIDDEN)) * vocab**0.5 * 0.5,
        "encoder": [block_weights(10 * i, cross=False) for i in range(LAYERS)],
        "decoder": [block_weights(100 + 10 * i, cross=True) for i in range(LAYERS)],
        "head": weights((HIDDEN, vocab), 7),
    }


def translation_loss(params, source, target, *, smoothing, per_sample):
    causal = jnp.tril(jnp.ones((target.shape[1] - 1,) * 2, bool))
    source_mask = (source != PAD)[:, None, None, :]
    inputs, labels = target[:, :-1], target[:, 1:]
    memory = encode(params["encoder"], params["embed"][source] + sinusoids(source.shape[1], HIDDEN), source_mask)
    x = params["embed"][inputs] + sinusoids(inputs.shape[1], HIDDEN)
    mask = causal & (inputs != PAD)[:, None, None, :]
    logits = decode(params["decoder"], x, memory, mask, source_mask) @ params["head"]
    if smoothing:
        soft = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
        losses = optax.softmax_cross_entropy(logits, soft)
    else:
        losses = cross_entropy(logits, labels)
    real = (labels != PAD).astype(logits.dtype)
    if per_sample:
        return jnp.mean(jnp.sum(losses * real, 1) / real.sum(1)), real.sum()
    return jnp.sum(losses * real) / real.sum(), real.sum()


def translation(*, vocab: int = 32, smoothing: float = 0.0, per_sample: bool = False) -> Program:
    """A program that learns to translate."""
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.98, eps=EPSILON))
    loss_fn = functools.partial(translation_loss, smoothing=smoothing, per_sample=per_sample)

    def train_step(state, source, target):
        params, opt_state = state
        (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, source, target)
        updates, opt_state = transform.update(grads, opt_state, params)
        metrics = {"loss": loss, "tokens": count, "grad_norm": global_norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = init(vocab)
    inputs = (padded(vocab, SEQ, 1), padded(vocab, SEQ + 1, 5))
    return Program(step=train_step, state=(params, transform.init(params)), inputs=inputs)


@program
def translation_by_token():
    return translation()


@program
def translation_by_sentence():
    return translation(vocab=50, smoothing=0.1, per_sample=True)


@program
def masked_language_model():
    vocab = 50
    transform = optax.adamw(1e-3, eps=EPSILON)

    def step(state, tokens):
        params, opt_state, key = state
        key, mask_key, random_key = jax.random.split(key, 3)
        hidden = jax.random.bernoulli(mask_key, 0.3, tokens.shape) & (tokens != PAD)
        noise = jax.random.randint(random_key, tokens.shape, 1, vocab)
        corrupted = jnp.where(hidden, jnp.where(noise % 10 == 0, noise, vocab - 1), tokens)

        def loss_fn(params):
            x = params["embed"][corrupted] + params["position"][: tokens.shape[1]]
            x = encode(params["encoder"], x, (tokens != PAD)[:, None, None, :])
            logits = x @ params["embed"].T + params["bias"]
            losses = cross_entropy(logits, tokens) * hidden
            return losses.sum() / jnp.maximum(hidden.sum(), 1)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss, "hidden": hidden.sum()}

    params = init(vocab)
    ends = {"position": weights((SEQ, HIDDEN), 3), "bias": jnp.zeros(vocab)}
    params = {"embed": params["embed"], "encoder": params["encoder"], **ends}
    return Program(
        step=step, state=(params, transform.init(params), jax.random.key(0)), inputs=(padded(vocab, SEQ, 1),)
    )


@program
def packed_documents():
    """Several documents in a row, kept apart by their numbers; attention in blocks, positions restarting."""
    transform = optax.sgd(0.05, momentum=0.9)

    def step(state, tokens, segments):
        params, opt_state = state

        def loss_fn(params):
            same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
            mask = (same & jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)))[:, None]
            starts = jnp.concatenate([jnp.ones_like(segments[:, :1]), jnp.diff(segments, axis=1)], 1) != 0
            where = jnp.arange(tokens.shape[1])
            position = where - jax.lax.cummax(jnp.where(starts, where, 0), axis=1)
            x = encode(params["encoder"], params["embed"][tokens] + params["position"][position], mask)
            logits = (x @ params["head"])[:, :-1]
            real = same[:, jnp.arange(tokens.shape[1] - 1), jnp.arange(1, tokens.shape[1])]
            return jnp.sum(jnp.where(real, cross_entropy(logits, tokens[:, 1:]), 0.0)) / tokens.size

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = {**init(32), "position": weights((SEQ, HIDDEN), 3)}
    params.pop("decoder")
    segments = jnp.sort(integers(4, BATCH, SEQ, seed=3), axis=1)[:, ::-1]
    inputs = (integers(32, BATCH, SEQ), segments)
    return Program(step=step, state=(params, transform.init(params)), inputs=inputs)
