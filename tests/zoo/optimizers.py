"""A small network under many optimizers, as shipped by optax and as written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from tests.zoo.network import X, Y
from tests.zoo.registry import Program, global_norm, program, register, weights


def init() -> Any:
    """Weights and biases of three layers."""
    params = weights({"a": {"w": (8, 16)}, "b": {"w": (16, 16)}, "c": {"w": (16, 4)}})
    return {name: {"w": layer["w"], "b": jnp.full(layer["w"].shape[1], 0.1)} for name, layer in params.items()}


def forward(params, x):
    h = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"])
    h = jnp.tanh(h @ params["b"]["w"] + params["b"]["b"])
    return h @ params["c"]["w"] + params["c"]["b"]


def loss_fn(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


def with_optax(transform: Any, *, pass_value: bool = False) -> Program:
    """A program that trains by an optax transformation."""

    def step(state, x, y):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        extra = {"value": loss} if pass_value else {}
        updates, opt_state = transform.update(grads, opt_state, params, **extra)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = init()
    return Program(step=step, state=(params, transform.init(params)), inputs=(X, Y))


def only_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def kind_of(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def joined() -> Any:
    """A warm-up, a plateau and a decay."""
    parts = [optax.linear_schedule(1e-3, 1e-2, 1), optax.constant_schedule(1e-2), optax.exponential_decay(1e-2, 5, 0.5)]
    return optax.join_schedules(parts, [1, 3])


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "sgd_nesterov": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw_masked": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=only_matrices),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "adamax": lambda: optax.adamax(1e-2),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adabelief": lambda: optax.adabelief(1e-3),
    "radam": lambda: optax.radam(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, kind_of),
    "joined_schedules": lambda: optax.sgd(joined(), momentum=0.9),
    "injected_rate": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=joined()),
    "decayed_weights": lambda: optax.chain(optax.add_decayed_weights(1e-2, only_matrices), optax.sgd(0.1)),
    "ema_of_updates": lambda: optax.chain(optax.ema(0.9, debias=True), optax.scale(-0.1)),
    "clip_and_centralize": lambda: optax.chain(optax.clip(0.1), optax.centralize(), optax.sgd(0.1)),
    "adaptive_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "lookahead_free_schedule": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "polyak_by_value": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
}


for _name, _make in TRANSFORMS.items():
    register(_name, lambda make=_make: with_optax(make()))


@program
def muon():
    return with_optax(optax.contrib.muon(1e-2))


@program
def reduce_on_plateau():
    return with_optax(optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)), pass_value=True)


@program
def adam_by_hand():
    def step(state, x, y):
        params, m, v, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        count = count + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, grads)
        rate = 1e-2 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v)
        return (params, m, v, count), {"loss": loss, "rate": rate}

    params = init()
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Program(step=step, state=(params, zeros, zeros, jnp.zeros((), jnp.int32)), inputs=(X, Y))


@program
def sharpness_aware():
    transform = optax.sgd(0.05, momentum=0.9)

    def step(state, x, y):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        scale = 0.05 / (global_norm(grads) + 1e-12)
        worse = jax.tree.map(lambda p, g: p + scale * g, params, grads)
        sharp_loss, grads = jax.value_and_grad(loss_fn)(worse, x, y)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "sharp_loss": sharp_loss}

    params = init()
    return Program(step=step, state=(params, transform.init(params)), inputs=(X, Y))


@program
def shampoo_like():
    def root(matrix):
        values, vectors = jnp.linalg.eigh(matrix + 1e-2 * jnp.eye(matrix.shape[0]))
        return (vectors * values**-0.25) @ vectors.T

    def precondition(g, left, right):
        return root(left) @ g @ root(right) if g.ndim == 2 else g

    def step(state, x, y):
        params, lefts, rights = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        lefts = jax.tree.map(lambda s, g: s + g @ g.T if g.ndim == 2 else s, lefts, grads)
        rights = jax.tree.map(lambda s, g: s + g.T @ g if g.ndim == 2 else s, rights, grads)
        updates = jax.tree.map(precondition, grads, lefts, rights)
        params = jax.tree.map(lambda p, u: p - 0.01 * u, params, updates)
        return (params, lefts, rights), {"loss": loss, "update_norm": global_norm(updates)}

    params = init()
    square = lambda axis: jax.tree.map(lambda p: jnp.zeros((p.shape[axis],) * 2) if p.ndim == 2 else p[:0], params)  # noqa: E731
    return Program(step=step, state=(params, square(0), square(1)), inputs=(X, Y))


@program
def natural_gradient_by_cholesky():
    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        moment = x.T @ x / x.shape[0] + 0.1 * jnp.eye(x.shape[1])
        factor = jax.scipy.linalg.cho_factor(moment)
        first = jax.scipy.linalg.cho_solve(factor, grads["a"]["w"])
        grads = {**grads, "a": {**grads["a"], "w": first}}
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), {"loss": loss}

    return Program(step=step, state=init(), inputs=(X, Y))


@program
def line_search_by_while():
    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        slope = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
        at = lambda rate: jax.tree.map(lambda p, g: p - rate * g, params, grads)  # noqa: E731
        too_long = lambda rate: loss_fn(at(rate), x, y) > loss - 0.5 * rate * slope  # noqa: E731
        rate = jax.lax.while_loop(too_long, lambda rate: rate * 0.5, 4.0)
        return at(rate), {"loss": loss, "rate": rate}

    return Program(step=step, state=init(), inputs=(X, Y))


@program
def average_of_weights():
    transform = optax.adam(1e-2)

    def step(state, x, y):
        params, average, opt_state, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = transform.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        target = optax.periodic_update(params, average, count, 2)
        return (params, target, opt_state, count + 1), {"loss": loss, "average_loss": loss_fn(average, x, y)}

    params = init()
    return Program(step=step, state=(params, params, transform.init(params), jnp.zeros((), jnp.int32)), inputs=(X, Y))
