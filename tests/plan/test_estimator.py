"""Prices of tasks: additions to sums over micro-batches, and arrays that one message carries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.plan.pricing import Pricer
from alpa_lite.planners import FSDP, DataParallel, Planner
from alpa_lite.program.ir import Graph
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.trace.from_jaxpr import from_jaxpr
from cost_models import Backend, Cluster, load_cluster
from cost_models.composed import ComposedCostModel

CLUSTER = load_cluster("dgx-a100")
DEVICE = CLUSTER.device
WIDTH, LAYERS = 512, 3
BLOCK = 4.0 * WIDTH * WIDTH


def _pricer(cluster: Cluster = CLUSTER, backend: Backend | None = None) -> Pricer:
    return Pricer(
        cost_model=ComposedCostModel(cluster, backend or Backend()),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
        mesh=LogicalMesh(axis_names=("x",), shape=(8,)),
    )


def _graph(function: Any, *shapes: tuple[int, ...]) -> Graph:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return from_jaxpr(jax.make_jaxpr(function)(*args), [f"arg{i}" for i in range(len(args))]).graph


def _scanned(xs: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total, x @ x), 0.0, xs)[1]


@pytest.mark.parametrize(
    ("function", "shapes", "fused"),
    [
        (jnp.matmul, [(8, 8), (8, 8)], True),
        (lambda x, y: jnp.matmul(x, y).T, [(8, 8), (8, 8)], True),
        (lambda x: jnp.exp(x) * 2, [(8, 8)], True),
        (_scanned, [(3, 8, 8)], False),
        (lambda x: jnp.sort(x, axis=0), [(8, 8)], False),
    ],
    ids=["product", "transposed product", "element-wise", "loop", "sort"],
)
def test_kernels_add_what_they_make_where_a_compiler_lets_them(function: Any, shapes: Any, fused: bool) -> None:
    graph = _graph(function, *shapes)
    (made,) = graph.outputs
    assert _pricer().fuses_additions(graph, made) is fused
    assert not _pricer(backend=Backend(fusion="calls")).fuses_additions(graph, made)
    # XLA's products on CPUs are calls of a library.
    assert not _pricer(replace(CLUSTER, shared_processor=True)).fuses_additions(graph, made)


def test_an_addition_reads_the_sum_and_beside_a_kernel_of_its_own_the_part_too() -> None:
    graph, pricer = _graph(jnp.matmul, (WIDTH, WIDTH), (WIDTH, WIDTH)), _pricer()
    part, rate = graph.values[graph.outputs[0]], DEVICE.memory_efficiency * DEVICE.memory_bandwidth
    for spec, parts in ((Spec(((), ())), 1), (Spec((("x",), ())), 8), (Spec(((), ()), ("x",)), 1)):
        block = BLOCK / parts
        assert pricer.addition_seconds(part, spec, fused=True) == pytest.approx(block / rate)
        alone = DEVICE.launch_seconds + 3 * block / rate
        assert pricer.addition_seconds(part, spec, fused=False) == pytest.approx(alone)


def test_scalars_are_added_at_no_cost() -> None:
    graph = _graph(jnp.sum, (8, 8))
    assert _pricer().addition_seconds(graph.values[graph.outputs[0]], Spec(()), fused=False) == 0.0


def _step(weights: Any, x: Any) -> Any:
    def layer(y: Any, pair: Any) -> Any:
        first, second = pair
        return jnp.tanh(y @ first) @ second, None

    def loss(weights: Any) -> Any:
        y, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def _plan(batch: int, num_microbatches: int, planner: Planner, backend: Backend | None = None) -> al.Plan:
    weights = (jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),) * 2
    traced = al.parallelize(_step, batch_argnums=1).trace(weights, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))
    return planner.plan(traced.request(CLUSTER, num_microbatches, backend=backend or Backend()))


def test_each_of_several_micro_batches_pays_for_additions() -> None:
    """Beside a step of one micro-batch of the same size, which adds nothing up."""
    once, often = (_plan(16 * m, m, DataParallel()).stages[0].cost for m in (1, 4))
    alone = DEVICE.launch_seconds + 3 * LAYERS * BLOCK / (DEVICE.memory_efficiency * DEVICE.memory_bandwidth)
    assert often.backward_seconds - once.backward_seconds == pytest.approx(2 * alone)
    assert often.forward_seconds == pytest.approx(once.forward_seconds)


def test_flat_parameters_start_one_message_per_trip_and_move_the_same_bytes() -> None:
    plain, flat = (_plan(64, 1, FSDP(), Backend(flat_parameters=f)).prediction for f in (False, True))

    def moved(prediction: al.Prediction) -> list[tuple[Any, ...]]:
        return sorted((use.kind, use.axis, use.bytes, use.count) for use in prediction.collectives)

    assert moved(plain) == moved(flat)
    assert flat.collective_seconds < plain.collective_seconds
    # Of the two arrays that a layer gathers, the second one starts no message.
    gathers = [use.seconds for use in flat.collectives if use.kind == "all_gather" and use.phase == "forward"]
    alone = [use.seconds for use in plain.collectives if use.kind == "all_gather" and use.phase == "forward"]
    assert len(gathers) == len(alone) == 2
    assert gathers[0] == alone[0] and alone[1] - gathers[1] > 0.5 * 7 * CLUSTER.intra_host.latency_seconds
