"""Memory by choice: gathered copies, results before they are scattered, gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planners import FSDP, DataParallel, Planner, Zero

HIDDEN, LAYERS, BATCH = 256, 4, 16
WEIGHT_BYTES = 4 * HIDDEN * HIDDEN


def step(batch: Any, weights: Any, moments: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = batch
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    grads = jax.grad(loss)(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments


def plan(planner: Planner, *, num_microbatches: int = 1) -> al.Plan:
    weights = [jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((BATCH, HIDDEN), jnp.float32)
    cluster = al.cluster("p3.16xlarge", num_hosts=1)
    return al.plan(
        step, batch, weights, weights, cluster=cluster, planner=planner, num_microbatches=num_microbatches,
        batch_argnums=(0,),
    )  # fmt: skip


def stage(planner: Planner, **options: int) -> Any:
    (found,) = plan(planner, **options).stages
    return found


ACTIVATION_BYTES = BATCH // 8 * HIDDEN * 4


def test_gradients_count_until_the_update_reads_them() -> None:
    found = stage(DataParallel())
    assert found.cost.state_bytes == 2 * LAYERS * WEIGHT_BYTES
    extra = found.cost.temporary_bytes + found.cost.activation_bytes
    assert LAYERS * WEIGHT_BYTES <= extra <= LAYERS * WEIGHT_BYTES + 3 * LAYERS * ACTIVATION_BYTES


def test_sums_of_micro_batches_take_their_place() -> None:
    found = stage(DataParallel(), num_microbatches=2)
    assert found.cost.accumulator_bytes == LAYERS * WEIGHT_BYTES
    assert found.cost.temporary_bytes + found.cost.activation_bytes < 2 * WEIGHT_BYTES


def test_weights_that_lie_in_parts_are_gathered_one_at_a_time() -> None:
    found = stage(FSDP())
    assert found.cost.state_bytes == 2 * LAYERS * WEIGHT_BYTES / 8
    extra = found.cost.temporary_bytes + found.cost.activation_bytes
    assert extra >= WEIGHT_BYTES  # one gathered weight
    # A gathered weight, a gradient before it is scattered, and gradients in parts.
    assert extra <= 2 * WEIGHT_BYTES + LAYERS * WEIGHT_BYTES / 8 + 4 * LAYERS * ACTIVATION_BYTES


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_each_zero_stage_takes_less(num_microbatches: int) -> None:
    planners = (DataParallel(), Zero(stage=2), FSDP())
    peaks = [plan(p, num_microbatches=num_microbatches).prediction.peak_bytes[0] for p in planners]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
