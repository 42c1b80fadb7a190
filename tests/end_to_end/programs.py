"""Steps of every kind that users write, on a three-layer network so small that compiling dominates.

Each is registered with its arguments. Some are no sum over their samples: micro-batches must refuse those, with the
line that is marked `# refused`; without micro-batches they run like all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

NUM_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step, its arguments, where the batch is (None: found by itself), and whether micro-batches must refuse it."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: Any = None
    refused: bool = False

    @property
    def refused_line(self) -> int:
        """Line of the mark in this file."""
        lines, first = inspect.getsourcelines(self.step)
        return first + next(i for i, line in enumerate(lines) if "# refused" in line)


PROGRAMS: dict[str, Program] = {}
PRINTED: list[Any] = []
"""What `printed_once` and `told_by_callback` were called with."""

_rng = np.random.default_rng(0)


def _array(*shape: int) -> np.ndarray:
    return _rng.normal(size=shape).astype(np.float32)


PARAMS = {"w1": _array(8, 16) * 0.3, "w2": _array(16, 16) * 0.3, "w3": _array(16, 4) * 0.3}
X, Y = _array(NUM_SAMPLES, 8), _array(NUM_SAMPLES, 4)
LABELS = _rng.integers(0, 4, NUM_SAMPLES)
SEQUENCE = _array(NUM_SAMPLES, 5, 8)


def program(*args: Any, batch_argnums: Any = None, refused: bool = False) -> Callable[..., Any]:
    """Register a step; its first argument is always `PARAMS`."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[step.__name__] = Program(step=step, args=(PARAMS, *args), batch_argnums=batch_argnums, refused=refused)
        return step

    return register


def forward(p: Any, x: Any) -> Any:
    """``[batch, 8] -> [batch, 4]``."""
    return jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w3"]


