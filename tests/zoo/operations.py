"""A small network with one rarely used operation in its middle, as users reach for them now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.network import X, Y, init
from tests.zoo.registry import BATCH, Program, descend, integers, register

CHOICE = integers(8, BATCH, seed=3)


def around(operation: Callable[..., Any]) -> Program:
    """A program whose hidden features `[batch, 16]` go through an operation that keeps their shape."""

    def step(params, x, y, choice):
        def loss_fn(params):
            h = jnp.tanh(x @ params["a"])
            h = operation(h, params["b"], choice)
            return jnp.mean((jnp.tanh(h @ params["b"]) @ params["c"] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads, 0.05), {"loss": loss}

    return Program(step=step, state=init(), inputs=(X, Y, CHOICE))


def _orthogonal(h, w, choice):
    return h @ jnp.linalg.qr(w + 4 * jnp.eye(16))[0]


def _low_rank(h, w, choice):
    u, s, vt = jnp.linalg.svd(w + jnp.diag(jnp.arange(16.0)), full_matrices=False)
    return h @ (u * jnp.minimum(s, 5.0)) @ vt * 0.1


def _triangular(h, w, choice):
    return jax.scipy.linalg.solve_triangular(w + 4 * jnp.eye(16), h.T, lower=True).T


def _per_sample_matrix(h, w, choice):
    gram = h[:, :, None] * h[:, None, :] + jnp.eye(16)
    return jnp.linalg.solve(gram, h[..., None])[..., 0] + jnp.linalg.slogdet(gram)[1][:, None]


def _conjugate_gradient(h, w, choice):
    return jax.scipy.sparse.linalg.cg(lambda v: v @ (w @ w.T + jnp.eye(16)), h, maxiter=8)[0]


def _table(h, w, choice):
    return jnp.interp(h, jnp.linspace(-1, 1, 9), jnp.sin(jnp.linspace(-2, 2, 9)) + w[0, :9])


def _buckets(h, w, choice):
    return h + w[jnp.searchsorted(jnp.linspace(-1, 1, 8), h[:, 0])]


def _digits(h, w, choice):
    return h * jnp.bincount(choice, length=8)[choice][:, None] / 4.0


def _window_of_each_sample(h, w, choice):
    part = jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i,), (8,)))(h, choice)
    return jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice(row, new, (i,)))(h, 2 * part, choice)


def _rolled(h, w, choice):
    return jax.vmap(jnp.roll)(h, choice) + jnp.roll(h, 3, axis=1)


def _scattered(h, w, choice):
    rows = jnp.arange(h.shape[0])
    return h.at[rows, choice].multiply(2.0).at[rows, choice + 8].max(0.1).at[:, 3].add(1.0)


def _scattered_over_ranges_of_dims(h, w, choice):
    """JAX takes any sequence for the dims of a scatter."""
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=range(1), inserted_window_dims=range(1, 2), scatter_dims_to_operand_dims=range(1, 2)
    )
    return jax.lax.scatter_add(h, jnp.array([[1], [3], [1]]), h[:, :3] * 2, numbers)


def _largest(h, w, choice):
    best, where = jax.lax.top_k(h, 4)
    return jnp.zeros_like(h).at[jnp.arange(h.shape[0])[:, None], where].set(best)


def _median(h, w, choice):
    return h - jnp.median(h, axis=1, keepdims=True) + jnp.percentile(h, 30, axis=1, keepdims=True)


def _ranks(h, w, choice):
    order = jnp.argsort(h, axis=1)
    return jnp.take_along_axis(h, order[:, ::-1], axis=1) * jnp.argsort(order, axis=1) / 16


def _running(h, w, choice):
    return jnp.cumsum(h, 1) * 0.1 + jax.lax.cummax(h, axis=1) + jnp.cumprod(1 + 0.1 * h, axis=1) + _log_running(h)


def _log_running(h):
    return jax.lax.cumlogsumexp(h, axis=1, reverse=True)


def _frequencies(h, w, choice):
    return jnp.fft.irfft(jnp.fft.rfft(h) * (1 + 1j * w[0, :9]), n=16)


def _windows(h, w, choice):
    folded = h.reshape(-1, 4, 4, 1)
    pooled = jax.lax.reduce_window(folded, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return (pooled + jax.lax.reduce_window(folded, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")).reshape(
        h.shape
    )


def _dilated(h, w, choice):
    kernel = w[:3, :4].reshape(3, 2, 2)
    image = h.reshape(-1, 8, 2)
    layout = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        image, kernel, (1,), "SAME", rhs_dilation=(2,), dimension_numbers=layout
    ).reshape(h.shape)


def _folded(h, w, choice):
    patches = jax.lax.conv_general_dilated_patches(h.reshape(-1, 1, 4, 4), (3, 3), (1, 1), "SAME")
    return patches.sum(1).reshape(h.shape)


def _mapped(h, w, choice):
    return jax.lax.map(lambda row: jnp.tanh(row @ w), h, batch_size=4)


def _one_by_one(h, w, choice):
    return jax.lax.map(lambda row: jnp.where(row.sum() > 0, row @ w, -row), h)


def _scan_of_scans(h, w, choice):
    def outer(carry, _):
        inner = lambda c, i: (jnp.tanh(c + 0.1 * jnp.roll(c, 1, 1)), c.mean(1) * i)  # noqa: E731
        carry, means = jax.lax.scan(inner, carry, jnp.arange(2.0))
        return carry @ w, means

    carry, means = jax.lax.scan(outer, h, None, length=2)
    return carry + means.sum((0, 1))[:, None]


def _branch_in_scan(h, w, choice):
    def body(carry, i):
        kinds = [lambda c: c @ w, jnp.tanh, lambda c: c * i]
        return jax.lax.switch(i % 3, kinds, carry), None

    return jax.lax.scan(body, h, jnp.arange(4))[0]


def _branch_of_each_sample(h, w, choice):
    kinds = [lambda r: jnp.tanh(r @ w), lambda r: r * 2, lambda r: jnp.cumsum(r)]
    return jax.vmap(lambda row, i: jax.lax.switch(i % 3, kinds, row))(h, choice)


def _while_of_each_sample(h, w, choice):
    halve = lambda row: jax.lax.while_loop(lambda r: jnp.sum(r**2) > 1, lambda r: r / 2, row)  # noqa: E731
    return h + jax.lax.stop_gradient(jax.vmap(halve)(h)) @ w


def _own_reduction(h, w, choice):
    larger = lambda a, b: jnp.where(jnp.abs(a) > jnp.abs(b), a, b)  # noqa: E731
    return h + jax.lax.stop_gradient(jax.lax.reduce(h, jnp.float32(0), larger, (1,)))[:, None]


def _bits(h, w, choice):
    raw = jax.lax.bitcast_convert_type(h, jnp.int32) & jnp.int32(~0xFFF)
    cut = jax.lax.bitcast_convert_type(raw, jnp.float32)
    return h + jax.lax.stop_gradient(cut - h) * 0 + jax.lax.population_count(choice)[:, None] / 8


def _special(h, w, choice):
    p = jnp.clip((h + 1) / 2, 0.1, 0.9)
    return jax.scipy.special.erfinv(h * 0.5) + jax.scipy.special.gammaln(1 + p) + jax.scipy.special.ndtri(p) * 0.1


def _expectation(h, w, choice):
    key = jax.random.key(0)
    draws = [jax.random.gumbel(key, h.shape), jax.random.truncated_normal(key, -1, 1, h.shape)]
    return h + 0.1 * sum(draws) + 0.1 * jax.random.gamma(key, 2.0, h.shape) + jax.random.permutation(key, 16) / 16


def _outer_product_of_means(h, w, choice):
    grouped = h.reshape(-1, 4, 4)
    return jnp.einsum("bij,bkj->bik", grouped, grouped).reshape(h.shape) + jnp.kron(w[:4, :4], jnp.ones((4, 4)))[0]


def _blocks(h, w, choice):
    parts = jnp.split(h, [4, 6, 12], axis=1)
    return jnp.concatenate(
        [jax.nn.softmax(parts[0]), parts[1] * 2, jnp.flip(parts[2], 1), jnp.tril(w)[:4, 0] + parts[3]], 1
    )


def _padded(h, w, choice):
    return jnp.pad(h, ((0, 0), (2, 2)), mode="reflect")[:, 1:-3] + jax.lax.pad(h[:, ::2], 0.0, ((0, 0, 0), (1, 0, 1)))


def _unrolled_while(h, w, choice):
    count = jnp.minimum(jnp.sum(choice) % 4, 3)
    return jax.lax.stop_gradient(jax.lax.fori_loop(0, count, lambda i, v: jnp.tanh(v @ w), h)) + h


def _no_result(h, w, choice):
    return h + jnp.zeros((h.shape[0], 0)).sum(1, keepdims=True) + jnp.concatenate([h[:, :0], h], 1)


for _function in [value for key, value in list(globals().items()) if key.startswith("_") and key[1:2].islower()]:
    if callable(_function) and _function is not _log_running:
        register(f"operation{_function.__name__}", lambda f=_function: around(f))
