"""Programs in the style of Equinox: models of one sample, mapped over the batch."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.zoo.registry import BATCH, EPSILON, SEQ, Program, integers, normal, program

VOCAB, CLASSES = 32, 10


def filtered(model: Any, transform: Any, loss_of: Any, *inputs: Any) -> Program:
    """A program whose state holds a model's arrays; what is no array stays outside."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(state, *batch):
        arrays, opt_state = state
        model = eqx.combine(arrays, static)
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, *batch)
        updates, opt_state = transform.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        return (eqx.filter(model, eqx.is_array), opt_state), {"loss": loss}

    opt_state = transform.init(eqx.filter(model, eqx.is_inexact_array))
    return Program(step=step, state=(arrays, opt_state), inputs=inputs)


@program
def equinox_mlp():
    model = eqx.nn.MLP(8, 4, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    loss_of = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)  # noqa: E731
    return filtered(model, optax.adam(1e-3, eps=EPSILON), loss_of, normal(BATCH, 8), normal(BATCH, 4, seed=1))


class Block(eqx.Module):
    """A layer of a Transformer on one sequence."""

    norm_1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm_2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, hidden: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(hidden), eqx.nn.LayerNorm(hidden)
        self.attention = eqx.nn.MultiheadAttention(heads, hidden, dropout_p=0.1, key=keys[0])
        self.up = eqx.nn.Linear(hidden, 2 * hidden, key=keys[1])
        self.down = eqx.nn.Linear(2 * hidden, hidden, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, mask, key):
        first, second = jax.random.split(key)
        h = jax.vmap(self.norm_1)(x)
        x = x + self.attention(h, h, h, mask=mask, key=first)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm_2)(x)))
        return x + self.dropout(jax.vmap(self.down)(h), key=second)


class LanguageModel(eqx.Module):
    """A small decoder on one sequence."""

    embed: eqx.nn.Embedding
    position: jax.Array
    layers: list[Block]
    head: eqx.nn.Linear

    def __init__(self, vocab: int, hidden: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(vocab, hidden, key=keys[0])
        self.position = 0.1 * jax.random.normal(keys[1], (SEQ, hidden))
        self.layers = [Block(hidden, heads, k) for k in keys[2:4]]
        self.head = eqx.nn.Linear(hidden, vocab, use_bias=False, key=keys[4])

    def __call__(self, tokens, key):
        x = jax.vmap(self.embed)(tokens) + self.position
        mask = jnp.tril(jnp.ones((tokens.shape[0],) * 2, bool))
        for layer, k in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True):
            x = layer(x, mask, k)
        return jax.vmap(self.head)(x)


def language_loss(model, tokens, key):
    keys = jax.random.split(key, tokens.shape[0])
    logits = jax.vmap(model)(tokens[:, :-1], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@program
def equinox_transformer():
    model = LanguageModel(VOCAB, 16, 2, jax.random.key(0))
    inputs = (integers(VOCAB, BATCH, SEQ + 1), jax.random.key(1))
    return filtered(model, optax.adamw(1e-3, eps=EPSILON), language_loss, *inputs)


@program
def equinox_transformer_of_odd_sizes():
    model = LanguageModel(50, 24, 3, jax.random.key(0))
    inputs = (integers(50, BATCH, SEQ + 1), jax.random.key(1))
    return filtered(model, optax.adamw(1e-3, eps=EPSILON), language_loss, *inputs)


@program
def equinox_stacked_layers():
    """Layers made by `filter_vmap` and applied by a scan over their arrays."""

    class Stack(eqx.Module):
        layers: eqx.nn.MLP
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            make = lambda key: eqx.nn.MLP(16, 16, 32, 1, activation=jnp.tanh, key=key)  # noqa: E731
            self.layers = eqx.filter_vmap(make)(jax.random.split(key, 3))
            self.head = eqx.nn.Linear(16, CLASSES, key=key)

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)
            body = eqx.filter_checkpoint(lambda x, layer: (x + eqx.combine(layer, static)(x), None))
            x, _ = jax.lax.scan(body, x, arrays)
            return self.head(x)

    def loss_of(model, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels).mean()

    model = Stack(jax.random.key(0))
    return filtered(model, optax.sgd(0.05, momentum=0.9), loss_of, normal(BATCH, 16), integers(CLASSES, BATCH))


