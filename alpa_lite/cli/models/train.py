"""Train steps as a user would write them, and optimizers for steps over thousands of arrays.

    loss, grads = value_and_grad(loss_fn)(params, batch, key)
    updates, opt_state = optimizer.update(grads, opt_state, params)      (`make_train_step`)
    params = params + updates

The step is a plain function; `jax.jit` it, or give it to anything else that takes one. An optimizer is a
`Transformation`: `Adam`, or any of optax, whose results are the same but which traces its rule anew for every array:

    m, v   = b1 m + (1 - b1) g,  b2 v + (1 - b2) g^2                          (`Adam`; Kingma and Ba 2015, algorithm 1)
    u      = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w  (AdamW; Loshchilov and Hutter 2019)
    u      = u |w| / |u|                                                      (LAMB; You et al. 2020, algorithm 2)
    w      = w - learning_rate u

Moments are float32. With `master_weights` so is a copy of the weights in the optimizer's state: the step reads
gradients in the dtype of the weights, updates the copy and rounds it (mixed precision; Micikevicius et al. 2018). An
optimizer of optax gets such copies from `with_master_weights`.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.model_parts import Reduction, Tree


class Transformation(Protocol):
    """An optimizer: ``init(params) -> state`` and ``update(grads, state, params) -> (changes, state)``."""

    @property
    def init(self) -> Callable[..., Tree]:
        """Return the state before the first step."""
        ...

    @property
    def update(self) -> Callable[..., Tree]:
        """Return the changes of the weights, and the next state."""
        ...


class Optimizer(NamedTuple):
    """A `Transformation` of two functions."""

    init: Callable[..., Tree]
    update: Callable[..., Tree]


def apply_changes(params: Tree, changes: Tree) -> Tree:
    """Return the weights with the changes added, in the dtype of the weights."""
    # The sum is computed in the wider of both dtypes and then rounded once.
    return jax.tree.map(lambda w, change: (w + change).astype(w.dtype), params, changes)


def clipped(optimizer: Transformation, max_norm: float) -> Optimizer:
    """Return an optimizer that scales all gradients down together to a norm of at most `max_norm` first."""

    def update(grads: Tree, state: Tree, params: Tree = None) -> Tree:
        # One norm over all arrays, as of the gradient as a vector: its direction does not change.
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        scale = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return optimizer.update(jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), state, params)

    return Optimizer(optimizer.init, update)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """Number of steps done, an int32 scalar, and per weight the two moments and optionally the copy; all float32."""

    count: jax.Array
    first: Tree
    second: Tree
    master: Tree


class Moments(NamedTuple):
    """The two moments of one array, float32."""

    first: jax.Array
    second: jax.Array


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, AdamW (with `weight_decay`) or LAMB (with `trust_ratio`).

    Attributes:
        learning_rate: a constant.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: share of the weight that is added to the update.
        trust_ratio: scale the update of each array (a stack of layers is one) to the norm of its weights.
        master_weights: keep float32 copies of weights of lower precision.
    """

    learning_rate: float = 1e-3
    _: KW_ONLY
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    trust_ratio: bool = False
    master_weights: bool = False

    def init(self, params: Tree) -> AdamState:
        """Return the state before the first step."""
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
        master = jax.tree.map(lambda w: w.astype(jnp.float32), params) if self.master_weights else None
        return AdamState(count=jnp.zeros((), jnp.int32), first=zeros, second=zeros, master=master)

    def update(self, grads: Tree, state: AdamState, params: Tree = None) -> tuple[Tree, AdamState]:
        """Return the changes of the weights, and the next state."""
        count = state.count + 1
        # Both moments start at zero and are biased towards it; these factors undo that.
        fixes = 1.0 / (1.0 - self.b1**count), 1.0 / (1.0 - self.b2**count)
        # By columns of leaves: `tree.map` over five trees would need one that returns several trees.
        weights, structure = jax.tree.flatten(params)
        columns = [structure.flatten_up_to(tree) for tree in (grads, state.first, state.second)]
        copies = structure.flatten_up_to(state.master) if self.master_weights else [None] * len(weights)
        rows = [
            self.rule(g, Moments(m, v), w, c, fixes) for g, m, v, w, c in zip(*columns, weights, copies, strict=True)
        ]
        changes, moments, copies = zip(*rows, strict=True)
        return structure.unflatten(changes), AdamState(
            count=count,
            first=structure.unflatten([each.first for each in moments]),
            second=structure.unflatten([each.second for each in moments]),
            master=structure.unflatten(copies) if self.master_weights else None,
        )

    # `jit` caches the trace per shape, so that thousands of arrays of a few shapes are traced a few times.
    @partial(jax.jit, static_argnums=0)
    def rule(
        self,
        grad: jax.Array,
        moments: Moments,
        weight: jax.Array,
        copy: jax.Array | None,
        fixes: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, Moments, jax.Array | None]:
        """Return the change of one array, its next moments, and its next copy if it has one."""
        grad, old = grad.astype(jnp.float32), weight.astype(jnp.float32) if copy is None else copy
        first = self.b1 * moments.first + (1.0 - self.b1) * grad
        second = self.b2 * moments.second + (1.0 - self.b2) * jnp.square(grad)
        # The decay is added to Adam's quotient and not to the gradient (AdamW, Loshchilov and Hutter 2019).
        change = first * fixes[0] / (jnp.sqrt(second * fixes[1]) + self.eps) + self.weight_decay * old
        if self.trust_ratio:
            lengths = jnp.sqrt(jnp.sum(jnp.square(old))), jnp.sqrt(jnp.sum(jnp.square(change)))
            positive = (lengths[0] > 0.0) & (lengths[1] > 0.0)
            # The inner `where` keeps the branch that is not taken free of a division by zero.
            change = change * jnp.where(positive, lengths[0] / jnp.where(positive, lengths[1], 1.0), 1.0)
        change = -self.learning_rate * change
        if copy is None:
            return change, Moments(first, second), None
        # The step adds this to the weights, which then are the copy as rounded to their dtype.
        copy = copy + change
        return copy - weight.astype(jnp.float32), Moments(first, second), copy


