"""A module of a user's, as text: a train step with the hook that the command line asks for."""

from __future__ import annotations


def step_module(*, layers: int, width: int, samples: int) -> str:
    """`train_step` over `layers` square weights, and `example` with its arguments as shapes."""
    return f"""
import jax
import jax.numpy as jnp

def loss(params, x, y):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)

def train_step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return [p - 0.1 * g for p, g in zip(params, grads)], value

def example():
    w = jax.ShapeDtypeStruct(({width}, {width}), jnp.float32)
    x = jax.ShapeDtypeStruct(({samples}, {width}), jnp.float32)
    return train_step, ([w] * {layers}, x, x)
"""
