"""Published stages as a planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alpa_lite.errors import InfeasibleError
from benchmarks.alpa.cases import CASES
from benchmarks.alpa.fixed_plans import FixedPlan, fixed_plans, given
from benchmarks.alpa.given_stages import GivenStage
from benchmarks.alpa.price import Desk

STAGES = [(2, (1, 2), (2, 1)), (2, (1, 2), (2, 1)), (4, (1, 4), (4, 1))]


@pytest.fixture(scope="module")
def fixed() -> FixedPlan:
    return given("Alpa", CASES["gpt-2.6B"], STAGES, 128, None)


def test_stages_get_their_layers_and_meshes(fixed):
    plan = Desk().plan(fixed.case, fixed.planner, fixed.num_microbatches)
    assert [stage.mesh_shape.shape for stage in plan.stages] == [(2, 1), (2, 1), (4, 1)]
    assert [stage.layers for stage in plan.stages] == [(0, 1), (2, 3), (4, 7)]
    assert sum(stage.submesh.num_devices for stage in plan.stages) == 8
    first, second, _ = (stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    assert first == pytest.approx(second, rel=0.05)


def test_stages_that_wait_for_messages_take_longer(fixed):
    """Each end of a message waits: four messages per micro-batch at the stage in the middle."""
    beside = Desk().plan(fixed.case, fixed.planner, fixed.num_microbatches)
    waiting = Desk().plan(fixed.case, replace(fixed.planner, waits=True), fixed.num_microbatches)
    longer = waiting.prediction.step_seconds - beside.prediction.step_seconds
    assert 0 < longer <= 2.5 * beside.prediction.transfer_seconds
    assert fixed.ran_as == replace(fixed.planner, waits=True)


def test_a_stage_that_does_not_fit_is_named(fixed):
    with pytest.raises(InfeasibleError, match="stage 2 with 1 micro-batch"):
        Desk().plan(fixed.case, fixed.planner, 8)
    price = Desk().price(given("Alpa", CASES["gpt-2.6B"], STAGES, 8, 1.0))
    assert price.seconds is None and price.ratio is None and "does not fit" in price.problem


def test_with_a_forced_batch_nothing_moves_between_dims():
    """Alpa had no all_to_all on two axes (ReshardingCost of its integer program); a free search uses them here."""
    stages = [(1, (1, 8), (4, 2))]
    forced, free = (
        Desk().plan(fixed.case, fixed.planner, fixed.num_microbatches)
        for force in (True, False)
        for fixed in [given("intra-op only", CASES["gpt-2.6B"], stages, 32, None, force_batch=force)]
    )
    kinds = {use.kind for use in forced.prediction.collectives}
    assert "all_reduce" in kinds and "all_to_all" not in kinds
    assert free.prediction.step_seconds <= forced.prediction.step_seconds


def test_axes_of_one_device_are_left_out_unless_the_batch_is_forced():
    stage = GivenStage(layers=1, hosts=1, devices_per_host=4, data=1, model=4)
    assert stage.mesh(force_batch=True).shape == (1, 4)
    assert stage.mesh(force_batch=False).shape == (4,)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_published_plans_use_every_device(case):
    if case.published_parameters is None:
        return
    for plan in fixed_plans(case):
        stages = getattr(plan.planner, "stages", ())
        assert sum(stage.hosts * stage.devices_per_host for stage in stages) in (0, case.num_devices)
        assert plan.case.num_samples % plan.num_microbatches == 0
