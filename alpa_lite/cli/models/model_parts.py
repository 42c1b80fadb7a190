"""What the models share: weights drawn from shapes, dropout, and losses.

- weights: the name of a shape in a tree decides how it is drawn: ``scale`` as ones, ``bias``, ``b``, ``b_*`` and
  ``vocab_bias`` as zeros, anything else normal(0.02) (`draw_weights`);
- dropout: masks of one byte per number (`drop`);
- cross entropy: ``losses = -log_softmax(logits)[label]`` (`cross_entropy`), in float32;
- reduction: ``mean(losses)`` or ``sum(losses)`` (`reduce_losses`).
"""

from collections.abc import Hashable
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Tree = Any
"""A pytree: nested dicts and lists whose leaves are arrays."""

Shapes = Tree
"""A pytree of dicts and lists whose leaves are shapes."""


def count_weights(shapes: Shapes) -> int:
    """Return the number of weights."""
    return sum(prod(shape) for shape in jax.tree.leaves(shapes, is_leaf=_is_shape))


def stacked_shapes(shapes: Shapes, size: int) -> Shapes:
    """Return the shapes of `size` trees of these shapes, stacked along a leading dim."""
    return jax.tree.map(lambda shape: (size, *shape), shapes, is_leaf=_is_shape)


def draw_weights(key: jax.Array, shapes: Shapes, dtype: DTypeLike, num_segments: int) -> dict[str, Tree]:
    """Draw weights of these shapes.

    Args:
        key: the random key.
        shapes: a dict whose ``layers``, and those of its ``encoder`` if there is one, are stacked.
        dtype: dtype of the weights.
        num_segments: number of segments into which ``layers`` is split, as a list; the weights do not depend on it.
    """
    keys = iter(jax.random.split(key, len(jax.tree.leaves(shapes, is_leaf=_is_shape))))

    def one(path: tuple[Hashable, ...], shape: tuple[int, ...]) -> jax.Array:
        name, leaf_key = jax.tree_util.keystr(path[-1:], simple=True), next(keys)
        if name == "scale":
            return jnp.ones(shape, dtype)
        if name in ("bias", "b", "vocab_bias") or name.startswith("b_"):
            return jnp.zeros(shape, dtype)
        return 0.02 * jax.random.normal(leaf_key, shape, dtype)

    # Whole stacks are drawn before they are cut, so that the weights do not depend on the number of segments.
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


def _cut(layers: Tree, num_segments: int) -> list[Tree]:
    """Split the layers of one stack, leaves ``[layers, ...]``, into segments."""
    sizes = segment_sizes(jax.tree.leaves(layers)[0].shape[0], num_segments)
    ends = [sum(sizes[: i + 1]) for i in range(num_segments)]
    return [
        jax.tree.map(lambda leaf, end=end, size=size: leaf[end - size : end], layers)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _is_shape(node: object) -> bool:
    # A tuple would otherwise be a node of the tree, and its numbers the leaves.
    return isinstance(node, tuple)


def drop(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    """Zero entries at a rate of `rate` (to 1/256) and scale up the others; the identity without a key or rate."""
    if key is None or not rate:
        return x
    # `jax.random.bernoulli` draws four bytes per number; one byte is enough for rates that are multiples of 1/256.
    threshold = round(256 * rate)
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= threshold
    return jnp.where(keep, x * jnp.asarray(256 / (256 - threshold), x.dtype), jnp.zeros((), x.dtype))


Reduction = Literal["mean", "sum"]
"""The reduction of the losses of a batch's examples (or tokens) to one number."""


@jax.named_scope("cross_entropy")
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of each label.

    Args:
        logits: ``[..., num_classes]``, any float dtype.
        labels: ``[...]`` integers in ``[0, num_classes)``.

    Returns:
        ``[...]`` float32, in nats.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = labels[..., None] == jnp.arange(logits.shape[-1])
    # A masked sum is fused, stays in parts where the classes are split, and has no gradient that must be scattered.
    return -jnp.sum(jnp.where(chosen, log_probs, 0.0), axis=-1)


def reduce_losses(losses: jax.Array, reduction: Reduction) -> jax.Array:
    """Reduce ``[...]`` losses over every dim to a scalar."""
    if reduction == "mean":
        return jnp.mean(losses)
    if reduction == "sum":
        return jnp.sum(losses)
    raise ValueError(f"The reduction of a loss is 'mean' or 'sum'; got {reduction!r}.")
