"""No choice for a stage takes less memory than its bound, and stages that are excluded by it are not laid out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.bench.request import find_target
from alpa_lite.inter_op import stage_costs
from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.memory_bound import least_peak_bytes
from alpa_lite.intra_op.problem import evaluate
from alpa_lite.intra_op.stage import StageSolution, StageView
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.planners import Auto, DataParallel
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from cost_models.composed import ComposedCostModel

RESTRICTIONS = {
    "free": Restriction(optimizer=BatchSplit.MAY, parameters=BatchSplit.MAY),
    "all in parts": Restriction(
        roles={"x": AxisRole.BATCH, "y": AxisRole.BATCH}, optimizer=BatchSplit.MUST, parameters=BatchSplit.MUST
    ),
}


@pytest.mark.parametrize("restriction", RESTRICTIONS)
@pytest.mark.parametrize("virtual", [False, True], ids=["GPUs", "virtual devices"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
    "model", ["mlp-tiny", "gpt-tiny", "cnn-tiny", "moe-tiny", "bert-tiny", "unet-tiny", "nmt-tiny"]
)
def test_no_choice_takes_less(model: str, num_microbatches: int, virtual: bool, restriction: str) -> None:
    target = find_target(model)
    traced = al.parallelize(target.step).trace(*target.arguments)
    step = traced.step(num_microbatches).step
    layers = make_layers(step, 2)
    cluster = replace(al.cluster("p3.16xlarge", num_hosts=1), shared_processor=virtual)
    pricer = Pricer(
        cost_model=ComposedCostModel(cluster),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
        mesh=LogicalMesh(axis_names=("x", "y"), shape=(2, 4)),
    )
    catalogue, random = Catalogue(pricer, RESTRICTIONS[restriction]), np.random.default_rng(0)
    for first, last in ((0, 0), (1, 1), (0, 1)):
        view = StageView(step=step, layers=layers, first=first, last=last)
        builder = Builder(view, catalogue)
        for in_flight in (1, 3):
            bound = least_peak_bytes(view, catalogue, in_flight)
            problem = builder.problem(limit_bytes=None, in_flight=in_flight)
            for _ in range(5):
                choices = [int(random.integers(len(costs))) for costs in builder.costs]
                assert evaluate(problem, choices).peak_bytes >= bound > 0
            leanest = [usage.sizes.min() for usage in builder.usages(in_flight)]
            curve = np.zeros(max(usage.end for usage in builder.usages(in_flight)) + 1)
            for size, usage in zip(leanest, builder.usages(in_flight), strict=True):
                curve[usage.start : usage.end] += size
            assert curve.max() >= bound


def test_it_is_close_where_activations_take_the_memory() -> None:
    """On one device every choice is the same: what the bound leaves out is gradients and what an op works with."""
    target, cluster = find_target("gpt-tiny"), replace(al.cluster("p3.16xlarge", num_hosts=1), devices_per_host=1)
    plan = al.plan(target.step, *target.arguments, cluster=cluster, planner=DataParallel(), num_microbatches=1)
    step = al.parallelize(target.step).trace(*target.arguments).step(1).step
    pricer = Pricer(
        cost_model=ComposedCostModel(cluster),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=1),
        mesh=LogicalMesh(axis_names=("x",), shape=(1,)),
    )
    view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
    bound = least_peak_bytes(view, Catalogue(pricer, Restriction()), 1)
    assert 0.7 * plan.prediction.peak_bytes[0] <= bound <= plan.prediction.peak_bytes[0]
    assert bound > plan.stages[0].cost.state_bytes


def test_stages_that_it_excludes_are_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, cluster = find_target("gpt-tiny"), replace(al.cluster("p3.16xlarge", num_hosts=1), devices_per_host=4)
    whole = al.plan(target.step, *target.arguments, cluster=cluster, planner=DataParallel())
    laid_out, solve = list[tuple[float, float]](), stage_costs.solve_stage

    def counted(builder: Builder, *, limit_bytes: float | None, in_flight: int, **options: Any) -> StageSolution:
        least = least_peak_bytes(builder.view, builder.catalogue, in_flight)
        laid_out.append((least, math.inf if limit_bytes is None else limit_bytes))
        return solve(builder, limit_bytes=limit_bytes, in_flight=in_flight, **options)

    monkeypatch.setattr(stage_costs, "solve_stage", counted)
    planner = Auto(max_memory_bytes=0.5 * whole.prediction.peak_bytes[0])
    al.plan(target.step, *target.arguments, cluster=cluster, planner=planner, cache=False)
    assert laid_out and all(least <= limit for least, limit in laid_out)
