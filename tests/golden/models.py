"""The models of the golden cases, as plain JAX train steps for abstract arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Primitive

Params = Any


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function and its abstract arguments; `batch` are the positions of those that hold the batch."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    batch: tuple[int, ...] | None = None


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def training(
    loss: Callable[..., jax.Array], params: Params, *batch: Any, optimizer: optax.GradientTransformation | None = None
) -> Program:
    """`params, state, *batch -> params, state`: gradients of `loss(params, *batch)`, then the optimizer (Adam)."""
    transform = optimizer or optax.adam(1e-2)

    def train_step(params: Params, state: Any, *batch: Any) -> Any:
        grads = jax.grad(loss)(params, *batch)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(transform.init, params)
    return Program(run=train_step, args=(params, state, *batch), batch=tuple(range(2, 2 + len(batch))))


def squared_error(out: jax.Array, target: jax.Array) -> jax.Array:
    """Mean over all elements."""
    return jnp.mean((out - target) ** 2)


# ---------------------------------------------------------------------------------------------------- perceptrons


def mlp(*, layers: int, batch: int, hidden: int, bias: bool = True, optimizer: Any = None) -> Program:
    """Dense layers of one width with relu between them."""
    params = [{"w": array(hidden, hidden)} | ({"b": array(hidden)} if bias else {}) for _ in range(layers)]

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            x = jax.nn.relu(x) if i else x
            x = x @ p["w"] + p["b"] if bias else x @ p["w"]
        return squared_error(x, y)

    return training(loss, params, array(batch, hidden), array(batch, hidden), optimizer=optimizer)


def linear_network(*, layers: int, batch: int, hidden: int, bias: bool = False) -> Program:
    """Dense layers with nothing between them, and plain gradient descent."""
    params = [{"w": array(hidden, hidden)} | ({"b": array(hidden)} if bias else {}) for _ in range(layers)]

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for p in params:
            x = x @ p["w"] + p["b"] if bias else x @ p["w"]
        return squared_error(x, y)

    return training(loss, params, array(batch, hidden), array(batch, hidden), optimizer=optax.sgd(1.0))


# ---------------------------------------------------------------------------------------------------- transformers


def dense_params(fan_in: int, fan_out: int) -> Params:
    """Kernel and bias."""
    return {"w": array(fan_in, fan_out), "b": array(fan_out)}


def norm_params(hidden: int) -> Params:
    """Scale and bias."""
    return {"scale": array(hidden), "b": array(hidden)}


def dense(p: Params, x: jax.Array) -> jax.Array:
    """x w + b."""
    return x @ p["w"] + p["b"]


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Over the last dim."""
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * p["scale"] + p["b"]