def squared(p: Any, x: Any, y: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((forward(p, x) - y) ** 2)


def picked(logits: Any, labels: Any) -> Any:
    """Log probability of each label."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def descend(p: Any, grads: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda a, g: a - rate * g, p, grads)


def train(loss_fn: Callable[..., Any], p: Any) -> tuple[Any, Any]:
    """New parameters and loss."""
    loss, grads = jax.value_and_grad(loss_fn)(p)
    return descend(p, grads), loss


def train_with_aux(loss_fn: Callable[..., Any], p: Any) -> tuple[Any, Any, Any]:
    """New parameters, loss and auxiliary output."""
    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(p)
    return descend(p, grads), loss, aux


# --- losses -----------------------------------------------------------------------------------------------------------


@program(X, Y)
def mean_loss(p, x, y):
    return train(lambda p: squared(p, x, y), p)


@program(X, Y)
def sum_loss_by_shape(p, x, y):
    return train(lambda p: jnp.sum((forward(p, x) - y) ** 2) / x.shape[0] ** 2, p)


@program(X, Y)
def penalty_on_weights(p, x, y):
    return train(lambda p: squared(p, x, y) + 0.1 * sum(jnp.sum(w**2) for w in p.values()), p)


@program(X, Y)
def constant_in_loss(p, x, y):
    return train(lambda p: squared(p, x, y) + 3.0, p)


@program(X, Y)
def masked_by_constant_count(p, x, y):
    return train(lambda p: jnp.sum(jnp.where(y[:, :1] > 0, (forward(p, x) - y) ** 2, 0.0)) / 32.0, p)


@program(X, Y)
def weighted_by_position(p, x, y):
    return train(lambda p: jnp.mean(jnp.mean((forward(p, x) - y) ** 2, 1) * jnp.arange(x.shape[0])), p)


@program(X, Y)
def weighted_by_numpy(p, x, y):
    weights = np.linspace(0, 1, x.shape[0], dtype=np.float32)
    return train(lambda p: jnp.mean(jnp.mean((forward(p, x) - y) ** 2, 1) * weights), p)


@program(X, Y)
def scaled_by_numpy_vector(p, x, y):
    scale = np.full(4, 1 / x.shape[0], np.float32)
    return train(lambda p: jnp.sum(jnp.sum((forward(p, x) - y) ** 2, 0) * scale), p)


@program(X, LABELS)
def rows_by_arange(p, x, labels):
    return train(lambda p: -jnp.mean(jax.nn.log_softmax(forward(p, x))[jnp.arange(x.shape[0]), labels]), p)


@program(X, Y)
def gradient_penalty(p, x, y):
    slopes = lambda p: jax.grad(lambda x: jnp.sum(forward(p, x)))(x)  # noqa: E731
    return train(lambda p: squared(p, x, y) + 0.1 * jnp.mean(slopes(p) ** 2), p)


@program(X, Y)
def per_sample_clipping(p, x, y):
    grads = jax.vmap(jax.grad(squared), (None, 0, 0))(p, x[:, None], y[:, None])
    norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in grads.values()))
    scale = jnp.minimum(1.0, 1.0 / norms) / x.shape[0]
    return descend(p, {k: jnp.einsum("b,bij->ij", scale, g) for k, g in grads.items()}), norms


@program(X, Y)
def vjp_by_hand(p, x, y):
    loss, pull = jax.vjp(lambda p: squared(p, x, y), p)
    return descend(p, pull(jnp.float32(1.0))[0]), loss


@program(X, Y)
def forward_mode(p, x, y):
    loss, slope = jax.jvp(lambda p: squared(p, x, y), (p,), (p,))
    return jax.tree.map(lambda w: w - 0.1 * slope * w, p), loss


@program(X, Y)
def curvature(p, x, y):
    grad = jax.grad(lambda p: squared(p, x, y))
    return descend(p, jax.jvp(grad, (p,), (jax.tree.map(jnp.ones_like, p),))[1], 0.01)


# --- what an update may look like -------------------------------------------------------------------------------------


@program(X, Y)
def clipped_by_global_norm(p, x, y):
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    return descend(p, jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.01 / norm), grads)), loss, norm


@program(X, Y)
def clipped_twice(p, x, y):
    grads = jax.grad(squared)(p, x, y)
    decayed = {k: g + 0.1 * p[k] for k, g in grads.items()}
    norm = jnp.sqrt(sum(jnp.sum(u**2) for u in decayed.values()))
    updates = jax.tree.map(lambda u: u / (1.0 + norm), decayed)
    trust = jnp.sqrt(sum(jnp.sum(u**2) for u in updates.values()))
    return descend(p, jax.tree.map(lambda u: u / (0.1 + trust), updates)), norm, trust


@program(X, Y, np.float32(2.0))
def dynamic_loss_scale(p, x, y, scale):
    loss, grads = jax.value_and_grad(lambda p: scale * squared(p, x, y))(p)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads.values()]))
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), descend(p, grads, 0.05), p)
    return new, jnp.where(finite, 2 * scale, scale / 2), loss / scale


@program(X, Y)
def shared_weight(p, x, y):
    def loss(p):
        h = jnp.tanh(jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w2"])
        return jnp.mean((jnp.tanh(h @ p["w2"].T) @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y)
def loop_in_update(p, x, y):
    new, loss = train(lambda p: squared(p, x, y), p)
    return new, jax.lax.while_loop(lambda c: c[1] < 5, lambda c: (c[0] * 0.9, c[1] + 1), (loss, 0))[0]


@program(X, Y)
def fixed_point(p, x, y):
    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        z = jax.lax.while_loop(lambda c: c[1] < 5, lambda c: (jnp.tanh(c[0] @ p["w2"] + h), c[1] + 1), (h, 0))[0]
        return jnp.mean((jnp.tanh(jax.lax.stop_gradient(z) @ p["w2"]) @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y, 1)
def skipped_layer(p, x, y, flag):
    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        h = jax.lax.cond(flag > 0, lambda h: jnp.tanh(h @ p["w2"]), lambda h: h, h)
        return jnp.mean((h @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y, 2)
def switched_update(p, x, y, count):
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    rates = [lambda p, g, r=r: descend(p, g, r) for r in (0.0, 0.1, 0.5)]
    return jax.lax.switch(count, rates, p, grads), loss


@program(X, Y)
def halved_until_small(p, x, y):
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    norm = lambda g: sum(jnp.sum(a**2) for a in g.values())  # noqa: E731
    grads = jax.lax.while_loop(lambda g: norm(g) > 1e-3, lambda g: jax.tree.map(lambda a: a / 2, g), grads)
    return descend(p, grads), loss


@program(SEQUENCE, Y)
def decayed_sums(p, x, y):
    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        h = jax.lax.associative_scan(combine, (jnp.full_like(h, 0.9), h), axis=1)[1]
        return jnp.mean((jnp.tanh(h[:, -1] @ p["w2"]) @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y)
def printed_once(p, x, y):
    new, loss = train(lambda p: squared(p, x, y), p)
    jax.debug.callback(PRINTED.append, loss)
    return new, loss


@program(X, Y)
def told_by_callback(p, x, y):
    new, loss = train(lambda p: squared(p, x, y), p)

    def answer(loss: Any) -> tuple[np.ndarray, np.ndarray]:
        PRINTED.append(loss)
        return np.array([True, False, True]), np.arange(5, dtype=np.float32)

    shapes = jax.ShapeDtypeStruct((3,), jnp.bool_), jax.ShapeDtypeStruct((5,), jnp.float32)
    flags, rates = io_callback(answer, shapes, loss)
    return jax.tree.map(lambda w: jnp.where(flags[0], w * rates[2], w), new), loss, flags, rates


@program(X, Y)
def solved_per_sample(p, x, y):
    matrix = x[:, :4, None] * x[:, None, :4] + 4 * jnp.eye(4)
    return train(lambda p: jnp.mean((forward(p, x) - jnp.linalg.solve(matrix, y[..., None])[..., 0]) ** 2), p)


@program(X, Y)
def tiled_row(p, x, y):
    row = jnp.tile(p["w2"][:1], (x.shape[0], 1))
    return train(lambda p: jnp.mean(((jnp.tanh(x @ p["w1"]) * row) @ p["w3"] - y) ** 2), p)


@program(X, Y)
def running_products(p, x, y):
    return train(lambda p: jnp.mean((jnp.cumprod(forward(p, x), axis=1) - y) ** 2), p)


@program(X, Y)
def two_losses(p, x, y):
    new, loss = train(lambda p: squared(p, x, y), p)
    other = jax.grad(lambda p: jnp.mean((forward(p, 2 * x) - jax.lax.stop_gradient(forward(p, x))) ** 2))(p)
    return descend(new, other), loss


@program(X, Y, _array(16, 16), 0.1, np.int32(3), batch_argnums=(1, 2))
def state_beside_parameters(p, x, y, average, rate, count):
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    new = descend(p, grads, rate)
    return new, 0.9 * average + 0.1 * new["w2"], count + 1, loss


# --- what may come out ------------------------------------------------------------------------------------------------


@program(X, Y)
def samples_in_outputs(p, x, y):
    out = lambda p: (squared(p, x, y), forward(p, x))  # noqa: E731
    new, loss, rows = train_with_aux(out, p)
    return new, {"loss": loss, "rows": rows, "columns": rows.T, "flat": rows.reshape(-1), "total": rows.sum(0)}


@program(X, Y)
def inputs_constants_and_repeats_in_outputs(p, x, y):
    new, loss = train(lambda p: squared(p, x, y), p)
    return new, loss, loss, x, p["w1"], new["w2"], 1 / x.shape[0], True, np.arange(3.0), jnp.ones(3) * loss


@program(X, Y, jax.random.key(3))
def mask_in_outputs(p, x, y, key):
    mask = jax.random.bernoulli(key, 0.5, (x.shape[0], 16))
    new, loss = train(lambda p: jnp.mean(((jnp.tanh(x @ p["w1"]) * mask) @ p["w2"] @ p["w3"] - y) ** 2), p)
    return new, loss, mask, jnp.zeros((x.shape[0], 2))


@program(X, LABELS)
def accuracy_and_top_two(p, x, labels):
    def loss(p):
        logits = forward(p, x)
        _, best = jax.lax.top_k(logits, 2)
        return -jnp.mean(picked(logits, labels)), jnp.mean(jnp.any(best == labels[:, None], 1).astype(jnp.float32))

    return train_with_aux(loss, p)


@program(X, Y)
def running_statistics(p, x, y):
    return *train(lambda p: squared(p, x, y), p), 0.9 * p["w1"][:, 0] + 0.1 * x.mean(0)


# --- randomness -------------------------------------------------------------------------------------------------------


@program(X, Y, jax.random.PRNGKey(3))
def noise_from_a_raw_key(p, x, y, key):
    return train(lambda p: squared(p, x + 0.1 * jax.random.normal(key, x.shape), y), p)


@program(X, Y, jax.random.key(3))
def noise_with_the_batch_last(p, x, y, key):
    return train(lambda p: squared(p, x + 0.1 * jax.random.normal(key, (8, x.shape[0])).T, y), p)


@program(X, Y, jax.random.key(3))
def a_key_per_sample(p, x, y, key):
    noise = jax.vmap(lambda k: jax.random.normal(k, (8,)))(jax.random.split(key, x.shape[0]))
    return train(lambda p: squared(p, x + 0.1 * noise, y), p)


@program(X, Y, jax.random.key(3))
def a_key_per_position(p, x, y, key):
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (8,)))(jnp.arange(x.shape[0]))
    return train(lambda p: squared(p, x + 0.1 * noise, y), p)


@program(X, LABELS, jax.random.key(5))
def sampled_labels(p, x, labels, key):
    def loss(p):
        logits = forward(p, x)
        return -jnp.mean(picked(logits, labels)), jax.random.categorical(key, logits)

    return train_with_aux(loss, p)


@program(X, Y, jax.random.key(3, impl="rbg"))
def another_generator(p, x, y, key):
    return train(lambda p: squared(p, x + 0.1 * jax.random.normal(key, x.shape), y), p)


# --- structure --------------------------------------------------------------------------------------------------------


@program(SEQUENCE, Y)
def recurrence(p, xs, y):
    def loss(p):
        cell = lambda h, x: (jnp.tanh(x @ p["w1"] + h @ p["w2"]),) * 2  # noqa: E731
        h, states = jax.lax.scan(cell, jnp.zeros((xs.shape[0], 16)), xs.swapaxes(0, 1))
        return jnp.mean((h @ p["w3"] - y) ** 2), states

    return train_with_aux(loss, p)


@program(SEQUENCE, Y, jax.random.key(3))
def recurrence_with_dropout(p, xs, y, key):
    def loss(p):
        @jax.checkpoint
        def cell(carry, x):
            h, key = carry
            key, now = jax.random.split(key)
            h = jnp.tanh(x @ p["w1"] + h @ p["w2"])
            mask = jax.random.bernoulli(now, 0.5, h.shape)
            return (h * mask, key), mask

        (h, _), masks = jax.lax.scan(cell, (jnp.zeros((xs.shape[0], 16)), key), xs.swapaxes(0, 1))
        return jnp.mean((h @ p["w3"] - y) ** 2), masks

    return train_with_aux(loss, p)


@program(X, Y)
def layers_in_a_fori_loop(p, x, y):
    body = lambda p: lambda _, h: jnp.tanh(h @ p["w2"])  # noqa: E731
    return train(lambda p: jnp.mean((jax.lax.fori_loop(0, 3, body(p), x @ p["w1"]) @ p["w3"] - y) ** 2), p)


@program(X, Y)
def own_derivative(p, x, y):
    @jax.custom_vjp
    def wave(h):
        return jnp.sin(h)

    wave.defvjp(lambda h: (jnp.sin(h), h), lambda h, g: (2 * g * jnp.cos(h),))
    return train(lambda p: jnp.mean((wave(x @ p["w1"]) @ p["w2"] @ p["w3"] - y) ** 2), p)


@program(X, Y)
def jit_inside(p, x, y):
    return train(lambda p: jnp.mean((jax.jit(forward)(p, x) - y) ** 2), p)


@program(X, Y)
def fourier_transform(p, x, y):
    return train(lambda p: jnp.mean((jnp.abs(jnp.fft.fft(x @ p["w1"], axis=1)) @ p["w2"] @ p["w3"] - y) ** 2), p)


@program(X, Y)
def sorting_and_running_sums(p, x, y):
    return train(lambda p: jnp.mean((jnp.cumsum(jnp.sort(x @ p["w1"], 1), 1) @ p["w2"] @ p["w3"] - y) ** 2), p)


@program(LABELS, Y)
def embedding(p, tokens, y):
    return train(lambda p: jnp.mean((jnp.tanh(p["w1"][tokens]) @ p["w2"] @ p["w3"] - y) ** 2), p)


@program(X, LABELS)
def sums_by_label(p, x, labels):
    return train(lambda p: jnp.sum(jax.ops.segment_sum(forward(p, x), labels, 4) * jnp.ones((4, 4))), p)


@program(X.reshape(8, 2, 8), Y.reshape(8, 2, 4))
def two_rows_per_sample(p, x, y):
    return train(lambda p: squared(p, x.reshape(-1, 8), y.reshape(-1, 4)), p)


# --- no sums over samples ---------------------------------------------------------------------------------------------


@program(X, Y)
def totals_that_start_from_one(p, x, y):
    def loss(p):
        h = forward(p, x)
        total, _ = jax.lax.scan(lambda c, w: (c + jnp.mean((h - y) ** 2 * w[0]), None), 1.0, p["w2"])
        return total

    return train(loss, p)


@program(X, Y, refused=True)
def batch_norm(p, x, y):
    def loss(p):
        h = x @ p["w1"]
        h = h - h.mean(0)  # refused
        return jnp.mean((jnp.tanh(h) @ p["w2"] @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y)
def divided_by_the_number_of_masked(p, x, y):
    mask = (y[:, 0] > 0).astype(jnp.float32)
    count = jnp.sum(mask)
    return train(lambda p: jnp.sum(jnp.mean((forward(p, x) - y) ** 2, 1) * mask) / count, p)


@program(X, refused=True, batch_argnums=1)
def all_pairs(p, x):
    def loss(p):
        z = forward(p, x)
        return jnp.mean(jax.nn.logsumexp(z @ z.T, 1))  # refused

    return train(loss, p)


@program(X, Y, refused=True)
def square_root_of_the_mean(p, x, y):
    def loss(p):
        return jnp.sqrt(jnp.mean((forward(p, x) - y) ** 2))  # refused

    return train(loss, p)


@program(X, Y)
def largest_of_the_batch(p, x, y):
    out = lambda p: (squared(p, x, y), jnp.max(forward(p, x)))  # noqa: E731
    return train_with_aux(out, p)


@program(X, Y, refused=True)
def loss_after_the_update(p, x, y):
    new, loss = train(lambda p: squared(p, x, y), p)
    return new, loss, jnp.mean((jnp.tanh(x @ new["w1"]) @ new["w2"] @ new["w3"] - y) ** 2)  # refused


@program(X, Y)
def samples_in_reverse(p, x, y):
    return train(lambda p: squared(p, x[::-1], y), p)


@program(X, Y)
def first_sample_as_anchor(p, x, y):
    anchor = y[0]
    return train(lambda p: squared(p, x, anchor), p)


@program(X, refused=True)
def first_prediction_as_anchor(p, x):
    def loss(p):
        z = forward(p, x)
        return jnp.mean((z - z[0]) ** 2)  # refused

    return train(loss, p)


@program(X, Y, refused=True)
def divided_by_the_predictions(p, x, y):
    def loss(p):
        z = forward(p, x)
        weight = jnp.exp(-jnp.mean((z - y) ** 2, 1))
        return jnp.sum(jnp.mean((z - y) ** 2, 1) * weight) / jnp.sum(weight)  # refused

    return train(loss, p)


@program(X, Y, refused=True)
def running_sum_over_samples(p, x, y):
    return train(lambda p: jnp.mean((jnp.cumsum(forward(p, x), 0) - y) ** 2), p)  # refused


@program(X, Y)
def both_views_in_one_batch(p, x, y):
    return train(lambda p: squared(p, jnp.concatenate([x, 2 * x]), jnp.concatenate([y, y])), p)


@program(X, Y, jax.random.key(3))
def shuffled_samples(p, x, y, key):
    order = jax.random.permutation(key, x.shape[0])
    return train(lambda p: squared(p, x[order], y[order]), p)


@program(X, LABELS)
def rows_by_numpy_arange(p, x, labels):
    rows = np.arange(x.shape[0])
    return train(lambda p: -jnp.mean(jax.nn.log_softmax(forward(p, x))[rows, labels]), p)


@program(X, Y, refused=True)
def branch_by_a_mean(p, x, y):
    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        h = jax.lax.cond(jnp.mean(h**2) > 0.1, lambda h: jnp.tanh(h @ p["w2"]), lambda h: h, h)  # refused
        return jnp.mean((h @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y, refused=True)
def halved_until_the_mean_is_small(p, x, y):
    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        h = jax.lax.while_loop(lambda h: jnp.mean(h**2) > 0.01, lambda h: h / 2, jax.lax.stop_gradient(h))  # refused
        return jnp.mean((h @ p["w2"] @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y, 1, refused=True)
def sum_in_one_branch(p, x, y, flag):
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    size = jax.lax.cond(flag > 0, lambda x: jnp.sum(x**2), lambda x: jnp.float32(2.0), x)  # refused
    return descend(p, grads), loss, size


@program(X, Y, refused=True)
def printed_per_sample(p, x, y):
    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        jax.debug.callback(lambda h: None, h)  # refused
        return jnp.mean((h @ p["w2"] @ p["w3"] - y) ** 2)

    return train(loss, p)


@program(X, Y)
def halved_one_by_one(p, x, y):
    def halve(row):
        return jax.lax.while_loop(lambda r: jnp.sum(r**2) > 1, lambda r: r / 2, row)

    def loss(p):
        h = jnp.tanh(x @ p["w1"])
        return jnp.mean(((h + jax.lax.stop_gradient(jax.vmap(halve)(h))) @ p["w2"] @ p["w3"] - y) ** 2)

    return train(loss, p)
