"""Adam and LAMB, written so that a step over thousands of arrays traces quickly: one traced rule for all of a shape.

An `Optimizer` has the form of an optax transformation, and any of those may be used in its place; such an optimizer
gets float32 copies of narrow weights from `with_master_weights`.

    m, v   = b1 m + (1 - b1) g,  b2 v + (1 - b2) g^2                          (`adam`; Kingma and Ba 2015, algorithm 1)
    u      = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w  (AdamW; Loshchilov and Hutter 2019)
    u      = u |w| / |u|                                                      (LAMB; You et al. 2020, algorithm 2)
    w      = w - learning_rate u

Moments are float32. With `master_weights` so is a copy of the weights in the optimizer's state: the step reads
gradients in the dtype of the weights, updates the copy and rounds it (mixed precision; Micikevicius et al. 2018).
The results are those of `optax.adamw` and `optax.lamb`, whose rules are traced anew for every array.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Transformation(Protocol):
    """An optimizer: ``init(params) -> state`` and ``update(grads, state, params) -> (changes, state)``."""

    @property
    def init(self) -> Callable[..., Any]:
        """Return the state before the first step."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """Return what is added to the weights, and the next state."""
        ...


class Optimizer(NamedTuple):
    """A `Transformation` of this module."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def apply_changes(params: Any, changes: Any) -> Any:
    """Return the weights with the changes added, in the dtype of the weights."""
    return jax.tree.map(lambda w, change: (w + change).astype(w.dtype), params, changes)


def clipped(optimizer: Transformation, max_norm: float) -> Optimizer:
    """Return an optimizer that scales all gradients down together to a norm of at most `max_norm` first."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        scale = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return optimizer.update(jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), state, params)

    return Optimizer(optimizer.init, update)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """Number of steps done, an int32 scalar, and per weight the two moments and optionally the copy; all float32."""

    count: jax.Array
    first: Any
    second: Any
    master: Any


def adam(
    learning_rate: float = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    trust_ratio: bool = False,
    master_weights: bool = False,
) -> Optimizer:
    """Adam, AdamW (with `weight_decay`) or LAMB (with `trust_ratio`).

    Args:
        learning_rate: a constant.
        b1: of the first moment.
        b2: of the second moment.
        eps: added to the root of the second moment.
        weight_decay: share of the weight that is added to the update.
        trust_ratio: scale the update of each array (a stack of layers is one) to the norm of its weights.
        master_weights: keep float32 copies of weights of lower precision.
    """

    def rule(grad: jax.Array, first: jax.Array, second: jax.Array, weight: jax.Array, copy: Any, fixes: Any) -> Any:
        grad, old = grad.astype(jnp.float32), weight.astype(jnp.float32) if copy is None else copy
        first = b1 * first + (1.0 - b1) * grad
        second = b2 * second + (1.0 - b2) * jnp.square(grad)
        change = first * fixes[0] / (jnp.sqrt(second * fixes[1]) + eps) + weight_decay * old
        if trust_ratio:
            lengths = jnp.sqrt(jnp.sum(jnp.square(old))), jnp.sqrt(jnp.sum(jnp.square(change)))
            known = (lengths[0] > 0.0) & (lengths[1] > 0.0)
            change = change * jnp.where(known, lengths[0] / jnp.where(known, lengths[1], 1.0), 1.0)
        change = -learning_rate * change
        if copy is None:
            return change, first, second, None
        copy = copy + change
        return copy - weight.astype(jnp.float32), first, second, copy

    rule = jax.jit(rule)

    def init(params: Any) -> AdamState:
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
        master = jax.tree.map(lambda w: w.astype(jnp.float32), params) if master_weights else None
        return AdamState(count=jnp.zeros((), jnp.int32), first=zeros, second=zeros, master=master)

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        count = state.count + 1
        fixes = 1.0 / (1.0 - b1**count), 1.0 / (1.0 - b2**count)
        weights, structure = jax.tree.flatten(params)
        columns = [structure.flatten_up_to(tree) for tree in (grads, state.first, state.second)]
        copies = structure.flatten_up_to(state.master) if master_weights else [None] * len(weights)
        rows = [rule(g, m, v, w, c, fixes) for g, m, v, w, c in zip(*columns, weights, copies, strict=True)]
        changes, first, second, copies = (structure.unflatten(column) for column in zip(*rows, strict=True))
        master = copies if master_weights else None
        return changes, AdamState(count=count, first=first, second=second, master=master)

    return Optimizer(init, update)


def with_master_weights(optimizer: Transformation) -> Optimizer:
    """Return an optimizer that works on float32 copies of the weights, which are part of its state."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return optimizer.init(wide(params)), wide(params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        inner, copies = state
        changes, inner = optimizer.update(wide(grads), inner, copies)
        copies = apply_changes(copies, changes)
        return jax.tree.map(lambda c, p: c - p.astype(jnp.float32), copies, params), (inner, copies)

    return Optimizer(init, update)
