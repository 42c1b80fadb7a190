"""Published stages as a planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alpa_lite.cli.models.alpa_cases import CASES
from alpa_lite.errors import InfeasibleError
from benchmarks.alpa.fixed_plans import PYTORCH, FixedPlan, fixed_plans, given, megatron
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
    first, second, _ = (stage.cost.forward_seconds + stage.cost.backward_seconds for stage in plan.stages)
    assert first == pytest.approx(second, rel=0.05)


def test_stages_that_wait_for_messages_take_longer(fixed):
    """Each end of a message waits: four messages per micro-batch at the stage in the middle."""
    beside = Desk().plan(fixed.case, fixed.planner, fixed.num_microbatches)
    waiting = Desk().plan(fixed.case, replace(fixed.planner, as_alpa_ran=True), fixed.num_microbatches)
    longer = waiting.prediction.step_seconds - beside.prediction.step_seconds
    assert 0 < longer <= 2.5 * beside.prediction.transfer_seconds
    assert fixed.ran_as == replace(fixed.planner, as_alpa_ran=True)


def test_alpa_left_no_sum_scattered_but_gradients():
    fixed = given("intra-op only", CASES["gpt-2.6B"], [(1, (1, 8), (8, 1))], 32, None, force_batch=False)
    plan = Desk().plan(fixed.case, replace(fixed.planner, as_alpa_ran=True), fixed.num_microbatches)
    assert "reduce_scatter" not in {use.kind for use in plan.prediction.collectives if use.phase != "update"}


def test_alpa_paid_for_gradients_as_for_whole_sums():
    """They are scattered once, twice as dear, and weights are gathered, with state in parts."""
    fixed = given("intra-op only", CASES["gpt-760M"], [(1, (1, 2), (2, 1))], 64, None)
    ran = Desk().plan(fixed.case, replace(fixed.planner, as_alpa_ran=True), fixed.num_microbatches).prediction
    seconds = {kind: ran.breakdown()[kind] for kind in ("reduce_scatter", "all_gather")}
    assert 0 < seconds["reduce_scatter"] == pytest.approx(seconds["all_gather"], rel=0.05)
    paid = ran.compute_seconds + ran.collective_seconds + seconds["reduce_scatter"]
    assert ran.step_seconds == pytest.approx(paid, rel=1e-3)


def test_plans_are_priced_on_the_software_that_they_ran_on():
    """How they are compared, and as they ran, are two things: one may fit where the other does not."""
    case = CASES["gpt-350M"]
    small, large = (replace(PYTORCH, memory_bytes=size) for size in (1e9, 1e12))
    known = FixedPlan(system="Megatron-LM", case=case, planner=megatron(1, 1, 1), num_microbatches=128)
    fits = Desk().price(replace(known, ran_on=small))
    assert fits.tflops is not None and fits.as_run_tflops is None
    price = Desk().price(replace(known, ran_on=large, num_microbatches=2, measured_tflops=40.0))
    assert price.tflops is None and price.as_run_tflops is not None
    assert price.ratio == price.as_run_tflops / 40.0
    assert Desk().price(known).as_run_tflops == fits.tflops > Desk().price(replace(known, ran_on=PYTORCH)).as_run_tflops


def test_a_stage_that_does_not_fit_is_named(fixed):
    with pytest.raises(InfeasibleError, match="stage 2 with 1 micro-batch"):
        Desk().plan(fixed.case, fixed.planner, 8)
    price = Desk().price(given("Alpa", CASES["gpt-2.6B"], STAGES, 8, 1.0))
    assert price.seconds is None and price.ratio is None and "does not fit" in price.problem


def test_with_a_forced_batch_nothing_moves_between_dims():
    """Alpa had no all_to_all on two axes (ReshardingCost of its integer program); a free search uses them here.

    In micro-batches, that is: which dim of a small table the update splits is decided by the memory that is left.
    """
    stages = [(1, (1, 8), (4, 2))]
    forced, free = (
        Desk().plan(fixed.case, fixed.planner, fixed.num_microbatches)
        for force in (True, False)
        for fixed in [given("intra-op only", CASES["gpt-2.6B"], stages, 32, None, force_batch=force)]
    )
    kinds = {use.kind for use in forced.prediction.collectives if use.phase != "update"}
    assert "all_reduce" in kinds and "all_to_all" not in kinds
    assert any(use.kind == "all_to_all" and use.phase != "update" for use in free.prediction.collectives)
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