def dropout(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """A tenth becomes zero; nothing without a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def bert_layer_params(hidden: int) -> Params:
    """Twelve leaves."""
    return {
        "qkv": dense_params(hidden, 3 * hidden),
        "attention_out": dense_params(hidden, hidden),
        "attention_norm": norm_params(hidden),
        "mlp_in": dense_params(hidden, 4 * hidden),
        "mlp_out": dense_params(4 * hidden, hidden),
        "norm": norm_params(hidden),
    }


def attention(p: Params, x: jax.Array, mask: jax.Array, *, heads: int, key: jax.Array | None) -> jax.Array:
    """Self-attention with its residual and normalisation; queries, keys and values by one matrix, heads outermost."""
    batch, seq, hidden = x.shape
    keys = (None, None) if key is None else jax.random.split(key)
    q, k, v = jnp.split(dense(p["qkv"], x).reshape(batch, seq, heads, -1, 3), 3, axis=-1)
    scores = jnp.einsum("bqhdx,bkhdx->bhqk", q, k) / jnp.sqrt(hidden / heads)
    scores = scores + jnp.where(mask > 0, 0.0, -1e10)[:, None, None, :]
    weights = dropout(jax.nn.softmax(scores), keys[0])
    mixed = jnp.einsum("bhqk,bkhdx->bqhdx", weights, v).reshape(batch, seq, hidden)
    return layer_norm(p["attention_norm"], x + dropout(dense(p["attention_out"], mixed), keys[1]))


def bert_layer(p: Params, x: jax.Array, mask: jax.Array, *, heads: int, key: jax.Array | None) -> jax.Array:
    """Attention, then a perceptron, each normalised afterwards."""
    keys = (None, None) if key is None else jax.random.split(key)
    x = attention(p, x, mask, heads=heads, key=keys[0])
    hidden = jax.nn.gelu(dense(p["mlp_in"], x))
    return layer_norm(p["norm"], x + dropout(dense(p["mlp_out"], hidden), keys[1]))


def bert_layers(
    *, layers: int, batch: int, seq: int, hidden: int, heads: int, remat: bool = False, dropouts: bool = True
) -> Program:
    """A stack of BERT layers from hidden states to hidden states."""
    params = [bert_layer_params(hidden) for _ in range(layers)]

    def apply(p: Params, x: jax.Array, mask: jax.Array, key: jax.Array | None) -> jax.Array:
        return bert_layer(p, x, mask, heads=heads, key=key)

    layer = jax.checkpoint(apply) if remat else apply

    def loss(params: Params, x: jax.Array, mask: jax.Array, y: jax.Array, key: Any) -> jax.Array:
        keys = jax.random.split(key, layers) if dropouts else (None,) * layers
        for p, layer_key in zip(params, keys, strict=True):
            x = layer(p, x, mask, layer_key)
        return squared_error(x, y)

    states, key = array(batch, seq, hidden), jax.eval_shape(lambda: jax.random.key(0))
    program = training(loss, params, states, array(batch, seq, dtype=jnp.int32), states, key)
    return Program(run=program.run, args=program.args, batch=(2, 3, 4))


def tied_embedding(*, batch: int, seq: int, hidden: int, vocab: int) -> Program:
    """Tokens to logits by one table, which is looked up as a matrix product."""

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.one_hot(x, vocab) @ params["embed"] @ params["embed"].T
        return -jnp.sum(jax.nn.one_hot(y, vocab) * jax.nn.log_softmax(logits))

    tokens = array(batch, seq, dtype=jnp.int32)
    return training(loss, {"embed": array(vocab, hidden)}, tokens, tokens)


# ---------------------------------------------------------------------------------------------------- experts


def top_two(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and places [groups, tokens, experts, capacity] of the two best experts of each token."""
    _, tokens, experts = gates.shape
    capacity = 2 * tokens // experts
    first = jax.nn.one_hot(gates.argmax(-1), experts, dtype=gates.dtype)
    second = jax.nn.one_hot((gates * (1 - first)).argmax(-1), experts, dtype=gates.dtype)
    place_first = jnp.cumsum(first, 1) - first
    place_second = jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)
    weights = jnp.zeros((*gates.shape, capacity))
    total = jnp.sum(gates * (first + second), -1, keepdims=True)
    for chosen, place in ((first, place_first), (second, place_second)):
        kept = chosen * (place < capacity)
        slot = jax.nn.one_hot(jnp.sum(place * kept, -1).astype(jnp.int32), capacity)
        share = jnp.sum(gates * chosen, -1, keepdims=True) / total
        weights += (share * kept)[..., None] * slot[:, :, None, :]
    return weights, (weights > 0).astype(gates.dtype)


def expert_params(hidden: int, experts: int) -> Params:
    """Gate, and the two matrices of each expert."""
    return {
        "gate": array(hidden, experts),
        "wi": array(experts, hidden, 4 * hidden),
        "wo": array(experts, 4 * hidden, hidden),
    }


def experts_layer(p: Params, x: jax.Array, *, group: int) -> jax.Array:
    """Tokens in groups to the two best experts, and back."""
    tokens = x.reshape(-1, group, x.shape[-1])
    weights, places = top_two(jax.nn.softmax(jnp.einsum("gsm,me->gse", tokens, p["gate"])))
    inside = jnp.einsum("gsec,gsm->egcm", places, tokens)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inside, p["wi"]))
    outside = jnp.einsum("egch,ehm->gecm", hidden, p["wo"])
    return jnp.einsum("gsec,gecm->gsm", weights, outside).reshape(x.shape)


