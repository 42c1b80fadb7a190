"""Steps at the edges of what a step can be: nothing to compute, nothing to train, no batch, names of any characters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al

ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """A step and what it is called with; `options`: of `al.parallelize`."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _trained(params: Any, x: Any) -> tuple[Any, Any]:
    """One step of gradient descent on all leaves, whatever they are called."""

    def loss(params: Any) -> Any:
        h = x
        for leaf in jax.tree.leaves(params):
            h = jnp.tanh(h * leaf.sum() if leaf.ndim < 2 else h @ leaf)
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _summed(params: list[Any], x: Any) -> tuple[Any, Any]:
    """Many small parameters, few ops: they are read together."""

    def loss(params: list[Any]) -> Any:
        return (x[:, :1] * jnp.concatenate(params)).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


ODD_NAMES = (
    "plain", "<b>bold</b>", "[red]", "[/]", '"quoted"', "it's", "two\nlines", "tab\t", "\x1b[31mred", "emoji 😀", "a/b",
    "back\\slash", "{brace}", "\u202eturned", "\udc80", " ", "%s", "stage 0", "op 1", "&amp;", "</script>",
)  # fmt: skip

EXTREMES: dict[str, Extreme] = {
    "returns its arguments": Extreme(step=lambda p, x: (p, x), args=(_floats(4, 4), _floats(ROWS, 4))),
    "returns a constant": Extreme(step=lambda p, x: (p, jnp.float32(1)), args=(_floats(4), _floats(ROWS, 4))),
    "returns nothing": Extreme(step=lambda p, x: (), args=(_floats(4), _floats(ROWS, 4))),
    "takes nothing": Extreme(step=lambda: jnp.arange(4.0) ** 2, args=()),
    "one op": Extreme(step=lambda p, x: (p, x + 1), args=(_floats(4), _floats(ROWS, 4))),
    "one op on parameters": Extreme(step=lambda p, x: (p + 1, x), args=(_floats(4), _floats(ROWS, 4))),
    "moves only": Extreme(step=lambda p, x: (p.T, x[::-1]), args=(_floats(4, 8), _floats(ROWS, 4))),
    "whole numbers": Extreme(
        step=lambda p, x: (p + 1, (x * 2).sum(0)),
        args=(jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((ROWS, 4), jnp.int8)),
    ),
    "no parameters": Extreme(step=lambda x: jnp.tanh(x).mean(), args=(_floats(ROWS, 4),)),
    "no batch": Extreme(step=lambda p: p - 0.1 * jax.grad(lambda p: (p**2).sum())(p), args=(_floats(4, 4),)),
    "scalars": Extreme(step=lambda p, x: (p - 0.1 * jax.grad(lambda p: p * x)(p), x), args=(_floats(), _floats())),
    "no elements": Extreme(step=_trained, args=([_floats(4, 0), _floats(0, 4)], _floats(ROWS, 4))),
    "an empty batch": Extreme(step=_trained, args=([_floats(4, 4)], _floats(0, 4))),
    "one sample": Extreme(step=_trained, args=([_floats(4, 4)], _floats(1, 4))),
    "random numbers": Extreme(
        step=lambda key, x: (jax.random.split(key)[0], x * jax.random.normal(key, x.shape)),
        args=(jax.eval_shape(jax.random.key, 0), _floats(ROWS, 4)),
    ),
    "a loop of no trips": Extreme(
        step=lambda p, x: (p, jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]),
        args=(_floats(0, 4, 4), _floats(ROWS, 4)),
    ),
    "names": Extreme(step=_trained, args=(dict.fromkeys(ODD_NAMES, _floats(4, 4)), _floats(ROWS, 4))),
    "many parameters": Extreme(step=_summed, args=([_floats(1)] * 500, _floats(ROWS, 4))),
}

VERY_MANY = Extreme(step=_summed, args=([_floats(1)] * 10_000, _floats(ROWS, 4)))

_HOST = al.cluster("p3.16xlarge")
CLUSTERS = {"one device": replace(_HOST, devices_per_host=1), "eight devices": _HOST}
