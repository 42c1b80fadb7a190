"""The table of training programs, and the few helpers that their modules share.

A program is registered by a function that builds it, so that importing a module initialises no model.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 16
SEQ = 8

EPSILON = 1e-4
"""What Adam adds to the size of a gradient: with less, it makes whole steps of the rounding of gradients near zero."""

FAMILIES = (
    "llama",
    "moe",
    "seq2seq",
    "vision",
    "recurrent",
    "diffusion",
    "flax_linen",
    "flax_nnx",
    "equinox_programs",
    "optimizers",
    "structure",
    "precision",
    "derivatives",
    "objectives",
    "decoding",
    "operations",
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step `(state, *inputs) -> (state, metrics)` with its first state and its inputs.

    Where the step computes in a low precision, `dtype` names it and `exact` is the same step in float32.
    `batch_argnums` is as for `al.parallelize`.
    """

    step: Callable[..., Any]
    state: Any
    inputs: tuple[Any, ...] = ()
    dtype: Any = jnp.float32
    exact: Callable[..., Any] | None = None
    batch_argnums: Any = None

    def run(self, step: Callable[..., Any], num_steps: int = 2) -> Any:
        """The last state and the metrics of every step."""
        state, metrics = self.state, []
        for _ in range(num_steps):
            state, now = step(state, *self.inputs)
            metrics.append(now)
        return state, metrics


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    """Register a function that builds a program under the function's name."""
    return register(build.__name__, build)


def register(name: str, build: Callable[[], Program]) -> Callable[[], Program]:
    """Register a function that builds a program under a name."""
    if name in PROGRAMS:
        raise ValueError(f"There are two programs called {name}.")
    PROGRAMS[name] = functools.cache(build)
    return build


def load() -> dict[str, Callable[[], Program]]:
    """The table of all families."""
    for family in FAMILIES:
        importlib.import_module(f"tests.zoo.{family}")
    return PROGRAMS


# --- data -------------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Normally distributed float32 data."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> jax.Array:
    """Integers from `low` to below `high`."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


def weights(shapes: Any, seed: int = 0) -> Any:
    """A tree of weights for a tree of shapes, scaled by the square root of their last but one dim."""
    rng = np.random.default_rng(seed)

    def one(shape: tuple[int, ...]) -> jax.Array:
        fan_in = shape[-2] if len(shape) > 1 else 1
        if len(shape) == 4:
            fan_in *= shape[0] * shape[1]
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree.map(one, shapes, is_leaf=lambda s: isinstance(s, tuple))


# --- layers of the programs without a library -------------------------------------------------------------------------


def layer_norm(x: Any, p: Any) -> Any:
    """Layer norm over the last dim."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def norm_weights(size: int) -> dict[str, jax.Array]:
    """Weights of `layer_norm`."""
    return {"scale": jnp.ones(size), "bias": jnp.zeros(size)}


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Negative log likelihood of each label."""
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


def descend(params: Any, grads: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def global_norm(tree: Any) -> Any:
    """Euclidean norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
