"""Models whose layers are written out one after the other, with their optimizers, as in the usual Flax libraries.

    gpt2-xl     Hugging Face Flax: transposed kernels, one fused projection, a mask of the attention, dropout
    llama-7b    EasyLM: rotary embeddings on complex numbers, RMSNorm, recomputed blocks, a masked loss
    vit-l-16    vision_transformer: a convolution for patches, a class token, dropout
    dit-xl-2    DiT: modulated layers, noise and timesteps drawn in the step, a moving average of the weights
    wmt-base    Flax: an encoder and a decoder that share embeddings, label smoothing, weights of the targets

All clip the gradients by their global norm and use AdamW under a schedule. Nothing here knows of parallelism, and no
loop over layers is left for a compiler to find. `CASES` holds each model with its cluster and batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import alpa_lite as al
from cost_models.cluster import Cluster

Batch = Mapping[str, jax.ShapeDtypeStruct]
Step = Callable[..., Any]

_DTYPE = jnp.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOut:
    """A model to train on a cluster, written out layer by layer.

    Attributes:
        id: model and size, such as "llama-7b".
        make: returns the train step and its arguments as shapes, for a batch and a number of layers.
        num_layers: layers of the model; of both halves together for an encoder with a decoder.
        bar_seconds: longest time that planning may take on two cores with empty caches.
    """

    id: str
    make: Callable[[int, int], tuple[Step, tuple[Any, ...]]]
    num_layers: int
    host: str
    num_hosts: int
    global_batch: int
    bar_seconds: float = 10.0

    @property
    def cluster(self) -> Cluster:
        """The cluster of the case."""
        return al.cluster(self.host, num_hosts=self.num_hosts)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(x.size for x in jax.tree.leaves(self.arguments()[0].params))

    def train_step(self) -> Step:
        """Return a plain train step."""
        return self.make(self.num_layers, self.global_batch)[0]

    def arguments(self) -> tuple[Any, ...]:
        """Return the state and the batch of the step as shapes; nothing is allocated."""
        return self.make(self.num_layers, self.global_batch)[1]


def _adamw(peak: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, 2_000, 100_000)
    # Biases and scales of norms are vectors: they do not decay.
    decayed = partial(jax.tree.map, lambda x: x.ndim > 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, mask=decayed))


def _state(model: nn.Module, optimizer: optax.GradientTransformation, *inputs: Any, **options: Any) -> TrainState:
    """Return the state of a model as shapes."""

    def create(*inputs: Any) -> TrainState:
        params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs, **options)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return jax.eval_shape(create, *inputs)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_KEY = jax.eval_shape(lambda: jax.random.key(0))


# ---------------------------------------------------------------------------------------------- GPT-2, Hugging Face


class _TransposedDense(nn.Module):
    """A dense layer that stores its kernel with outputs first."""

    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel, bias = jnp.asarray(kernel.transpose(), _DTYPE), jnp.asarray(bias, _DTYPE)
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))) + bias


class _GPT2Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: Any, attention_mask: Any, deterministic: bool) -> Any:
        hidden, batch, length = x.shape[-1], x.shape[0], x.shape[1]
        h = nn.LayerNorm(epsilon=1e-5, dtype=_DTYPE, name="ln_1")(x)
        query, key, value = jnp.split(_TransposedDense(3 * hidden, name="c_attn")(h), 3, axis=2)
        query, key, value = (y.reshape(batch, length, self.heads, -1) for y in (query, key, value))
        causal = nn.make_causal_mask(jnp.ones((1, length), dtype="bool"), dtype="bool")
        causal = jnp.broadcast_to(causal, (batch, *causal.shape[1:]))
        mask = nn.combine_masks(jnp.broadcast_to(attention_mask[:, None, None], causal.shape), causal)
        assert mask is not None
        low = jnp.full(mask.shape, jnp.finfo(_DTYPE).min).astype(_DTYPE)
        bias = jax.lax.select(mask > 0, jnp.full(mask.shape, 0.0).astype(_DTYPE), low)
        rng = None if deterministic else self.make_rng("dropout")
        weights = nn.attention.dot_product_attention_weights(
            query, key, bias=bias, dropout_rng=rng, dropout_rate=0.1, deterministic=deterministic, dtype=_DTYPE
        )
        h = jnp.einsum("...hqk,...khd->...qhd", weights, value).reshape(batch, length, hidden)
        h = _TransposedDense(hidden, name="attn_c_proj")(h)
        x = x + nn.Dropout(0.1)(h, deterministic=deterministic)
        h = nn.LayerNorm(epsilon=1e-5, dtype=_DTYPE, name="ln_2")(x)
        h = nn.gelu(_TransposedDense(4 * hidden, name="c_fc")(h))
        return x + nn.Dropout(0.1)(_TransposedDense(hidden, name="mlp_c_proj")(h), deterministic=deterministic)


class _GPT2(nn.Module):
    layers: int
    hidden: int = 1600
    heads: int = 25
    vocab: int = 50257

    @nn.compact
    def __call__(self, tokens: Any, mask: Any, positions: Any, *, deterministic: bool = False) -> Any:
        embed = nn.Embed(self.vocab, self.hidden, dtype=_DTYPE, name="wte")
        x = embed(tokens.astype("i4")) + nn.Embed(1024, self.hidden, dtype=_DTYPE, name="wpe")(positions.astype("i4"))
        x = nn.Dropout(0.1)(x, deterministic=deterministic)
        for layer in range(self.layers):
            x = _GPT2Block(self.heads, name=str(layer))(x, mask, deterministic)
        x = nn.LayerNorm(epsilon=1e-5, dtype=_DTYPE, name="ln_f")(x)
        return embed.attend(x)


def gpt2_xl(num_layers: int, batch: int, length: int = 1024) -> tuple[Step, tuple[Any, ...]]:
    """Return the train step of GPT-2 XL, and its arguments as shapes."""
    model, optimizer = _GPT2(num_layers), _adamw(6e-4)

    def train_step(state: TrainState, batch: Mapping[str, Any], rng: Any) -> Any:
        dropout_rng, new_rng = jax.random.split(rng)

        def loss_fn(params: Any) -> Any:
            positions = jnp.broadcast_to(jnp.arange(length)[None, :], batch["input_ids"].shape)
            rngs = {"dropout": dropout_rng}
            logits = state.apply_fn(
                {"params": params}, batch["input_ids"], batch["attention_mask"], positions, rngs=rngs
            )
            shifted, labels = logits[..., :-1, :], batch["labels"][..., 1:]
            return optax.softmax_cross_entropy(shifted, jax.nn.one_hot(labels, shifted.shape[-1])).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), new_rng, {"loss": loss}

    one = _integers(1, length)
    names = ("input_ids", "attention_mask", "labels")
    state = _state(model, optimizer, one, one, one, deterministic=True)
    return train_step, (state, {name: _integers(batch, length) for name in names}, _KEY)


# --------------------------------------------------------------------------------------------------- LLaMA, EasyLM


class _RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        weight = self.param("kernel", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.promote_types(_DTYPE, jnp.float32))
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return x.astype(_DTYPE) * jnp.asarray(weight, _DTYPE)


def _rotated(x: Any, turns: Any) -> Any:
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    turned = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * turns
    return jnp.stack((jnp.real(turned), jnp.imag(turned)), axis=-1).reshape(x.shape).astype(_DTYPE)


class _LlamaBlock(nn.Module):
    heads: int
    inner: int

    @nn.compact
    def __call__(self, x: Any, attention_mask: Any, positions: Any) -> Any:
        hidden, batch, length = x.shape[-1], x.shape[0], x.shape[1]
        dense = partial(nn.Dense, use_bias=False, dtype=_DTYPE)
        h = _RMSNorm(name="attention_norm")(x)
        query, key, value = (dense(hidden, name=name)(h) for name in ("wq", "wk", "wv"))
        query, key, value = (y.reshape(batch, length, self.heads, -1) for y in (query, key, value))
        size = hidden // self.heads
        frequencies = 1.0 / (10_000.0 ** (jnp.arange(0, size, 2)[: size // 2].astype(jnp.float32) / size))
        angles = jnp.outer(jnp.arange(length), frequencies).astype(jnp.float32)
        turns = jnp.take(jax.lax.complex(jnp.cos(angles), jnp.sin(angles)), positions, axis=0)[:, :, None]
        query, key = _rotated(query, turns), _rotated(key, turns)
        causal = nn.make_causal_mask(jnp.ones((1, length), dtype="bool"), dtype="bool")
        causal = jnp.broadcast_to(causal, (batch, *causal.shape[1:]))
        mask = nn.combine_masks(jnp.broadcast_to(attention_mask[:, None, None], causal.shape), causal)
        assert mask is not None
        low = jnp.full(mask.shape, jnp.finfo(_DTYPE).min).astype(_DTYPE)
        bias = jax.lax.select(mask > 0, jnp.full(mask.shape, 0.0).astype(_DTYPE), low)
        weights = nn.attention.dot_product_attention_weights(query, key, bias=bias, dtype=jnp.float32)
        h = jnp.einsum("...hqk,...khd->...qhd", weights.astype(_DTYPE), value).reshape(batch, length, hidden)
        x = x + dense(hidden, name="wo")(h)
        h = _RMSNorm(name="ffn_norm")(x)
        return x + dense(hidden, name="w2")(nn.silu(dense(self.inner, name="w1")(h)) * dense(self.inner, name="w3")(h))


class _Llama(nn.Module):
    layers: int
    hidden: int = 4096
    heads: int = 32
    inner: int = 11008
    vocab: int = 32000

    @nn.compact
    def __call__(self, tokens: Any, mask: Any) -> Any:
        x = nn.Embed(self.vocab, self.hidden, dtype=_DTYPE, name="wte")(tokens)
        positions = jnp.clip(jnp.cumsum(mask, axis=-1) - 1, 0)
        block = nn.remat(_LlamaBlock, policy=jax.checkpoint_policies.nothing_saveable)
        for layer in range(self.layers):
            x = block(self.heads, self.inner, name=str(layer))(x, mask, positions)
        return nn.Dense(self.vocab, use_bias=False, dtype=_DTYPE, name="lm_head")(_RMSNorm(name="ln_f")(x))


def llama_7b(num_layers: int, batch: int, length: int = 2048) -> tuple[Step, tuple[Any, ...]]:
    """Return the train step of LLaMA-7B, and its arguments as shapes."""
    model, optimizer = _Llama(num_layers), _adamw(3e-4)

    def train_step(state: TrainState, batch: Mapping[str, Any]) -> Any:
        def loss_fn(params: Any) -> Any:
            tokens = batch["input_tokens"]
            logits = state.apply_fn({"params": params}, tokens, jnp.ones_like(tokens)).astype(jnp.float32)
            valid = batch["loss_masks"].astype(jnp.float32)
            number = jnp.maximum(jnp.sum(valid, axis=-1), 1e-10)
            targets = jnp.expand_dims(batch["target_tokens"], -1)
            likely = jnp.squeeze(jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets, axis=-1), -1)
            loss = -jnp.mean(jnp.sum(jnp.where(valid > 0.0, likely, 0.0), axis=-1) / number)
            right = jnp.where(valid > 0.0, jnp.argmax(logits, axis=-1) == batch["target_tokens"], False)
            return loss, jnp.mean(jnp.sum(right, axis=-1) / number)

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        norms = {"gradient": optax.global_norm(grads), "params": optax.global_norm(state.params)}
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy, **norms}

    one = _integers(1, length)
    inputs = {"input_tokens": _integers(batch, length), "target_tokens": _integers(batch, length)}
    return train_step, (_state(model, optimizer, one, one), {**inputs, "loss_masks": _floats(batch, length)})


# ---------------------------------------------------------------------------------------- ViT, vision_transformer


class _MLP(nn.Module):
    inner: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x: Any, deterministic: bool) -> Any:
        h = nn.gelu(nn.Dense(self.inner, dtype=_DTYPE)(x))
        h = nn.Dense(x.shape[-1], dtype=_DTYPE)(nn.Dropout(self.dropout)(h, deterministic=deterministic))
        return nn.Dropout(self.dropout)(h, deterministic=deterministic)


class _ViT(nn.Module):
    layers: int
    hidden: int = 1024
    heads: int = 16
    classes: int = 1000

    @nn.compact
    def __call__(self, images: Any, *, deterministic: bool = False) -> Any:
        x = nn.Conv(self.hidden, (16, 16), strides=(16, 16), padding="VALID", dtype=_DTYPE, name="embedding")(images)
        x = x.reshape(x.shape[0], -1, self.hidden)
        cls = jnp.tile(self.param("cls", nn.initializers.zeros, (1, 1, self.hidden)), (x.shape[0], 1, 1))
        x = jnp.concatenate([cls.astype(_DTYPE), x], axis=1)
        x = x + self.param("posembed", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(_DTYPE)
        x = nn.Dropout(0.1)(x, deterministic=deterministic)
        for _ in range(self.layers):
            h = nn.LayerNorm(dtype=_DTYPE)(x)
            h = nn.MultiHeadDotProductAttention(self.heads, dtype=_DTYPE, dropout_rate=0.1, broadcast_dropout=False)(
                h, h, deterministic=deterministic
            )
            x = x + nn.Dropout(0.1)(h, deterministic=deterministic)
            x = x + _MLP(4 * self.hidden)(nn.LayerNorm(dtype=_DTYPE)(x), deterministic)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(name="encoder_norm")(x)[:, 0])


def vit_l_16(num_layers: int, batch: int) -> tuple[Step, tuple[Any, ...]]:
    """Return the train step of ViT-L/16, and its arguments as shapes."""
    model, optimizer = _ViT(num_layers), _adamw(1e-3)

    def train_step(state: TrainState, batch: Mapping[str, Any], rng: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            rngs = {"dropout": jax.random.fold_in(rng, state.step)}
            logits = state.apply_fn({"params": params}, batch["image"], rngs=rngs)
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * batch["label"], axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = _state(model, optimizer, _floats(1, 224, 224, 3), deterministic=True)
    return train_step, (state, {"image": _floats(batch, 224, 224, 3), "label": _floats(batch, 1000)}, _KEY)


# ------------------------------------------------------------------------------------------------------------- DiT


class _DiTBlock(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: Any, condition: Any) -> Any:
        hidden = x.shape[-1]
        six = nn.Dense(6 * hidden, dtype=_DTYPE, kernel_init=nn.initializers.zeros)(nn.silu(condition))
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = jnp.split(six[:, None], 6, axis=-1)
        norm = partial(nn.LayerNorm, use_bias=False, use_scale=False, dtype=_DTYPE)
        h = norm()(x) * (1 + scale) + shift
        x = x + gate * nn.MultiHeadDotProductAttention(self.heads, dtype=_DTYPE)(h, h)
        h = norm()(x) * (1 + scale_mlp) + shift_mlp
        h = nn.Dense(hidden, dtype=_DTYPE)(nn.gelu(nn.Dense(4 * hidden, dtype=_DTYPE)(h)))
        return x + gate_mlp * h


class _DiT(nn.Module):
    layers: int
    hidden: int = 1152
    heads: int = 16
    classes: int = 1000

    @nn.compact
    def __call__(self, latents: Any, times: Any, labels: Any) -> Any:
        batch, side, channels = latents.shape[0], latents.shape[1] // 2, latents.shape[-1]
        x = nn.Conv(self.hidden, (2, 2), strides=(2, 2), dtype=_DTYPE)(latents).reshape(batch, -1, self.hidden)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, side * side, self.hidden)).astype(_DTYPE)
        frequencies = jnp.exp(-math.log(10_000) * jnp.arange(128, dtype=jnp.float32) / 128)
        angles = times[:, None].astype(jnp.float32) * frequencies[None]
        h = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        h = nn.Dense(self.hidden, dtype=_DTYPE)(nn.silu(nn.Dense(self.hidden, dtype=_DTYPE)(h)))
        condition = h + nn.Embed(self.classes + 1, self.hidden, dtype=_DTYPE)(labels)
        for _ in range(self.layers):
            x = _DiTBlock(self.heads)(x, condition)
        shift, scale = jnp.split(nn.Dense(2 * self.hidden, dtype=_DTYPE)(nn.silu(condition))[:, None], 2, axis=-1)
        x = nn.LayerNorm(use_bias=False, use_scale=False, dtype=_DTYPE)(x) * (1 + scale) + shift
        x = nn.Dense(4 * channels, dtype=jnp.float32)(x).reshape(batch, side, side, 2, 2, channels)
        return jnp.einsum("nhwpqc->nhpwqc", x).reshape(latents.shape)


def dit_xl_2(num_layers: int, batch: int) -> tuple[Step, tuple[Any, ...]]:
    """Return the train step of DiT-XL/2, and its arguments as shapes."""
    model, optimizer = _DiT(num_layers), _adamw(1e-4)

    def train_step(state: TrainState, average: Any, batch: Mapping[str, Any], rng: Any) -> Any:
        time_rng, noise_rng, label_rng = jax.random.split(jax.random.fold_in(rng, state.step), 3)

        def loss_fn(params: Any) -> Any:
            latents, labels = batch["latent"], batch["label"]
            times = jax.random.uniform(time_rng, labels.shape)
            noise = jax.random.normal(noise_rng, latents.shape)
            labels = jnp.where(jax.random.bernoulli(label_rng, 0.1, labels.shape), 1000, labels)
            part = times[:, None, None, None]
            predicted = state.apply_fn({"params": params}, (1 - part) * noise + part * latents, 1000 * times, labels)
            return jnp.mean((predicted - (latents - noise)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=grads)
        average = jax.tree.map(lambda old, new: 0.9999 * old + 0.0001 * new, average, state.params)
        return state, average, loss

    state = _state(model, optimizer, _floats(1, 32, 32, 4), _floats(1), _integers(1))
    return train_step, (state, state.params, {"latent": _floats(batch, 32, 32, 4), "label": _integers(batch)}, _KEY)


# ------------------------------------------------------------------------------------------------------- WMT, Flax


class _WMTBlock(nn.Module):
    """A layer of the encoder, or with `encoded` of the decoder."""

    heads: int = 8

    @nn.compact
    def __call__(self, x: Any, mask: Any, encoded: Any = None, cross_mask: Any = None, *, deterministic: bool) -> Any:
        attention = partial(
            nn.MultiHeadDotProductAttention,
            self.heads,
            dtype=_DTYPE,
            dropout_rate=0.1,
            use_bias=False,
            broadcast_dropout=False,
        )
        h = attention()(nn.LayerNorm(dtype=_DTYPE)(x), mask=mask, deterministic=deterministic)
        x = x + nn.Dropout(0.1)(h, deterministic=deterministic)
        if encoded is not None:
            h = nn.LayerNorm(dtype=_DTYPE)(x)
            x = x + attention()(h, encoded, mask=cross_mask, deterministic=deterministic)
        return x + _MLP(4 * x.shape[-1])(nn.LayerNorm(dtype=_DTYPE)(x), deterministic)


class _WMT(nn.Module):
    layers: int
    hidden: int = 512
    vocab: int = 32000

    @nn.compact
    def __call__(self, inputs: Any, targets: Any, *, deterministic: bool = False) -> Any:
        embed = nn.Embed(self.vocab, self.hidden)
        at, rate = jnp.arange(2048)[:, None], jnp.exp(-math.log(10_000) * jnp.arange(0, self.hidden, 2) / self.hidden)
        table = jnp.concatenate([jnp.sin(at * rate), jnp.cos(at * rate)], axis=-1)[None]

        def embedded(tokens: Any) -> Any:
            x = embed(tokens.astype("int32")) + table[:, : tokens.shape[1]]
            return nn.Dropout(0.1)(x, deterministic=deterministic).astype(_DTYPE)

        x, mask = embedded(inputs), nn.make_attention_mask(inputs > 0, inputs > 0, dtype=_DTYPE)
        for _ in range(self.layers // 2):
            x = _WMTBlock()(x, mask, deterministic=deterministic)
        encoded = nn.LayerNorm(dtype=_DTYPE)(x)
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        own = nn.combine_masks(
            nn.make_attention_mask(targets > 0, targets > 0, dtype=_DTYPE), nn.make_causal_mask(targets, dtype=_DTYPE)
        )
        cross = nn.make_attention_mask(targets > 0, inputs > 0, dtype=_DTYPE)
        x = embedded(shifted)
        for _ in range(self.layers // 2):
            x = _WMTBlock()(x, own, encoded, cross, deterministic=deterministic)
        logits = embed.attend(nn.LayerNorm(dtype=_DTYPE)(x).astype(jnp.float32))
        return logits / jnp.sqrt(self.hidden)


def wmt_base(num_layers: int, batch: int, length: int = 256) -> tuple[Step, tuple[Any, ...]]:
    """Return the train step of a base Transformer for translation, and its arguments as shapes."""
    model, optimizer = _WMT(num_layers), _adamw(2e-3)

    def train_step(state: TrainState, batch: Mapping[str, Any], rng: Any) -> Any:
        targets = batch["targets"]
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)

        def loss_fn(params: Any) -> Any:
            rngs = {"dropout": jax.random.fold_in(rng, state.step)}
            logits = state.apply_fn({"params": params}, batch["inputs"], targets, rngs=rngs)
            vocab = logits.shape[-1]
            low = 0.1 / (vocab - 1)
            soft = jax.nn.one_hot(targets, vocab) * (0.9 - low) + low
            least = -(0.9 * math.log(0.9) + (vocab - 1) * low * math.log(low + 1e-20))
            loss = (-jnp.sum(soft * nn.log_softmax(logits), axis=-1) - least) * weights
            return loss.sum() / weights.sum(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        right = jnp.equal(jnp.argmax(logits, axis=-1), targets) * weights
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": right.sum(), "number": weights.sum()}

    one = _integers(1, length)
    state = _state(model, optimizer, one, one, deterministic=True)
    return train_step, (state, {"inputs": _integers(batch, length), "targets": _integers(batch, length)}, _KEY)


CASES = {
    case.id: case
    for case in (
        WrittenOut(id="gpt2-xl", make=gpt2_xl, num_layers=48, host="dgx-a100", num_hosts=4, global_batch=512),
        WrittenOut(id="llama-7b", make=llama_7b, num_layers=32, host="tpu-v4", num_hosts=16, global_batch=2048),
        WrittenOut(id="vit-l-16", make=vit_l_16, num_layers=24, host="tpu-v3", num_hosts=4, global_batch=4096),
        WrittenOut(id="dit-xl-2", make=dit_xl_2, num_layers=28, host="dgx-a100", num_hosts=4, global_batch=256),
        WrittenOut(id="wmt-base", make=wmt_base, num_layers=12, host="tpu-v3", num_hosts=1, global_batch=256),
    )
}
"""The cases by id."""
