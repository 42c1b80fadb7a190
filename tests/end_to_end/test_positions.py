"""Positions in the batch: steps that read them per sample run in micro-batches, arrays over pairs of samples do not.

The oracle is `jax.jit`; what is refused must run in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import NonAdditiveError

RNG = np.random.default_rng(0)
WEIGHTS = (RNG.normal(size=(8, 8)) / 3).astype(np.float32)
BATCH = RNG.normal(size=(16, 8)).astype(np.float32)


def _logits(w: Any, x: Any) -> Any:
    h = x @ w
    h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
    return jax.nn.log_softmax(h @ h.T)


def _gram(w: Any, x: Any) -> Any:
    return (x @ w) @ (x @ w).T


def _numbers(x: Any) -> Any:
    return jnp.arange(len(x))


PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "eye": lambda w, x: -jnp.mean(jnp.sum(jnp.eye(len(x)) * _logits(w, x), -1)),
    "diagonal": lambda w, x: -jnp.mean(jnp.diagonal(_logits(w, x))),
    "one_hot": lambda w, x: -jnp.mean(jnp.sum(jax.nn.one_hot(_numbers(x), len(x)) * _logits(w, x), -1)),
    "comparison": lambda w, x: jnp.mean(jnp.where(_numbers(x)[:, None] == _numbers(x), 0.0, _gram(w, x))),
    "lower triangle": lambda w, x: jnp.sum(jnp.tril(_gram(w, x))),
    "off the diagonal": lambda w, x: jnp.sum(_gram(w, x) * (1 - jnp.eye(len(x)))),
    "trace": lambda w, x: jnp.trace(_gram(w, x)),
    "same class": lambda w, x: jnp.mean((jnp.argmax(x, 1)[:, None] == jnp.argmax(x, 1)) * _gram(w, x)),
    "labels": lambda w, x: -jnp.mean(jnp.take_along_axis(_logits(w, x), _numbers(x)[:, None], 1)),
}

OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "next sample": lambda w, x: jnp.mean((x @ w)[(_numbers(x) + 1) % len(x)] * x),
    "from the end": lambda w, x: jnp.mean((x @ w)[len(x) - 1 - _numbers(x)] * x),
    "segments": lambda w, x: jnp.mean(jax.ops.segment_sum(x @ w, _numbers(x) // 2, len(x) // 2) ** 2),
}

PER_SAMPLE: dict[str, Callable[[Any, Any], Any]] = {
    "own class": lambda w, x: jnp.mean(jax.nn.log_softmax(x @ w)[_numbers(x), jnp.argmax(x, -1)]),
    "weights": lambda w, x: jnp.mean(_numbers(x)[:, None] * (x @ w)),
    "embedding": lambda w, x: jnp.mean(w[_numbers(x) % 8] * (x @ w)),
    "classes": lambda w, x: jnp.mean(jnp.eye(8)[jnp.argmax(x, 1)] * jax.nn.log_softmax(x @ w)),
    "pairs of data": lambda w, x: jnp.mean(jnp.sum((x @ x.T) * (1 - jnp.eye(len(x))), 1) * jnp.sum(x @ w, 1)),
}


def _step(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def step(w: Any, x: Any) -> Any:
        value, slope = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * slope, value

    return step


def _check(loss: Callable[[Any, Any], Any], num_microbatches: int) -> None:
    step = _step(loss)
    parallel = al.parallelize(step, cluster="p3.16xlarge", num_microbatches=num_microbatches, **OPTIONS)
    for got, want in zip(parallel(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


OPTIONS: dict[str, Any] = {"planner": al.planners.Megatron(tensor=8), "cache": False}


@pytest.mark.parametrize("name", PAIRS)
def test_arrays_over_pairs_of_samples_are_refused(name: str, devices: Any) -> None:
    step = _step(PAIRS[name])
    with pytest.raises(NonAdditiveError, match=r"test_positions\.py.*pairs of samples.*num_microbatches=1"):
        al.plan(step, WEIGHTS, BATCH, cluster="p3.16xlarge", num_microbatches=2, **OPTIONS)
    _check(PAIRS[name], 1)


@pytest.mark.parametrize("name", OTHERS)
def test_samples_that_read_others_are_refused(name: str, devices: Any) -> None:
    with pytest.raises(NonAdditiveError, match=r"test_positions\.py.*(by computed numbers|by their numbers)"):
        al.plan(_step(OTHERS[name]), WEIGHTS, BATCH, cluster="p3.16xlarge", num_microbatches=2, **OPTIONS)
    _check(OTHERS[name], 1)


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_positions_that_are_read_per_sample_are_exact(name: str, devices: Any) -> None:
    _check(PER_SAMPLE[name], 4)


def _drawn(seed: int) -> Callable[[Any, Any], Any]:
    """Return a loss with a random function of the positions, compared, weighted or masked by random numbers."""
    draw = np.random.default_rng(seed)
    few, many = int(draw.integers(1, 6)), int(draw.integers(0, 16))
    moved: Callable[[Any], Any] = [
        lambda n: n,
        lambda n: n % few,
        lambda n: n // few,
        lambda n: n[::-1],
        lambda n: jnp.cumsum(n),
        lambda n: jnp.roll(n, few),
        lambda n: n * few - many,
    ][draw.integers(7)]
    used: Callable[[Any], Any] = [
        lambda n: n,
        lambda n: n == many,
        lambda n: n < many,
        lambda n: n != jnp.max(n),
        lambda n: jax.nn.one_hot(n, 8),
        lambda n: jnp.sin(n),
        lambda n: jnp.eye(16)[n % 16, :8],
    ][draw.integers(7)]

    def loss(w: Any, x: Any) -> Any:
        weight = jnp.asarray(used(moved(_numbers(x))), jnp.float32)
        return jnp.mean((weight if weight.ndim == 2 else weight[:, None]) * jnp.tanh(x @ w))

    return loss


@pytest.mark.parametrize("seed", range(24))
def test_drawn_functions_of_positions_are_exact_or_refused(seed: int, devices: Any) -> None:
    try:
        _check(_drawn(seed), 4)
    except NonAdditiveError as error:
        assert "test_positions.py" in str(error)
        _check(_drawn(seed), 1)
