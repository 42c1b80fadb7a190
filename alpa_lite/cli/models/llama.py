"""A decoder-only transformer in the manner of Llama 3: rotary positions, grouped queries, gated feed-forward, RMS norm.

    x_0     = embedding[tokens]                                                   (`Llama.hidden_states`)
    x       = x + attention(rms_norm(x)) w_o                                      (`Llama._attention`)
    x_{l+1} = x + (silu(rms_norm(x) w_gate) * (rms_norm(x) w_up)) w_down          (`_feed_forward`)
    logits  = rms_norm(x_L) head                                                  (`Llama.logits`)

The defaults are the sizes of Llama 3 8B. With `scan_layers` the layers run under one `lax.scan` over stacked weights;
otherwise they are unrolled in Python. Both compute the same function.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.losses import Reduction, cross_entropy, reduce_losses

Params = dict[str, Any]
"""``embedding`` [vocab, hidden], ``layers`` (a list of per-layer dicts, or one dict of leaves with a leading layer
dim), ``final_norm`` [hidden] and ``head`` [hidden, vocab]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Sizes and options of the transformer.

    Attributes:
        num_kv_heads: heads of keys and values; each serves ``num_heads / num_kv_heads`` heads of queries.
        inner: width of the feed-forward layers.
        scan_layers: one `lax.scan` over stacked layer weights instead of a Python loop.
        remat: recompute each layer in the backward pass (`jax.checkpoint`).
        dtype: of activations and of the weights where they are used; the weights themselves, norms, softmax and loss
            are float32.
    """

    vocab_size: int = 128256
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    hidden: int = 4096
    inner: int = 14336
    seq_len: int = 2048
    rope_base: float = 500000.0
    scan_layers: bool = False
    remat: bool = True
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads or self.hidden // self.num_heads % 2:
            raise ValueError(f"Heads need an even width; got hidden={self.hidden} for {self.num_heads} heads.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got {self.num_heads} and {self.num_kv_heads}."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.num_heads

    def init(self, key: jax.Array) -> Params:
        """Draw the weights: normal(0.02); norms start at one."""
        embedding_key, head_key, layers_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(layers_key, self.num_layers)
        return {
            "embedding": _normal(embedding_key, (self.vocab_size, self.hidden)),
            "layers": (
                jax.vmap(self._init_layer)(layer_keys)
                if self.scan_layers
                else [self._init_layer(k) for k in layer_keys]
            ),
            "final_norm": jnp.ones((self.hidden,)),
            "head": _normal(head_key, (self.hidden, self.vocab_size)),
        }

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        Integer ``tokens`` and ``targets`` ``[batch, seq_len]``.
        """
        shape = jax.ShapeDtypeStruct((batch_size, self.seq_len), jnp.int32)
        return {"tokens": shape, "targets": shape}

    @property
    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {"tokens": self.vocab_size, "targets": self.vocab_size}

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Next-token cross entropy, a float32 scalar.

        Args:
            params: from `init`.
            batch: ``tokens`` and ``targets``, both ``[batch, seq_len]`` integers.
            key: unused; nothing is drawn.
            reduction: of the loss over all tokens of the batch.
        """
        return reduce_losses(cross_entropy(self.logits(params, batch["tokens"]), batch["targets"]), reduction)

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """``tokens [batch, seq_len] -> logits [batch, seq_len, vocab_size]``."""
        x = _rms_norm(self.hidden_states(params, tokens), params["final_norm"])
        return x @ params["head"].astype(self.dtype)

    def hidden_states(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Output of the last block, before the final norm: ``[batch, seq_len, hidden]``."""
        x = params["embedding"].astype(self.dtype)[tokens]
        block = jax.checkpoint(self._block) if self.remat else self._block
        if self.scan_layers:
            x, _ = jax.lax.scan(lambda h, layer: (block(h, layer), None), x, params["layers"])
            return x
        for layer in params["layers"]:
            x = block(x, layer)
        return x

    def _block(self, x: jax.Array, layer: Params) -> jax.Array:
        """One transformer block, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        weights = jax.tree.map(lambda w: w.astype(self.dtype), layer)
        x = x + self._attention(_rms_norm(x, weights["attention_norm"]), weights)
        return x + _feed_forward(_rms_norm(x, weights["feed_forward_norm"]), weights)

    def _attention(self, x: jax.Array, weights: Params) -> jax.Array:
        """Causal self-attention with grouped queries, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        batch, seq, _ = x.shape
        queries = self._rotate((x @ weights["w_q"]).reshape(batch, seq, self.num_heads, self.head_dim))
        keys = self._rotate((x @ weights["w_k"]).reshape(batch, seq, self.num_kv_heads, self.head_dim))
        values = (x @ weights["w_v"]).reshape(batch, seq, self.num_kv_heads, self.head_dim)
        grouped = queries.reshape(batch, seq, self.num_kv_heads, -1, self.head_dim)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, keys).astype(jnp.float32) * self.head_dim**-0.5
        causal = jnp.tril(jnp.ones((seq, seq), dtype=bool))
        attended = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bgrqk,bkgd->bqgrd", attended, values)
        return mixed.reshape(batch, seq, self.hidden) @ weights["w_o"]

    def _rotate(self, x: jax.Array) -> jax.Array:
        """Rotary positions in halves, ``[batch, seq, heads, head_dim] -> same``."""
        half = self.head_dim // 2
        frequencies = self.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    def _init_layer(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, 7)
        hidden, shared = self.hidden, self.num_kv_heads * self.head_dim
        return {
            "attention_norm": jnp.ones((hidden,)),
            "w_q": _normal(keys[0], (hidden, hidden)),
            "w_k": _normal(keys[1], (hidden, shared)),
            "w_v": _normal(keys[2], (hidden, shared)),
            "w_o": _normal(keys[3], (hidden, hidden)),
            "feed_forward_norm": jnp.ones((hidden,)),
            "w_gate": _normal(keys[4], (hidden, self.inner)),
            "w_up": _normal(keys[5], (hidden, self.inner)),
            "w_down": _normal(keys[6], (self.inner, hidden)),
        }


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape)


def _feed_forward(x: jax.Array, weights: Params) -> jax.Array:
    """The gated feed-forward layers, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
    return (jax.nn.silu(x @ weights["w_gate"]) * (x @ weights["w_up"])) @ weights["w_down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last dim, in float32: ``[..., hidden] -> [..., hidden]``."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-5)
    return normed.astype(x.dtype) * scale.astype(x.dtype)
