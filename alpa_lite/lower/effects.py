"""Ops that do something beside computing: a print or callback runs on one device, not on each with its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from alpa_lite.lower.block import block_index


def on_first_device(run: Callable[..., Sequence[Any]], operands: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """What `run(*operands)` gives on the first device of a mesh, on all of them. Operands must be whole."""
    axes = tuple(sizes)
    shapes = jax.eval_shape(lambda *xs: tuple(run(*xs)), *operands)
    results = lax.cond(
        block_index(axes, sizes) == 0,
        lambda *xs: tuple(run(*xs)),
        lambda *_: tuple(jax.numpy.zeros(s.shape, s.dtype) for s in shapes),
        *operands,
    )
    # All but the first add zero.
    return [lax.psum(x, axes).astype(x.dtype) for x in results]
