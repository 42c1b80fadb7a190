"""Planning takes linear time and a bounded stack, however long the chains of a program are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al

FRAMES = 120
"""More than planning nests calls, fewer than the programs below have ops in a row."""


@contextmanager
def few_frames() -> Iterator[None]:
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(usual)


def clipped_by_the_norm_of_many_arrays(weights: list[Any], batch: Any) -> tuple[list[Any], Any]:
    def loss(weights: list[Any]) -> Any:
        return sum(jnp.mean((batch @ weight) ** 2) for weight in weights)

    value, slopes = jax.value_and_grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(slope**2) for slope in slopes))
    return [w - 0.1 * s / jnp.maximum(norm, 1.0) for w, s in zip(weights, slopes, strict=True)], value


def read_twice_by_each_line(weights: list[Any], batch: Any, times: Any) -> tuple[list[Any], Any]:
    def loss(weights: list[Any]) -> Any:
        first, second = times[0], times[1]
        for _ in range(60):
            first, second = jnp.sin(first) + first, jnp.cos(second) + second
        return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1] * first * second) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * s for w, s in zip(weights, slopes, strict=True)], value


@pytest.mark.parametrize(
    "planner", [al.planners.DataParallel(), al.planners.FSDP(), al.planners.Pipeline(pipeline=2)], ids=str
)
@pytest.mark.parametrize("vectorised", [False, True])
def test_many_arrays_under_one_norm(planner: Any, vectorised: bool) -> None:
    step, shape = clipped_by_the_norm_of_many_arrays, (16, 16)
    step, shape = (jax.vmap(step, (0, None)), (2, *shape)) if vectorised else (step, shape)
    weights = [jax.ShapeDtypeStruct(shape, "float32")] * 150
    traced = al.parallelize(step).trace(weights, jax.ShapeDtypeStruct((64, 16), "float32"))
    with few_frames():
        plan = traced.plan(cluster="p3.16xlarge", planner=planner, num_microbatches=1, cache=False).last_plan
    assert len(plan.stages[0].specs) > 1


def test_values_that_each_line_reads_twice() -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    batch, times = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((2,), "float32")
    traced = al.parallelize(read_twice_by_each_line, batch_argnums=1).trace(weights, batch, times)
    # A walk over all paths through the sixty lines would not end.
    with few_frames():
        assert traced.plan(cluster="p3.16xlarge", planner=al.planners.Auto(), cache=False).last_plan.stages
