"""A configurable transformer: decoders with plain or gated MLPs, mixtures of experts, encoders, encoder-decoders.

    x_0     = token_embedding[tokens] + position_embedding                      (`Transformer._embed`)
    x       = x + attention(norm(x))                                            (`Transformer._layer`)
    x       = x + cross_attention(norm(x), memory)                              (`Transformer._layer`, with an encoder)
    x_{l+1} = x + feed_forward(norm(x))                                         (`Transformer._layer`)
    logits  = norm(x_L) head                                                    (`Transformer._logits`)

Which options make which published model (`architecture` unless said otherwise):

- GPT-2, GPT-3, Megatron-LM, MPT: the defaults (MPT: ``bias=False``); Nemotron: ``activation="squared_relu"``,
  ``positions="rotary"``, ``bias=False``, ``tied=False``, grouped queries.
- Llama 2 and 3: ``gated=True, activation="silu", norm="rms", positions="rotary", bias=False, tied=False``.
- Grok-1, Mixtral: Llama's, and for the model ``experts=Experts(num_experts=8, top_k=2)``.
- GShard and the MoE of Alpa: for the model ``experts=Experts(num_experts=E, top_k=2, group_size=S, every=2)``. Alpa's
  `inner` is eight times `hidden` (benchmark/alpa of alpa-projects/alpa, ``intermediate_size=hidden_size * 8``).
- DeepSeek-V3: ``Architecture(latent=Latent(), head_dim=128, …)`` and ``experts=Experts(num_experts=256, top_k=8,
  shared=1)``; its first three layers, whose MLPs are as wide as nine experts, have experts here.
- Gemma 3: ``window=1024, global_every=6``.
- BERT: for the model ``num_masked``, the predictions per sequence. Norms stand before attention and MLP as in the
  others, not behind; the work is the same.
- T5 1.1: ``gated=True, norm="rms", positions="relative", bias=False, tied=False``, for the model ``encoder=Encoder(
  num_layers=L, seq_len=512), seq_len=128``, and ``Computation(fused=False)``. `num_layers` counts the decoder's.

The stack of layers is written as `num_segments` loops (`lax.scan`) one after the other, so that a pipeline may be cut
between them; the loops share one body, which JAX traces once. What the backward pass recomputes: see `Recompute`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from alpa_lite.cli.models.model_parts import (
    Model,
    Reduction,
    Tree,
    cross_entropy,
    draw_weights,
    drop,
    reduce_losses,
    stacked_shapes,
)
from alpa_lite.cli.models.transformer_layers import (
    NUM_BUCKETS,
    Activation,
    Attention,
    Experts,
    FeedForward,
    Latent,
    distance_buckets,
    narrow_einsum,
)

Params = dict[str, Tree]
"""``token_embedding`` [vocab, hidden]; ``layers``, one entry per segment: a list of the layers of a period (one layer,
or `Experts.every` layers) with leaves ``[periods, ...]``; ``final_norm``; where the options ask for them
``position_embedding``, ``head``, ``relative_bias``, ``masked_head``, and ``encoder`` with layers, norm and bias."""

Recompute = Literal["none", "full", "selective", "dots", "dots_without_batch", "projections", "alternate"]
"""What the backward pass computes again:

- ``none``: nothing;
- ``full``: each layer, from its input;
- ``selective``: the attention core (scores, softmax, weighted sum; Korthikanti et al. 2022, section 5);
- ``dots``: each layer but for the outputs of contractions (`jax.checkpoint_policies.dots_saveable`);
- ``dots_without_batch``: likewise, but contractions with batch dims (scores, weighted sums) are computed again
  (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`);
- ``projections``: each layer but for its input and the projections around the attention core (MaxText, policy
  "custom"; where that offloads them to the host, here they are kept);
- ``alternate``: each layer but for the attention core and every other dense contraction, from the first on (torchtitan,
  selective activation checkpointing per op). Needs ``fused=False``.
"""

_NAMED: dict[str, tuple[str, ...]] = {
    "projections": ("query", "key", "value", "attention_out"),
    "alternate": ("query", "value", "core", "gate", "down"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The kind of a transformer's layers; the module says which options make which published model.

    Attributes:
        num_kv_heads: heads of keys and values; None for as many as there are heads of queries.
        head_dim: width of a head; None for ``hidden / num_heads``.
        activation: of the feed-forward layers.
        gated: gated feed-forward layers, which have no bias.
        norm: with the mean subtracted, or of the root mean square alone.
        bias: whether projections and layer norms have a bias.
        positions: learned embeddings, rotary, biases by relative distance (T5), or none.
        rotary_base: base of the frequencies of rotary positions.
        tied: use the token embedding, transposed, as the output projection.
        window: positions that a local layer attends to, itself included; None makes no layer local.
        global_every: the last of every so many layers attends to all positions in spite of `window`; 0: none does.
        latent: latent attention, with as many heads of keys as of queries.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    activation: Activation = "gelu"
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    bias: bool = True
    positions: Literal["learned", "rotary", "relative", "none"] = "learned"
    rotary_base: float = 500000.0
    tied: bool = True
    window: int | None = None
    global_every: int = 0
    latent: Latent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The form in which a transformer is computed; it changes neither the function nor the number of weights.

    Attributes:
        fused: queries, keys and values, and both inner projections of gated layers, as one contraction each.
        num_segments: loops that the layers (of encoder and decoder each) are written as.
        recompute: what the backward pass computes again.
        narrow: the projections of the layers compute in eight-bit floating point (`narrow_einsum`).
        dtype: of activations and of weights where they are used; softmax, norms and loss are computed in float32.
        param_dtype: of the weights.
    """

    fused: bool = True
    num_segments: int = 1
    recompute: Recompute = "none"
    narrow: bool = False
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The encoder that a decoder attends to: its layers, and the tokens per sequence that it reads."""

    num_layers: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(Model):
    """Sizes and options of the model.

    Attributes:
        inner: width of the feed-forward layers.
        seq_len: tokens per sequence (of the decoder).
        num_masked: predictions per sequence of masked tokens, gathered before the output projection, besides which the
            model says whether two sentences follow each other; None to predict the next token (causal).
        experts: mixture of experts in place of the feed-forward layers.
        dropout: rate behind the embedding and each branch, and of attention; masks are drawn only when `loss_fn` is
            given a key.
    """

    vocab_size: int = 256
    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 4
    inner: int = 512
    seq_len: int = 128
    architecture: Architecture = Architecture()
    num_masked: int | None = None
    experts: Experts | None = None
    encoder: Encoder | None = None
    dropout: float = 0.0
    computation: Computation = Computation()

    def __post_init__(self) -> None:
        kv_heads = self.architecture.num_kv_heads or self.num_heads
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {self.num_heads} and {kv_heads}.")
        if self.architecture.head_dim is None and self.hidden % self.num_heads:
            raise ValueError(f"Without head_dim, heads divide hidden; got {self.hidden} for {self.num_heads} heads.")
        stacks = [self.num_layers, *([] if self.encoder is None else [self.encoder.num_layers])]
        if any(layers % self.period for layers in stacks):
            raise ValueError(
                f"With experts or global attention in one of every {self.period} layers, the layers must be a multiple "
                f"of it; got "
                f"{' and an encoder of '.join(map(str, stacks))}."
            )
        if not 1 <= self.computation.num_segments <= min(stacks) // self.period:
            raise ValueError(
                f"num_segments must lie between 1 and the {min(stacks) // self.period} repetitions of the layers; got "
                f"{self.computation.num_segments}."
            )
        if self.computation.recompute == "alternate" and self.computation.fused:
            raise ValueError("recompute='alternate' names every projection by itself; got fused=True, set it to False.")

    @property
    def period(self) -> int:
        """The number of layers until the kinds of layers repeat."""
        every = 1 if self.experts is None else self.experts.every
        return lcm(every, self.architecture.global_every or 1)

    def init(self, key: jax.Array) -> Params:
        """Draw the weights: normal(0.02); norms start at one, biases at zero. They do not depend on `num_segments`."""
        return draw_weights(key, self._shapes(), self.computation.param_dtype, self.computation.num_segments)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch of so many sequences as shapes; all hold integers.

        Next token: ``tokens`` and ``targets`` ``[batch, seq_len]``, and with an encoder ``inputs``
        ``[batch, encoder_seq_len]``. Masked: ``tokens`` and ``types`` (of the sentence, 0 or 1) ``[batch, seq_len]``,
        ``positions`` and ``targets`` ``[batch, num_masked]``, ``follows`` ``[batch]``.
        """
        # Shapes of one sequence; the batch is put in front of all of them.
        names = {"tokens": (self.seq_len,)}
        if self.num_masked is not None:
            names |= {"types": (self.seq_len,), "positions": (self.num_masked,), "targets": (self.num_masked,)}
            names |= {"follows": ()}
        else:
            names |= {"targets": (self.seq_len,)}
        if self.encoder is not None:
            names |= {"inputs": (self.encoder.seq_len,)}
        return {name: jax.ShapeDtypeStruct((batch_size, *shape), jnp.int32) for name, shape in names.items()}

    @property
    def limits(self) -> dict[str, int]:
        """The exclusive upper bound of the integers of each array of a batch, by name."""
        return {
            **dict.fromkeys(("tokens", "targets", "inputs"), self.vocab_size),
            **dict.fromkeys(("types", "follows"), 2),
            "positions": self.seq_len,
        }

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the cross entropy of the predictions; the masked objective adds that of the sequences."""
        x = self.hidden_states(params, batch, key)
        if self.num_masked is None:
            return reduce_losses(cross_entropy(self._logits(params, x), batch["targets"]), reduction)
        head = _cast(params["masked_head"], self.computation.dtype)
        masked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        masked = self._norm(jax.nn.gelu(masked @ head["w"] + head["b"]), head["norm"])
        # Only the masked positions are projected to the vocabulary.
        predicted = cross_entropy(self._logits(params, masked) + head["vocab_bias"], batch["targets"])
        # The first token stands for the pair of sentences, as in BERT.
        pooled = jnp.tanh(x[:, 0] @ head["w_pool"] + head["b_pool"])
        follows = cross_entropy(pooled @ head["w_follows"] + head["b_follows"], batch["follows"])
        return reduce_losses(predicted, reduction) + reduce_losses(follows, reduction)

    def hidden_states(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
        """Return the output of the last layer, normed: ``[batch, seq_len, hidden]``."""
        # Without dropout no key is split: a step that draws nothing has no random ops, whatever its caller passes.
        keys = None if key is None or self.dropout == 0.0 else jax.random.split(key)
        memory = None
        if self.encoder is not None:
            inputs = self._embed(params, batch["inputs"])
            # The decoder gets the first key, whether there is an encoder or not.
            encoder_key = None if keys is None else keys[1]
            memory = self._stack(params["encoder"], inputs, encoder_key, causal=False, memory=None)
        x = self._embed(params, batch["tokens"])
        if self.num_masked is not None:
            x = x + params["type_embedding"][batch["types"]].astype(self.computation.dtype)
        key = None if keys is None else keys[0]
        return self._stack(params, x, key, causal=self.num_masked is None, memory=memory)

    def _embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return the embeddings of tokens, ``[batch, seq] -> [batch, seq, hidden]``."""
        x = params["token_embedding"][tokens].astype(self.computation.dtype)
        if self.architecture.positions == "learned":
            x = x + params["position_embedding"].astype(self.computation.dtype)[: tokens.shape[1]]
        return x

    def _logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Project to the vocabulary, ``[..., hidden] -> [..., vocab_size]``."""
        if self.architecture.tied:
            return jnp.einsum("bsh,vh->bsv", x, params["token_embedding"].astype(self.computation.dtype))
        return jnp.einsum("bsh,hv->bsv", x, params["head"].astype(self.computation.dtype))

    def _stack(
        self, params: Params, x: jax.Array, key: jax.Array | None, *, causal: bool, memory: jax.Array | None
    ) -> jax.Array:
        """Apply all layers of the encoder or decoder and the norm behind them, ``[batch, seq, hidden] -> same``."""
        bias = None
        if self.architecture.positions == "relative":
            buckets = distance_buckets(x.shape[1], x.shape[1], causal=causal)
            # Shared by all layers of a stack, as in T5.
            bias = params["relative_bias"][buckets].transpose(2, 0, 3, 1)
        sizes = [jax.tree.leaves(segment)[0].shape[0] for segment in params["layers"]]
        layer_keys = None
        if key is not None:
            embedding_key, layers_key = jax.random.split(key)
            x = drop(x, embedding_key, self.dropout)
            # For all layers at once, so that the masks do not depend on the number of segments.
            layer_keys = jax.random.split(layers_key, (sum(sizes), self.period, 5))
        context = _Context(causal=causal, bias=bias, memory=memory, local=False)
        local, whole = (
            self._recomputed(partial(self._layer, context=context._replace(local=is_local)))
            for is_local in (True, False)
        )

        def period(x: jax.Array, scanned: tuple[list[Params], jax.Array | None]) -> tuple[jax.Array, None]:
            layers, keys = scanned
            for i, weights in enumerate(layers):
                layer = local if self._is_local(i) else whole
                x = layer(x, weights, None if keys is None else keys[i])
            return x, None

        # Under one `jit` all segments of equal size share a trace.
        start = 0
        run = jax.jit(lambda x, scanned: lax.scan(period, x, scanned)[0])
        for size, segment in zip(sizes, params["layers"], strict=True):
            x = run(x, (segment, None if layer_keys is None else layer_keys[start : start + size]))
            start += size
        return self._norm(x, _cast(params["final_norm"], self.computation.dtype))

    def _recomputed(self, layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Apply the policy of `recompute` to a layer."""
        # Selective recomputation is inside of attention (`Attention.recompute_core`).
        if self.computation.recompute in ("none", "selective"):
            return layer
        # A policy says which values are saved; all others are computed again.
        policies = jax.checkpoint_policies
        policy = {"dots": policies.dots_saveable, "dots_without_batch": policies.dots_with_no_batch_dims_saveable}.get(
            self.computation.recompute
        )
        if self.computation.recompute in _NAMED:
            policy = policies.save_only_these_names(*_NAMED[self.computation.recompute])
        return jax.checkpoint(layer, policy=policy)

    def _layer(self, x: jax.Array, layer: Params, keys: jax.Array | None, context: "_Context") -> jax.Array:
        """Apply one layer, ``[batch, seq, hidden] -> same``."""
        # Inside the recomputed function: the backward pass converts again instead of keeping the narrow weights.
        weights = _cast(layer, self.computation.dtype)
        attend = self._attention(causal=context.causal, local=context.local)
        # In order: attention's branch, cross attention's branch, feed-forward's, and the weights of either attention.
        drops = (None,) * 5 if keys is None else tuple(keys)
        attended = attend.apply(self._norm(x, weights["norm1"]), weights["attention"], bias=context.bias, key=drops[3])
        x = x + drop(attended, drops[0], self.dropout)
        if context.memory is not None:
            attend = self._attention(causal=False, cross=True)
            crossed = attend.apply(self._norm(x, weights["norm_cross"]), weights["cross"], context.memory, key=drops[4])
            x = x + drop(crossed, drops[1], self.dropout)
        normed, mlp = self._norm(x, weights["norm2"]), self._feed_forward()
        # Only the last layer of a period has experts, as its weights say.
        if self.experts is not None and "experts" in weights:
            mixed = self.experts.apply(normed, weights["experts"], mlp)
            if self.experts.shared:
                mixed = mixed + self._shared_feed_forward().apply(normed, weights["shared"])
            return x + drop(mixed, drops[2], self.dropout)
        return x + drop(self._dense_feed_forward().apply(normed, weights["mlp"]), drops[2], self.dropout)

    @jax.named_scope("norm")
    def _norm(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        """Normalise the last dim, in float32: ``[..., hidden] -> [..., hidden]``."""
        x32 = x.astype(jnp.float32)
        if self.architecture.norm == "layer":
            # The rms norm omits the mean (Zhang and Sennrich 2019).
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-5)
        scaled = normed.astype(x.dtype) * weights["scale"]
        return scaled + weights["bias"] if "bias" in weights else scaled

    def _is_local(self, index: int) -> bool:
        """Whether layer number `index` of a period attends to a window alone."""
        kind = self.architecture
        return kind.window is not None and not (kind.global_every and (index + 1) % kind.global_every == 0)

    def _attention(self, *, causal: bool, cross: bool = False, local: bool = False) -> Attention:
        kind = self.architecture
        return Attention(
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=kind.num_kv_heads or self.num_heads,
            head_dim=kind.head_dim or self.hidden // self.num_heads,
            causal=causal,
            # Queries and keys of cross attention are positions of different sequences, which have no common distances.
            rotary_base=kind.rotary_base if kind.positions == "rotary" and not cross else None,
            bias=kind.bias,
            # Queries of cross attention have another input than its keys and values: one product cannot make all three.
            fused=self.computation.fused and not cross,
            recompute_core=self.computation.recompute == "selective",
            dropout=self.dropout,
            einsum=narrow_einsum if self.computation.narrow else jnp.einsum,
            window=kind.window if local else None,
            latent=None if cross else kind.latent,
        )

    def _dense_feed_forward(self) -> FeedForward:
        """Return the MLP of layers without experts."""
        mlp = self._feed_forward()
        inner = None if self.experts is None else self.experts.dense_inner
        return mlp if inner is None else replace(mlp, inner=inner)

    def _shared_feed_forward(self) -> FeedForward:
        """Return the MLP of the shared experts, side by side."""
        shared = 0 if self.experts is None else self.experts.shared
        return replace(self._feed_forward(), inner=shared * self.inner)

    def _feed_forward(self) -> FeedForward:
        kind = self.architecture
        return FeedForward(
            hidden=self.hidden,
            inner=self.inner,
            activation=kind.activation,
            gated=kind.gated,
            bias=kind.bias,
            fused=self.computation.fused,
            einsum=narrow_einsum if self.computation.narrow else jnp.einsum,
        )

    def _shapes(self) -> Params:
        """Return the shapes of the weights, with the layers not yet split into segments."""
        hidden, norm = self.hidden, self._norm_shapes()
        shapes: Params = {"token_embedding": (self.vocab_size, hidden), **self._stack_shapes(decoder=True)}
        if self.encoder is not None:
            shapes["encoder"] = self._stack_shapes(decoder=False)
        if self.architecture.positions == "learned":
            # Encoder and decoder share the embedding of positions, as they share the token embedding.
            longest = self.seq_len if self.encoder is None else max(self.seq_len, self.encoder.seq_len)
            shapes["position_embedding"] = (longest, hidden)
        if not self.architecture.tied:
            shapes["head"] = (hidden, self.vocab_size)
        if self.num_masked is not None:
            shapes["type_embedding"] = (2, hidden)
            shapes["masked_head"] = {
                "w": (hidden, hidden),
                "b": (hidden,),
                "norm": norm,
                "vocab_bias": (self.vocab_size,),
                "w_pool": (hidden, hidden),
                "b_pool": (hidden,),
                "w_follows": (hidden, 2),
                "b_follows": (2,),
            }
        return shapes

    def _stack_shapes(self, *, decoder: bool) -> Params:
        """Return ``layers`` with the whole stack in one segment, the final norm, and the bias of its attention."""
        num_layers = self.num_layers if decoder or self.encoder is None else self.encoder.num_layers
        layers = [self._layer_shapes(i, decoder=decoder) for i in range(self.period)]
        shapes: Params = {"layers": stacked_shapes(layers, num_layers // self.period)}
        shapes["final_norm"] = self._norm_shapes()
        if self.architecture.positions == "relative":
            # By group of queries that share keys, as the scores are.
            heads = self.architecture.num_kv_heads or self.num_heads
            shapes["relative_bias"] = (NUM_BUCKETS, heads, self.num_heads // heads)
        return shapes

    def _layer_shapes(self, index: int, *, decoder: bool) -> Params:
        """Return the shapes of layer number `index` of a period."""
        norm, mlp = self._norm_shapes(), self._feed_forward()
        shapes: Params = {"norm1": norm, "attention": self._attention(causal=False).shapes(), "norm2": norm}
        if decoder and self.encoder is not None:
            shapes |= {"norm_cross": norm, "cross": self._attention(causal=False, cross=True).shapes()}
        if self.experts is not None and (index + 1) % self.experts.every == 0:
            shared = {"shared": self._shared_feed_forward().shapes()} if self.experts.shared else {}
            return shapes | {"experts": self.experts.shapes(mlp), **shared}
        return shapes | {"mlp": self._dense_feed_forward().shapes()}

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        # The rms norm never has a bias.
        names = ("scale", "bias") if self.architecture.norm == "layer" and self.architecture.bias else ("scale",)
        return {name: (self.hidden,) for name in names}


class _Context(NamedTuple):
    """What layers of a stack share: the mask, the bias of attention by distance, the encoder's output, the window."""

    causal: bool
    bias: jax.Array | None
    memory: jax.Array | None
    local: bool


def _cast(weights: Tree, dtype: DTypeLike) -> Tree:
    """Convert all weights to another dtype."""
    return jax.tree.map(lambda w: w.astype(dtype), weights)