def with_master_weights(optimizer: Transformation) -> Optimizer:
    """Return an optimizer that works on float32 copies of the weights, which are part of its state."""

    def wide(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Tree) -> Tree:
        return optimizer.init(wide(params)), wide(params)

    def update(grads: Tree, state: Tree, params: Tree = None) -> Tree:
        inner, copies = state
        changes, inner = optimizer.update(wide(grads), inner, copies)
        copies = apply_changes(copies, changes)
        # The train step adds the changes to the narrow weights: what is returned makes them the rounded copies.
        return jax.tree.map(lambda c, p: c - p.astype(jnp.float32), copies, params), (inner, copies)

    return Optimizer(init, update)


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

    params: Tree
    opt_state: Tree
    step: jax.Array


TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""The signature of a train step: ``(state, batch, key=None) -> (state, metrics)``."""


def make_optimizer(
    learning_rate: float = 1e-3, *, weight_decay: float = 0.01, max_grad_norm: float | None = None
) -> Transformation:
    """Return AdamW; the gradients are first scaled down to the global norm `max_grad_norm` if one is given."""
    adamw = Adam(learning_rate, weight_decay=weight_decay)
    return adamw if max_grad_norm is None else clipped(adamw, max_grad_norm)


def init_state(params: Tree, optimizer: Transformation) -> TrainState:
    """Return the state before the first step."""
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32))


def make_train_step(
    loss_fn: Callable[..., Tree],
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
        loss_fn = partial(loss_fn, reduction=reduction)
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def train_step(state: TrainState, batch: Tree, key: jax.Array | None = None) -> tuple[TrainState, Metrics]:
        value, grads = value_and_grad(state.params, batch, key)
        loss, aux = value if has_aux else (value, {})
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = apply_changes(state.params, updates)
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), {"loss": loss, **aux}

    return train_step
