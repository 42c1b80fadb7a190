"""Memory by choice: gathered copies, results before they are scattered, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.liveness import lives_of
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.planners import FSDP, DataParallel, Megatron, Planner, Zero
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from cost_models.composed import ComposedCostModel

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


def test_a_trip_gathers_a_weight_once_for_all_that_read_it() -> None:
    """The loop of the backward pass reads it three times: to recompute a product, and for two gradients."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return jnp.einsum("bo,io->bi", jnp.tanh(h @ w), w), None

    def step(stack: Any, x: Any) -> Any:
        def loss(stack: Any) -> Any:
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, stack)[0] ** 2)

        return stack - 0.1 * jax.grad(loss)(stack)

    shapes = (LAYERS, HIDDEN, 2 * HIDDEN), (BATCH, HIDDEN)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = al.parallelize(step, batch_argnums=(1,)).trace(*arrays).step(1).step
    view = StageView(step=traced, layers=make_layers(traced, 1), first=0, last=0)
    pricer = Pricer(
        cost_model=ComposedCostModel(al.cluster("p3.16xlarge", num_hosts=1)),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
        mesh=LogicalMesh(axis_names=("x",), shape=(8,)),
    )
    sharded = Restriction(roles={"x": AxisRole.BATCH}, optimizer=BatchSplit.MUST, parameters=BatchSplit.MUST)
    builder = Builder(view, Catalogue(pricer, sharded))
    spans = lives_of(view, KernelModel.of(pricer.cost_model, 8)).spans
    usages = builder.usages(1)
    loops = [op for op in view.graph.ops if op.bodies]
    for loop, num_readers in zip(loops, (2, 3), strict=True):
        (body,) = loop.bodies
        scope = next(i for i, each in enumerate(builder.scopes) if each.graph is body)
        products = [op for op in body.ops if op.primitive == "dot_general"]
        (weight,) = {v for op in products for v in op.operands if body.values[v].shape == (HIDDEN, 2 * HIDDEN)}
        readers = [spans[((loop.id, 0),), op.id] for op in products if weight in op.operands]
        (copy,) = (usage for usage in usages if usage.value == (scope, weight) and max(usage.sizes) == 2 * WEIGHT_BYTES)
        assert len(readers) == num_readers
        assert copy.start <= min(span.start for span in readers) and copy.end == max(span.end for span in readers)
