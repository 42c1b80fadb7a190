"""Contractions in eight-bit floating point, as training recipes use it (Micikevicius et al. 2022, arXiv 2209.05433).

    y  = q4(x) q4(w),   dx = q5(dy) q4(w)^T,   dw = q4(x)^T q5(dy)              (`narrow_einsum`)

q4 rounds to float8_e4m3fn, q5 to float8_e5m2; sums are kept in the operands' own dtype. Scales are left out: they are
numbers per tensor that are known before the step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Einsum = Callable[..., Any]
"""``(equation, x, weight) -> array``, as `jnp.einsum`."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def narrow_einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``einsum(equation, x, weight)`` of operands rounded to eight bits; every letter occurs in two arrays."""
    return _forward(equation, x, weight)[0]


def _forward(equation: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Any]]:
    x8, w8 = x.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    return jnp.einsum(equation, x8, w8, preferred_element_type=x.dtype), (x8, w8, jnp.zeros((), x.dtype))


def _backward(equation: str, kept: tuple[jax.Array, jax.Array, Any], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, w8, like = kept
    operands, result = equation.split("->")
    first, second = operands.split(",")
    dy8 = dy.astype(jnp.float8_e5m2)
    dx = jnp.einsum(f"{result},{second}->{first}", dy8, w8, preferred_element_type=like.dtype)
    dw = jnp.einsum(f"{first},{result}->{second}", x8, dy8, preferred_element_type=like.dtype)
    return dx, dw


narrow_einsum.defvjp(_forward, _backward)
