"""Recurrence over time: gated cells in a scan, linear recurrences by an associative scan, a loss over alignments."""

from __future__ import annotations

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
    descend,
    global_norm,
    integers,
    layer_norm,
    norm_weights,
    normal,
    program,
    weights,
)

VOCAB, HIDDEN = 32, 16


def lstm_cell(p, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["bias"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def lstm_weights(seed: int) -> Any:
    """Weights of one cell."""
    p = weights({"x": (HIDDEN, 4 * HIDDEN), "h": (HIDDEN, 4 * HIDDEN)}, seed)
    return {**p, "bias": jnp.zeros(4 * HIDDEN)}


@program
def lstm_language_model():
    transform = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=EPSILON))

    def loss_fn(params, tokens):
        xs = params["embed"][tokens[:, :-1]].swapaxes(0, 1)
        zeros = jnp.zeros((tokens.shape[0], HIDDEN))
        for p in params["layers"]:
            _, xs = jax.lax.scan(lambda carry, x, p=p: lstm_cell(p, carry, x), (zeros, zeros), xs)
        return cross_entropy(xs.swapaxes(0, 1) @ params["head"], tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": global_norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = weights({"embed": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)})
    params["layers"] = [lstm_weights(i) for i in range(2)]
    return Program(step=step, state=(params, transform.init(params)), inputs=(integers(VOCAB, BATCH, SEQ + 1),))


@program
def lstm_carrying_its_state():
    """Truncated gradients through time: the last state of each sample starts the next step."""

    def step(state, tokens):
        params, carry = state

        def loss_fn(params):
            xs = params["embed"][tokens[:, :-1]].swapaxes(0, 1)
            cell = lambda carry, x: lstm_cell(params["cell"], carry, x)  # noqa: E731
            last, hs = jax.lax.scan(cell, jax.lax.stop_gradient(carry), xs, unroll=2)
            return cross_entropy(hs.swapaxes(0, 1) @ params["head"], tokens[:, 1:]).mean(), last

        (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (descend(params, grads), carry), {"loss": loss}

    params = {**weights({"embed": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}), "cell": lstm_weights(1)}
    zeros = jnp.zeros((BATCH, HIDDEN))
    inputs, batch = (integers(VOCAB, BATCH, SEQ + 1),), {"state/1": 0, "tokens": 0}
    return Program(step=step, state=(params, (zeros, zeros)), inputs=inputs, batch_argnums=batch)


@program
def gru_with_lengths():
    transform = optax.adam(1e-3, eps=EPSILON)

    def cell(p, h, x):
        z, r = jnp.split(jax.nn.sigmoid(x @ p["x"][:, : 2 * HIDDEN] + h @ p["h"]), 2, axis=-1)
        candidate = jnp.tanh(x @ p["x"][:, 2 * HIDDEN :] + (r * h) @ p["candidate"])
        return (1 - z) * h + z * candidate

    def loss_fn(params, xs, lengths, labels):
        def masked(h, part):
            x, t = part
            return jnp.where((t < lengths)[:, None], cell(params, h, x), h), None

        h, _ = jax.lax.scan(masked, jnp.zeros((xs.shape[0], HIDDEN)), (xs.swapaxes(0, 1), jnp.arange(xs.shape[1])))
        logits = h @ params["head"]
        return cross_entropy(logits, labels).mean(), logits

    def step(state, xs, lengths, labels):
        params, opt_state = state
        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, xs, lengths, labels)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "logits": logits}

    shapes = {"x": (8, 3 * HIDDEN), "h": (HIDDEN, 2 * HIDDEN), "candidate": (HIDDEN, HIDDEN), "head": (HIDDEN, 10)}
    params = weights(shapes)
    inputs = (normal(BATCH, SEQ, 8), integers(SEQ + 1, BATCH, low=1), integers(10, BATCH, seed=3))
    return Program(step=step, state=(params, transform.init(params)), inputs=inputs)


@program
def both_directions():
    def step(params, xs, labels):
        def loss_fn(params):
            cell = lambda w: lambda h, x: (jnp.tanh(x @ w["x"] + h @ w["h"]),) * 2  # noqa: E731
            start, sequence = jnp.zeros((xs.shape[0], HIDDEN)), xs.swapaxes(0, 1)
            _, ahead = jax.lax.scan(cell(params["ahead"]), start, sequence)
            _, back = jax.lax.scan(cell(params["back"]), start, sequence, reverse=True)
            logits = jnp.concatenate([ahead, back], -1).swapaxes(0, 1) @ params["head"]
            return cross_entropy(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads), {"loss": loss}

    cell = {"x": (8, HIDDEN), "h": (HIDDEN, HIDDEN)}
    params = weights({"ahead": cell, "back": cell, "head": (2 * HIDDEN, 5)})
    return Program(step=step, state=params, inputs=(normal(BATCH, SEQ, 8), integers(5, BATCH, SEQ)))


# --- linear recurrences -----------------------------------------------------------------------------------------------


