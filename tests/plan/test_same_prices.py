"""What the search adds up for a plan is what the plan's program costs: seconds and collectives of each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

import alpa_lite as al
from alpa_lite.api.stages import PlannedFunction
from alpa_lite.plan.estimator import Estimator
from alpa_lite.plan.plan import CollectiveUse
from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.simulation import Prices, simulate_program
from alpa_lite.plan.task_prices import estimate
from alpa_lite.planners import DataParallel, Hybrid, Planner
from alpa_lite.schedule import OneFOneB, ZeroBubbleH1
from cost_models.composed import ComposedCostModel
from tests.zoo.registry import PROGRAMS, load

PLANNERS: dict[str, tuple[Planner, int]] = {
    "auto": (al.planners.Auto(), 1),
    "data": (DataParallel(), 1),
    "fsdp": (al.planners.FSDP(), 1),
    "kept": (al.planners.FSDP(reshard_after_forward=False), 1),
    "zero": (al.planners.Zero(stage=2), 1),
    "megatron": (al.planners.Megatron(tensor=4), 4),
    "pipeline": (Hybrid(pipeline=2, schedule=OneFOneB()), 4),
    "four stages": (Hybrid(pipeline=4, schedule=OneFOneB()), 2),
    "zero bubble": (Hybrid(pipeline=2, schedule=ZeroBubbleH1()), 4),
    "sharded pipeline": (Hybrid(pipeline=2, zero=3), 2),
}
NAMES = [
    "noisy_sgd",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("denoising_diffusion", "llama_scan_remat", "wide_residual_network")
    ),
]
load()


def _planned(name: str, planner: Planner, num_microbatches: int) -> PlannedFunction:
    program = PROGRAMS[name]()
    batch = {} if program.batch_argnums is None else {"batch_argnums": program.batch_argnums}
    traced = al.parallelize(program.step, cache=False, **batch).trace(program.state, *program.inputs)
    return traced.plan(
        cluster=al.cluster("p3.16xlarge"), planner=planner, num_microbatches=num_microbatches, cache=False
    )


def _counted(uses: Iterable[CollectiveUse]) -> Counter[tuple[object, ...]]:
    found = Counter[tuple[object, ...]]()
    for use in uses:
        if use.num_devices > 1:
            found[use.stage, use.phase, use.kind, use.axis, use.bytes] += use.count
    return found


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_program_costs_what_the_plan_says(name: str, planner: str) -> None:
    chosen, num_microbatches = PLANNERS[planner]
    # The statistics of a batch are no sum over micro-batches.
    planned = _planned(name, chosen, 1 if name == "wide_residual_network" else num_microbatches)
    plan, lowered = planned.last_plan, planned.lower()
    step, parts = lowered.step.step, list[Estimator]()
    pricers = [
        Pricer(cost_model=ComposedCostModel(plan.cluster), submesh=stage.submesh, mesh=stage.mesh_shape)
        for stage in plan.stages
    ]
    for task in lowered.program.tasks:
        parts += estimate(task, step, plan.stages[task.stage].ops, pricers[task.stage])
    for number, stage in enumerate(plan.stages):
        for phase in ("forward", "backward", "update"):
            seconds = sum(part.seconds for part in parts if (part.stage, part.phase) == (number, phase))
            assert seconds == pytest.approx(getattr(stage.cost, f"{phase}_seconds"), rel=1e-9)
    simulated = lowered.simulate()
    by_costs = simulate_program(lowered.program, plan, step, prices=Prices.OF_PLAN)
    assert [(t.name, t.microbatch, t.start_seconds, t.end_seconds) for t in by_costs.times] == [
        (t.name, t.microbatch, pytest.approx(t.start_seconds), pytest.approx(t.end_seconds)) for t in simulated.times
    ]
    prediction = plan.prediction
    assert simulated.step_seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    assert simulated.transfer_seconds == pytest.approx(prediction.transfer_seconds, rel=1e-9)
    assert simulated.bubble_fraction == pytest.approx(prediction.bubble_fraction, abs=1e-9)
    assert [simulated.use_of(n).peak_bytes for n in range(len(plan.stages))] == [*prediction.peak_bytes]
    found = _counted(use for part in parts for use in part.collectives)
    assert found == pytest.approx(_counted(plan.prediction.collectives))
