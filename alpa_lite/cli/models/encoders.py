"""Models with an encoder, as they were published: BERT, and translation by LSTM layers with attention.

BERT has post-LN layers and bidirectional attention; it predicts masked words and whether two sentences follow.

    x_0     = dropout(norm(token[tokens] + position + type[types]))                       (`BERT.hidden_states`)
    y       = norm(x + dropout(attention(x)));  x_{l+1} = norm(y + dropout(mlp(y)))       (`BERT._layer`)
    words   = norm(gelu(x_L[positions] w + b)) token^T + vocab_bias                       (`BERT._word_losses`)
    follows = tanh(x_L[0] w_pool + b_pool) w_follows + b_follows                          (`BERT._follows_losses`)
    loss    = sum(weights cross_entropy(words)) / sum(weights) + mean(cross_entropy(follows))   (`BERT.loss_fn`)

Devlin et al. 2019, section 3.1 and appendix A; the weights of predictions are those of google-research/bert, which
fills up sequences with fewer masked words by predictions of weight zero. The defaults are BERT-Large, uncased:
336,226,108 weights, of which the heads have 1,084,220; the paper says 340M.
`transformer` has a BERT of the same work in its own form (norms in front, every prediction counted).

The translator is an encoder and a decoder of LSTM layers.

    i, f, g, o = x w_x + h w_h + b;   c = σ(f) c + σ(i) tanh(g);   h = σ(o) tanh(c)        (`lstm_cell`)
    encoder    one scan over time per layer; its last h, c are the first of the decoder     (`Translator._run`)
    decoder    one scan over time over all layers, which reads [embedding_t; s_{t-1}]        (`Translator._attended`)
    score      a = softmax(h_t w_score memory^T);  s_t = tanh([a memory; h_t] w_combine)     (`Translator._attend`)
    loss       sum(weights cross_entropy(s w + b)) / sum(weights)                            (`Translator.loss_fn`)

The defaults are the model of Luong et al. 2015 (section 4.1: four layers of 1000 cells, embeddings of 1000, 50K words
each, global attention with the "general" score and input feeding; σ is the logistic function). With
``attention=False, source_vocab=160000, target_vocab=80000`` it is that of Sutskever et al. 2014, section 3.4: 384M
weights, of which 64M are recurrent.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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

BERTParams = dict[str, Tree]
"""``token_embedding`` [vocab, hidden], ``position_embedding``, ``type_embedding``, ``embedding_norm``, ``pool`` and the
two heads ``words`` and ``follows``; ``layers``: a list of segments with leaves ``[layers, ...]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BERT(Model):
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
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden must be a multiple of num_heads; got {self.hidden} and {self.num_heads}.")
        if not 1 <= self.num_segments <= self.num_layers:
            raise ValueError(f"num_segments lies between 1 and {self.num_layers} layers; got {self.num_segments}.")

    def init(self, key: jax.Array) -> BERTParams:
        """Draw the weights: normal(0.02); norms start at one, biases at zero."""
        return draw_weights(key, self._shapes(), jnp.float32, self.num_segments)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        ``tokens``, ``types`` (of the sentence, 0 or 1) and ``present`` (1, or 0 for padding)
        ``[batch, seq_len]``; ``positions``, ``targets`` and float ``weights`` ``[batch, num_masked]``; ``follows``
        ``[batch]``, 0 or 1.
        """
        sequence, masked = (batch_size, self.seq_len), (batch_size, self.num_masked)
        shapes = {name: jax.ShapeDtypeStruct(sequence, jnp.int32) for name in ("tokens", "types", "present")}
        shapes |= {name: jax.ShapeDtypeStruct(masked, jnp.int32) for name in ("positions", "targets")}
        shapes["weights"] = jax.ShapeDtypeStruct(masked, jnp.float32)
        return shapes | {"follows": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}

    @property
    def limits(self) -> dict[str, int]:
        """The exclusive upper bound of the integers of each array of a batch, by name."""
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
        params: BERTParams,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return both losses together, a float32 scalar; the mean over masked words is weighted."""
        x = self.hidden_states(params, batch, key)
        words = batch["weights"] * self._word_losses(params, x, batch)
        follows = reduce_losses(self._follows_losses(params, x, batch), reduction)
        if reduction == "sum":
            return jnp.sum(words) + follows
        # The published code adds this constant too: a batch may have no masked word.
        return jnp.sum(words) / (jnp.sum(batch["weights"]) + 1e-5) + follows

    def hidden_states(
        self, params: BERTParams, batch: Mapping[str, jax.Array], key: jax.Array | None = None
    ) -> jax.Array:
        """Output of the last layer, ``[batch, seq_len, hidden]``."""
        x = params["token_embedding"][batch["tokens"]] + params["position_embedding"][: batch["tokens"].shape[1]]
        x = self._norm((x + params["type_embedding"][batch["types"]]).astype(self.dtype), params["embedding_norm"])
        keys = None
        if key is not None and self.dropout:
            first, rest = jax.random.split(key)
            x, keys = drop(x, first, self.dropout), jax.random.split(rest, (self.num_layers, 3))
        # Added to the scores: padding gets no share of the attention. Not -inf, whose softmax may be NaN.
        hidden_keys = jnp.where(batch["present"] > 0, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]

        def layer(x: jax.Array, scanned: tuple[BERTParams, jax.Array | None]) -> tuple[jax.Array, None]:
            weights, layer_keys = scanned
            return self._layer(x, weights, layer_keys, hidden_keys), None

        start = 0
        for segment in params["layers"]:
            size = segment["w_qkv"].shape[0]
            x, _ = lax.scan(layer, x, (segment, None if keys is None else keys[start : start + size]))
            start += size
        return x

    def _layer(self, x: jax.Array, layer: BERTParams, keys: jax.Array | None, hidden_keys: jax.Array) -> jax.Array:
        """One layer, ``[batch, seq, hidden] -> same``."""
        # In order: the weights of attention, its branch, the MLP's branch.
        drops = (None,) * 3 if keys is None else tuple(keys)
        w = {name: leaf.astype(self.dtype) for name, leaf in layer.items() if not name.startswith("norm")}
        batch, seq, _ = x.shape
        qkv = (x @ w["w_qkv"] + w["b_qkv"]).reshape(batch, seq, 3, self.num_heads, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]).astype(jnp.float32)
        scores = scores * (self.hidden // self.num_heads) ** -0.5 + hidden_keys
        attended = drop(jax.nn.softmax(scores, axis=-1).astype(x.dtype), drops[0], self.dropout)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", attended, qkv[:, :, 2]).reshape(batch, seq, self.hidden)
        x = self._norm(x + drop(mixed @ w["w_out"] + w["b_out"], drops[1], self.dropout), layer["norm_attention"])
        # The exact gelu (by erf); JAX's default is the approximation by tanh.
        up = jax.nn.gelu(x @ w["w_up"] + w["b_up"], approximate=False)
        return self._norm(x + drop(up @ w["w_down"] + w["b_down"], drops[2], self.dropout), layer["norm_mlp"])

    def _word_losses(self, params: BERTParams, x: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the loss of each masked word, ``[batch, num_masked]``, without the weights of the predictions."""
        head = params["words"]
        # Only masked positions, a seventh of all, are projected to the vocabulary.
        masked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        masked = jax.nn.gelu(masked @ head["w"].astype(self.dtype) + head["b"].astype(self.dtype), approximate=False)
        # The output projection is the token embedding, transposed; only its bias is a weight of its own.
        embedding = params["token_embedding"].astype(self.dtype)
        logits = jnp.einsum("bph,vh->bpv", self._norm(masked, head["norm"]), embedding) + head["vocab_bias"]
        return cross_entropy(logits, batch["targets"])

    def _follows_losses(self, params: BERTParams, x: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the loss of the prediction whether the second sentence follows the first, ``[batch]``."""
        pool, head = params["pool"], params["follows"]
        # The first token, [CLS], stands for the pair of sentences.
        pooled = jnp.tanh(x[:, 0].astype(jnp.float32) @ pool["w"] + pool["b"])
        return cross_entropy(pooled @ head["w"] + head["b"], batch["follows"])

    def _norm(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        """Normalise the last dim, in float32: ``[..., hidden] -> same``."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        # The epsilon of the published code.
        normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-12)
        return (normed * weights["scale"] + weights["bias"]).astype(x.dtype)

    def _shapes(self) -> BERTParams:
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
            "layers": stacked_shapes(layer, self.num_layers),
            "pool": {"w": (hidden, hidden), "b": (hidden,)},
            "words": {"w": (hidden, hidden), "b": (hidden,), "norm": norm, "vocab_bias": (self.vocab_size,)},
            "follows": {"w": (hidden, 2), "b": (2,)},
        }


TranslatorParams = dict[str, Tree]
"""``source_embedding`` and ``target_embedding`` [vocab, hidden]; ``encoder`` and ``decoder``: lists of cells ``{"w_x":
[in, 4 hidden], "w_h": [hidden, 4 hidden], "b": [4 hidden]}``; ``head``; with attention ``w_score``, ``w_combine``."""

State = tuple[jax.Array, jax.Array]
"""Output and cell state of a layer, ``[batch, hidden]`` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator(Model):
    """Sizes of the model; encoder and decoder have `num_layers` layers each."""

    source_vocab: int = 50000
    target_vocab: int = 50000
    num_layers: int = 4
    hidden: int = 1000
    source_len: int = 50
    target_len: int = 50
    attention: bool = True
    dtype: DTypeLike = jnp.float32

    def init(self, key: jax.Array) -> TranslatorParams:
        """Draw the weights, uniform in [-0.1, 0.1] as in both papers; biases too."""
        # Shapes are tuples, which JAX would otherwise flatten into their numbers.
        leaves, structure = jax.tree.flatten(self._shapes(), is_leaf=lambda node: isinstance(node, tuple))
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.uniform(k, s, jnp.float32, -0.1, 0.1) for k, s in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        Integer ``source`` and float ``source_weights`` (1, or 0 for padding) ``[batch,
        source_len]``; integer ``inputs`` and ``targets`` and float ``weights`` ``[batch, target_len]``.
        """
        source, target = (batch_size, self.source_len), (batch_size, self.target_len)
        return {
            "source": jax.ShapeDtypeStruct(source, jnp.int32),
            "source_weights": jax.ShapeDtypeStruct(source, jnp.float32),
            "inputs": jax.ShapeDtypeStruct(target, jnp.int32),
            "targets": jax.ShapeDtypeStruct(target, jnp.int32),
            "weights": jax.ShapeDtypeStruct(target, jnp.float32),
        }

    @property
    def limits(self) -> dict[str, int]:
        """The exclusive upper bound of the integers of each array of a batch, by name."""
        return {"source": self.source_vocab, "inputs": self.target_vocab, "targets": self.target_vocab}

    def loss_fn(
        self,
        params: TranslatorParams,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the cross entropy of each word of the translation, given the previous ones; a float32 scalar.

        The mean is over the words with a weight.
        """
        total = jnp.sum(batch["weights"] * cross_entropy(self.logits(params, batch), batch["targets"]))
        return total / jnp.sum(batch["weights"]) if reduction == "mean" else total

    def logits(self, params: TranslatorParams, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the logits of every word of the translation: ``[batch, target_len, target_vocab]``."""
        # Time first, the dim that `lax.scan` runs over.
        x = params["source_embedding"].astype(self.dtype)[batch["source"]].swapaxes(0, 1)
        # The encoder starts empty; the decoder starts where the encoder ended.
        zeros = jnp.zeros(x.shape[1:], self.dtype)
        memory, states = self._run(params["encoder"], x, [(zeros, zeros)] * self.num_layers)
        y = params["target_embedding"].astype(self.dtype)[batch["inputs"]].swapaxes(0, 1)
        if self.attention:
            y = self._attended(params, y, states, memory.swapaxes(0, 1), batch["source_weights"])
        else:
            y, _ = self._run(params["decoder"], y, states)
        return y.swapaxes(0, 1) @ params["head"]["w"].astype(self.dtype) + params["head"]["b"].astype(self.dtype)

    def _run(self, cells: list[TranslatorParams], x: jax.Array, states: list[State]) -> tuple[jax.Array, list[State]]:
        """Run layer by layer over time, ``[time, batch, hidden] -> same``; also return each layer's last state."""
        last: list[State] = []
        for cell, state in zip(cells, states, strict=True):
            cell = {name: weights.astype(self.dtype) for name, weights in cell.items()}
            # One large contraction for all times, outside the loop, which is left with the recurrent part alone.
            given = x @ cell["w_x"] + cell["b"]
            state, x = lax.scan(lambda state, x, cell=cell: lstm_cell(cell, state, x), state, given)
            last.append(state)
        return x, last

    def _attended(
        self, params: TranslatorParams, y: jax.Array, states: list[State], memory: jax.Array, present: jax.Array
    ) -> jax.Array:
        """Run the decoder with attention and input feeding, ``[time, batch, hidden] -> same``; memory: batch first."""
        # Input feeding: a step reads what the previous one attended to, so that layers cannot run one after the other.
        names = ("decoder", "w_score", "w_combine")
        weights = jax.tree.map(lambda w: w.astype(self.dtype), {name: params[name] for name in names})

        def step(carry: tuple[list[State], jax.Array], y: jax.Array) -> tuple[tuple[list[State], jax.Array], jax.Array]:
            x, new = jnp.concatenate([y, carry[1]], axis=-1), list[State]()
            for cell, state in zip(weights["decoder"], carry[0], strict=True):
                state, x = lstm_cell(cell, state, x @ cell["w_x"] + cell["b"])
                new.append(state)
            attended = self._attend(weights, x, memory, present)
            return (new, attended), attended

        return lax.scan(step, (states, jnp.zeros_like(y[0])), y)[1]

    def _attend(self, weights: TranslatorParams, x: jax.Array, memory: jax.Array, present: jax.Array) -> jax.Array:
        """Attend: ``x [batch, hidden], memory [batch, source_len, hidden] -> [batch, hidden]``."""
        scores = jnp.einsum("bh,bsh->bs", x @ weights["w_score"], memory).astype(jnp.float32)
        # Padding of the source gets no attention.
        scores = jnp.where(present > 0.0, scores, jnp.finfo(jnp.float32).min)
        seen = jnp.einsum("bs,bsh->bh", jax.nn.softmax(scores, axis=-1).astype(x.dtype), memory)
        return jnp.tanh(jnp.concatenate([seen, x], axis=-1) @ weights["w_combine"])

    def _shapes(self) -> TranslatorParams:
        hidden = self.hidden

        def cells(inputs: int) -> list[TranslatorParams]:
            # Only the first layer reads the input, all others read the layer below.
            widths = [inputs, *[hidden] * (self.num_layers - 1)]
            return [{"w_x": (width, 4 * hidden), "w_h": (hidden, 4 * hidden), "b": (4 * hidden,)} for width in widths]

        shapes: TranslatorParams = {
            "source_embedding": (self.source_vocab, hidden),
            "target_embedding": (self.target_vocab, hidden),
            "encoder": cells(hidden),
            "decoder": cells(2 * hidden if self.attention else hidden),
            "head": {"w": (hidden, self.target_vocab), "b": (self.target_vocab,)},
        }
        if self.attention:
            shapes |= {"w_score": (hidden, hidden), "w_combine": (2 * hidden, hidden)}
        return shapes


def lstm_cell(weights: TranslatorParams, state: State, given: jax.Array) -> tuple[State, jax.Array]:
    """Return a layer's new state after one step, and its output (Hochreiter and Schmidhuber 1997, with forget gates).

    Only ``w_h`` of the weights is used; `given` is what the input contributes, bias included, ``[batch, 4 hidden]``.
    """
    # Gates are columns of one product, so that a step is one contraction instead of four.
    output, cell = state
    take, forget, new, show = jnp.split(given + output @ weights["w_h"], 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
    output = jax.nn.sigmoid(show) * jnp.tanh(cell)
    return (output, cell), output
