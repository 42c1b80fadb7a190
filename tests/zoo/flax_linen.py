"""Programs in the style of Flax Linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from tests.zoo.registry import BATCH, EPSILON, SEQ, Program, integers, normal, program

VOCAB, CLASSES = 32, 10


class Block(nn.Module):
    """A layer of a Transformer."""

    heads: int = 2
    inner: int = 32
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, mask, deterministic):
        h = nn.LayerNorm()(x)
        # A bias of the keys would have a gradient of zero, which Adam turns into noise.
        h = nn.MultiHeadDotProductAttention(num_heads=self.heads, dropout_rate=self.dropout, use_bias=False)(
            h, mask=mask, deterministic=deterministic
        )
        x = x + nn.Dropout(self.dropout)(h, deterministic=deterministic)
        h = nn.Dense(self.inner)(nn.LayerNorm()(x))
        h = nn.Dense(x.shape[-1])(nn.gelu(h))
        return x + nn.Dropout(self.dropout)(h, deterministic=deterministic)


class LanguageModel(nn.Module):
    """A decoder; its layers in a loop, or recomputed and scanned."""

    layers: int = 2
    hidden: int = 16
    vocab: int = VOCAB
    scan: bool = False

    @nn.compact
    def __call__(self, tokens, *, train):
        embed = nn.Embed(self.vocab, self.hidden)
        position = self.param("position", nn.initializers.normal(0.1), (SEQ, self.hidden))
        x = embed(tokens) + position
        mask = nn.make_causal_mask(tokens)
        if self.scan:
            x, _ = _scanned(self.layers)(name="layers")(x, mask)
        else:
            for _ in range(self.layers):
                x = Block()(x, mask, deterministic=not train)
        return embed.attend(nn.LayerNorm()(x))


class _ScanBody(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return Block()(x, mask, deterministic=False), None


def _scanned(length: int) -> Any:
    return nn.scan(
        nn.remat(_ScanBody, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=nn.broadcast,
        length=length,
    )


def language_model(**changes: Any) -> Program:
    """A program that trains a decoder through a `TrainState`."""
    model = LanguageModel(**changes)

    def train_step(state, batch, dropout_key):
        key = jax.random.fold_in(dropout_key, state.step)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return losses.mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["targets"])
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    batch = {"tokens": integers(model.vocab, BATCH, SEQ), "targets": integers(model.vocab, BATCH, SEQ, seed=1)}
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, batch["tokens"], train=True)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3, eps=EPSILON))
    return Program(step=train_step, state=state, inputs=(batch, jax.random.key(2)))


@program
def linen_transformer():
    return language_model()


@program
def linen_transformer_of_odd_sizes():
    return language_model(vocab=50, hidden=24)


@program
def linen_transformer_scanned():
    return language_model(scan=True)


class BatchState(train_state.TrainState):
    """A train state that holds running statistics too."""

    batch_stats: Any


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    @nn.compact
    def __call__(self, x, train):
        for width, stride in ((8, 1), (16, 2)):
            x = nn.Conv(width, (3, 3), strides=stride, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.avg_pool(nn.max_pool(x, (2, 2), strides=(2, 2)), (2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(CLASSES)(x)


@program
def linen_convolutions_with_batch_norm():
    model = ConvNet()

    def train_step(state, images, labels, key):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, images, train=True, mutable=["batch_stats"], rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits, new)

        (loss, (logits, new)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return state, {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == labels)}

    images, labels = normal(BATCH, 8, 8, 3), integers(CLASSES, BATCH)
    variables = model.init(jax.random.key(0), images, train=False)
    state = BatchState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.05, momentum=0.9),
    )
    return Program(step=train_step, state=state, inputs=(images, labels, jax.random.key(2)))


class Tagger(nn.Module):
    """A recurrent network over both directions."""

    @nn.compact
    def __call__(self, tokens, lengths):
        x = nn.Embed(VOCAB, 16)(tokens)
        ahead = nn.RNN(nn.OptimizedLSTMCell(16))
        back = nn.RNN(nn.GRUCell(16))
        return nn.Dense(5)(nn.Bidirectional(ahead, back)(x, seq_lengths=lengths))


@program
def linen_recurrent_tagger():
    model, transform = Tagger(), optax.sgd(0.1, momentum=0.9)

    def step(state, tokens, lengths, tags):
        params, opt_state = state

        def loss_fn(params):
            logits = model.apply(params, tokens, lengths)
            real = jnp.arange(tokens.shape[1]) < lengths[:, None]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tags)
            return jnp.mean(losses, where=real)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    inputs = (integers(VOCAB, BATCH, SEQ), integers(SEQ + 1, BATCH, low=2), integers(5, BATCH, SEQ, seed=4))
    params = model.init(jax.random.key(0), *inputs[:2])
    return Program(step=step, state=(params, transform.init(params)), inputs=inputs)


class Normed(nn.Module):
    """Group norm, spectral norm, weight norm and other layers with a will of their own."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.SpectralNorm(nn.Dense(32))(x, update_stats=train)
        x = nn.silu(nn.GroupNorm(4)(x))
        x = nn.WeightNorm(nn.Dense(32))(x)
        x = nn.tanh(nn.RMSNorm()(x))
        return nn.DenseGeneral((2, 4))(x)


@program
def linen_norms():
    model, transform = Normed(), optax.sgd(0.05)

    def step(state, x, y):
        params, rest, opt_state = state

        def loss_fn(params):
            out, new = model.apply({"params": params, **rest}, x, train=True, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), new

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), {"loss": loss}

    inputs = (normal(BATCH, 16), normal(BATCH, 2, 4, seed=1))
    variables = model.init(jax.random.key(0), inputs[0], train=False)
    params = variables.pop("params")
    return Program(step=step, state=(params, variables, transform.init(params)), inputs=inputs)
