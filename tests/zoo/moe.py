"""Transformers whose feed-forward part is a mixture of experts: by capacity with one-hot einsums, and by sorting."""

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
    integers,
    layer_norm,
    norm_weights,
    program,
    weights,
)

VOCAB, HIDDEN, INNER, HEADS, EXPERTS = 32, 16, 32, 2, 4


def init(layers: int = 2, experts: int = EXPERTS) -> Any:
    """Weights of a decoder whose feed-forward parts are experts."""
    shapes = {
        "qkv": (HIDDEN, 3, HEADS, HIDDEN // HEADS),
        "out": (HEADS, HIDDEN // HEADS, HIDDEN),
        "router": (HIDDEN, experts),
        "up": (experts, HIDDEN, INNER),
        "down": (experts, INNER, HIDDEN),
    }
    blocks = [
        {**weights(shapes, seed=i), "norm_1": norm_weights(HIDDEN), "norm_2": norm_weights(HIDDEN)}
        for i in range(layers)
    ]
    ends = weights({"embed": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}, seed=9)
    return {**ends, "layers": jax.tree.map(lambda w: 0.5 * w, blocks)}


def attention(p, x):
    q, k, v = jnp.einsum("bsd,dnhk->nbhsk", x, p["qkv"])
    scores = jnp.einsum("bhsk,bhtk->bhst", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jnp.einsum("bhst,bhtk->bshk", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)
    return jnp.einsum("bshk,hkd->bsd", mixed, p["out"])


def balance(probs, chosen):
    """How unevenly the experts are chosen, per sample."""
    return jnp.mean(jnp.mean(probs, 1) * jnp.mean(chosen, 1), -1) * probs.shape[-1] ** 2


def by_capacity(p, x):
    """The two best experts of each token, each with room for a number of tokens of a sample."""
    experts = p["router"].shape[-1]
    capacity = 2 * x.shape[1] // experts
    probs = jax.nn.softmax(x @ p["router"])
    first = jax.nn.one_hot(probs.argmax(-1), experts)
    second = jax.nn.one_hot((probs * (1 - first)).argmax(-1), experts)
    gates = [jnp.sum(probs * chosen, -1) for chosen in (first, second)]
    total = gates[0] + gates[1] + 1e-9
    places = jnp.cumsum(first, 1) - first
    later = jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)
    combine = jnp.zeros((*probs.shape, capacity))
    for chosen, place, gate in ((first, places, gates[0]), (second, later, gates[1])):
        kept = chosen * (place < capacity)
        slot = jax.nn.one_hot(jnp.sum(place * chosen, -1).astype(jnp.int32), capacity)
        combine += jnp.einsum("bs,bse,bsc->bsec", gate / total, kept, slot)
    dispatch = (combine > 0).astype(x.dtype)
    inside = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inside, p["up"]))
    outside = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"])
    return jnp.einsum("bsec,ebcd->bsd", combine, outside), balance(probs, first)


def by_top_one(p, x):
    """The best expert of each token, all tokens of the batch in one queue."""
    experts, tokens = p["router"].shape[-1], x.reshape(-1, x.shape[-1])
    probs = jax.nn.softmax(tokens @ p["router"])
    chosen = jax.nn.one_hot(probs.argmax(-1), experts)
    capacity = 2 * tokens.shape[0] // experts
    place = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, -1).astype(jnp.int32)
    dispatch = chosen[:, :, None] * jax.nn.one_hot(place, capacity)[:, None]
    inside = jnp.einsum("tec,td->ecd", dispatch, tokens)
    outside = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", inside, p["up"])), p["down"])
    out = jnp.einsum("tec,ecd->td", dispatch * jnp.max(probs, -1)[:, None, None], outside)
    aux = experts * jnp.sum(jnp.mean(chosen, 0) * jnp.mean(probs, 0))
    return out.reshape(x.shape), aux


def by_sorting(p, x):
    """The two best experts of each token, tokens sorted by expert and multiplied in ragged groups."""
    experts, tokens = p["router"].shape[-1], x.reshape(-1, x.shape[-1])
    probs = jax.nn.softmax(tokens @ p["router"])
    gates, chosen = jax.lax.top_k(probs, 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
    rows = tokens[order // 2]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["up"], sizes))
    outside = jax.lax.ragged_dot(hidden, p["down"], sizes) * gates.reshape(-1)[order][:, None]
    out = jnp.zeros_like(tokens).at[order // 2].add(outside)
    aux = experts * jnp.sum(jnp.mean(probs, 0) * sizes / chosen.size)
    return out.reshape(x.shape), aux


def by_weights_per_token(p, x):
    """The best two experts of each token by gathering their weights."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    hidden = jax.nn.gelu(jnp.einsum("bsd,bskdf->bskf", x, p["up"][chosen]))
    return jnp.einsum("bsk,bskf,bskfd->bsd", gates, hidden, p["down"][chosen]), jnp.zeros(())


def softly(p, x):
    """All experts on mixtures of the tokens of a sample."""
    logits = x @ p["router"]
    inside = jnp.einsum("bse,bsd->bed", jax.nn.softmax(logits, 1), x)
    outside = jnp.einsum("bef,efd->bed", jax.nn.gelu(jnp.einsum("bed,edf->bef", inside, p["up"])), p["down"])
    return jnp.einsum("bse,bed->bsd", jax.nn.softmax(logits, -1), outside), jnp.zeros(())


def mixture(experts_of: Any, *, scan: bool = False) -> Program:
    """A language model with one way to choose experts."""

    def block(carry, p):
        x, aux = carry
        x = x + attention(p, layer_norm(x, p["norm_1"]))
        out, more = experts_of(p, layer_norm(x, p["norm_2"]))
        return (x + out, aux + jnp.mean(more)), None

    def loss_fn(params, tokens):
        carry = params["embed"][tokens[:, :-1]], jnp.zeros(())
        if scan:
            carry, _ = jax.lax.scan(jax.checkpoint(block), carry, params["layers"])
        else:
            for p in params["layers"]:
                carry, _ = block(carry, p)
        x, aux = carry
        loss = cross_entropy(x @ params["head"], tokens[:, 1:]).mean()
        return loss + 1e-2 * aux, {"cross_entropy": loss, "aux": aux}

    transform = optax.adamw(1e-3, eps=EPSILON)

    def train_step(state, tokens):
        params, opt_state = state
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **aux}

    params = init()
    if scan:
        params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    tokens = integers(VOCAB, BATCH, SEQ + 1)
    return Program(step=train_step, state=(params, transform.init(params)), inputs=(tokens,))


@program
def experts_by_capacity():
    return mixture(by_capacity)


@program
def experts_by_capacity_in_scan():
    return mixture(by_capacity, scan=True)


@program
def experts_by_top_one():
    return mixture(by_top_one)


@program
def experts_by_sorting():
    return mixture(by_sorting)


@program
def experts_by_gathered_weights():
    return mixture(by_weights_per_token)


@program
def experts_softly():
    return mixture(softly)
