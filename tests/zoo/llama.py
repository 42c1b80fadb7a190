"""Decoder-only language models as plain trees: rotary positions, grouped queries, gated feed-forward, RMS norm."""

from __future__ import annotations

import functools
from dataclasses import dataclass
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
    program,
    weights,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a model."""

    vocab: int = 32
    hidden: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    scan: bool = False
    policy: Any = None
    dtype: Any = jnp.float32
    tied: bool = False
    repeat_kv: bool = False
    z_loss: float = 0.0


def init(config: Config) -> Any:
    """Random weights; with `scan` the layers' weights are stacked."""
    c, d = config, config.hidden
    layer = {
        "wq": (d, c.heads * c.head_dim),
        "wk": (d, c.kv_heads * c.head_dim),
        "wv": (d, c.kv_heads * c.head_dim),
        "wo": (c.heads * c.head_dim, d),
        "gate": (d, c.inner),
        "up": (d, c.inner),
        "down": (c.inner, d),
    }
    layers = [{**weights(layer, seed=i), "norm_1": jnp.ones(d), "norm_2": jnp.ones(d)} for i in range(c.layers)]
    params: dict[str, Any] = {"embed": weights((c.vocab, d), seed=9), "norm": jnp.ones(d)}
    params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if c.scan else layers
    if not c.tied:
        params["head"] = weights((d, c.vocab), seed=10)
    return params


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(config, p, x):
    batch, seq, _ = x.shape
    heads, groups, dim = config.heads, config.kv_heads, config.head_dim
    positions = jnp.arange(seq)
    q = rotate((x @ p["wq"]).reshape(batch, seq, heads, dim), positions)
    k = rotate((x @ p["wk"]).reshape(batch, seq, groups, dim), positions)
    v = (x @ p["wv"]).reshape(batch, seq, groups, dim)
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    if config.repeat_kv:
        k, v = (jnp.repeat(y, heads // groups, axis=2) for y in (k, v))
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / dim**0.5
        probs = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(x.dtype)
        out = jnp.einsum("bhst,bthd->bshd", probs, v)
    else:
        q = q.reshape(batch, seq, groups, heads // groups, dim)
        scores = jnp.einsum("bsgrd,btgd->bgrst", q, k).astype(jnp.float32) / dim**0.5
        probs = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        out = jnp.einsum("bgrst,btgd->bsgrd", probs, v)
    return out.reshape(batch, seq, heads * dim) @ p["wo"]


def block(config, x, p):
    x = x + attention(config, p, rms_norm(x, p["norm_1"]))
    h = rms_norm(x, p["norm_2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def logits_of(config, params, tokens):
    params = jax.tree.map(lambda w: w.astype(config.dtype), params)
    x = params["embed"][tokens]
    apply = functools.partial(block, config)
    if config.policy is not None:
        apply = jax.checkpoint(apply, policy=config.policy)
    if config.scan:
        x, _ = jax.lax.scan(lambda x, p: (apply(x, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = apply(x, p)
    x = rms_norm(x, params["norm"])
    head = params["embed"].T if config.tied else params["head"]
    return (x @ head).astype(jnp.float32)


def make_step(config, transform):
    def loss_fn(params, tokens):
        logits = logits_of(config, params, tokens[:, :-1])
        losses = cross_entropy(logits, tokens[:, 1:])
        if config.z_loss:
            losses = losses + config.z_loss * jax.nn.logsumexp(logits, -1) ** 2
        return losses.mean()

    def train_step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        norm = global_norm(grads)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "grad_norm": norm}

    return train_step


def llama(**changes: Any) -> Program:
    """A model trained by AdamW under a cosine schedule with clipping."""
    config = Config(**changes)
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 2, 10)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, eps=EPSILON))
    params = init(config)
    exact = None
    if config.dtype != jnp.float32:
        exact = make_step(Config(**{**changes, "dtype": jnp.float32}), transform)
    tokens = integers(config.vocab, BATCH, SEQ + 1)
    step, state = make_step(config, transform), (params, transform.init(params))
    return Program(step=step, state=state, inputs=(tokens,), dtype=config.dtype, exact=exact)


@program
def llama_loop():
    return llama()


@program
def llama_odd_sizes():
    return llama(vocab=50, hidden=24, heads=3, kv_heads=3, inner=40, repeat_kv=True)


@program
def llama_tied_z_loss():
    return llama(tied=True, repeat_kv=True, z_loss=1e-2)


@program
def llama_remat():
    return llama(policy=jax.checkpoint_policies.nothing_saveable)


@program
def llama_scan():
    return llama(scan=True)


@program
def llama_scan_remat():
    return llama(scan=True, policy=jax.checkpoint_policies.dots_saveable)


@program
def llama_bf16():
    return llama(dtype=jnp.bfloat16)


@program
def llama_bf16_scan_remat():
    return llama(dtype=jnp.bfloat16, scan=True, policy=jax.checkpoint_policies.dots_saveable)
