"""ColocRL: groups of branches, placements that run as on one device, and their prices."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.planners import ColocRL
from alpa_lite.planners.coloc_rl import _Placing
from alpa_lite.program.phases import Phase
from alpa_lite.schedule import Sequential
from alpa_lite.step.colocation import colocated_groups
from cost_models import HostGroup
from tests.end_to_end.cases import eager_cluster

QUICK = ColocRL(steps=30, samples=6, hidden=16)


def _step(params, batch):
    """A network of two branches between a stem and a head."""

    def loss_fn(params):
        x = jnp.tanh(batch["x"] @ params["stem"])
        ends = []
        for branch in params["branches"]:
            y = x
            for weights in branch:
                y = jnp.tanh(y @ weights)
            ends.append(y)
        return jnp.mean((jnp.concatenate(ends, -1) @ params["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def _arguments(width, batch, make, depth=3):
    branches = [[make((width, width)) for _ in range(depth)] for _ in range(2)]
    params = {"stem": make((width, width)), "branches": branches, "head": make((2 * width, width))}
    return params, {"x": make((batch, width)), "y": make((batch, width))}


def _shape(dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def _two():
    return al.cluster("p3.16xlarge").part(0, 2)


def _request(arguments, cluster):
    return al.parallelize(_step).trace(*arguments).request(cluster)


def test_groups_are_branches_in_an_order_in_which_they_can_be_stages():
    step = _request(_arguments(64, 16, _shape), _two()).step_at(1, 0)
    groups = colocated_groups(step, 16)
    # The stem, three products in each branch, and the head.
    assert groups.layers.num_layers == 8 and groups.together == tuple(range(8))
    assert groups.edges == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 7), (4, 5), (5, 6), (6, 7))
    # The forward pass only goes on, and the backward pass only back.
    for op in step.graph.ops:
        for v in op.operands:
            maker = step.graph.producer[v]
            if maker is None or step.phases[maker] is not step.phases[op.id]:
                continue
            a, b = groups.layers.of_op[maker], groups.layers.of_op[op.id]
            assert None in (a, b) or step.phases[op.id] is not Phase.FORWARD or a <= b
            assert None in (a, b) or step.phases[op.id] is not Phase.BACKWARD or a >= b


@pytest.mark.parametrize("most", [1, 2, 4, 7])
def test_fewer_groups_keep_branches_apart_as_long_as_possible(most):
    step = _request(_arguments(64, 16, _shape), _two()).step_at(1, 0)
    groups = colocated_groups(step, most)
    assert groups.layers.num_layers == most
    if most >= 4:
        # No group has ops of both branches.
        assert any((a, b) not in groups.edges for a, b in itertools.pairwise(range(most)))


def test_the_user_names_groups_by_arguments():
    request = _request(_arguments(64, 16, _shape), _two())
    groups = colocated_groups(request.step_at(1, 0), 16, ("params/branches/0", "params/branches/1"))
    assert len(set(groups.together)) == 4  # the stem, both branches, the head
    with pytest.raises(PlanError, match="Did you mean"):
        colocated_groups(request.step_at(1, 0), 16, ("params/stm",))
    with pytest.raises(PlanError, match="at least 1"):
        colocated_groups(request.step_at(1, 0), 0)
    plan = replace(QUICK, groups=("params/branches/0", "params/branches/1")).plan(request)
    held = [{s.submesh for s in plan.stages if any(f"branches/{b}" in name for name in s.specs)} for b in (0, 1)]
    assert all(len(each) == 1 for each in held)


def test_the_search_prices_placements_as_the_simulation_does():
    # In the second of each, arrays are on the way for longer than products take, and wait for each other.
    clusters, sizes = (al.cluster("p3.16xlarge", num_hosts=2), eager_cluster()), ((256, 64), (32, 4096))
    for cluster, size in itertools.product(clusters, sizes):
        request = _request(_arguments(*size, _shape, depth=1), cluster)
        placing = _Placing.of(request, ColocRL()._groups(request))
        seconds, random = placing.simulated_seconds(), np.random.default_rng(0)
        # Two devices of a host, and one of another: several arrays then go the same way.
        few = [0, 1, cluster.num_devices - 1]
        for _ in range(10):
            placement = tuple(random.choice(few, placing.num_sets).tolist())
            plan = placing.plan("", placement, time.perf_counter())
            assert seconds(placement) == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


def test_two_branches_use_two_devices_and_are_the_best_of_all_placements():
    request = _request(_arguments(2048, 2048, _shape, depth=2), _two())
    plan = replace(QUICK, steps=100).plan(request)
    placing = _Placing.of(request, ColocRL()._groups(request))
    seconds = placing.simulated_seconds()
    every = [seconds(placement) for placement in itertools.product(range(2), repeat=placing.num_sets)]
    assert plan.prediction.step_seconds == pytest.approx(min(filter(None, every)), rel=1e-9)
    assert len({stage.submesh for stage in plan.stages}) == 2
    one = al.plan(_step, *_arguments(2048, 2048, _shape, depth=2), cluster=_two().part(0, 1), planner="data_parallel")
    assert plan.prediction.step_seconds < 0.9 * one.prediction.step_seconds
    assert plan.num_microbatches == 1 and plan.schedule.name == "sequential"
    assert "placements of 6 groups were tried" in plan.notes[-1] and "uses 2 of 2 devices" in plan.notes[-1]


def test_a_chain_of_little_work_stays_on_one_device():
    def step(params, batch):
        def loss_fn(params):
            x = batch
            for weights in params:
                x = jnp.tanh(x @ weights)
            return jnp.mean(x**2)

        return jax.grad(loss_fn)(params)

    plan = al.plan(step, [_shape((32, 32))] * 8, _shape((4096, 32)), cluster=_two(), planner=QUICK)
    assert len({stage.submesh for stage in plan.stages}) == 1 and len(plan.stages) == 8
    assert "uses 1 of 2 devices" in plan.notes[-1]


def test_placements_that_do_not_fit_are_never_returned():
    arguments, cluster = _arguments(1024, 32, _shape), _two()

    def with_memory(size):
        device = replace(cluster.device, memory_bytes=size * 2**20, memory_reserve=0.0)
        return replace(cluster, device=device)

    # All parameters take 36 MiB.
    plan = al.plan(_step, *arguments, cluster=with_memory(50), planner=QUICK)
    assert len({stage.submesh for stage in plan.stages}) == 2
    assert all(peak <= 50 * 2**20 for peak in plan.prediction.peak_bytes)
    with pytest.raises(InfeasibleError, match="placements that were tried need more memory"):
        al.plan(_step, *arguments, cluster=with_memory(10), planner=QUICK)


def test_seeds_repeat_and_options_are_checked():
    arguments = _arguments(256, 64, _shape)
    first, second = (al.plan(_step, *arguments, cluster=_two(), planner=QUICK) for _ in range(2))
    assert first.stages == second.stages and first.schedule == second.schedule
    assert al.Plan.from_json(first.to_json()) == first
    with pytest.raises(PlanError, match="steps = 0"):
        al.plan(_step, *arguments, cluster=_two(), planner=replace(QUICK, steps=0))
    with pytest.raises(PlanError, match="no devices to run them on"):
        replace(QUICK, reward="measured").plan(replace(_request(arguments, _two()), measure=None))


@pytest.mark.parametrize("reward", ["simulated", pytest.param("measured", marks=pytest.mark.slow)])
def test_placements_run_as_on_one_device(devices, reward):
    keys = iter(jax.random.split(jax.random.key(0), 20))
    arguments = _arguments(16, 8, lambda dims: jax.random.normal(next(keys), dims))
    planner = replace(QUICK, reward=reward, steps=2 if reward == "measured" else 30)
    step = al.parallelize(_step, planner=planner, cluster=eager_cluster())
    found, wanted = step(*arguments), jax.jit(_step)(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_of_measured_placements_the_fastest_is_the_plan():
    # As if a step took the longer, the fewer devices it has.
    request = _request(_arguments(64, 16, _shape, depth=1), _two())
    request = replace(request, measure=lambda plan: 1.0 / len({stage.submesh for stage in plan.stages}))
    plan = replace(QUICK, reward="measured", steps=3).plan(request)
    assert len({stage.submesh for stage in plan.stages}) == 2
    request = replace(request, measure=lambda plan: float(len({stage.submesh for stage in plan.stages})))
    plan = replace(QUICK, reward="measured", steps=3, samples=16).plan(request)
    assert len({stage.submesh for stage in plan.stages}) == 1


def test_any_placement_runs_as_on_one_device(devices):
    keys = iter(jax.random.split(jax.random.key(0), 20))
    arguments = _arguments(16, 8, lambda dims: jax.random.normal(next(keys), dims), depth=2)
    request = _request(arguments, eager_cluster())
    placing = _Placing.of(request, ColocRL()._groups(request))
    plan = placing.plan("", (5, 0, 3, 0, 5, 3)[: placing.num_sets], time.perf_counter())
    assert plan.schedule == Sequential(processors=(0, 1, 2, 1, 0, 2))
    wanted, step = jax.jit(_step)(*arguments), al.parallelize(_step, planner=plan, cluster=eager_cluster())
    for one, other in zip(jax.tree.leaves(step(*arguments)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert "device" in str(plan) and plan.explain("params/stem") and plan.diff(plan)


def test_a_step_without_gradients_is_placed_too(devices):
    def forward(params, batch):
        return jnp.tanh(jnp.tanh(batch @ params[0]) @ params[1]) @ params[2]

    keys = iter(jax.random.split(jax.random.key(0), 4))
    arguments = [jax.random.normal(next(keys), (16, 16)) for _ in range(3)], jax.random.normal(next(keys), (8, 16))
    request = al.parallelize(forward).trace(*arguments).request(eager_cluster())
    placing = _Placing.of(request, ColocRL()._groups(request))
    plan = placing.plan("", (0, 1, 0), time.perf_counter())
    found = al.parallelize(forward, planner=plan, cluster=eager_cluster())(*arguments)
    np.testing.assert_allclose(found, jax.jit(forward)(*arguments), rtol=2e-5, atol=2e-6)


def test_groups_of_a_step_that_recomputes_values_run_as_on_one_device(devices):
    """A block whose ops are in several groups: the recomputation of one reads what others recompute."""

    @jax.checkpoint
    def block(x, weights):
        gates = jax.nn.softmax(x @ weights["gate"])
        return x + jnp.tanh((gates > 0.1) * gates @ weights["up"]) @ weights["down"]

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(block(block(x, p[0]), p[1]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {"gate": (16, 8), "up": (8, 16), "down": (16, 16)}
    params = [{name: jax.random.normal(next(keys), dims) for name, dims in shapes.items()} for _ in range(2)]
    arguments = params, jax.random.normal(next(keys), (8, 16))
    request = al.parallelize(step).trace(*arguments).request(eager_cluster())
    placing = _Placing.of(request, ColocRL()._groups(request))
    plan = placing.plan("", tuple(n % 4 for n in range(placing.num_sets)), time.perf_counter())
    found = al.parallelize(step, planner=plan, cluster=eager_cluster())(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*arguments)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_groups_go_to_the_faster_devices_of_a_mixed_cluster():
    host, fast = al.cluster("p3.16xlarge").part(0, 2), al.cluster("dgx-a100").device
    groups = tuple(HostGroup(num_hosts=1, device=each, intra_host=host.intra_host) for each in (host.device, fast))
    cluster = replace(host, num_hosts=2, groups=groups)
    arguments = _arguments(1024, 1024, _shape, depth=1)
    request = _request(arguments, cluster)
    placing = _Placing.of(request, ColocRL()._groups(request))
    seconds = placing.simulated_seconds()
    for placement in [(0, 1, 2, 3), (2, 2, 2, 2), (3, 0, 1, 3)]:
        plan = placing.plan("", placement, time.perf_counter())
        assert seconds(placement) == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
    plan = replace(QUICK, steps=60).plan(request)
    assert all(stage.submesh.first_device >= 2 for stage in plan.stages)
