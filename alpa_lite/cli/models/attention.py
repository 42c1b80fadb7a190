"""Attention written out: projections, scores, softmax, weighted sum, projection.

    q, k, v = x w_q + b_q, y w_k + b_k, y w_v + b_v            (`Attention.apply`; y = x, or the memory attended to)
    core    = softmax(q k^T / sqrt(head_dim) + bias) v          (`attention_core`)
    output  = core w_out + b_out                                (`Attention.apply`)

Heads are dims of the weights: with ``g`` heads of keys, each serving ``r`` heads of queries (Ainslie et al. 2023,
"GQA"), queries are ``[batch, seq, g, r, head_dim]`` and scores ``[batch, g, seq, r, keys]``.

Positions: rotary in halves (`rotate`; Su et al. 2021) or a bias by distance (`distance_buckets`; Raffel et al. 2020,
"T5", section 2.1). Values that a recomputation policy may name carry the names of `NAMES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alpa_lite.cli.models.precision import Einsum
from alpa_lite.cli.models.regularisation import drop

Weights = Mapping[str, jax.Array]

NAMES = ("query", "key", "value", "core", "attention_out")
"""Names of the outputs of the projections and of the core (`jax.ad_checkpoint.checkpoint_name`)."""

NUM_BUCKETS = 32
"""The number of buckets of distances in T5."""

MAX_DISTANCE = 128
"""The distance from which on keys share the last bucket (T5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes and options of one attention.

    Attributes:
        num_kv_heads: heads of keys and values; each serves ``num_heads / num_kv_heads`` heads of queries.
        causal: whether later keys are masked.
        rotary_base: base of the rotary frequencies; None applies no rotation.
        bias: whether projections add a bias.
        fused: queries, keys and values by one contraction instead of three; only where they read the same input.
        recompute_core: compute scores and softmax again in the backward pass instead of saving them.
        dropout: rate at which attention weights are zeroed; only if `apply` is given a key.
        einsum: the contraction of the projections (`precision.narrow_einsum` in a narrow format).
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    rotary_base: float | None
    bias: bool
    fused: bool
    recompute_core: bool
    dropout: float = 0.0
    einsum: Einsum = jnp.einsum

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name; ``w_*`` are matrices (with heads as dims), ``b_*`` biases."""
        group, ratio, dim = self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim
        parts = {"qkv": (group, ratio + 2, dim)} if self.fused else {"q": (group, ratio, dim)}
        parts |= {} if self.fused else {"k": (group, dim), "v": (group, dim)}
        shapes: dict[str, tuple[int, ...]] = {f"w_{name}": (self.hidden, *shape) for name, shape in parts.items()}
        shapes["w_out"] = (group, ratio, dim, self.hidden)
        if self.bias:
            shapes |= {f"b_{name}": shape for name, shape in parts.items()} | {"b_out": (self.hidden,)}
        return shapes

    def apply(
        self,
        x: jax.Array,
        weights: Weights,
        memory: jax.Array | None = None,
        bias: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """``[batch, seq, hidden] -> [batch, seq, hidden]``.

        Args:
            x: gives the queries.
            weights: of the names and shapes of `shapes`.
            memory: gives keys and values, ``[batch, keys, hidden]``; None stands for `x`.
            bias: added to the scores, ``[g, seq, r, keys]``.
            key: draws the dropout mask; None means no dropout.
        """
        query, keys, value = self._project(x, x if memory is None else memory, weights)
        if self.rotary_base is not None:
            query, keys = rotate(query, self.rotary_base), rotate(keys, self.rotary_base)
        core = jax.checkpoint(attention_core, static_argnums=(4, 6)) if self.recompute_core else attention_core
        mixed = checkpoint_name(core(query, keys, value, bias, self.causal, key, self.dropout), "core")
        out = self.einsum("bgqrd,grdh->bqh", mixed, weights["w_out"])
        return checkpoint_name(out + weights["b_out"] if self.bias else out, "attention_out")

    def _project(self, x: jax.Array, memory: jax.Array, weights: Weights) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries ``[batch, seq, g, r, head_dim]``; keys and values ``[batch, keys, g, head_dim]``."""
        if self.fused:
            qkv = self.einsum("bsh,hgrd->bsgrd", x, weights["w_qkv"])
            qkv = qkv + weights["b_qkv"] if self.bias else qkv
            query, key, value = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
        else:
            query = self.einsum("bsh,hgrd->bsgrd", x, weights["w_q"])
            key, value = (self.einsum("bsh,hgd->bsgd", memory, weights[name]) for name in ("w_k", "w_v"))
            if self.bias:
                query, key, value = query + weights["b_q"], key + weights["b_k"], value + weights["b_v"]
        return checkpoint_name(query, "query"), checkpoint_name(key, "key"), checkpoint_name(value, "value")


def attention_core(
    query: jax.Array,
    keys: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    causal: bool,
    key: jax.Array | None = None,
    dropout: float = 0.0,
) -> jax.Array:
    """``softmax(q k^T / sqrt(head_dim) + bias) v`` with a float32 softmax.

    Args:
        query: ``[batch, seq, g, r, head_dim]``.
        keys: ``[batch, keys, g, head_dim]``.
        value: like `keys`.
        bias: ``[g, seq, r, keys]`` or None.
        causal: hide keys behind the query.
        key: draws the dropout mask; None means no dropout.
        dropout: rate at which weights of the sum are zeroed.

    Returns:
        ``[batch, g, seq, r, head_dim]``.
    """
    scores = jnp.einsum("bqgrd,bkgd->bgqrk", query, keys).astype(jnp.float32) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        visible = jnp.tril(jnp.ones((scores.shape[2], scores.shape[4]), dtype=bool))
        scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    shares = drop(jax.nn.softmax(scores, axis=-1).astype(value.dtype), key, dropout)
    return jnp.einsum("bgqrk,bkgd->bgqrd", shares, value)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotate feature pairs by ``position base^(-i / half)``, in float32: ``[batch, seq, ..., head_dim] -> same``."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    angles = jnp.expand_dims(angles, tuple(range(1, x.ndim - 2)))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def distance_buckets(num_queries: int, num_keys: int, *, causal: bool) -> jax.Array:
    """Return the bucket of each key's distance from each query, ``[num_queries, num_keys]`` in ``[0, NUM_BUCKETS)``.

    Half of the buckets of a direction hold one distance each, the others grow by a constant factor up to
    `MAX_DISTANCE`.
    Without `causal` the two directions have half of the buckets each.
    """
    distance = jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)
    buckets = NUM_BUCKETS if causal else NUM_BUCKETS // 2
    offset = jnp.where(distance < 0, 0 if causal else buckets, 0)
    distance = jnp.maximum(distance, 0) if causal else jnp.abs(distance)
    exact = buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1) / exact) / log(MAX_DISTANCE / exact)
    far = jnp.minimum(exact + (growth * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)
