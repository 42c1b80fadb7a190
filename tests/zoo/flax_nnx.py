"""Programs in the style of Flax NNX, with the model's state passed through a plain function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.zoo.registry import BATCH, EPSILON, SEQ, Program, integers, normal, program

VOCAB, CLASSES = 32, 10


class Mlp(nnx.Module):
    """Two layers with dropout and batch norm between them."""

    def __init__(self, features: int, inner: int, out: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(features, inner, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(inner, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(inner, out, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Block(nnx.Module):
    """A layer of a Transformer."""

    def __init__(self, hidden: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, hidden, decode=False, use_bias=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(hidden, rngs=rngs)
        self.up = nnx.Linear(hidden, 2 * hidden, rngs=rngs)
        self.down = nnx.Linear(2 * hidden, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class LanguageModel(nnx.Module):
    """A small decoder."""

    def __init__(self, vocab: int, hidden: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, hidden, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (SEQ, hidden)))
        self.layers = nnx.List([Block(hidden, heads, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(hidden, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[...]
        mask = nnx.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def in_three_parts(model: Any, transform: Any, loss_of: Any, *inputs: Any) -> Program:
    """A program that passes parameters and other state (statistics, generators) separately."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(state, *batch):
        params, rest, opt_state = state

        def loss_fn(params):
            model = nnx.merge(graph, params, rest, copy=True)
            loss = loss_of(model, *batch)
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), {"loss": loss}

    return Program(step=step, state=(params, rest, transform.init(params)), inputs=inputs)


def classified(model, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


@program
def nnx_network_with_batch_norm_and_dropout():
    model = Mlp(16, 32, CLASSES, rngs=nnx.Rngs(0, dropout=1))
    inputs = (normal(BATCH, 16), integers(CLASSES, BATCH))
    return in_three_parts(model, optax.sgd(0.05, momentum=0.9), classified, *inputs)


@program
def nnx_transformer():
    model = LanguageModel(VOCAB, 16, 2, rngs=nnx.Rngs(0, dropout=1))
    inputs = (integers(VOCAB, BATCH, SEQ), integers(VOCAB, BATCH, SEQ, seed=1))
    return in_three_parts(model, optax.adamw(1e-3, eps=EPSILON), classified, *inputs)


@program
def nnx_transformer_of_odd_sizes():
    model = LanguageModel(50, 24, 3, rngs=nnx.Rngs(0, dropout=1))
    inputs = (integers(50, BATCH, SEQ), integers(50, BATCH, SEQ, seed=1))
    return in_three_parts(model, optax.adamw(1e-3, eps=EPSILON), classified, *inputs)


@program
def nnx_optimizer_inside():
    """Model and optimizer are merged, updated in place by `nnx.value_and_grad`, and split again."""

    class Network(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)])

        def __call__(self, x):
            return self.layers[1](nnx.tanh(self.layers[0](x)))

    model = Network(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3, eps=EPSILON), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return Program(step=step, state=state, inputs=(normal(BATCH, 16), normal(BATCH, 4, seed=1)))


@program
def nnx_convolutions():
    class ConvNet(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.conv_1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(8, num_groups=4, rngs=rngs)
            self.conv_2 = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
            self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
            self.head = nnx.Linear(8, CLASSES, rngs=rngs)

        def __call__(self, x):
            x = nnx.silu(self.norm(self.conv_1(x)))
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
            x = self.up(nnx.relu(self.conv_2(x)))
            return self.head(x.mean((1, 2)))

    inputs = (normal(BATCH, 8, 8, 3), integers(CLASSES, BATCH))
    return in_three_parts(ConvNet(rngs=nnx.Rngs(0)), optax.sgd(0.05, momentum=0.9), classified, *inputs)


@program
def nnx_layers_by_vmap_and_scan():
    """Layers made by `nnx.vmap` and applied by `nnx.scan`."""

    class Stack(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return nnx.Linear(16, 16, rngs=rngs)

            self.layers = make(rngs)
            self.head = nnx.Linear(16, CLASSES, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def apply(x, layer):
                return x + nnx.tanh(layer(x))

            return self.head(apply(x, self.layers))

    inputs = (normal(BATCH, 16), integers(CLASSES, BATCH))
    return in_three_parts(Stack(rngs=nnx.Rngs(0)), optax.sgd(0.05, momentum=0.9), classified, *inputs)


@program
def nnx_recurrent():
    class Reader(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
            self.rnn = nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs))
            self.head = nnx.Linear(16, CLASSES, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.rnn(self.embed(tokens))[:, -1])

    inputs = (integers(VOCAB, BATCH, SEQ), integers(CLASSES, BATCH, seed=1))
    return in_three_parts(Reader(rngs=nnx.Rngs(0)), optax.sgd(0.05, momentum=0.9), classified, *inputs)
