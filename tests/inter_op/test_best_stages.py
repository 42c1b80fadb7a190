"""The best of all ways in which stages may be alike is that of the stage DP on each of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inter_op.best_stages import BestStages, PipelinedBatch
from alpa_lite.inter_op.space import Space, equal_parts, ways
from alpa_lite.inter_op.stage_dp import PipelineTerms, StageStatus, StageTable, solve
from alpa_lite.schedule import EagerOneFOneB, OneFOneB, Synthesised, ZeroBubbleH1, simulate
from cost_models.composed import ComposedCostModel

LAYERS = 4


@pytest.mark.parametrize("num_stages", [None, 2])
@pytest.mark.parametrize("seed", range(24))
def test_it_is_the_best_of_each_way(seed: int, num_stages: int | None) -> None:
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=4)
    # A host that dispatches at once: what it takes is no part of the stage DP.
    cluster = replace(cluster, device=replace(cluster.device, dispatch_seconds=0.0))
    schedule = ZeroBubbleH1() if seed % 5 == 0 else OneFOneB()
    space, number, random = Space.of(cluster), int(2 ** (seed % 4)), np.random.default_rng(seed)
    shape = (LAYERS, LAYERS, len(space.kinds), space.most_shapes)
    # Where all stages take about as long, no way can be told to be worse before it is looked at.
    seconds = random.uniform(0.5, 0.52 if seed % 3 else 2.0, shape)
    seconds[random.uniform(size=shape) < 0.3] = np.inf
    updates, following = random.uniform(0.0, 0.05, shape), random.integers(-1, LAYERS, shape)
    slower = random.uniform(0.0, 0.01, (LAYERS, len(space.kinds), len(space.kinds)))
    alike = [*ways(space, LAYERS, ("layers",) if seed % 2 else (), one_mesh=True, repeats=1)]
    table = StageTable(
        seconds=seconds,
        max_following_stages=following,
        submesh_devices=space.devices,
        submesh_groups=space.groups,
        inflow_seconds=slower,
        update_seconds=updates,
    )
    found = BestStages(
        space=space,
        cost_model=ComposedCostModel(cluster),
        batch=PipelinedBatch(schedule, number, postponed=1 / 3),
        ways=alike,
        num_stages=num_stages,
    )(table)
    each = [
        solve(
            replace(table, seconds=np.where(way, seconds, np.inf)),
            PipelineTerms(
                num_devices=space.devices_of_groups,
                num_microbatches=number,
                waiting_share=schedule.waiting_share(1 / 3, max(2, num_stages or 1), number),
                min_stages=num_stages or 1,
                max_stages=num_stages,
            ),
        )
        for way in alike
    ]
    best = min(each, key=lambda other: other.seconds)
    assert len(alike) > 3
    assert found.stages == best.stages
    assert found.status == (best.status if best.stages else StageStatus.INFEASIBLE)
    assert found.seconds == pytest.approx(best.seconds + cluster.skew_seconds)


@pytest.mark.parametrize("seed", range(12))
def test_stages_are_as_few_as_their_host_can_dispatch(seed: int) -> None:
    """The best of each number of stages by the DP, with what dispatching that many takes."""
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=4)
    cluster = replace(cluster, device=replace(cluster.device, dispatch_seconds=0.01 * (1 + seed % 4)))
    space, number, random = Space.of(cluster), 4, np.random.default_rng(seed)
    shape = (LAYERS, LAYERS, len(space.kinds), space.most_shapes)
    # Stages of more devices take as long, so that many small ones are the best while dispatching costs nothing.
    seconds = random.uniform(0.01, 0.02, shape) * (1 + np.arange(LAYERS) - np.arange(LAYERS)[:, None])[..., None, None]
    seconds = np.where(seconds > 0, seconds, 0.01)
    following = np.full(shape, LAYERS)
    table = StageTable(
        seconds=seconds, max_following_stages=following, submesh_devices=space.devices, submesh_groups=space.groups
    )
    model, waves = ComposedCostModel(cluster), 1 + seed % 3
    totals: list[float] = []
    for count in range(1, LAYERS + 1):
        terms = PipelineTerms(
            num_devices=space.devices_of_groups, num_microbatches=number, min_stages=count, max_stages=count
        )
        found = solve(table, terms)
        if found.stages:
            together = min(count, max(1, cluster.devices_per_host // space.devices[found.stages[0].submesh]))
            tasks = (2 * number + (waves if count > 1 else 1)) * together
            totals.append(max(found.seconds, tasks * model.launch_seconds()) + cluster.skew_seconds)
    best = BestStages(
        space=space,
        cost_model=model,
        batch=PipelinedBatch(OneFOneB(), number),
        ways=[*ways(space, LAYERS, (), one_mesh=False, repeats=1)],
        num_stages=None,
        update_tasks=waves,
    )(table)
    assert best.seconds == pytest.approx(min(totals))


@pytest.mark.parametrize("num_stages", [None, 1, 3, 4, 6, 12])
@pytest.mark.parametrize("num_layers", [1, 4, 6, 12])
def test_equal_parts_are_those_that_cover_all_layers_and_devices(num_layers: int, num_stages: int | None) -> None:
    space = Space.of(replace(al.cluster("p3.16xlarge"), num_hosts=3, devices_per_host=4))
    expected = np.zeros((num_layers, num_layers, len(space.kinds)), dtype=bool)
    for kind, devices in enumerate(space.devices):
        for count in {num_stages} if num_stages else range(1, num_layers + 1):
            if count * devices != 12 or num_layers % count:
                continue
            borders = [num_layers * stage // count for stage in range(count + 1)]
            for first, end in pairwise(borders):
                expected[first, end - 1, kind] = True
    np.testing.assert_array_equal(equal_parts(space, num_layers, num_stages), expected)


@pytest.mark.parametrize("number", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize(("forward", "gradients", "weights"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 2.0, 1.0)])
def test_no_order_of_equal_stages_waits_less(
    number: int, stages: int, forward: float, gradients: float, weights: float
) -> None:
    """The share of the waiting that is left at least, against orders that are made with memory for everything."""
    work = forward + gradients + weights
    order = Synthesised(
        forward=(forward,) * stages,
        backward=(gradients + weights,) * stages,
        weight=(weights,) * stages,
        processors=tuple(range(stages)),
    )
    tasks = order.tasks(stages, number)
    taken = simulate(tasks, order.forward, order.backward, weight_seconds=order.weight).makespan_seconds
    batch = PipelinedBatch(EagerOneFOneB(), number, postponed=weights / work, forward_share=forward / work)
    share = batch.waiting_share(stages)
    assert batch.waiting_share() <= share <= 1
    least = (number + share * (stages - 1)) * work
    # One micro-batch has one shortest way; of many, gradients of weights fill all but the waiting at the beginning.
    exact = number == 1 or number >= 2 * stages
    assert taken == pytest.approx(least) if exact else taken >= least - 1e-9
