"""Measure how long a step takes on the devices of this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.lower.instructions import TaskTime
from alpa_lite.runtime.execute.execute import Executor

Inputs = Callable[[Sequence[Any]], list[Any]]

NUM_STEPS = 3
"""Number of steps run to measure one."""


def step_seconds(executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs) -> float:
    """Return the median time of a few steps on arguments of zeros, in seconds, without the time to place the arguments.

    `shapes`: of the arguments; `inputs`: maps the arguments to all inputs of the step.
    """
    seconds = [_seconds_once(executor, shapes, inputs) for _ in range(1 + NUM_STEPS)]
    return statistics.median(seconds[1:])  # the first step includes remaining compilation


def _seconds_once(executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs) -> float:
    leaves = jax.block_until_ready(executor.place_inputs([*map(_zeros, shapes)]))
    started = time.perf_counter()
    jax.block_until_ready(executor(inputs(leaves)))
    return time.perf_counter() - started


def _zeros(like: jax.ShapeDtypeStruct) -> Any:
    """Return an array of zeros on the host, or of PRNG keys, of a shape and dtype."""
    if not jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        return np.zeros(like.shape, like.dtype)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
    implementation = _jax.key_implementation(_jax.name_of(like.dtype))
    return jax.random.wrap_key_data(jax.numpy.zeros(words.shape, words.dtype), impl=implementation)


def typical_times(
    executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs, *, awaited: bool
) -> tuple[TaskTime, ...]:
    """Return the spans of the instructions of the step with the median length, of a few steps on arguments of zeros.

    `awaited`: see `Executor.__call__`.
    """
    steps: list[list[TaskTime]] = []
    for _ in range(1 + NUM_STEPS):
        record: list[TaskTime] = []
        leaves = jax.block_until_ready(executor.place_inputs([*map(_zeros, shapes)]))
        executor(inputs(leaves), record, awaited=awaited)
        steps.append(record)
    return tuple(sorted(steps[1:], key=_length)[NUM_STEPS // 2])


def _length(record: Sequence[TaskTime]) -> float:
    return max(span.end_seconds for span in record)
