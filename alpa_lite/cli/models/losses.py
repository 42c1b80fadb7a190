"""Losses shared by the models.

- cross entropy: ``losses = -log_softmax(logits)[label]`` (`cross_entropy`), in float32;
- reduction: ``mean(losses)`` or ``sum(losses)`` (`reduce_losses`).
"""

from typing import Literal

import jax
import jax.numpy as jnp

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