@program
def equinox_convolutions():
    class ConvNet(eqx.Module):
        layers: eqx.nn.Sequential

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 3)
            self.layers = eqx.nn.Sequential(
                [
                    eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
                    eqx.nn.GroupNorm(4, 8),
                    eqx.nn.Lambda(jax.nn.silu),
                    eqx.nn.MaxPool2d(2, 2),
                    eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=keys[1]),
                    eqx.nn.Lambda(jax.nn.relu),
                    eqx.nn.AdaptiveAvgPool2d(1),
                    eqx.nn.Lambda(jnp.ravel),
                    eqx.nn.Linear(16, CLASSES, key=keys[2]),
                ]
            )

        def __call__(self, x):
            return self.layers(x)

    def loss_of(model, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels).mean()

    model = ConvNet(jax.random.key(0))
    return filtered(model, optax.sgd(0.05, momentum=0.9), loss_of, normal(BATCH, 3, 8, 8), integers(CLASSES, BATCH))


@program
def equinox_batch_norm():
    """Batch norm by a named axis of `vmap`, its statistics passed along."""

    class Network(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        second: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(8, 16, use_bias=False, key=keys[0])
            self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
            self.second = eqx.nn.Linear(16, 4, key=keys[1])

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.second(jax.nn.relu(x)), state

    network, start = eqx.nn.make_with_state(Network)(jax.random.key(0))
    arrays, static = eqx.partition(network, eqx.is_array)

    def loss_of(model, rest, x, y):
        out, rest = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, rest)
        return jnp.mean((out - y) ** 2), rest

    def step(state, x, y):
        arrays, rest = state
        model = eqx.combine(arrays, static)
        (loss, rest), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, rest, x, y)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, grads))
        return (eqx.filter(model, eqx.is_array), rest), {"loss": loss}

    return Program(step=step, state=(arrays, start), inputs=(normal(BATCH, 8), normal(BATCH, 4, seed=1)))


@program
def equinox_recurrent():
    class Reader(eqx.Module):
        cell: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key)
            self.cell = eqx.nn.GRUCell(8, 16, key=keys[0])
            self.head = eqx.nn.Linear(16, 1, key=keys[1])

        def __call__(self, xs):
            h, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(16), xs)
            return jax.nn.sigmoid(self.head(h))[0]

    def loss_of(model, xs, labels):
        p = jax.vmap(model)(xs)
        return -jnp.mean(labels * jnp.log(p) + (1 - labels) * jnp.log(1 - p))

    labels = integers(2, BATCH).astype(jnp.float32)
    return filtered(Reader(jax.random.key(0)), optax.adam(1e-3, eps=EPSILON), loss_of, normal(BATCH, SEQ, 8), labels)


@program
def equinox_adapted_layer():
    """Low-rank adapters on a frozen network: only some leaves are trained."""
    base = eqx.nn.MLP(8, 4, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    adapters = [
        {"a": normal(4, w.in_features, seed=i), "b": 0.1 * normal(w.out_features, 4, seed=i)}
        for i, w in enumerate(base.layers)
    ]
    frozen, static = eqx.partition(base, eqx.is_array)
    transform = optax.adam(1e-3, eps=EPSILON)

    def step(state, frozen, x, y):
        adapters, opt_state = state
        base = eqx.combine(frozen, static)

        def loss_fn(adapters):
            layers = lambda model: [layer.weight for layer in model.layers]  # noqa: E731
            new = [w + p["b"] @ p["a"] for w, p in zip(layers(base), adapters, strict=True)]
            return jnp.mean((jax.vmap(eqx.tree_at(layers, base, new))(x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(adapters, updates), opt_state), {"loss": loss}

    inputs = (frozen, normal(BATCH, 8), normal(BATCH, 4, seed=1))
    return Program(step=step, state=(adapters, transform.init(adapters)), inputs=inputs, batch_argnums=(2, 3))
