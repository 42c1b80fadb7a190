"""Clusters whose hosts differ: each stage is priced by its own devices, and has their memory."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import InfeasibleError
from alpa_lite.planners import Auto, Pipeline, Planner
from cost_models.cluster import Cluster, HostGroup
from tests.inter_op.test_stage_costs import chain_step


def _mixed_memory() -> Cluster:
    """A host with 16 GB devices, and one with five times as much."""
    host = al.cluster("p3.16xlarge")
    roomy = replace(host.device, name="roomy", memory_bytes=5 * host.device.memory_bytes)
    groups = tuple(HostGroup(num_hosts=1, device=device, intra_host=host.intra_host) for device in (host.device, roomy))
    return replace(host, num_hosts=2, groups=groups)


def _plan_on_mixed_memory(planner: Planner, width: int) -> al.Plan:
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((4096, width), jnp.float32)
    return al.plan(chain_step, weights, batch, cluster=_mixed_memory(), planner=planner, num_microbatches=8)


def test_a_limit_of_memory_holds_in_every_group_of_hosts() -> None:
    free = max(_plan_on_mixed_memory(Auto(), 1024).prediction.peak_bytes)
    limited = _plan_on_mixed_memory(Auto(max_memory_bytes=0.9 * free), 1024)
    assert max(limited.prediction.peak_bytes) <= 0.9 * free


def test_where_a_mixed_cluster_has_too_little_its_growth_is_proposed() -> None:
    with pytest.raises(InfeasibleError, match=r"What would fit: \d+ hosts instead of 2"):
        _plan_on_mixed_memory(Auto(max_memory_bytes=2e6), 1024)
    with pytest.raises(
        InfeasibleError,
        match=r"V100 SXM2 16GB has 13\.4 GiB usable|roomy has 67\.1 GiB usable, 7\.45 GiB kept for the allocator",
    ):
        _plan_on_mixed_memory(Pipeline(pipeline=2), 40960)


def test_memory_is_told_of_the_devices_of_each_stage() -> None:
    plan = _plan_on_mixed_memory(Pipeline(pipeline=2), 8192)
    capacities = {stage.submesh.first_device: plan.capacity_bytes(n) for n, stage in enumerate(plan.stages)}
    assert capacities == {0: 14.4e9, 8: 72e9}
    shares = [peak / plan.capacity_bytes(n) for n, peak in enumerate(plan.prediction.peak_bytes)]
    assert shares[plan.fullest_stage] == max(shares)
    assert "of 13.4 GiB usable, 1.49 GiB kept for the allocator to 67.1 GiB usable" in str(plan)


def test_a_manual_stage_is_priced_by_the_devices_that_it_runs_on() -> None:
    slow, mixed = al.cluster("p3.16xlarge"), _mixed_memory()
    fast = replace(slow.device, name="fast", peak_flops={k: 3 * v for k, v in slow.device.peaks.items()})
    groups = tuple(
        replace(group, device=device) for group, device in zip(mixed.groups, (slow.device, fast), strict=True)
    )
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float16)] * 8
    batch = jax.ShapeDtypeStruct((65536, 4096), jnp.float16)
    cluster = replace(mixed, groups=groups)
    plan = al.plan(chain_step, weights, batch, cluster=cluster, planner=Pipeline(pipeline=2), num_microbatches=8)
    seconds = {stage.submesh.first_device: stage.cost.forward_seconds for stage in plan.stages}
    assert seconds[8] < 0.6 * seconds[0]
