"""Plans of all contenders: prices as the plans say, how devices spend the step, and reasons in place of crashes."""

from dataclasses import replace

import pytest

from alpa_lite.cli.bench import planned
from alpa_lite.cli.bench.contenders import named_contenders
from alpa_lite.cli.bench.planned import best_of_counts, plan_at, same_plan, traced_target
from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.planners import DataParallel, Pipeline
from tests.cli.bench.conftest import CLUSTER


def test_rows_say_what_the_plans_say(entries):
    for entry in entries[:-1]:
        row, plan = entry.row, entry.plan
        assert not row.reason and row.predicted_step_seconds == plan.prediction.step_seconds
        assert row.predicted_peak_bytes == max(plan.prediction.peak_bytes)
        assert (row.num_stages, row.num_microbatches) == (len(plan.stages), plan.num_microbatches)
        assert (row.solver_status, row.solver_gap) == (plan.solver.status, plan.solver.gap)
        assert row.planning_seconds > 0 and row.model == "mlp-tiny" and row.batch_size == 64


def test_a_planner_that_does_not_apply_is_a_row_with_the_reason(entries):
    row = entries[-1].row
    assert entries[-1].plan is None and row.predicted_step_seconds is None
    assert "degrees whose product is 8" in row.reason


def test_a_plan_that_does_not_fit_is_a_row_with_the_reason(target):
    device = replace(CLUSTER.device, memory_bytes=2e4)
    contenders = named_contenders("data_parallel", CLUSTER)
    small = replace(CLUSTER, device=device)
    traced = traced_target(target)
    (entry,) = planned.planned_entries(target, traced, small, contenders, ["auto"], lambda _: None)
    assert "does not fit" in entry.row.reason and entry.plan is None


def test_the_devices_time_is_that_of_the_simulated_program(entries):
    for entry in entries[:-1]:
        step, row = entry.lowered.simulate(), entry.row
        sizes = [entry.plan.stages[use.stages[0]].submesh.num_devices for use in step.submeshes]
        busy = sum(use.busy_seconds * size for use, size in zip(step.submeshes, sizes, strict=True)) / 8
        assert row.simulated_step_seconds == step.step_seconds
        # Busy time holds the collectives that nothing hides; waiting for transfers is communication, but not busy.
        assert busy + row.idle_seconds <= row.simulated_step_seconds * (1 + 1e-9)
        assert busy + row.idle_seconds + row.communication_seconds >= row.simulated_step_seconds * (1 - 1e-9)
    pipeline = next(entry.row for entry in entries if "pipeline" in entry.row.planner)
    assert pipeline.idle_seconds > 0.0 == entries[1].row.idle_seconds


def test_equal_plans_are_found_whatever_they_are_called(entries):
    plans = [entry.plan for entry in entries]
    assert same_plan(plans[1], plans[3]) and plans[1].name != plans[3].name
    assert not same_plan(plans[1], plans[2])


class Listed:
    """A planner whose plans take as long as a table says, or do not fit."""

    name = "listed"

    def __init__(self, like, own, seconds):
        self.like, self.own, self.seconds, self.asked = like, own, seconds, []

    def plan(self, request):
        count = self.own if request.num_microbatches == "auto" else request.num_microbatches
        self.asked.append(count)
        if self.seconds.get(count) is None:
            raise InfeasibleError(f"{count} does not fit.")
        if self.seconds[count] == "refused":
            raise PlanError(f"{count} is refused.")
        prediction = replace(self.like.prediction, step_seconds=self.seconds[count])
        return replace(self.like, num_microbatches=count, prediction=prediction)


@pytest.mark.parametrize(
    ("own", "seconds", "best", "asked"),
    [
        pytest.param(8, {8: 3.0, 16: 2.0, 32: 4.0, 4: 5.0}, 16, [8, 16, 32, 4], id="up"),
        pytest.param(8, {8: 3.0, 16: 4.0, 4: 2.0, 2: 2.5}, 4, [8, 16, 4, 2], id="down"),
        pytest.param(1, {4: 5.0, 8: 4.0, 16: 4.5}, 8, [1, 2, 4, 8, 16], id="until it fits"),
        pytest.param(8, {8: 3.0, 16: "refused", 4: 2.0}, 4, [8, 16, 4, 2], id="refused"),
    ],
)
def test_manual_plans_get_the_number_of_microbatches_that_is_best_for_them(entries, target, own, seconds, best, asked):
    planner = Listed(entries[1].plan, own, seconds)
    found = best_of_counts(traced_target(target), CLUSTER, planner)
    assert found.num_microbatches == best and planner.asked == asked


def test_where_no_number_works_the_reason_is_that_of_the_planners_own(entries, target):
    with pytest.raises(InfeasibleError, match="1 does not fit"):
        best_of_counts(traced_target(target), CLUSTER, Listed(entries[1].plan, 1, {}))
    with pytest.raises(PlanError, match="8 is refused"):
        best_of_counts(traced_target(target), CLUSTER, Listed(entries[1].plan, 8, {8: "refused"}))


def test_a_search_may_run_its_plans(target, devices):
    contenders = named_contenders("auto:measure_top=2:pipeline=1", CLUSTER)
    traced = traced_target(target)
    (entry,) = planned.planned_entries(target, traced, CLUSTER, contenders, [1], lambda _: None)
    assert not entry.row.reason and entry.row.auto and entry.row.planner == "auto, best of 2 measured, 1 micro-batch"


def test_numbers_that_are_given_are_kept(target):
    traced = traced_target(target)
    for planner in (DataParallel(), Pipeline(pipeline=2)):
        assert plan_at(traced, CLUSTER, planner, 2).num_microbatches == 2


def test_state_is_given_away_and_nothing_else(target):
    traced = traced_target(target).traced
    assert {name.split("/")[0] for name, gone in zip(traced.names, traced.donated, strict=True) if gone} == {"state"}
    assert not any(gone for name, gone in zip(traced.names, traced.donated, strict=True) if name.startswith("batch"))
