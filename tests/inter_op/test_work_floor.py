"""No plan is priced below the lower bound of its step, and the bound is what perfect devices would take."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.inter_op.work_floor import (
    least_loop_seconds,
    least_seconds,
    pipeline_slowdown,
)
from alpa_lite.planners import Auto, DataParallel
from alpa_lite.schedule import EagerOneFOneB, GPipe, OneFOneB, Schedule, simulate
from cost_models.cluster import Cluster, HostGroup
from cost_models.composed import ComposedCostModel
from tests.planners.test_planners import ALL, CASES, plan_for, traced


@pytest.mark.parametrize(("model", "planner", "cluster"), CASES)
def test_no_plan_is_priced_below_the_bound(model: str, planner: str, cluster: str) -> None:
    # Its devices may be a part of the cluster.
    plan = plan_for(model, planner, cluster)
    bound = least_seconds(traced(model).step(1).step, plan.cluster, ComposedCostModel)
    assert 0 < bound <= plan.prediction.step_seconds
    assert planner in ALL


def test_the_bound_of_a_plan_holds_for_plans_with_other_micro_batches_and_without_recomputation() -> None:
    """Weights are read once per micro-batch, and recomputation is work as well: neither is part of a bound for all."""
    cluster = al.cluster("p3.16xlarge")
    whole, cut, again = (
        traced("gpt_scan").plan(planner=planner, cluster=cluster, num_microbatches=number).last_plan
        for planner, number in ((DataParallel(), 1), (DataParallel(), 8), (Auto(manual=(), remat="full"), 8))
    )
    assert again.remat, "the case recomputes nothing"
    bounds = [plan.solver.bound for plan in (whole, cut, again)]
    assert bounds == [bounds[0]] * 3
    assert bounds[0] == least_seconds(traced("gpt_scan").step(1).step, cluster, ComposedCostModel)


@settings(deadline=None)
@given(
    times=st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=6),
    num_microbatches=st.integers(1, 12),
    schedule=st.sampled_from([GPipe(), OneFOneB(), EagerOneFOneB()]),
)
def test_no_pipeline_waits_less_than_the_bound(
    times: list[tuple[float, float]], num_microbatches: int, schedule: Schedule
) -> None:
    """Whatever part of the work each stage has."""
    tasks = schedule.tasks(len(times), num_microbatches)
    forward, backward = zip(*times, strict=True)
    made = simulate(tasks, forward, backward, transfer_seconds=[0.0] * (len(times) - 1))
    shared = num_microbatches * sum(map(sum, times)) / len(times)
    assert made.makespan_seconds >= pipeline_slowdown(len(times), num_microbatches) * shared * (1 - 1e-9)


def test_the_loop_is_a_part_of_the_step() -> None:
    step = traced("mlp").step(1).step
    cluster = al.cluster("p3.16xlarge")
    loop = least_loop_seconds(step, cluster, ComposedCostModel)
    assert 0 < loop < least_seconds(step, cluster, ComposedCostModel)


def _product(cluster: Cluster) -> float:
    """The bound of one large matrix product in float16, 2^42 FLOPs."""

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    shapes = [
        jax.ShapeDtypeStruct((1 << 13, 1 << 14), jnp.float16),
        jax.ShapeDtypeStruct((1 << 14, 1 << 14), jnp.float16),
    ]
    step = al.parallelize(multiply).trace(*shapes).step(1).step
    return least_seconds(step, cluster, ComposedCostModel)


def test_devices_share_the_work_and_groups_share_it_by_their_rates() -> None:
    v100 = replace(
        al.cluster("p3.16xlarge"), inter_host=replace(al.cluster("p3.16xlarge").inter_host, skew_seconds=0.0)
    )
    # Each block of the result loses what it takes to fill a unit.
    filled = 2**14 / (2**14 + v100.device.fill_depth)
    rate = v100.device.peak("float16") * v100.device.efficiencies["float16"] * filled
    assert _product(v100) == pytest.approx(2**42 / (8 * rate) + v100.device.launch_seconds / 8)
    fast = replace(v100.device, peak_flops={k: 3 * v for k, v in v100.device.peaks.items()})
    groups = (
        HostGroup(num_hosts=1, device=v100.device, intra_host=v100.intra_host),
        HostGroup(num_hosts=2, device=fast, intra_host=v100.intra_host),
    )
    mixed = replace(v100, num_hosts=3, groups=groups)
    slow, quick = (2**42 / each + v100.device.launch_seconds for each in (rate, 3 * rate))
    assert _product(mixed) == pytest.approx(1 / (8 / slow + 16 / quick))
