"""BERT as it was published: post-LN layers, bidirectional attention, masked words and whether two sentences follow.

    x_0     = dropout(norm(token[tokens] + position + type[types]))                       (`BERT.hidden_states`)
    y       = norm(x + dropout(attention(x)));  x_{l+1} = norm(y + dropout(mlp(y)))       (`BERT._layer`)
    words   = norm(gelu(x_L[positions] w + b)) token^T + vocab_bias                       (`BERT._word_losses`)
    follows = tanh(x_L[0] w_pool + b_pool) w_follows + b_follows                          (`BERT._follows_losses`)
    loss    = sum(weights cross_entropy(words)) / sum(weights) + mean(cross_entropy(follows))   (`BERT.loss_fn`)

Devlin et al. 2019, section 3.1 and appendix A; the weights of predictions are those of google-research/bert, which
fills up sequences with fewer masked words by predictions of weight zero. The defaults are BERT-Large, uncased:
336,226,108 weights, of which the heads have 1,084,220; the paper says 340M.
`transformer` has a BERT of the same work in its own form (norms in front, every prediction counted).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.cli.models.initial_weights import count, draw, stacked
from alpa_lite.cli.models.losses import Reduction, cross_entropy, reduce_losses
from alpa_lite.cli.models.regularisation import drop

Params = dict[str, Any]
"""``token_embedding`` [vocab, hidden], ``position_embedding``, ``type_embedding``, ``embedding_norm``, ``pool`` and the
two heads ``words`` and ``follows``; ``layers``: a list of segments with leaves ``[layers, ...]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BERT:
    """Sizes and options.

    Attributes:
        num_masked: predictions per sequence.
        num_segments: loops (`lax.scan`) that the layers are written as, one after the other.
        dropout: rate; masks are drawn only when `loss_fn` is given a key.
        dtype: of activations and of weights where they are used; softmax, norms and losses are computed in float32.
    """

    vocab_size: int = 30522
    num_layers: int = 24
    hidden: int = 1024
    num_heads: int = 16
    inner: int = 4096
    seq_len: int = 512
    num_masked: int = 76
    num_segments: int = 1
    dropout: float = 0.1
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden must be a multiple of num_heads; got {self.hidden} and {self.num_heads}.")
        if not 1 <= self.num_segments <= self.num_layers:
            raise ValueError(f"num_segments lies between 1 and {self.num_layers} layers; got {self.num_segments}.")

    def init(self, key: jax.Array) -> Params:
        """Draw the weights: normal(0.02); norms start at one, biases at zero."""
        return draw(key, self._shapes(), jnp.float32, self.num_segments)

    def parameter_count(self) -> int:
        """Return the number of weights."""
        return count(self._shapes())

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        ``tokens``, ``types`` (of the sentence, 0 or 1) and ``present`` (1, or 0 for padding)
        ``[batch, seq_len]``; ``positions``, ``targets`` and float ``weights`` ``[batch, num_masked]``; ``follows``
        ``[batch]``, 0 or 1.
        """
        sequence, masked = (batch_size, self.seq_len), (batch_size, self.num_masked)
        found = {name: jax.ShapeDtypeStruct(sequence, jnp.int32) for name in ("tokens", "types", "present")}
        found |= {name: jax.ShapeDtypeStruct(masked, jnp.int32) for name in ("positions", "targets")}
        found["weights"] = jax.ShapeDtypeStruct(masked, jnp.float32)
        return found | {"follows": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}

    @property
    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {
            "tokens": self.vocab_size,
            "types": 2,
            "present": 2,
            "positions": self.seq_len,
            "targets": self.vocab_size,
            "follows": 2,
        }

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Both losses together, a float32 scalar.

        Args:
            params: from `init`.
            batch: arrays of the names and shapes of `batch_shapes`.
            key: draws the dropout masks; None means no dropout.
            reduction: over the batch; the mean over masked words is weighted.
        """
        x = self.hidden_states(params, batch, key)
        words = batch["weights"] * self._word_losses(params, x, batch)
        follows = reduce_losses(self._follows_losses(params, x, batch), reduction)
        if reduction == "sum":
            return jnp.sum(words) + follows
        return jnp.sum(words) / (jnp.sum(batch["weights"]) + 1e-5) + follows

    def hidden_states(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
        """Output of the last layer, ``[batch, seq_len, hidden]``."""
        x = params["token_embedding"][batch["tokens"]] + params["position_embedding"][: batch["tokens"].shape[1]]
        x = self._norm((x + params["type_embedding"][batch["types"]]).astype(self.dtype), params["embedding_norm"])
        keys = None
        if key is not None and self.dropout:
            first, rest = jax.random.split(key)
            x, keys = drop(x, first, self.dropout), jax.random.split(rest, (self.num_layers, 3))
        hidden_keys = jnp.where(batch["present"] > 0, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]

        def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, None]:
            weights, layer_keys = scanned
            return self._layer(x, weights, layer_keys, hidden_keys), None

        start = 0
        for segment in params["layers"]:
            size = segment["w_qkv"].shape[0]
            x, _ = lax.scan(layer, x, (segment, None if keys is None else keys[start : start + size]))
            start += size
        return x

    def _layer(self, x: jax.Array, layer: Params, keys: jax.Array | None, hidden_keys: jax.Array) -> jax.Array:
        """One layer, ``[batch, seq, hidden] -> same``."""
        drops = (None,) * 3 if keys is None else tuple(keys)
        w = {name: leaf.astype(self.dtype) for name, leaf in layer.items() if not name.startswith("norm")}
        batch, seq, _ = x.shape
        qkv = (x @ w["w_qkv"] + w["b_qkv"]).reshape(batch, seq, 3, self.num_heads, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]).astype(jnp.float32)
        scores = scores * (self.hidden // self.num_heads) ** -0.5 + hidden_keys
        attended = drop(jax.nn.softmax(scores, axis=-1).astype(x.dtype), drops[0], self.dropout)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", attended, qkv[:, :, 2]).reshape(batch, seq, self.hidden)
        x = self._norm(x + drop(mixed @ w["w_out"] + w["b_out"], drops[1], self.dropout), layer["norm_attention"])
        up = jax.nn.gelu(x @ w["w_up"] + w["b_up"], approximate=False)
        return self._norm(x + drop(up @ w["w_down"] + w["b_down"], drops[2], self.dropout), layer["norm_mlp"])

    def _word_losses(self, params: Params, x: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """``[batch, num_masked]``, without the weights of the predictions."""
        head = params["words"]
        masked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        masked = jax.nn.gelu(masked @ head["w"].astype(self.dtype) + head["b"].astype(self.dtype), approximate=False)
        embedding = params["token_embedding"].astype(self.dtype)
        logits = jnp.einsum("bph,vh->bpv", self._norm(masked, head["norm"]), embedding) + head["vocab_bias"]
        return cross_entropy(logits, batch["targets"])

    def _follows_losses(self, params: Params, x: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """``[batch]``."""
        pool, head = params["pool"], params["follows"]
        pooled = jnp.tanh(x[:, 0].astype(jnp.float32) @ pool["w"] + pool["b"])
        return cross_entropy(pooled @ head["w"] + head["b"], batch["follows"])

    def _norm(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        """Normalise the last dim, in float32: ``[..., hidden] -> same``."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-12)
        return (normed * weights["scale"] + weights["bias"]).astype(x.dtype)

    def _shapes(self) -> Params:
        hidden, inner = self.hidden, self.inner
        norm = {"scale": (hidden,), "bias": (hidden,)}
        layer = {
            "w_qkv": (hidden, 3 * hidden),
            "b_qkv": (3 * hidden,),
            "w_out": (hidden, hidden),
            "b_out": (hidden,),
            "norm_attention": norm,
            "w_up": (hidden, inner),
            "b_up": (inner,),
            "w_down": (inner, hidden),
            "b_down": (hidden,),
            "norm_mlp": norm,
        }
        return {
            "token_embedding": (self.vocab_size, hidden),
            "position_embedding": (self.seq_len, hidden),
            "type_embedding": (2, hidden),
            "embedding_norm": norm,
            "layers": stacked(layer, self.num_layers),
            "pool": {"w": (hidden, hidden), "b": (hidden,)},
            "words": {"w": (hidden, hidden), "b": (hidden,), "norm": norm, "vocab_bias": (self.vocab_size,)},
            "follows": {"w": (hidden, 2), "b": (2,)},
        }