def moe_layer_params(hidden: int, experts: int) -> Params:
    """Attention and experts."""
    return {
        "qkv": dense_params(hidden, 3 * hidden),
        "attention_out": dense_params(hidden, hidden),
        "attention_norm": norm_params(hidden),
        "experts": expert_params(hidden, experts),
        "norm": norm_params(hidden),
    }


def moe_block(p: Params, x: jax.Array, mask: jax.Array, *, heads: int, group: int) -> jax.Array:
    """Attention, then experts, each normalised afterwards."""
    x = attention(p, x, mask, heads=heads, key=None)
    return layer_norm(p["norm"], x + experts_layer(p["experts"], x, group=group))


def moe_layer(*, batch: int, seq: int, hidden: int, heads: int, group: int, experts: int) -> Program:
    """One block from hidden states to hidden states, without dropout."""

    def loss(params: Params, x: jax.Array, mask: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(moe_block(params, x, mask, heads=heads, group=group), y)

    states = array(batch, seq, hidden)
    return training(loss, moe_layer_params(hidden, experts), states, array(batch, seq, dtype=jnp.int32), states)


def moe_lm(
    *, layers: int, batch: int, seq: int, hidden: int, heads: int, vocab: int, group: int, experts: int
) -> Program:
    """A language model with experts in every other layer and one table for both embeddings; adafactor."""
    params = {
        "embed": array(vocab, hidden),
        "position": array(seq, hidden),
        "norm": norm_params(hidden),
        "layers": [bert_layer_params(hidden) if i % 2 else moe_layer_params(hidden, experts) for i in range(layers)],
        "bias": array(vocab),
    }

    def loss(params: Params, ids: jax.Array, mask: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.one_hot(ids, vocab) @ params["embed"] + params["position"]
        x = layer_norm(params["norm"], x)
        for i, p in enumerate(params["layers"]):
            x = (
                bert_layer(p, x, mask, heads=heads, key=None)
                if i % 2
                else moe_block(p, x, mask, heads=heads, group=group)
            )
        logits = x @ params["embed"].T + params["bias"]
        counted = jnp.where(labels > 0, 1.0, 0.0)
        losses = -jnp.sum(jax.nn.one_hot(labels, vocab) * jax.nn.log_softmax(logits), -1)
        return jnp.sum(counted * losses) / jnp.sum(counted)

    ids = array(batch, seq, dtype=jnp.int32)
    optimizer = optax.adafactor(learning_rate=1e-2, min_dim_size_to_factor=4)
    return training(loss, params, ids, ids, ids, optimizer=optimizer)


def dense_and_experts(*, batch: int, experts: int, width: int) -> Program:
    """Two dense layers, an expert for each part of the features, two dense layers."""
    part = width // experts
    params = {
        "before": [array(width, width)] * 2,
        "wi": array(experts, part, 8 * width),
        "wo": array(experts, 8 * width, part),
        "after": [array(width, width)] * 2,
    }

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in params["before"]:
            x = x @ w
        inside = jnp.einsum("bem,emh->ebh", x.reshape(batch, experts, part), params["wi"])
        x = jnp.einsum("ebh,ehm->bem", inside, params["wo"]).reshape(batch, width)
        for w in params["after"]:
            x = x @ w
        return squared_error(x, y)

    return training(loss, params, array(batch, width), array(batch, width), optimizer=optax.sgd(1e-2))


# ---------------------------------------------------------------------------------------------------- convolutions


def convolve(x: jax.Array, w: jax.Array, *, stride: int = 1, groups: int = 1) -> jax.Array:
    """3 × 3, same padding."""
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def batch_norm(p: Params, stats: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    """Normalised over all but the last dim, and the running statistics."""
    mean, square = jnp.mean(x, (0, 1, 2)), jnp.mean(x**2, (0, 1, 2))
    variance = square - mean**2
    new = {"mean": 0.99 * stats["mean"] + 0.01 * mean, "var": 0.99 * stats["var"] + 0.01 * variance}
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["b"], new


def max_pool(x: jax.Array) -> jax.Array:
    """2 × 2 windows at every place."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")


def with_statistics(apply: Callable[..., Any], params: Params, stats: Params, x: Any, y: Any) -> Program:
    """A step that also replaces running statistics; gradient descent with momentum."""
    transform = optax.sgd(0.1, momentum=0.9)

    def train_step(params: Params, state: Any, stats: Params, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Params) -> Any:
            out, new = apply(params, stats, x)
            return squared_error(out, y), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, new

    return Program(run=train_step, args=(params, jax.eval_shape(transform.init, params), stats, x, y), batch=(3, 4))


def convolutions(*, layers: int, batch: int, image: int, channels: int) -> Program:
    """Strided convolutions, each with batch normalisation, relu and pooling."""
    params = [{"w": array(3, 3, channels, channels), **norm_params(channels)} for _ in range(layers)]
    stats = [{"mean": array(channels), "var": array(channels)} for _ in range(layers)]

    def apply(params: Params, stats: Params, x: jax.Array) -> Any:
        new = []
        for p, s in zip(params, stats, strict=True):
            x, replaced = batch_norm(p, s, convolve(x, p["w"], stride=2))
            x = max_pool(jax.nn.relu(x))
            new.append(replaced)
        return x, new

    out = image // 2**layers
    images, targets = array(batch, image, image, channels), array(batch, out, out, channels)
    return with_statistics(apply, params, stats, images, targets)


def depthwise_convolutions(*, batch: int, image: int, channels: int) -> Program:
    """Eight times as many channels, a convolution of each by itself, and back."""
    wide = 8 * channels
    params = {
        "widen": array(3, 3, channels, wide),
        "depthwise": array(3, 3, 1, wide),
        "narrow": array(3, 3, wide, channels),
        **norm_params(channels),
    }
    stats = {"mean": array(channels), "var": array(channels)}

    def apply(params: Params, stats: Params, x: jax.Array) -> Any:
        x = convolve(convolve(x, params["widen"]), params["depthwise"], groups=wide)
        return batch_norm(params, stats, jax.nn.relu(convolve(x, params["narrow"])))

    images = array(batch, image, image, channels)
    return with_statistics(apply, params, stats, images, images)


# ---------------------------------------------------------------------------------------------------- forward programs

_whole = Primitive("whole")
_whole.def_abstract_eval(lambda x: x)


def whole(x: jax.Array) -> jax.Array:
    """`x`, which every device must hold whole: an op that no rule knows."""
    return _whole.bind(x)


def attention_forward(*, batch: int, seq: int, hidden: int, heads: int, whole_output: bool) -> Program:
    """Self-attention without residual and normalisation; weights by head."""
    shape = (hidden, heads, hidden // heads)
    params = {name: {"w": array(*shape), "b": array(*shape[1:])} for name in ("q", "k", "v")}
    params["out"] = {"w": array(*shape), "b": array(hidden)}

    def run(params: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
        rows = x.reshape(batch * seq, hidden)

        def project(p: Params) -> jax.Array:
            return (rows @ p["w"].reshape(hidden, hidden)).reshape(batch, seq, heads, -1) + p["b"]

        q, k, v = (project(params[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", 0.125 * q, k)
        weights = jax.nn.softmax(scores + jnp.where(mask > 0, 0.0, -1e10)[:, None, None, :])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch * seq, hidden)
        out = (mixed @ params["out"]["w"].reshape(hidden, hidden)).reshape(x.shape) + params["out"]["b"]
        return whole(out) if whole_output else out

    states, mask = array(batch, seq, hidden), array(batch, seq, dtype=jnp.int32)
    return Program(run=run, args=(params, states, mask), batch=(1, 2))
