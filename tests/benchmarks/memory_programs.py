"""Ten small programs, other than those of the benchmark, by which the memory model is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.planners import FSDP, DataParallel, Megatron, Planner
from benchmarks.memory import Case

Shape = jax.ShapeDtypeStruct
PLANS: Mapping[str, tuple[Planner, int]] = {
    "one device": (DataParallel(), 1),
    "data parallel": (DataParallel(), 1),
    "FSDP": (FSDP(), 1),
    "Megatron": (Megatron(), 1),
}


def _f32(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def _adam(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        gradient = jax.grad(loss)(state["p"], batch)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradient)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], gradient)
        p = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["p"], m, v)
        return {"p": p, "m": m, "v": v}

    return step


def _sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(p: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient), value

    return step


def _norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def _squared_error(x: Any, y: Any) -> Any:
    return ((x - y) ** 2).mean()


def lstm(p: Any, b: Any) -> Any:
    def cell(carry: Any, x: Any) -> Any:
        h, s = carry
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
        s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(s)
        return (h, s), h

    zeros = jnp.zeros((b["x"].shape[0], 128))
    _, h = jax.lax.scan(cell, (zeros, zeros), b["x"].swapaxes(0, 1))
    return _squared_error(h[-1] @ p["o"], b["y"])


def gelu(p: Any, b: Any) -> Any:
    return _squared_error(jax.nn.gelu(jax.nn.gelu(b["x"] @ p["a"] + p["c"]) @ p["b"]) @ p["d"], b["y"])


def normed(p: Any, b: Any) -> Any:
    h = b["x"]
    for w, v in p:
        h = h + jax.nn.relu(_norm(h) @ w) @ v
    return _squared_error(h, b["y"])


def attention(p: Any, b: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bhse", b["x"], p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k) / 8.0, -1)
    return _squared_error(jnp.einsum("bhst,bhte,hed->bsd", weights, v, p["o"]), b["y"])


def words(p: Any, b: Any) -> Any:
    return _cross_entropy(jnp.tanh(p["e"][b["x"]] @ p["w"]) @ p["u"], b["y"])


def autoencoder(p: Any, b: Any) -> Any:
    h = b["x"]
    for w in p[:-1]:
        h = jax.nn.sigmoid(h @ w)
    return jnp.abs(h @ p[-1] - b["x"]).mean()


def convolutions(p: Any, b: Any) -> Any:
    h, numbers = b["x"], ("NHWC", "HWIO", "NHWC")
    for w in p["k"]:
        h = jax.nn.silu(jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=numbers))
    return _cross_entropy(h.mean((1, 2)) @ p["u"], b["y"])


def experts(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(b["x"] @ p["g"])
    h = jax.nn.relu(jnp.einsum("nd,edh->enh", b["x"], p["a"]))
    return _squared_error(jnp.einsum("enh,ehd,ne->nd", h, p["b"], gates), b["y"])


def recomputed(p: Any, b: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w["a"]) @ w["b"], None))
    return _squared_error(jax.lax.scan(layer, b["x"], p)[0], b["y"])


def gated(p: Any, b: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + (jax.nn.silu(_norm(h) @ w["g"]) * (_norm(h) @ w["a"])) @ w["b"], None

    return _squared_error(jax.lax.scan(layer, b["x"], p)[0], b["y"])


def _pairs(samples: int, read: int, made: int) -> dict[str, Shape]:
    return {"x": _f32(samples, read), "y": _f32(samples, made)}


_WORDS, _LABELS = Shape((16, 64), jnp.int32), Shape((64,), jnp.int32)
_ADAM: Mapping[Callable[..., Any], tuple[Any, Any]] = {
    lstm: ({"x": _f32(64, 512), "h": _f32(128, 512), "o": _f32(128, 32)}, {"x": _f32(64, 48, 64), "y": _f32(64, 32)}),
    normed: ([(_f32(256, 512), _f32(512, 256)) for _ in range(5)], _pairs(512, 256, 256)),
    attention: (
        {**{name: _f32(128, 8, 16) for name in "qkv"}, "o": _f32(8, 16, 128)},
        {"x": _f32(16, 128, 128), "y": _f32(16, 128, 128)},
    ),
    autoencoder: ([_f32(256, 512), _f32(512, 128), _f32(128, 512), _f32(512, 256)], {"x": _f32(2048, 256)}),
    experts: ({"g": _f32(128, 8), "a": _f32(8, 128, 256), "b": _f32(8, 256, 128)}, _pairs(512, 128, 128)),
    recomputed: ({"a": _f32(6, 256, 512), "b": _f32(6, 512, 256)}, _pairs(1024, 256, 256)),
}
_SGD: Mapping[Callable[..., Any], tuple[Any, Any]] = {
    gelu: ({"a": _f32(256, 1024), "c": _f32(1024), "b": _f32(1024, 512), "d": _f32(512, 128)}, _pairs(1024, 256, 128)),
    words: ({"e": _f32(2048, 128), "w": _f32(128, 256), "u": _f32(256, 2048)}, {"x": _WORDS, "y": _WORDS}),
    convolutions: (
        {"k": [_f32(3, 3, 8, 32), _f32(3, 3, 32, 32), _f32(3, 3, 32, 64)], "u": _f32(64, 16)},
        {"x": _f32(64, 16, 16, 8), "y": _LABELS},
    ),
    gated: ({"g": _f32(6, 128, 256), "a": _f32(6, 128, 256), "b": _f32(6, 256, 128)}, _pairs(1024, 128, 128)),
}


def cases() -> list[Case]:
    """Return the train steps of the programs."""
    found = [
        Case(name=loss.__name__, step=_adam(loss), arguments=({"p": p, "m": p, "v": p}, batch))
        for loss, (p, batch) in _ADAM.items()
    ]
    return found + [Case(name=loss.__name__, step=_sgd(loss), arguments=given) for loss, given in _SGD.items()]
