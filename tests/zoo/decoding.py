"""Evaluation and inference: metrics, decoding with a cache, generation in a loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.registry import BATCH, SEQ, Program, cross_entropy, integers, normal, program, weights

VOCAB, HIDDEN, HEADS, LAYERS = 32, 32, 4, 2


def init() -> Any:
    """Weights of a small decoder."""
    layer = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "up": (HIDDEN, 64), "down": (64, HIDDEN)}
    layers = [weights(layer, seed=i) for i in range(LAYERS)]
    return {"embed": weights((VOCAB, HIDDEN), 8), "position": 0.1 * normal(2 * SEQ, HIDDEN, seed=9), "layers": layers}


def empty_cache(batch: int, length: int) -> Any:
    """Keys and values of every layer, all zero."""
    shape = (batch, length, HEADS, HIDDEN // HEADS)
    return [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(LAYERS)]


def decode(params, cache, tokens, position):
    """Logits after one more token of each sample, and the new cache."""
    x = params["embed"][tokens] + params["position"][position]
    new = []
    for p, layer in zip(params["layers"], cache, strict=True):
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*tokens.shape, HEADS, -1), 3, axis=-1)
        keys = jax.lax.dynamic_update_slice(layer["k"], k[:, None], (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(layer["v"], v[:, None], (0, position, 0, 0))
        scores = jnp.einsum("bhd,bthd->bht", q, keys) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
        mixed = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), values)
        x = x + mixed.reshape(tokens.shape[0], HIDDEN) @ p["out"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        new.append({"k": keys, "v": values})
    return x @ params["embed"].T, new


@program
def decode_one_token():
    def step(state, params, tokens):
        cache, position = state
        logits, cache = decode(params, cache, tokens, position)
        loss = cross_entropy(logits, tokens).mean()
        return (cache, position + 1), {"loss": loss, "next": logits.argmax(-1), "logits": logits}

    return Program(
        step=step,
        state=(empty_cache(BATCH, SEQ), jnp.int32(3)),
        inputs=(init(), integers(VOCAB, BATCH)),
        batch_argnums=(0, 2),
    )


@program
def generate_in_fori_loop():
    def step(state, prompt):
        params, count = state
        batch = prompt.shape[0]

        def body(i, carry):
            tokens, cache = carry
            logits, cache = decode(params, cache, tokens[:, i], i)
            chosen = jnp.where(i + 1 < prompt.shape[1], tokens[:, jnp.minimum(i + 1, SEQ - 1)], logits.argmax(-1))
            return jax.lax.dynamic_update_slice(tokens, chosen[:, None], (0, i + 1)), cache

        tokens = jnp.zeros((batch, SEQ), jnp.int32)
        tokens = jax.lax.dynamic_update_slice(tokens, prompt, (0, 0))
        tokens, cache = jax.lax.fori_loop(0, SEQ - 1, body, (tokens, empty_cache(batch, SEQ)))
        return (params, count + 1), {"loss": jnp.mean(cache[0]["k"] ** 2), "tokens": tokens}

    return Program(step=step, state=(init(), jnp.int32(0)), inputs=(integers(VOCAB, BATCH, 3),))


@program
def sample_until_all_end():
    def step(state, first):
        params, key = state
        key, start = jax.random.split(key)
        batch = first.shape[0]

        def go_on(carry):
            _, _, _, done, i, _ = carry
            return (i < SEQ - 1) & ~jnp.all(done)

        def body(carry):
            tokens, latest, cache, done, i, key = carry
            key, now = jax.random.split(key)
            logits, cache = decode(params, cache, latest, i)
            latest = jnp.where(done, 0, jax.random.categorical(now, logits / 0.8))
            return tokens.at[:, i + 1].set(latest), latest, cache, done | (latest == 0), i + 1, key

        tokens = jnp.zeros((batch, SEQ), jnp.int32).at[:, 0].set(first)
        start = (tokens, first, empty_cache(batch, SEQ), jnp.zeros(batch, bool), 0, start)
        tokens, _, _, done, length, _ = jax.lax.while_loop(go_on, body, start)
        return (params, key), {"loss": jnp.mean(done.astype(jnp.float32)), "tokens": tokens, "length": length}

    return Program(step=step, state=(init(), jax.random.key(0)), inputs=(integers(VOCAB, BATCH, low=1),))


@program
def generate_in_scan_with_top_k():
    def step(state, first):
        params, key = state
        key, now = jax.random.split(key)

        def body(carry, part):
            latest, cache = carry
            i, key = part
            logits, cache = decode(params, cache, latest, i)
            best, which = jax.lax.top_k(logits, 4)
            chosen = jax.random.categorical(key, best)
            latest = jnp.take_along_axis(which, chosen[:, None], 1)[:, 0]
            return (latest, cache), (latest, jax.nn.logsumexp(logits, -1))

        parts = (jnp.arange(SEQ), jax.random.split(now, SEQ))
        _, (tokens, totals) = jax.lax.scan(body, (first, empty_cache(first.shape[0], SEQ)), parts)
        return (params, key), {"loss": totals.mean(), "tokens": tokens.T}

    return Program(step=step, state=(init(), jax.random.key(0)), inputs=(integers(VOCAB, BATCH),))


@program
def beam_search():
    beams = 4

    def step(state, first):
        params, count = state
        batch = first.shape[0]

        def body(carry, i):
            tokens, scores, cache = carry
            logits, cache = decode(params, cache, tokens.reshape(-1), i)
            totals = scores[..., None] + jax.nn.log_softmax(logits).reshape(batch, beams, VOCAB)
            scores, which = jax.lax.top_k(totals.reshape(batch, -1), beams)
            parent, tokens = which // VOCAB, which % VOCAB
            rows = (jnp.arange(batch)[:, None] * beams + parent).reshape(-1)
            return (tokens, scores, jax.tree.map(lambda c: c[rows], cache)), (tokens, parent)

        tokens = jnp.repeat(first[:, None], beams, 1)
        scores = jnp.tile(jnp.array([0.0] + [-1e9] * (beams - 1)), (batch, 1))
        carry = (tokens, scores, empty_cache(batch * beams, SEQ))
        (_, scores, _), (tokens, parents) = jax.lax.scan(body, carry, jnp.arange(SEQ))
        return (params, count + 1), {"loss": -scores[:, 0].mean(), "tokens": tokens, "parents": parents}

    return Program(step=step, state=(init(), jnp.int32(0)), inputs=(integers(VOCAB, BATCH),))


@program
def evaluation():
    def step(totals, params, x, labels, mask):
        logits = jnp.tanh(x @ params["a"]) @ params["b"]
        losses = cross_entropy(logits, labels) * mask
        right = (logits.argmax(-1) == labels) * mask
        confusion = jnp.zeros((10, 10)).at[labels, logits.argmax(-1)].add(mask)
        totals = {
            "loss": totals["loss"] + losses.sum(),
            "right": totals["right"] + right.sum(),
            "count": totals["count"] + mask.sum(),
            "confusion": totals["confusion"] + confusion,
        }
        top = jax.lax.top_k(logits, 5)[1]
        return totals, {"loss": losses.sum() / mask.sum(), "in_top": jnp.any(top == labels[:, None], 1)}

    totals = {name: jnp.float32(0) for name in ("loss", "right", "count")}
    mask = (jnp.arange(BATCH) < 13).astype(jnp.float32)
    return Program(
        step=step,
        state={**totals, "confusion": jnp.zeros((10, 10))},
        inputs=(weights({"a": (16, 32), "b": (32, 10)}), normal(BATCH, 16), integers(10, BATCH), mask),
        batch_argnums=(2, 3, 4),
    )
