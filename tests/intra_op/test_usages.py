"""Memory by choice: gathered copies, results before they are scattered, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planners import FSDP, DataParallel, Megatron, Planner, Zero

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


def plan(planner: Planner, *, num_microbatches: int = 1, virtual: bool = False) -> al.Plan:
    weights = [jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((BATCH, HIDDEN), jnp.float32)
    cluster = replace(al.cluster("p3.16xlarge", num_hosts=1), shared_processor=virtual)
    return al.plan(
        step, batch, weights, weights, cluster=cluster, planner=planner, num_microbatches=num_microbatches,
        batch_argnums=(0,),
    )  # fmt: skip


def stage(planner: Planner, **options: Any) -> Any:
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


def test_weights_that_lie_in_parts_are_gathered_while_the_one_before_is_read() -> None:
    found = stage(FSDP())
    assert found.cost.state_bytes == 2 * LAYERS * WEIGHT_BYTES / 8
    extra = found.cost.temporary_bytes + found.cost.activation_bytes
    assert extra >= 2 * WEIGHT_BYTES  # as many as the program gathers at a time
    # These, a gradient before it is scattered, and gradients in parts.
    assert extra <= 3 * WEIGHT_BYTES + LAYERS * WEIGHT_BYTES / 8 + 4 * LAYERS * ACTIVATION_BYTES


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_each_zero_stage_takes_less(num_microbatches: int) -> None:
    planners = (DataParallel(), Zero(stage=2), FSDP())
    peaks = [plan(p, num_microbatches=num_microbatches).prediction.peak_bytes[0] for p in planners]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_virtual_devices_need_memory_for_the_sums_of_gradients_twice(num_microbatches: int) -> None:
    """XLA's CPU backend does not reduce in place, and combines the all_reduces of all gradients."""
    found = plan(DataParallel(), num_microbatches=num_microbatches, virtual=True)
    # Weights, moments, and gradients before and after they are reduced.
    expected = 4 * LAYERS * WEIGHT_BYTES
    assert expected <= found.prediction.peak_bytes[0] <= expected + 3 * LAYERS * ACTIVATION_BYTES


def test_virtual_devices_scatter_gradients_as_others_do() -> None:
    peaks = [plan(FSDP(), virtual=virtual).prediction.peak_bytes[0] for virtual in (True, False)]
    # Gathers and reduce_scatters have results of their own everywhere.
    assert peaks[0] <= peaks[1] + WEIGHT_BYTES


def test_virtual_devices_need_memory_for_activations_before_they_are_reduced() -> None:
    peaks = [plan(Megatron(), virtual=virtual).prediction.peak_bytes[0] for virtual in (True, False)]
    assert peaks[0] > peaks[1]