def combine(a, b):
    return a[0] * b[0], b[0] * a[1] + b[1]


@program
def selective_state_space():
    inner, size = 16, 4
    transform = optax.adamw(1e-3, eps=EPSILON)

    def mixer(p, x):
        u, gate = jnp.split(x @ p["in"], 2, axis=-1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = jax.nn.silu(sum(padded[:, i : i + u.shape[1]] * p["conv"][i] for i in range(4)))
        dt = jax.nn.softplus(u @ p["dt"] + p["dt_bias"])
        b, c = jnp.split(u @ p["bc"], 2, axis=-1)
        decay = jnp.exp(-dt[..., None] * jnp.exp(p["a"]))
        drive = dt[..., None] * b[:, :, None, :] * u[..., None]
        _, h = jax.lax.associative_scan(combine, (decay, drive), axis=1)
        y = jnp.einsum("btds,bts->btd", h, c) + p["d"] * u
        return (y * jax.nn.silu(gate)) @ p["out"]

    def loss_fn(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + mixer(p, layer_norm(x, p["norm"]))
        return cross_entropy(x @ params["head"], tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    shapes = {"in": (HIDDEN, 2 * inner), "conv": (4, inner), "dt": (inner, inner), "bc": (inner, 2 * size)}
    shapes |= {"out": (inner, HIDDEN), "a": (inner, size)}
    rest = {"dt_bias": jnp.full(inner, -1.0), "d": jnp.ones(inner), "norm": norm_weights(HIDDEN)}
    params = weights({"embed": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}, 9)
    params["layers"] = [{**weights(shapes, i), **rest} for i in range(2)]
    return Program(step=step, state=(params, transform.init(params)), inputs=(integers(VOCAB, BATCH, SEQ + 1),))


@program
def complex_linear_recurrence():
    def step(params, xs, y):
        def loss_fn(params):
            decay = jnp.exp(-jnp.exp(params["nu"]) + 1j * jnp.exp(params["theta"]))
            drive = xs.astype(jnp.complex64) @ (params["b_real"] + 1j * params["b_imag"])
            decays = jnp.broadcast_to(decay, drive.shape)
            _, h = jax.lax.associative_scan(combine, (decays, drive), axis=1)
            out = jnp.real(h @ (params["c_real"] + 1j * params["c_imag"]))
            return jnp.mean((out.mean(1) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads, 0.01), {"loss": loss}

    shapes = {"b_real": (8, HIDDEN), "b_imag": (8, HIDDEN), "c_real": (HIDDEN, 4), "c_imag": (HIDDEN, 4)}
    params = {**weights(shapes), "nu": 0.3 * normal(HIDDEN), "theta": normal(HIDDEN, seed=2)}
    return Program(step=step, state=params, inputs=(normal(BATCH, SEQ, 8), normal(BATCH, 4)))


@program
def linear_attention_in_chunks():
    heads, size, chunk = 2, 8, 4

    def mixer(p, x):
        batch, length, _ = x.shape
        q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(batch, length // chunk, chunk, 3, heads, size), 3, 0)
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        causal = jnp.tril(jnp.ones((chunk, chunk)))

        def body(memory, part):
            q, k, v = part
            inside = jnp.einsum("bihk,bjhk,ij,bjhv->bihv", q, k, causal, v)
            out = inside + jnp.einsum("bihk,bhkv->bihv", q, memory)
            return memory + jnp.einsum("bjhk,bjhv->bhkv", k, v), out

        start = jnp.zeros((batch, heads, size, size))
        _, out = jax.lax.scan(body, start, tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v)))
        return jnp.moveaxis(out, 0, 1).reshape(batch, length, heads * size) @ p["out"] * 0.1

    def step(params, tokens):
        def loss_fn(params):
            x = params["embed"][tokens[:, :-1]]
            for p in params["layers"]:
                x = x + mixer(p, x)
            return cross_entropy(x @ params["head"], tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads, 0.05), {"loss": loss}

    layer = {"qkv": (HIDDEN, 3 * heads * size), "out": (heads * size, HIDDEN)}
    params = weights({"embed": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB), "layers": [layer, layer]})
    return Program(step=step, state=params, inputs=(integers(VOCAB, BATCH, SEQ + 1),))


@program
def alignment_by_ctc():
    transform = optax.adam(1e-3, eps=EPSILON)

    def step(state, xs, labels, label_padding):
        params, opt_state = state

        def loss_fn(params):
            logits = jnp.tanh(xs @ params["a"]) @ params["b"]
            return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, label_padding).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = weights({"a": (8, HIDDEN), "b": (HIDDEN, 6)})
    padding = (jnp.arange(3) >= integers(4, BATCH, 1, low=1)).astype(jnp.float32)
    inputs = (normal(BATCH, SEQ, 8), integers(6, BATCH, 3, low=1), padding)
    return Program(step=step, state=(params, transform.init(params)), inputs=inputs)
