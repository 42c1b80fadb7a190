"""Ops that do something beside computing: a print or callback runs on one device, not on each with its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.lower.local.block import block_index


def on_first_device(
    run: Callable[..., Sequence[Any]], operands: Sequence[Any], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> list[Any]:
    """What `run(*operands)` gives on the first device along `axes`, on all of them. Operands must be whole."""
    shapes = jax.eval_shape(lambda *xs: tuple(run(*xs)), *operands)
    results = lax.cond(
        block_index(axes, sizes) == 0,
        lambda *xs: tuple(run(*xs)),
        lambda *_: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes),
        *operands,
    )
    return [_shared(x, axes) for x in results]


def _shared(x: Any, axes: tuple[str, ...]) -> Any:
    """The sum over devices, of which all but one add zero. Truth values are summed as bytes, which is their size."""
    if x.size == 0:
        return x
    return lax.psum(x.astype(jnp.uint8), axes).astype(x.dtype) if x.dtype == jnp.bool_ else lax.psum(x, axes)
