"""Decoder-only transformers, written out: GPT-2 and Llama 3, for next-token prediction.

GPT: pre-LN blocks, learned positions, causal attention, gelu MLP.

    x_0     = dropout(token_embedding[tokens] + position_embedding)         (`GPT.hidden_states`)
    x       = x + dropout(attention(layer_norm(x)))                         (`GPT._attention`)
    x_{l+1} = x + dropout(gelu(layer_norm(x) w_up + b_up) w_down + b_down)  (`GPT._mlp`)
    logits  = layer_norm(x_L) head                                          (`GPT.logits`)

Llama, whose defaults are the sizes of Llama 3 8B: rotary positions, grouped queries, gated feed-forward, RMS norm.

    x_0     = embedding[tokens]                                             (`Llama.hidden_states`)
    x       = x + attention(rms_norm(x)) w_o                                (`Llama._attention`)
    x_{l+1} = x + (silu(rms_norm(x) w_gate) * (rms_norm(x) w_up)) w_down    (`_feed_forward`)
    logits  = rms_norm(x_L) head                                            (`Llama.logits`)

With `scan_layers` the layers run under one `lax.scan` over stacked weights; otherwise they are unrolled in Python. Both
forms compute the same function (`stack_layers` and `unstack_layers` convert the weights), with the same dropout masks.
`transformer` makes both, and many others, from options; these are what a user would write.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from alpa_lite.cli.models.model_parts import LanguageModel, Tree

GPTParams = dict[str, Tree]
"""``token_embedding`` [vocab, hidden], ``position_embedding`` [seq, hidden], ``layers`` (a list of per-layer dicts, or
one dict of leaves with a leading layer dim), ``final_norm``, and ``head`` [hidden, vocab] unless tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT(LanguageModel):
    """Sizes and options of the transformer.

    Attributes:
        dropout: rate in ``[0, 1)``; masks are drawn only when `loss_fn` is given a key.
        tied: use the token embedding, transposed, as the output projection.
        scan_layers: one `lax.scan` over stacked layer weights instead of a Python loop.
        remat: recompute each layer in the backward pass (`jax.checkpoint`).
        dtype: of the weights and activations; norms, softmax and loss are computed in float32.
    """

    vocab_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    hidden: int = 128
    seq_len: int = 128
    dropout: float = 0.0
    tied: bool = True
    scan_layers: bool = False
    remat: bool = False
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden must be a multiple of num_heads; got {self.hidden} and {self.num_heads}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"The dropout rate must lie in [0, 1); got {self.dropout}.")

    def init(self, key: jax.Array) -> GPTParams:
        """Draw the weights: normal(0.02), residual projections scaled by ``1 / sqrt(2 num_layers)`` (GPT-2)."""
        # All keys are split off whatever the options are, so that options do not change the weights that are drawn.
        token_key, position_key, head_key, layers_key = jax.random.split(key, 4)
        layer_keys = jax.random.split(layers_key, self.num_layers)
        params: GPTParams = {
            "token_embedding": self._normal(token_key, (self.vocab_size, self.hidden)),
            "position_embedding": self._normal(position_key, (self.seq_len, self.hidden)),
            "layers": (
                jax.vmap(self._init_layer)(layer_keys)
                if self.scan_layers
                else [self._init_layer(k) for k in layer_keys]
            ),
            "final_norm": self._init_norm(),
        }
        if not self.tied:
            params["head"] = self._normal(head_key, (self.hidden, self.vocab_size))
        return params

    def logits(self, params: GPTParams, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits of every token, ``[batch, seq_len] -> [batch, seq_len, vocab_size]``."""
        x = _layer_norm(self.hidden_states(params, inputs, key), params["final_norm"])
        return x @ (params["token_embedding"].T if self.tied else params["head"])

    def hidden_states(self, params: GPTParams, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Output of the last block, before the final norm: ``[batch, seq_len, hidden]``."""
        embedding_key, layer_keys = self._split_key(key)
        # Sequences may be shorter than `seq_len`, and then use the first positions.
        x = params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]]
        x = self._dropout(x, embedding_key)
        block = jax.checkpoint(self._block) if self.remat else self._block
        if self.scan_layers:
            # Without dropout the keys are None, an empty pytree, of which the scan has nothing to slice.
            x, _ = jax.lax.scan(lambda h, layer: (block(h, *layer), None), x, (params["layers"], layer_keys))
            return x
        for i, layer in enumerate(params["layers"]):
            x = block(x, layer, None if layer_keys is None else layer_keys[i])
        return x

    def _block(self, x: jax.Array, layer: GPTParams, key: jax.Array | None) -> jax.Array:
        """One transformer block, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        # One key for the weights of attention and one for each of the two branches.
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        x = x + self._dropout(self._attention(_layer_norm(x, layer["norm1"]), layer["attention"], keys[0]), keys[1])
        return x + self._dropout(_mlp(_layer_norm(x, layer["norm2"]), layer["mlp"]), keys[2])

    def _attention(self, x: jax.Array, params: GPTParams, key: jax.Array | None) -> jax.Array:
        """Causal multi-head self-attention, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        batch, seq, _ = x.shape
        qkv = (x @ params["w_qkv"] + params["b_qkv"]).reshape(batch, seq, 3, self.num_heads, -1)
        query, keys, values = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, keys).astype(jnp.float32)
        scores = scores * (self.hidden // self.num_heads) ** -0.5
        causal = jnp.tril(jnp.ones((seq, seq), dtype=bool))
        # float32: in half precision a softmax over many keys would lose the small shares.
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min), axis=-1)
        weights = self._dropout(weights.astype(x.dtype), key)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(batch, seq, self.hidden)
        return mixed @ params["w_out"] + params["b_out"]

    def _dropout(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Zero entries of `x` at the dropout rate and scale up the rest; the identity without a key."""
        if key is None or self.dropout == 0.0:
            return x
        # Scaled up by the rate, so that the expected activation is that without dropout.
        keep = jax.random.bernoulli(key, 1.0 - self.dropout, x.shape)
        return jnp.where(keep, x / (1.0 - self.dropout), jnp.zeros((), x.dtype))

    def _split_key(self, key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
        """Return keys for the embedding and, with a leading layer dim, for the layers; None where nothing is drawn."""
        if key is None or self.dropout == 0.0:
            return None, None
        embedding_key, layers_key = jax.random.split(key)
        return embedding_key, jax.random.split(layers_key, self.num_layers)

    def _init_layer(self, key: jax.Array) -> GPTParams:
        qkv_key, out_key, up_key, down_key = jax.random.split(key, 4)
        # Every layer adds two branches to the residual stream: scaled so, their sum has the same variance at any depth.
        hidden, residual_scale = self.hidden, (2 * self.num_layers) ** -0.5
        return {
            "norm1": self._init_norm(),
            "attention": {
                "w_qkv": self._normal(qkv_key, (hidden, 3 * hidden)),
                "b_qkv": jnp.zeros((3 * hidden,), self.dtype),
                "w_out": self._normal(out_key, (hidden, hidden)) * residual_scale,
                "b_out": jnp.zeros((hidden,), self.dtype),
            },
            "norm2": self._init_norm(),
            "mlp": {
                "w_up": self._normal(up_key, (hidden, 4 * hidden)),
                "b_up": jnp.zeros((4 * hidden,), self.dtype),
                "w_down": self._normal(down_key, (4 * hidden, hidden)) * residual_scale,
                "b_down": jnp.zeros((hidden,), self.dtype),
            },
        }

    def _init_norm(self) -> GPTParams:
        return {"scale": jnp.ones((self.hidden,), self.dtype), "bias": jnp.zeros((self.hidden,), self.dtype)}

    def _normal(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, self.dtype)


def stack_layers(params: GPTParams) -> GPTParams:
    """Convert unrolled weights to the weights of the same model with `scan_layers`."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def unstack_layers(params: GPTParams) -> GPTParams:
    """Convert the weights of a model with `scan_layers` to unrolled ones."""
    # The leading dim of any leaf is the number of layers.
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**params, "layers": [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(num_layers)]}


