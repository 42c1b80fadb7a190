"""Train steps as a user would write them: `jax.value_and_grad`, an optimizer in the form of optax, nothing else.

    loss, grads = value_and_grad(loss_fn)(params, batch, key)
    updates, opt_state = optimizer.update(grads, opt_state, params)      (`make_train_step`)
    params = params + updates

The step is a plain function; `jax.jit` it, or give it to anything else that takes one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.losses import Reduction
from alpa_lite.cli.models.optimizers import Optimizer, Transformation, adam, apply_changes, clipped

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The state that a train step passes from one call to the next; a pytree.

    Attributes:
        params: the model's weights, any pytree of arrays.
        opt_state: the optimizer's state.
        step: number of updates done, an int32 scalar.
    """

    params: Any
    opt_state: Any
    step: jax.Array


TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""The signature of a train step: ``(state, batch, key=None) -> (state, metrics)``."""


def make_optimizer(
    learning_rate: float = 1e-3, *, weight_decay: float = 0.01, max_grad_norm: float | None = None
) -> Optimizer:
    """AdamW; the gradients are first scaled down to the global norm `max_grad_norm` if one is given."""
    adamw = adam(learning_rate, weight_decay=weight_decay)
    return adamw if max_grad_norm is None else clipped(adamw, max_grad_norm)


def init_state(params: Any, optimizer: Transformation) -> TrainState:
    """Return the state before the first step."""
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32))


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Transformation,
    *,
    has_aux: bool = False,
    reduction: Reduction | None = None,
) -> TrainStep:
    """Build a train step, a plain function that is ready for `jax.jit`.

    Args:
        loss_fn: ``(params, batch, key) -> loss``, or ``-> (loss, metrics dict)`` with `has_aux`; the loss is a scalar.
        optimizer: an `Optimizer`, or any of optax.
        has_aux: whether `loss_fn` also returns a dict of metrics.
        reduction: passed to `loss_fn` by that name if given; otherwise the loss function's own default holds.

    Returns:
        ``train_step(state, batch, key=None) -> (state, metrics)``; the metrics are ``{"loss": scalar}`` and, with
        `has_aux`, those of `loss_fn`.
    """
    if reduction is not None:
        loss_fn = functools.partial(loss_fn, reduction=reduction)
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def train_step(state: TrainState, batch: Any, key: jax.Array | None = None) -> tuple[TrainState, Metrics]:
        value, grads = value_and_grad(state.params, batch, key)
        loss, aux = value if has_aux else (value, {})
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = apply_changes(state.params, updates)
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), {"loss": loss, **aux}

    return train_step
