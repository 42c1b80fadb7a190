"""Translation by recurrence: an encoder and a decoder of LSTM layers, with attention from one to the other.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.cli.models.initial_weights import count
from alpa_lite.cli.models.losses import Reduction, cross_entropy

Params = dict[str, Any]
"""``source_embedding`` and ``target_embedding`` [vocab, hidden]; ``encoder`` and ``decoder``: lists of cells ``{"w_x":
[in, 4 hidden], "w_h": [hidden, 4 hidden], "b": [4 hidden]}``; ``head``; with attention ``w_score``, ``w_combine``."""

State = tuple[jax.Array, jax.Array]
"""Output and cell state of a layer, ``[batch, hidden]`` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator:
    """Sizes of the model; encoder and decoder have `num_layers` layers each."""

    source_vocab: int = 50000
    target_vocab: int = 50000
    num_layers: int = 4
    hidden: int = 1000
    source_len: int = 50
    target_len: int = 50
    attention: bool = True
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> Params:
        """Draw the weights, uniform in [-0.1, 0.1] as in both papers; biases too."""
        leaves, structure = jax.tree.flatten(self._shapes(), is_leaf=lambda node: isinstance(node, tuple))
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.uniform(k, s, jnp.float32, -0.1, 0.1) for k, s in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    def parameter_count(self) -> int:
        """Return the number of weights."""
        return count(self._shapes())

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
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {"source": self.source_vocab, "inputs": self.target_vocab, "targets": self.target_vocab}

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the cross entropy of each word of the translation, given the previous ones; a float32 scalar.

        Args:
            params: from `init`.
            batch: arrays of the names and shapes of `batch_shapes`.
            key: unused (nothing is drawn); all models have the same signature.
            reduction: over the words with a weight.
        """
        del key
        total = jnp.sum(batch["weights"] * cross_entropy(self.logits(params, batch), batch["targets"]))
        return total / jnp.sum(batch["weights"]) if reduction == "mean" else total

    def logits(self, params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the logits of every word of the translation: ``[batch, target_len, target_vocab]``."""
        x = params["source_embedding"].astype(self.dtype)[batch["source"]].swapaxes(0, 1)
        zeros = jnp.zeros(x.shape[1:], self.dtype)
        memory, states = self._run(params["encoder"], x, [(zeros, zeros)] * self.num_layers)
        y = params["target_embedding"].astype(self.dtype)[batch["inputs"]].swapaxes(0, 1)
        if self.attention:
            y = self._attended(params, y, states, memory.swapaxes(0, 1), batch["source_weights"])
        else:
            y, _ = self._run(params["decoder"], y, states)
        return y.swapaxes(0, 1) @ params["head"]["w"].astype(self.dtype) + params["head"]["b"].astype(self.dtype)

    def _run(self, cells: list[Params], x: jax.Array, states: list[State]) -> tuple[jax.Array, list[State]]:
        """Run layer by layer over time, ``[time, batch, hidden] -> same``; also return each layer's last state."""
        last: list[State] = []
        for cell, state in zip(cells, states, strict=True):
            cell = {name: weights.astype(self.dtype) for name, weights in cell.items()}
            given = x @ cell["w_x"] + cell["b"]  # of all times at once
            state, x = lax.scan(lambda state, x, cell=cell: lstm_cell(cell, state, x), state, given)
            last.append(state)
        return x, last

    def _attended(
        self, params: Params, y: jax.Array, states: list[State], memory: jax.Array, present: jax.Array
    ) -> jax.Array:
        """Run the decoder with attention and input feeding, ``[time, batch, hidden] -> same``; memory: batch first."""
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

    def _attend(self, weights: Params, x: jax.Array, memory: jax.Array, present: jax.Array) -> jax.Array:
        """Attend: ``x [batch, hidden], memory [batch, source_len, hidden] -> [batch, hidden]``."""
        scores = jnp.einsum("bh,bsh->bs", x @ weights["w_score"], memory).astype(jnp.float32)
        scores = jnp.where(present > 0.0, scores, jnp.finfo(jnp.float32).min)
        seen = jnp.einsum("bs,bsh->bh", jax.nn.softmax(scores, axis=-1).astype(x.dtype), memory)
        return jnp.tanh(jnp.concatenate([seen, x], axis=-1) @ weights["w_combine"])

    def _shapes(self) -> Params:
        hidden = self.hidden

        def cells(inputs: int) -> list[Params]:
            widths = [inputs, *[hidden] * (self.num_layers - 1)]
            return [{"w_x": (width, 4 * hidden), "w_h": (hidden, 4 * hidden), "b": (4 * hidden,)} for width in widths]

        shapes: Params = {
            "source_embedding": (self.source_vocab, hidden),
            "target_embedding": (self.target_vocab, hidden),
            "encoder": cells(hidden),
            "decoder": cells(2 * hidden if self.attention else hidden),
            "head": {"w": (hidden, self.target_vocab), "b": (self.target_vocab,)},
        }
        if self.attention:
            shapes |= {"w_score": (hidden, hidden), "w_combine": (2 * hidden, hidden)}
        return shapes


def lstm_cell(weights: Params, state: State, given: jax.Array) -> tuple[State, jax.Array]:
    """Compute one step of a layer (Hochreiter and Schmidhuber 1997, with forget gates).

    Args:
        weights: weights of the cell; only ``w_h`` is used here.
        state: previous output and cell state, ``[batch, hidden]`` each.
        given: contribution of the input, bias included, ``[batch, 4 hidden]``.

    Returns:
        The new state, and its output.
    """
    output, cell = state
    take, forget, new, show = jnp.split(given + output @ weights["w_h"], 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
    output = jax.nn.sigmoid(show) * jnp.tanh(cell)
    return (output, cell), output