def _mlp(x: jax.Array, params: GPTParams) -> jax.Array:
    """Two dense layers with gelu between, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
    return jax.nn.gelu(x @ params["w_up"] + params["b_up"]) @ params["w_down"] + params["b_down"]


def _layer_norm(x: jax.Array, params: GPTParams) -> jax.Array:
    """Normalise the last dim, in float32: ``[..., hidden] -> [..., hidden]``."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    # In two passes: the difference of mean square and squared mean cancels in low precision.
    variance = jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True)
    normed = (x32 - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normed.astype(x.dtype) * params["scale"] + params["bias"]


LlamaParams = dict[str, Tree]
"""``embedding`` [vocab, hidden], ``layers`` (a list of per-layer dicts, or one dict of leaves with a leading layer
dim), ``final_norm`` [hidden] and ``head`` [hidden, vocab]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(LanguageModel):
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
    dtype: DTypeLike = jnp.bfloat16

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

    def init(self, key: jax.Array) -> LlamaParams:
        """Draw the weights: normal(0.02); norms start at one."""
        embedding_key, head_key, layers_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(layers_key, self.num_layers)
        return {
            "embedding": _normal(embedding_key, (self.vocab_size, self.hidden)),
            "layers": (
                # One draw per key under `vmap` too, so that stacked and unstacked weights are the same numbers.
                jax.vmap(self._init_layer)(layer_keys)
                if self.scan_layers
                else [self._init_layer(k) for k in layer_keys]
            ),
            "final_norm": jnp.ones((self.hidden,)),
            "head": _normal(head_key, (self.hidden, self.vocab_size)),
        }

    def logits(self, params: LlamaParams, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits of every token, ``[batch, seq_len] -> [batch, seq_len, vocab_size]``; no key is used."""
        x = _rms_norm(self.hidden_states(params, inputs), params["final_norm"])
        return x @ params["head"].astype(self.dtype)

    def hidden_states(self, params: LlamaParams, tokens: jax.Array) -> jax.Array:
        """Output of the last block, before the final norm: ``[batch, seq_len, hidden]``."""
        x = params["embedding"].astype(self.dtype)[tokens]
        block = jax.checkpoint(self._block) if self.remat else self._block
        if self.scan_layers:
            x, _ = jax.lax.scan(lambda h, layer: (block(h, layer), None), x, params["layers"])
            return x
        for layer in params["layers"]:
            x = block(x, layer)
        return x

    def _block(self, x: jax.Array, layer: LlamaParams) -> jax.Array:
        """One transformer block, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        # Converted inside the block: with `remat` the narrow copies are computed again instead of saved.
        weights = jax.tree.map(lambda w: w.astype(self.dtype), layer)
        x = x + self._attention(_rms_norm(x, weights["attention_norm"]), weights)
        return x + _feed_forward(_rms_norm(x, weights["feed_forward_norm"]), weights)

    def _attention(self, x: jax.Array, weights: LlamaParams) -> jax.Array:
        """Causal self-attention with grouped queries, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        batch, seq, _ = x.shape
        queries = self._rotate((x @ weights["w_q"]).reshape(batch, seq, self.num_heads, self.head_dim))
        keys = self._rotate((x @ weights["w_k"]).reshape(batch, seq, self.num_kv_heads, self.head_dim))
        values = (x @ weights["w_v"]).reshape(batch, seq, self.num_kv_heads, self.head_dim)
        # Heads of queries that share keys become a dim of their own, so that keys are never repeated in memory.
        grouped = queries.reshape(batch, seq, self.num_kv_heads, -1, self.head_dim)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, keys).astype(jnp.float32) * self.head_dim**-0.5
        causal = jnp.tril(jnp.ones((seq, seq), dtype=bool))
        # The lowest finite number and not -inf, as everywhere here: its softmax and gradient are zero, never NaN.
        attended = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bgrqk,bkgd->bqgrd", attended, values)
        return mixed.reshape(batch, seq, self.hidden) @ weights["w_o"]

    def _rotate(self, x: jax.Array) -> jax.Array:
        """Rotary positions in halves, ``[batch, seq, heads, head_dim] -> same``."""
        # Pairs are the two halves of a head; Su et al. 2021 pair neighbours, which is the same but for the order of
        # columns.
        half = self.head_dim // 2
        frequencies = self.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    def _init_layer(self, key: jax.Array) -> LlamaParams:
        keys = jax.random.split(key, 7)
        # Keys and values are narrower than queries, since heads share them.
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


def _feed_forward(x: jax.Array, weights: LlamaParams) -> jax.Array:
    """The gated feed-forward layers, ``[batch, seq, hidden] -> [batch, seq, hidden]``."""
    return (jax.nn.silu(x @ weights["w_gate"]) * (x @ weights["w_up"])) @ weights["w_down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last dim, in float32: ``[..., hidden] -> [..., hidden]``."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-5)
    return normed.astype(x.dtype) * scale.astype(x.dtype)
