"""Networks on images: a vision transformer, residual networks with batch norm, U-Nets, and a modern convolution."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.registry import (
    BATCH,
    EPSILON,
    Program,
    cross_entropy,
    descend,
    integers,
    layer_norm,
    norm_weights,
    normal,
    program,
    weights,
)

SIZE, CLASSES = 8, 10
IMAGES, LABELS = normal(BATCH, SIZE, SIZE, 3, seed=1), integers(CLASSES, BATCH, seed=2)
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, w, stride=1, groups=1, padding="SAME"):
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC, feature_group_count=groups)


def dropout(key, x, rate=0.1):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


# --- vision transformer -----------------------------------------------------------------------------------------------


def vit_block(p, x, key):
    first, second = jax.random.split(key)
    h = layer_norm(x, p["norm_1"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, p[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(q, k, v)
    x = x + dropout(first, jnp.einsum("bshk,hkd->bsd", mixed, p["out"]))
    h = jax.nn.gelu(layer_norm(x, p["norm_2"]) @ p["up"] + p["up_bias"])
    return x + dropout(second, h @ p["down"])


@program
def vision_transformer():
    hidden, heads, patch, layers = 24, 3, 2, 2
    transform = optax.adamw(1e-3, eps=EPSILON)

    def loss_fn(params, images, labels, key):
        x = conv(images, params["patch"], stride=patch, padding="VALID")
        x = x.reshape(x.shape[0], -1, hidden)
        token = jnp.broadcast_to(params["class"], (x.shape[0], 1, hidden))
        x = jnp.concatenate([token, x], 1) + params["position"]
        for p, layer_key in zip(params["layers"], jax.random.split(key, layers), strict=True):
            x = vit_block(p, x, layer_key)
        logits = layer_norm(x[:, 0], params["norm"]) @ params["head"]
        return cross_entropy(logits, labels).mean(), jnp.mean((logits.argmax(-1) == labels).astype(jnp.float32))

    def step(state, images, labels):
        params, opt_state, key = state
        key, now = jax.random.split(key)
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, images, labels, now)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss, "accuracy": accuracy}

    shapes = {name: (hidden, heads, hidden // heads) for name in "qkv"}
    shapes |= {"out": (heads, hidden // heads, hidden), "up": (hidden, 48), "down": (48, hidden)}
    blocks = [
        {
            **jax.tree.map(lambda w: 0.5 * w, weights(shapes, seed=i)),
            "up_bias": jnp.zeros(48),
            "norm_1": norm_weights(hidden),
            "norm_2": norm_weights(hidden),
        }
        for i in range(layers)
    ]
    patches = (SIZE // patch) ** 2
    ends = {"patch": (patch, patch, 3, hidden), "class": (1, 1, hidden), "position": (patches + 1, hidden)}
    params = {**weights({**ends, "head": (hidden, CLASSES)}, 9), "norm": norm_weights(hidden), "layers": blocks}
    state = (params, transform.init(params), jax.random.key(0))
    return Program(step=step, state=state, inputs=(IMAGES, LABELS))


# --- residual networks ------------------------------------------------------------------------------------------------


def batch_norm(x, p, s):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    out = (x - mean) * jax.lax.rsqrt(variance + 1e-3) * p["scale"] + p["bias"]
    return out, {"mean": 0.9 * s["mean"] + 0.1 * mean, "var": 0.9 * s["var"] + 0.1 * variance}


def statistics(size: int) -> dict[str, jax.Array]:
    """Running mean and variance at the start."""
    return {"mean": jnp.zeros(size), "var": jnp.ones(size)}


def residual_block(p, s, x, stride, *, first_norm, key=None):
    new = {}
    h = x
    if first_norm:
        h, new["norm_1"] = batch_norm(h, p["norm_1"], s["norm_1"])
        h = jax.nn.relu(h)
    short = conv(h if first_norm else x, p["short"], stride) if "short" in p else x
    h = conv(h, p["conv_1"], stride)
    h, new["norm_2"] = batch_norm(h, p["norm_2"], s["norm_2"])
    h = jax.nn.relu(h)
    if key is not None:
        h = dropout(key, h, 0.3)
    h = conv(h, p["conv_2"])
    if not first_norm:
        h, new["norm_3"] = batch_norm(h, p["norm_3"], s["norm_3"])
        return jax.nn.relu(h + short), new
    return h + short, new


def residual_weights(width: int, out: int, seed: int, *, first_norm: bool) -> tuple[Any, Any]:
    """Weights and running statistics of one block."""
    shapes = {"conv_1": (3, 3, width, out), "conv_2": (3, 3, out, out)}
    if width != out:
        shapes["short"] = (1, 1, width, out)
    norms = {"norm_1": width, "norm_2": out} if first_norm else {"norm_2": out, "norm_3": out}
    params = {**weights(shapes, seed), **{name: norm_weights(size) for name, size in norms.items()}}
    return params, {name: statistics(size) for name, size in norms.items()}


def residual(*, first_norm: bool, widths: tuple[int, ...]) -> Program:
    """A residual network; with `first_norm` the wide kind, norms first and dropout between the convolutions."""
    transform = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def loss_fn(params, stats, images, labels, key):
        x = conv(images, params["stem"])
        if not first_norm:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        new = []
        keys = jax.random.split(key, len(widths) - 1)
        for i, (p, s) in enumerate(zip(params["blocks"], stats, strict=True)):
            x, s = residual_block(p, s, x, 1 + (i > 0), first_norm=first_norm, key=keys[i] if first_norm else None)
            new.append(s)
        logits = x.mean((1, 2)) @ params["head"] + params["bias"]
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() + 1e-4 * penalty
        return loss, (new, jnp.mean((logits.argmax(-1) == labels).astype(jnp.float32)))

    def step(state, images, labels):
        params, stats, opt_state, key = state
        key, now = jax.random.split(key)
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (stats, accuracy)), grads = gradient(params, stats, images, labels, now)
        updates, opt_state = transform.update(grads, opt_state, params)
        state = (optax.apply_updates(params, updates), stats, opt_state, key)
        return state, {"loss": loss, "accuracy": accuracy}

    pairs = [residual_weights(a, b, i, first_norm=first_norm) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    ends = weights({"stem": (3, 3, 3, widths[0]), "head": (widths[-1], CLASSES)}, 9)
    params = {**ends, "bias": jnp.zeros(CLASSES), "blocks": [p for p, _ in pairs]}
    state = (params, [s for _, s in pairs], transform.init(params), jax.random.key(1))
    return Program(step=step, state=state, inputs=(IMAGES, LABELS))


@program
def residual_network():
    return residual(first_norm=False, widths=(8, 8, 16))


@program
def wide_residual_network():
    return residual(first_norm=True, widths=(8, 16, 32))


# --- U-Nets -----------------------------------------------------------------------------------------------------------


def unet(upsample: Any, images: jax.Array, targets: jax.Array, up_width: int = 16) -> Program:
    """Segmentation with skip connections and one way to double the resolution."""

    def forward(params, x):
        a = jax.nn.relu(conv(x, params["down_1"]))
        pooled = jax.lax.reduce_window(a, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        b = jax.nn.relu(conv(pooled, params["down_2"]))
        pooled = jax.lax.reduce_window(b, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        c = jax.nn.relu(conv(pooled, params["middle"]))
        u = jax.nn.relu(conv(jnp.concatenate([upsample(c, params["up_1"]), b], -1), params["merge_1"]))
        u = jax.nn.relu(conv(jnp.concatenate([upsample(u, params["up_2"]), a], -1), params["merge_2"]))
        return conv(u, params["out"])[..., 0]

    def loss_fn(params, images, targets):
        logits = forward(params, images)
        probs = jax.nn.sigmoid(logits)
        overlap = 2 * jnp.sum(probs * targets, (1, 2)) + 1
        dice = 1 - overlap / (jnp.sum(probs, (1, 2)) + jnp.sum(targets, (1, 2)) + 1)
        return optax.sigmoid_binary_cross_entropy(logits, targets).mean() + dice.mean()

    def step(params, images, targets):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, targets)
        return descend(params, grads, 0.05), {"loss": loss}

    shapes = {
        "down_1": (3, 3, 3, 8),
        "down_2": (3, 3, 8, 16),
        "middle": (3, 3, 16, 16),
        "up_1": (2, 2, 16, 16),
        "merge_1": (3, 3, 32, 16),
        "up_2": (2, 2, 16, 16),
        "merge_2": (3, 3, 24, 8),
        "out": (1, 1, 8, 1),
    }
    return Program(step=step, state=weights(shapes), inputs=(images, targets))


TARGETS = (normal(BATCH, SIZE, SIZE, seed=3) > 0).astype(jnp.float32)


@program
def unet_by_transposed_convolution():
    up = lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC)  # noqa: E731
    return unet(up, IMAGES, TARGETS)


@program
def unet_by_resizing():
    def up(x, w):
        batch, height, width, channels = x.shape
        return conv(jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "bilinear"), w)

    return unet(up, IMAGES, TARGETS)


@program
def unet_by_repeating():
    up = lambda x, w: conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), w)  # noqa: E731
    return unet(up, IMAGES, TARGETS)


# --- depthwise convolutions -------------------------------------------------------------------------------------------


@program
def depthwise_network():
    width, layers = 16, 2
    transform = optax.adamw(1e-3, eps=EPSILON)

    def loss_fn(params, images, labels, key):
        x = layer_norm(conv(images, params["stem"], stride=2, padding="VALID"), params["stem_norm"])
        for p, layer_key in zip(params["layers"], jax.random.split(key, layers), strict=True):
            h = layer_norm(conv(x, p["depthwise"], groups=width), p["norm"])
            h = jax.nn.gelu(h @ p["up"]) @ p["down"] * p["layer_scale"]
            keep = jax.random.bernoulli(layer_key, 0.8, (x.shape[0], 1, 1, 1))
            x = x + jnp.where(keep, h / 0.8, 0.0)
        logits = layer_norm(x.mean((1, 2)), params["norm"]) @ params["head"]
        soft = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
        return optax.softmax_cross_entropy(logits, soft).mean()

    def step(state, images, labels):
        params, opt_state, key = state
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels, now)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}

    shapes = {"depthwise": (3, 3, 1, width), "up": (width, 64), "down": (64, width)}
    blocks = [
        {**weights(shapes, i), "norm": norm_weights(width), "layer_scale": jnp.full(width, 0.1)} for i in range(layers)
    ]
    ends = weights({"stem": (2, 2, 3, width), "head": (width, CLASSES)}, 9)
    params = {**ends, "stem_norm": norm_weights(width), "norm": norm_weights(width), "layers": blocks}
    state = (params, transform.init(params), jax.random.key(2))
    return Program(step=step, state=state, inputs=(IMAGES, LABELS))


@program
def augmented_images():
    """Crops, flips and mixed pairs inside the step."""

    def augment(key, image):
        crop, flip = jax.random.split(key)
        top, left = jax.random.randint(crop, (2,), 0, 5)
        image = jax.lax.dynamic_slice(jnp.pad(image, ((2, 2), (2, 2), (0, 0))), (top, left, 0), (SIZE, SIZE, 3))
        return jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)

    def step(state, images, labels):
        params, key = state
        key, augment_key, share_key = jax.random.split(key, 3)
        images = jax.vmap(augment)(jax.random.split(augment_key, images.shape[0]), images)
        share = jax.random.beta(share_key, 1.0, 1.0)
        images = share * images + (1 - share) * images[::-1]
        targets = jax.nn.one_hot(labels, CLASSES)
        targets = share * targets + (1 - share) * targets[::-1]

        def loss_fn(params):
            h = jax.nn.relu(conv(images, params["conv"], stride=2)).reshape(images.shape[0], -1)
            return optax.softmax_cross_entropy(h @ params["head"], targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return (descend(params, grads), key), {"loss": loss, "share": share}

    params = weights({"conv": (3, 3, 3, 8), "head": (128, CLASSES)})
    return Program(step=step, state=(params, jax.random.key(3)), inputs=(IMAGES, LABELS))
