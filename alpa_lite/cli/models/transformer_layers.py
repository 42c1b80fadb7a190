"""The layers of a transformer, written out: attention, feed-forward layers, mixtures of experts.

    q, k, v = x w_q + b_q, y w_k + b_k, y w_v + b_v            (`Attention.apply`; y = x, or the memory attended to)
    core    = softmax(q k^T / sqrt(head_dim) + bias) v          (`attention_core`)
    output  = core w_out + b_out                                (`Attention.apply`)
    plain   = act(x w_up + b_up) w_down + b_down                                (`FeedForward.apply`)
    gated   = (act(x w_gate) * (x w_up)) w_down                                  (`FeedForward.apply`)
    experts = sum_e combine[s, e, c] MLP_e(sum_s' dispatch[s', e, c] x[s'])      (`Experts.apply`)

Heads are dims of the weights: with ``g`` heads of keys, each serving ``r`` heads of queries (Ainslie et al. 2023,
"GQA"), queries are ``[batch, seq, g, r, head_dim]`` and scores ``[batch, g, seq, r, keys]``. Positions are rotary in
halves (`rotate`; Su et al. 2021) or a bias by distance (`distance_buckets`; Raffel et al. 2020, "T5", section 2.1).

Experts follow GShard (Lepikhin et al. 2020, section 2 and algorithm 1): tokens come in groups of ``S``; in each group
an expert takes at most ``C = ceil(capacity_factor top_k S / num_experts)`` tokens, first choices before second ones,
earlier tokens before later ones, and drops the rest (`route`). The models add no auxiliary loss (`auxiliary_loss`).
Dispatching and combining cost ``4 capacity_factor top_k S hidden`` FLOPs per token, which grow with ``S``; the experts
cost ``4 capacity_factor top_k hidden inner`` (6 where gated). Their ratio is ``S / inner`` (``2 S / (3 inner)``): a
group of 256 tokens costs 0.5 % where `inner` is 32768. Systems that sort tokens instead have no such cost; a small
group with a capacity factor of 1 stands for them.

Contractions in eight-bit floating point (`narrow_einsum`) are those of training recipes (Micikevicius et al. 2022,
arXiv 2209.05433): ``y = q4(x) q4(w)``, ``dx = q5(dy) q4(w)^T``, ``dw = q4(x)^T q5(dy)``, where q4 rounds to
float8_e4m3fn and q5 to float8_e5m2, and sums have the operands' own dtype. Scales are left out: they are numbers per
tensor that are known before the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, log
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alpa_lite.cli.models.model_parts import Tree, drop

Einsum = Callable[..., Tree]
"""``(equation, x, weight) -> array``, as `jnp.einsum`."""


_Saved = tuple[jax.Array, jax.Array, jax.Array]
"""Both rounded operands, and a scalar of their original dtype."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def narrow_einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``einsum(equation, x, weight)`` of operands rounded to eight bits; every letter occurs in two arrays."""
    return _narrow_forward(equation, x, weight)[0]


def _narrow_forward(equation: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, _Saved]:
    x8, w8 = x.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    # An empty array carries the dtype of the operands to the backward pass, which sees only eight-bit ones.
    return jnp.einsum(equation, x8, w8, preferred_element_type=x.dtype), (x8, w8, jnp.zeros((), x.dtype))


