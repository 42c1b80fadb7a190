"""Random small steps for each kind of transfer function: `DRAWS[kind](rng, B)` gives a function of parameters and data.

`p` is an array of 12 parameters, `x` data of shape [B, 2, 6] and `y` whole numbers of shape [B], below 6. What is drawn
works at any batch size, so that it can be traced at two. Data pass through the parameters first (`hidden`), so that
nothing of it can be computed before the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Fun = Callable[[Any, Any, Any], Any]
DRAWS: dict[str, Callable[[Random], Fun]] = {}
T, D = 2, 6


def draw(function: Callable[[Random], Fun]) -> Callable[[Random], Fun]:
    """Register a kind."""
    DRAWS[function.__name__] = function
    return function


def hidden(p: Any, x: Any) -> Any:
    """``[B, T, D] -> [B, T, D]``, which no one knows before the loop."""
    return jnp.tanh(x * p[:D])


def placed(rng: Random) -> tuple[Callable[[Any], Any], str]:
    """The hidden array with its dims in some order or merged, and how the samples lie in it."""
    ways: dict[str, Callable[[Any], Any]] = {
        "BTD": lambda h: h,
        "TBD": lambda h: h.transpose(1, 0, 2),
        "DTB": lambda h: h.transpose(2, 1, 0),
        "(BT)D": lambda h: h.reshape(-1, D),
        "(TB)D": lambda h: h.transpose(1, 0, 2).reshape(-1, D),
        "B(TD)": lambda h: h.reshape(-1, T * D),
        "(BTD)": lambda h: h.reshape(-1),
    }
    name = rng.choice(list(ways))
    return ways[name], name


@draw
def pointwise(rng: Random) -> Fun:
    way, _ = placed(rng)
    unary = rng.choice([jnp.sin, jnp.abs, lambda h: h**2, jnp.exp, lambda h: -h, lambda h: h.astype(jnp.bfloat16)])
    binary = rng.choice([jnp.add, jnp.multiply, jnp.maximum, jnp.subtract, lambda a, b: jnp.where(a > b, a, b)])
    return lambda p, x, y: binary(unary(way(hidden(p, x))).astype(jnp.float32), way(hidden(p[::-1], x)))


@draw
def reshapes(rng: Random) -> Fun:
    def fun(p: Any, x: Any, y: Any) -> Any:
        h = hidden(p, x)
        seeded = Random(seed)
        for _ in range(4):
            dims = list(h.shape)
            move = seeded.choice(["merge", "split", "transpose", "new"])
            d = seeded.randrange(h.ndim)
            if move == "merge" and h.ndim > 1:
                d = min(d, h.ndim - 2)
                h = h.reshape(*dims[:d], dims[d] * dims[d + 1], *dims[d + 2 :])
            elif move == "split":
                part = seeded.choice([n for n in (1, 2, 3) if dims[d] % n == 0])
                pair = seeded.choice([(part, dims[d] // part), (dims[d] // part, part)])
                h = h.reshape(*dims[:d], *pair, *dims[d + 1 :])
            elif move == "transpose":
                order = list(range(h.ndim))
                seeded.shuffle(order)
                h = h.transpose(order)
            else:
                h = jnp.expand_dims(h, d)
        return h

    seed = rng.random()
    return fun


@draw
def joins(rng: Random) -> Fun:
    way, _ = placed(rng)
    axis, kind = rng.randrange(3), rng.choice(["concatenate", "stack", "tile", "repeat", "ones", "longer"])

    def fun(p: Any, x: Any, y: Any) -> Any:
        a, b = way(hidden(p, x)), way(hidden(p[::-1], x))
        d = axis % a.ndim
        if kind == "tile":
            return jnp.tile(a, [2 if i == d else 1 for i in range(a.ndim)])
        if kind == "repeat":
            return jnp.repeat(a, 3, axis=d)
        if kind == "longer":  # runs of two lengths
            return jnp.concatenate([a, b.repeat(2, axis=d), jnp.ones_like(a)], axis=d)
        if kind == "ones":
            return jnp.concatenate([a, jnp.ones_like(b), b], axis=d)
        return (jnp.stack if kind == "stack" else jnp.concatenate)([a, b, a], axis=d)

    return fun


@draw
def cuts(rng: Random) -> Fun:
    way, _ = placed(rng)
    axis = rng.randrange(3)
    kind = rng.choice(["halves", "first", "strided", "of joined", "padded", "spread", "all but one", "split"])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = way(hidden(p, x))
        d = axis % h.ndim
        n = h.shape[d]
        if kind == "padded":
            return jnp.pad(h, [(n, 2 * n) if i == d else (0, 0) for i in range(h.ndim)])
        if kind == "spread":
            return lax.pad(h, jnp.float32(0), [(1, 0, 1) if i == d else (0, 0, 0) for i in range(h.ndim)])
        if kind == "of joined":
            whole = jnp.concatenate([h, 2 * h, 3 * h], axis=d)
            return lax.slice_in_dim(whole, n, 3 * n, axis=d), lax.slice_in_dim(whole, 0, n, axis=d)
        if kind == "split":
            return tuple(jnp.split(jnp.concatenate([h, 2 * h], axis=d), 2, axis=d))
        if kind == "halves":
            return lax.slice_in_dim(h, 0, max(n // 2, 1), axis=d), lax.slice_in_dim(h, n // 2, n, axis=d)
        stop = {"first": 1, "strided": n, "all but one": n - 1}[kind]
        return lax.slice_in_dim(h, 0, stop, stride=2 if kind == "strided" else 1, axis=d)

    return fun


@draw
def reductions(rng: Random) -> Fun:
    way, _ = placed(rng)
    over = [d for d in range(3) if rng.random() < 0.5]
    reduce = rng.choice([jnp.sum, jnp.max, jnp.min, jnp.mean, jnp.prod, jnp.any, jnp.all, jnp.argmax, jnp.var])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = way(hidden(p, x))
        h = h > 0 if reduce in (jnp.any, jnp.all) else h
        axes = sorted({d % h.ndim for d in over})
        return reduce(h, axis=axes[0] if axes else 0) if reduce is jnp.argmax else reduce(h, axis=tuple(axes))

    return fun


@draw
def products(rng: Random) -> Fun:
    spec = rng.choice(
        ["btd,btd->b", "btd,bte->de", "btd,bse->bts", "btd,cte->bce", "btd,de->bte", "btd,ate->ab", "btd,bsd->bts"]
    )

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = hidden(p, x)
        other = jnp.outer(p[:D], p[D:]) if spec.split(",")[1].startswith("de") else jnp.cos(h)
        return jnp.einsum(spec, h, other)

    return fun


@draw
def picks(rng: Random) -> Fun:
    def own(x: Any) -> Any:
        return jnp.arange(x.shape[0])

    table = rng.choice(
        ["embedding", "along", "own", "own column", "next", "diagonal", "of labels", "vmap", "sorted", "tokens"]
    )

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = hidden(p, x)[:, 0]
        i = own(x)
        return {
            "embedding": lambda: jnp.outer(p, p)[y],
            "along": lambda: jnp.take_along_axis(h, y[:, None], axis=1),
            "own": lambda: h[i],
            "own column": lambda: h[i, y],
            "next": lambda: h[i - 1],
            "diagonal": lambda: h[i % 2, i % D],
            "of labels": lambda: h[y % x.shape[0]],
            "vmap": lambda: jax.vmap(lambda row, label: row[label])(h, y),
            "sorted": lambda: jnp.sort(h, axis=1),
            "tokens": lambda: h[jnp.repeat(i, 3)] + h[jnp.tile(i, 3)],
        }[table]()

    return fun


@draw
def writes(rng: Random) -> Fun:
    name = rng.choice(
        [
            "counts",
            "to state",
            "own",
            "own add",
            "own max",
            "labels",
            "largest",
            "rows",
            "all rows",
            "first",
            "times",
            "tokens",
        ]
    )

    def fun(p: Any, x: Any, y: Any) -> Any:
        h, i = hidden(p, x)[:, 1], jnp.arange(x.shape[0])
        return {
            "counts": lambda: jnp.zeros(D).at[y].add(h[:, 0]),
            "to state": lambda: p[:D].at[y].add(h[:, 0]),
            "own": lambda: jnp.zeros_like(h).at[i, y].set(h[:, 2]),
            "own add": lambda: h.at[i, y].add(1.0),
            "own max": lambda: h.at[i].max(0.1),
            "labels": lambda: h.at[:, 2].set(h[:, 3]),
            "largest": lambda: p[:D].at[y].max(h[:, 0]),
            "rows": lambda: jnp.zeros((D, D)).at[y].add(h),
            "all rows": lambda: lax.dynamic_update_slice(h, h[:, :2], (0, 3)),
            "first": lambda: h.at[0].set(1.0),
            "times": lambda: p[:D].at[y].multiply(h[:, 0]),
            "tokens": lambda: jax.ops.segment_sum(hidden(p, x).reshape(-1, D), jnp.repeat(i, T), x.shape[0]),
        }[name]()

    return fun


@draw
def orders(rng: Random) -> Fun:
    way, _ = placed(rng)
    axis = rng.randrange(3)
    change = rng.choice([jnp.cumsum, jnp.sort, jnp.flip, lambda h, axis: jnp.roll(h, 1, axis), jnp.diff, jnp.argsort])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = way(hidden(p, x))
        return change(h, axis=axis % h.ndim)

    return fun


@draw
def convolutions(rng: Random) -> Fun:
    kind = rng.choice(["batch", "gradient", "per sample", "over samples"])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = hidden(p, x)
        kernel = jnp.outer(p[:T], p[2:8]).reshape(T, T, 3)

        def conv(rows: Any, kernel: Any) -> Any:
            return lax.conv_general_dilated(rows, kernel, (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"))

        if kind == "over samples":
            return conv(h.transpose(2, 1, 0), kernel)
        loss = lambda kernel, rows: jnp.sum(conv(rows, kernel) ** 2)  # noqa: E731
        if kind == "per sample":
            return jax.vmap(lambda row: jax.grad(loss)(kernel, row[None]))(h)
        return jax.grad(loss)(kernel, h) if kind == "gradient" else conv(h, kernel)

    return fun


@draw
def loops(rng: Random) -> Fun:
    kind = rng.choice(
        ["layers", "totals", "from one", "regularised", "time", "largest", "samples", "mean of samples", "map", "last"]
    )

    def fun(p: Any, x: Any, y: Any) -> Any:
        h, layers = hidden(p, x), p.reshape(3, 4)

        def scan(body: Callable[..., Any], start: Any, xs: Any) -> Any:
            return lax.scan(body, start, xs)

        def layer(c: Any, w: Any) -> Any:
            c = jnp.tanh(c * w[0] + w[1])
            return c, (jnp.sum(w**2), jnp.sum(c), jnp.max(c), c[:, 0, 0])

        return {
            "layers": lambda: scan(layer, h, layers),
            "totals": lambda: scan(lambda c, w: (c + jnp.sum(h * w[0]), c), 0.0, layers),
            "from one": lambda: scan(lambda c, w: (c + jnp.sum(h * w[0]) + w[1], None), 1.0, layers),
            "regularised": lambda: jax.grad(lambda q: sum(map(jnp.sum, scan(layer, h, q)[1])))(layers),
            "time": lambda: scan(lambda c, row: (jnp.tanh(c + row), c), jnp.zeros_like(h[:, 0]), h.transpose(1, 0, 2)),
            "largest": lambda: scan(lambda c, row: (jnp.maximum(c, row), row[0]), h[0] * 0.0, h),
            "samples": lambda: scan(lambda c, row: (c + row, row * 2), jnp.ones((T, D)), h),
            "mean of samples": lambda: scan(lambda c, row: (0.9 * c + row, None), jnp.zeros((T, D)), h),
            "map": lambda: lax.map(lambda row: jnp.tanh(row) * p[0], h),
            "last": lambda: scan(lambda c, row: (row, c), jnp.zeros((T, D)), h),
        }[kind]()

    return fun


@draw
def branches(rng: Random) -> Fun:
    kind = rng.choice(["state decides", "sums", "data decide", "one by one", "to a bound", "in step", "counting"])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = hidden(p, x)

        def halved(row: Any) -> Any:
            return row * jnp.clip(p[3], 0.3, 0.6)

        def halve(row: Any) -> Any:
            return lax.while_loop(lambda r: jnp.sum(r**2) > 0.5, lambda r: r / 2, row)

        return {
            "state decides": lambda: lax.cond(p[0] > 0, jnp.sin, jnp.cos, h),
            "sums": lambda: lax.cond(p[0] > 0, jnp.sum, lambda h: jnp.zeros(()), h),
            "data decide": lambda: lax.cond(jnp.mean(h) > 0, jnp.sin, jnp.cos, h),
            "one by one": lambda: jax.vmap(halve)(lax.stop_gradient(h)),
            "to a bound": lambda: jax.vmap(
                lambda row: lax.while_loop(lambda r: jnp.sum(r**2) > p[2] ** 2 + 0.1, halved, row)
            )(lax.stop_gradient(h)),
            "in step": lambda: lax.while_loop(lambda c: c[0] < p[1] + 3, lambda c: (c[0] + 1, c[1] / 2), (0.0, h)),
            "counting": lambda: lax.fori_loop(0, x.shape[0], lambda i, c: c * 1.1 + p[0], 1.0) + jnp.sum(h),
        }[kind]()

    return fun


@draw
def sources(rng: Random) -> Fun:
    kind = rng.choice(["positions", "noise", "keys", "linspace", "eye", "gamma", "permutation", "ones"])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h, key = hidden(p, x)[:, 0], jax.random.key(3)
        b = x.shape[0]
        return {
            "positions": lambda: h * jnp.arange(b)[:, None] + jnp.arange(D),
            "noise": lambda: h * jax.random.normal(key, h.shape),
            "keys": lambda: jax.vmap(lambda k, row: row * jax.random.normal(k, row.shape))(jax.random.split(key, b), h),
            "linspace": lambda: h * jnp.linspace(0.0, 1.0, b)[:, None],
            "eye": lambda: h @ jnp.eye(D),
            "gamma": lambda: h * jax.random.gamma(key, 2.0, h.shape),
            "permutation": lambda: h * jax.random.permutation(key, b)[:, None],
            "ones": lambda: jnp.sum(h) / jnp.sum(jnp.ones(b)),
        }[kind]()

    return fun


@draw
def algebra(rng: Random) -> Fun:
    kind = rng.choice(["solve", "cholesky", "triangular", "right", "inverse", "fft", "top", "cumulated"])

    def fun(p: Any, x: Any, y: Any) -> Any:
        h = hidden(p, x)
        square = h @ h.transpose(0, 2, 1) + 2 * jnp.eye(T)
        return {
            "solve": lambda: jnp.linalg.solve(square, h),
            "cholesky": lambda: jnp.linalg.cholesky(square),
            "triangular": lambda: lax.linalg.triangular_solve(square, h, left_side=True, lower=True),
            "right": lambda: lax.linalg.triangular_solve(jnp.eye(D) + jnp.outer(p[:D], p[D:]), h[:, 0], lower=True),
            "inverse": lambda: jnp.linalg.inv(square),
            "fft": lambda: jnp.abs(jnp.fft.fft(h)),
            "top": lambda: lax.top_k(h, 2),
            "cumulated": lambda: lax.cumlogsumexp(h, 2),
        }[kind]()

    return fun
