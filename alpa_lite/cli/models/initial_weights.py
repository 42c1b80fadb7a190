"""Weights from a tree of shapes: counting, drawing, and splitting stacks of layers into segments.

A shape is a tuple; its name in the tree decides how it is drawn: ``scale`` as ones, ``bias``, ``b``, ``b_*`` and
``vocab_bias`` as zeros, anything else normal(0.02) (`draw`).
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

Shapes = Any
"""A pytree of dicts and lists with shapes for leaves."""


def count(shapes: Shapes) -> int:
    """Return the number of weights."""
    return sum(prod(shape) for shape in jax.tree.leaves(shapes, is_leaf=_is_shape))


def stacked(shapes: Shapes, size: int) -> Shapes:
    """Return the shapes of `size` such trees, stacked along a leading dim."""
    return jax.tree.map(lambda shape: (size, *shape), shapes, is_leaf=_is_shape)


def draw(key: jax.Array, shapes: Shapes, dtype: Any, num_segments: int) -> dict[str, Any]:
    """Draw weights of these shapes.

    Args:
        key: the random key.
        shapes: a dict whose ``layers``, and those of its ``encoder`` if there is one, are stacked.
        dtype: dtype of the weights.
        num_segments: number of segments into which ``layers`` is split, as a list; the weights do not depend on it.
    """
    keys = iter(jax.random.split(key, len(jax.tree.leaves(shapes, is_leaf=_is_shape))))

    def one(path: Any, shape: tuple[int, ...]) -> jax.Array:
        name, leaf_key = str(path[-1].key), next(keys)
        if name == "scale":
            return jnp.ones(shape, dtype)
        if name in ("bias", "b", "vocab_bias") or name.startswith("b_"):
            return jnp.zeros(shape, dtype)
        return 0.02 * jax.random.normal(leaf_key, shape, dtype)

    params = jax.tree_util.tree_map_with_path(one, shapes, is_leaf=_is_shape)
    for stack in (params, params.get("encoder")):
        if stack is not None:
            stack["layers"] = _cut(stack["layers"], num_segments)
    return params


def segment_sizes(total: int, num_segments: int) -> tuple[int, ...]:
    """Return `num_segments` numbers with the sum `total`, as equal as possible, the larger ones in the middle."""
    size, larger = divmod(total, num_segments)
    first = (num_segments - larger) // 2
    return tuple(size + (first <= i < first + larger) for i in range(num_segments))


def _cut(layers: Any, num_segments: int) -> list[Any]:
    """Split the layers of one stack, leaves ``[layers, ...]``, into segments."""
    sizes = segment_sizes(jax.tree.leaves(layers)[0].shape[0], num_segments)
    ends = [sum(sizes[: i + 1]) for i in range(num_segments)]
    return [
        jax.tree.map(lambda leaf, end=end, size=size: leaf[end - size : end], layers)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)