def _narrow_backward(equation: str, saved: _Saved, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, w8, like = saved
    # The equations of both derivatives: each swaps the result with one operand.
    operands, result = equation.split("->")
    first, second = operands.split(",")
    dy8 = dy.astype(jnp.float8_e5m2)
    dx = jnp.einsum(f"{result},{second}->{first}", dy8, w8, preferred_element_type=like.dtype)
    dw = jnp.einsum(f"{first},{result}->{second}", x8, dy8, preferred_element_type=like.dtype)
    return dx, dw


narrow_einsum.defvjp(_narrow_forward, _narrow_backward)


Weights = Mapping[str, jax.Array]

NUM_BUCKETS = 32
"""The number of buckets of distances in T5."""

MAX_DISTANCE = 128
"""The distance from which on keys share the last bucket (T5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1); the defaults are theirs.

    Attributes:
        query_rank: width of the vector that the queries of a position are made from.
        key_rank: width of the vector that its keys and values are made from.
        rotary_dim: width of the rotary part of queries and keys, behind their `head_dim`; keys of all heads share it.
    """

    query_rank: int = 1536
    key_rank: int = 512
    rotary_dim: int = 64


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
        einsum: the contraction of the projections (`narrow_einsum` in a narrow format).
        window: positions of a block; a position attends to those of its own block and of the one before, causally,
            as far as `window` back. None attends to all. The sequence is a multiple of it, or shorter.
        latent: queries, keys and values by way of two narrow vectors; `num_kv_heads` is `num_heads` then.
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
    window: int | None = None
    latent: Latent | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name; ``w_*`` are matrices (with heads as dims), ``b_*`` biases."""
        group, ratio, dim = self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim
        if self.latent is not None:
            queries, keys, rotary = self.latent.query_rank, self.latent.key_rank, self.latent.rotary_dim
            return {
                "w_query_latent": (self.hidden, queries),
                "scale_query": (queries,),
                "w_q": (queries, group, ratio, dim + rotary),
                "w_key_latent": (self.hidden, keys + rotary),
                "scale_key": (keys,),
                "w_k": (keys, group, dim),
                "w_v": (keys, group, dim),
                "w_out": (group, ratio, dim, self.hidden),
            }
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
        """Attend, ``[batch, seq, hidden] -> [batch, seq, hidden]``.

        Args:
            x: gives the queries.
            weights: of the names and shapes of `shapes`.
            memory: gives keys and values, ``[batch, keys, hidden]``; None stands for `x`.
            bias: added to the scores, ``[g, seq, r, keys]``.
            key: draws the dropout mask; None means no dropout.
        """
        if self.latent is not None:
            projected = self._project_latent(x, weights, self.latent)
        else:
            projected = self._project(x, x if memory is None else memory, weights)
            if self.rotary_base is not None:
                query, keys = rotate(projected.query, self.rotary_base), rotate(projected.keys, self.rotary_base)
                projected = projected._replace(query=query, keys=keys)
        if self.window is not None and self.window < x.shape[1]:
            window = self.window
            core = jax.checkpoint(windowed_core, static_argnums=(1,)) if self.recompute_core else windowed_core
            mixed = checkpoint_name(core(projected, window), "core")
        else:
            # `causal` and the rate are Python values that decide what is traced.
            core = jax.checkpoint(attention_core, static_argnums=(2, 4)) if self.recompute_core else attention_core
            mixed = checkpoint_name(core(projected, bias, self.causal, key, self.dropout), "core")
        out = self.einsum("bgqrd,grdh->bqh", mixed, weights["w_out"])
        return checkpoint_name(out + weights["b_out"] if self.bias else out, "attention_out")

    def _project_latent(self, x: jax.Array, weights: Weights, latent: Latent) -> "Projected":
        """Return queries, keys and values of `x`, made from its two latent vectors."""
        low = scaled_rms(self.einsum("bsh,hc->bsc", x, weights["w_query_latent"]), weights["scale_query"])
        query = self.einsum("bsc,cgrd->bsgrd", low, weights["w_q"])
        both = self.einsum("bsh,hc->bsc", x, weights["w_key_latent"])
        low = scaled_rms(both[..., : latent.key_rank], weights["scale_key"])
        keys, value = (self.einsum("bsc,cgd->bsgd", low, weights[name]) for name in ("w_k", "w_v"))
        shared = both[:, :, None, latent.key_rank :]
        if self.rotary_base is not None:
            turned = rotate(query[..., self.head_dim :], self.rotary_base)
            query = jnp.concatenate([query[..., : self.head_dim], turned], axis=-1)
            shared = rotate(shared, self.rotary_base)
        shared = jnp.broadcast_to(shared, (*keys.shape[:-1], latent.rotary_dim))
        return Projected(
            query=checkpoint_name(query, "query"),
            keys=checkpoint_name(jnp.concatenate([keys, shared], axis=-1), "key"),
            value=checkpoint_name(value, "value"),
        )

    def _project(self, x: jax.Array, memory: jax.Array, weights: Weights) -> "Projected":
        """Return the queries of `x`, and the keys and values of `memory`."""
        if self.fused:
            qkv = self.einsum("bsh,hgrd->bsgrd", x, weights["w_qkv"])
            qkv = qkv + weights["b_qkv"] if self.bias else qkv
            # Keys and values stand behind the queries of their group: splitting heads then splits all three alike.
            query, key, value = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
        else:
            query = self.einsum("bsh,hgrd->bsgrd", x, weights["w_q"])
            key, value = (self.einsum("bsh,hgd->bsgd", memory, weights[name]) for name in ("w_k", "w_v"))
            if self.bias:
                query, key, value = query + weights["b_q"], key + weights["b_k"], value + weights["b_v"]
        return Projected(
            query=checkpoint_name(query, "query"),
            keys=checkpoint_name(key, "key"),
            value=checkpoint_name(value, "value"),
        )


class Projected(NamedTuple):
    """The projections that attention reads.

    Attributes:
        query: ``[batch, seq, g, r, head_dim]``.
        keys: ``[batch, keys, g, head_dim]``.
        value: ``[batch, keys, g, head_dim]``.
    """

    query: jax.Array
    keys: jax.Array
    value: jax.Array


def attention_core(
    projected: Projected,
    bias: jax.Array | None,
    causal: bool,
    key: jax.Array | None = None,
    dropout: float = 0.0,
) -> jax.Array:
    """Return ``softmax(q k^T / sqrt(head_dim) + bias) v``, ``[batch, g, seq, r, head_dim]``, with a float32 softmax.

    The bias is ``[g, seq, r, keys]``; `causal` hides keys behind the query; with a key, weights of the sum are zeroed
    at a rate of `dropout`.
    """
    query, keys, value = projected
    scores = jnp.einsum("bqgrd,bkgd->bgqrk", query, keys).astype(jnp.float32) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        visible = jnp.tril(jnp.ones((scores.shape[2], scores.shape[4]), dtype=bool))
        # Not -inf: the gradient of a softmax over a row that is masked entirely would be NaN.
        scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    shares = drop(jax.nn.softmax(scores, axis=-1).astype(value.dtype), key, dropout)
    return jnp.einsum("bgqrk,bkgd->bgqrd", shares, value)


def windowed_core(projected: Projected, window: int) -> jax.Array:
    """Return what `attention_core` returns where each position sees itself and the ``window - 1`` before it.

    Queries of a block of `window` positions meet the keys of their own block and of the one before, so that the work
    grows with ``2 window seq`` and not with ``seq^2`` (Beltagy et al. 2020, arXiv 2004.05150, section 3.1).
    """
    query, keys, value = projected
    batch, seq, group, ratio, dim = query.shape
    if seq % window:
        raise ValueError(f"A window divides the sequence; got a window of {window} for {seq} positions.")
    blocks = seq // window
    query = query.reshape(batch * blocks, window, group, ratio, dim)
    keys, value = (_with_block_before(each, window) for each in (keys, value))
    scores = jnp.einsum("bqgrd,bkgd->bgqrk", query, keys).astype(jnp.float32) * dim**-0.5
    distance = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)
    visible = (distance >= 0) & (distance < window)
    scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    # What stands before the first block is padding.
    first = jnp.arange(batch * blocks) % blocks == 0
    padding = first[:, None, None, None, None] & (jnp.arange(2 * window) < window)
    scores = jnp.where(padding, jnp.finfo(jnp.float32).min, scores)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bgqrk,bkgd->bgqrd", shares, value).reshape(batch, blocks, group, window, ratio, -1)
    return mixed.swapaxes(1, 2).reshape(batch, group, seq, ratio, -1)


def _with_block_before(x: jax.Array, window: int) -> jax.Array:
    """Return blocks of `window` positions, each behind the one before it: ``[batch blocks, 2 window, g, dim]``."""
    batch, seq, *rest = x.shape
    blocks = x.reshape(batch, seq // window, window, *rest)
    before = jnp.pad(blocks[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (blocks.ndim - 2)))
    return jnp.concatenate([before, blocks], axis=2).reshape(-1, 2 * window, *rest)


def scaled_rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide the last dim by its root mean square, in float32, and multiply by `scale` (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotate feature pairs by ``position base^(-i / half)``, in float32: ``[batch, seq, ..., head_dim] -> same``."""
    half = x.shape[-1] // 2
    # In float32: positions times frequencies lose whole turns in half precision.
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
    # Near distances do not use it, but their logarithm must be finite to become an integer.
    growth = jnp.log(jnp.maximum(distance, 1) / exact) / log(MAX_DISTANCE / exact)
    far = jnp.minimum(exact + (growth * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)


Activation = Literal["gelu", "relu", "squared_relu", "silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Sizes and options of an MLP with one inner layer.

    Attributes:
        inner: width of the inner layer.
        gated: multiply the inner layer by an activated second projection.
        bias: whether projections add a bias; never where gated.
        fused: where gated, both inner projections by one contraction.
        einsum: carries out the projections (`narrow_einsum` in a narrow format).
    """

    hidden: int
    inner: int
    activation: Activation
    gated: bool
    bias: bool
    fused: bool
    einsum: Einsum = jnp.einsum

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name."""
        hidden, inner = self.hidden, self.inner
        if self.gated and self.fused:
            return {"w_gate_up": (hidden, 2, inner), "w_down": (inner, hidden)}
        shapes: dict[str, tuple[int, ...]] = {"w_gate": (hidden, inner)} if self.gated else {}
        shapes |= {"w_up": (hidden, inner), "w_down": (inner, hidden)}
        return shapes | ({"b_up": (inner,), "b_down": (hidden,)} if self._has_bias else {})

    def apply(self, x: jax.Array, weights: Weights) -> jax.Array:
        """Apply the layers, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        act = activation_function(self.activation)
        if not self.gated:
            up = self.einsum("bsh,hi->bsi", x, weights["w_up"])
            inner = act(checkpoint_name(up + weights["b_up"] if self._has_bias else up, "up"))
        elif self.fused:
            both = checkpoint_name(self.einsum("bsh,hti->bsti", x, weights["w_gate_up"]), "up")
            inner = act(both[:, :, 0]) * both[:, :, 1]
        else:
            gate, up = (self.einsum("bsh,hi->bsi", x, weights[name]) for name in ("w_gate", "w_up"))
            inner = act(checkpoint_name(gate, "gate")) * checkpoint_name(up, "up")
        down = self.einsum("bsi,ih->bsh", inner, weights["w_down"])
        return checkpoint_name(down + weights["b_down"] if self._has_bias else down, "down")

    @property
    def _has_bias(self) -> bool:
        return self.bias and not self.gated


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Options of a mixture of experts; every expert is an MLP of the sizes of the model it stands in.

    Attributes:
        num_experts: MLPs to choose from.
        top_k: experts that each token visits.
        capacity_factor: room of an expert, in units of what it gets when all experts get the same.
        group_size: tokens that are routed together; divides a sequence, or holds whole ones.
        every: the last of every so many layers has experts, the others one MLP.
        shared: MLPs of the width of an expert that every token visits besides (DeepSeek-AI 2024, arXiv 2401.06066).
        dense_inner: width of the MLP of layers without experts; None for that of an expert.
    """

    num_experts: int
    top_k: int = 2
    capacity_factor: float = 1.0
    group_size: int = 256
    every: int = 1
    shared: int = 0
    dense_inner: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"Each token visits 1 to {self.num_experts} experts; got top_k={self.top_k}.")

    @property
    def capacity(self) -> int:
        """The number of tokens of a group that an expert takes."""
        return max(1, ceil(self.capacity_factor * self.top_k * self.group_size / self.num_experts))

    def shapes(self, mlp: FeedForward) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name; those of the MLPs have a leading dim of experts."""
        hidden, inner, count = mlp.hidden, mlp.inner, self.num_experts
        return {
            "w_router": (hidden, count),
            "w_up": (count, hidden, 2, inner) if mlp.gated else (count, hidden, inner),
            "w_down": (count, inner, hidden),
        }

    def apply(self, x: jax.Array, weights: Weights, mlp: FeedForward) -> jax.Array:
        """Apply the experts, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        tokens = self._groups(x)
        logits = jnp.einsum("bgsh,he->bgse", tokens, weights["w_router"])
        combine = route(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.top_k, self.capacity)
        # A token is sent where it has a weight; rounding that weight later must not send it elsewhere.
        dispatch, combine = (combine > 0.0).astype(x.dtype), combine.astype(x.dtype)
        act = activation_function(mlp.activation)
        inputs = jnp.einsum("bgsec,bgsh->ebgch", dispatch, tokens)
        if mlp.gated:
            both = checkpoint_name(mlp.einsum("ebgch,ehti->ebgcti", inputs, weights["w_up"]), "up")
            inner = act(both[..., 0, :]) * both[..., 1, :]
        else:
            inner = act(checkpoint_name(mlp.einsum("ebgch,ehi->ebgci", inputs, weights["w_up"]), "up"))
        outputs = checkpoint_name(mlp.einsum("ebgci,eih->ebgch", inner, weights["w_down"]), "down")
        return jnp.einsum("bgsec,ebgch->bgsh", combine, outputs).reshape(x.shape)

    def _groups(self, x: jax.Array) -> jax.Array:
        """Form groups, ``[batch, seq, hidden] -> [batch, groups, group_size, hidden]``; long ones shrink the batch."""
        batch, seq, hidden = x.shape
        if seq % self.group_size and (self.group_size % seq or batch * seq % self.group_size):
            raise ValueError(
                f"A group holds whole sequences or divides one; got groups of {self.group_size} tokens for {batch} "
                f"sequences of {seq}. Choose another group_size or batch."
            )
        return x.reshape(-1, max(seq // self.group_size, 1), self.group_size, hidden)


def route(gates: jax.Array, top_k: int, capacity: int) -> jax.Array:
    """Assign tokens to slots of experts, with weights.

    Args:
        gates: probabilities of the experts, ``[..., tokens, experts]`` float32.
        top_k: experts per token.
        capacity: slots per expert and group.

    Returns:
        ``[..., tokens, experts, capacity]`` float32: the token's gates over its chosen experts, scaled to a sum of one;
        zero where it is not sent, or dropped because the expert is full.
    """
    num_experts = gates.shape[-1]
    remaining, taken = gates, jnp.zeros((*gates.shape[:-2], 1, num_experts), gates.dtype)
    total, combine = jnp.zeros(gates.shape[:-1], gates.dtype), jnp.zeros((*gates.shape, capacity), gates.dtype)
    # All first choices take their slots before any second choice (GShard): `taken` counts the slots of earlier rounds.
    for _ in range(top_k):
        # Dense one-hot products instead of gathers: they are contractions, which are split and differentiated as such.
        chosen = jax.nn.one_hot(jnp.argmax(remaining, axis=-1), num_experts, dtype=gates.dtype)
        # The number of tokens in front of each one that chose the same expert is its slot.
        before = jnp.cumsum(chosen, axis=-2) - chosen + taken
        slot = jnp.sum(before * chosen, axis=-1).astype(jnp.int32)
        slots = jax.nn.one_hot(slot, capacity, dtype=gates.dtype)  # all zero beyond the capacity
        combine = combine + jnp.einsum("...se,...sc->...sec", gates * chosen, slots)
        total = total + jnp.sum(gates * chosen, axis=-1)
        taken = taken + jnp.sum(chosen, axis=-2, keepdims=True)
        # Below any probability, so that no expert is chosen twice.
        remaining = jnp.where(chosen > 0.0, -1.0, remaining)
    # By the gates of all choices, those that were dropped too, as in GShard.
    return combine / total[..., None, None]


def auxiliary_loss(gates: jax.Array) -> jax.Array:
    """Return a loss that grows as fewer experts get most tokens (Lepikhin et al. 2020, algorithm 1).

    It is ``(1/E) sum_e (c_e / S) m_e``.

    Args:
        gates: probabilities of the experts, ``[..., tokens, experts]`` float32.

    Returns:
        ``[...]``: of each group, with ``c_e`` the tokens whose first choice is expert ``e`` and ``m_e`` its mean gate;
        ``1 / E**2`` where all experts get the same.
    """
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), gates.shape[-1], dtype=gates.dtype)
    return jnp.mean(jnp.mean(chosen, axis=-2) * jnp.mean(gates, axis=-2), axis=-1)


def activation_function(name: Activation) -> Callable[[jax.Array], jax.Array]:
    """Return the activation function of that name."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "gelu": jax.nn.gelu,
        "relu": jax.nn.relu,
        "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
        "silu": jax.nn.silu,
    }
    if name not in functions:
        raise ValueError(f"An activation is one of {', '.join(functions)}; got {name!r}.")
    return functions[name]
