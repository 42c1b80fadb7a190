"""Plans of contenders at their best numbers of micro-batches, and steps that run in turn."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.bench.entries import (
    Running,
    best_of_counts,
    contest_of,
    in_turn,
    measured_rows,
    planned_entries,
    rounds_within,
    same_plan,
)
from alpa_lite.cli.bench.request import BenchTarget, named_contenders
from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.plan.progress import Progress
from alpa_lite.planners import DataParallel, Pipeline
from tests.cli.bench.conftest import CLUSTER


def test_rows_say_what_the_plans_say(entries):
    for entry in entries[:-1]:
        row, plan = entry.row, entry.plan
        assert not row.reason and row.predicted_seconds == plan.prediction.step_seconds
        assert row.price.peak_bytes == max(plan.prediction.peak_bytes)
        assert (row.price.num_stages, row.price.num_microbatches) == (len(plan.stages), plan.num_microbatches)
        assert (row.price.solver_status, row.price.solver_gap) == (plan.solver.status, plan.solver.gap)
        assert row.planning_seconds > 0 and row.model == "mlp-tiny" and row.batch_size == 64


def test_a_planner_that_does_not_apply_is_a_row_with_the_reason(entries):
    row = entries[-1].row
    assert entries[-1].plan is None and row.predicted_seconds is None
    assert "degrees whose product is 8" in row.reason


def test_a_plan_that_does_not_fit_is_a_row_with_the_reason(target):
    device = replace(CLUSTER.device, memory_bytes=2e4)
    contenders = named_contenders(["data_parallel"], CLUSTER)
    small = replace(CLUSTER, device=device)
    (entry,) = planned_entries(contest_of(target, small), contenders, ["auto"], lambda _: None)
    assert "does not fit" in entry.row.reason and entry.plan is None


def test_the_devices_time_is_that_of_the_simulated_program(entries):
    for entry in entries[:-1]:
        step, row = entry.lowered.simulate(), entry.row
        sizes = [entry.plan.stages[use.stages[0]].submesh.num_devices for use in step.submeshes]
        busy = sum(use.busy_seconds * size for use, size in zip(step.submeshes, sizes, strict=True)) / 8
        assert row.simulation.step_seconds == step.step_seconds
        # Busy time holds the collectives that nothing hides; waiting for transfers is communication, but not busy.
        assert busy + row.simulation.idle_seconds <= row.simulation.step_seconds * (1 + 1e-9)
        assert (
            busy + row.simulation.idle_seconds + row.simulation.communication_seconds
            >= row.simulation.step_seconds * (1 - 1e-9)
        )
    pipeline = next(entry.row for entry in entries if "pipeline" in entry.row.planner)
    assert pipeline.simulation.idle_seconds > 0.0 == entries[1].row.simulation.idle_seconds


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
        pytest.param(8, {8: 3.0, 16: "refused", 4: 2.0}, 4, [8, 16, 32, 4, 2], id="refused"),
    ],
)
def test_manual_plans_get_the_number_of_microbatches_that_is_best_for_them(entries, target, own, seconds, best, asked):
    planner = Listed(entries[1].plan, own, seconds)
    found = best_of_counts(contest_of(target, CLUSTER), planner)
    assert found.num_microbatches == best and planner.asked == asked


def test_where_no_number_works_the_reason_is_that_of_the_planners_own(entries, target):
    with pytest.raises(InfeasibleError, match="1 does not fit"):
        best_of_counts(contest_of(target, CLUSTER), Listed(entries[1].plan, 1, {}))
    with pytest.raises(PlanError, match="8 is refused"):
        best_of_counts(contest_of(target, CLUSTER), Listed(entries[1].plan, 8, {8: "refused"}))


def test_a_search_may_run_its_plans(target, devices):
    contenders = named_contenders(["auto:measure_top=2:pipeline=1"], CLUSTER)
    (entry,) = planned_entries(contest_of(target, CLUSTER), contenders, [1], lambda _: None)
    assert not entry.row.reason and entry.row.auto and entry.row.planner == "auto, best of 2 measured, 1 micro-batch"


def test_numbers_that_are_given_are_kept(target):
    contest = contest_of(target, CLUSTER)
    for planner in (DataParallel(), Pipeline(pipeline=2)):
        assert contest.plan(planner, 2).num_microbatches == 2


def test_state_is_given_away_and_nothing_else(target):
    traced = contest_of(target, CLUSTER).traced.traced
    assert {
        name.split("/")[0] for name, gone in zip(traced.inputs.names, traced.inputs.donated, strict=True) if gone
    } == {"state"}
    assert not any(
        gone for name, gone in zip(traced.inputs.names, traced.inputs.donated, strict=True) if name.startswith("batch")
    )


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_every_round_runs_each_step_once_and_every_other_backwards():
    clock, ran = Clock(), []

    def step(name, seconds):
        def run():
            ran.append(name)
            clock.now += seconds * (10.0 if len(ran) <= 6 else 1.0)  # the first rounds are slow

        return run

    steps = {"a": step("a", 1.0), "b": step("b", 2.0), "c": step("c", 3.0)}
    said = []
    progress = Progress(said.append)
    found = in_turn(steps, 2, progress, warm_up=2, clock=clock)
    assert "".join(ran) == "abccbaabccba"
    assert found == {"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [3.0, 3.0]}
    assert said == [f"round {i} of 4" for i in (1, 2, 3, 4)]


def test_plans_are_measured_and_equal_ones_share_it(entries, target, devices):
    rows = measured_rows(target, entries, 3, Progress())
    for row in rows[:-1]:
        assert len(row.run.samples) == 3 and row.run.step_seconds > 0
        assert row.run.quartiles[0] <= row.run.step_seconds <= row.run.quartiles[1]
        assert row.run.allocated_peak_bytes > 0
    assert rows[3].run.same_as == rows[1].planner and rows[3].run.samples == rows[1].run.samples
    assert rows[1].run.samples != rows[2].run.samples
    assert rows[-1] == entries[-1].row  # it has no plan


def test_what_was_compiled_and_measured_is_told_at_once_with_an_estimate(entries, target, devices):
    told = []
    progress = Progress(lambda text: told.append(f"({text})"))
    measured_rows(target, entries[:4], 2, progress, told.append)
    heads = [re.sub(r"^mlp-tiny[,:] ", "", line) for line in told]
    shown = [line for line in heads if not line.startswith("(")]
    names = [entry.row.planner for entry in entries[:3]]
    assert [line.partition(":")[0] for line in shown[:3]] == names and "compiled in" in shown[0]
    assert re.fullmatch(r"2 rounds of 3 plans, about \d+ s", shown[3])
    # The fourth plan equals the second, and is measured with it.
    assert [line.partition(":")[0] for line in shown[4:]] == [*names, entries[3].row.planner]
    assert heads.index("(round 3 of 3)") > heads.index(shown[3])
    assert progress.done == {"compile": 3, "run": 3} and progress.left == {"compile": 0, "run": 0}


def test_a_running_step_trains(entries, target, devices):
    """Each call starts from the state that the one before left: as `jax.jit`, three steps."""
    state, batch = target.values()
    running = Running.of(entries[2].lowered, jax.tree.leaves((state, batch)))
    want = state
    for _ in range(3):
        running()
        want, _ = jax.jit(target.step)(want, batch)
    got = running.leaves[: len(jax.tree.leaves(state))]
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_hook_may_name_one_array_twice(devices):
    """Both are given away; a second look at one buffer would end the interpreter."""
    w = jnp.eye(16)

    def step(ws, x):
        loss, grads = jax.value_and_grad(lambda ws: jnp.mean((x @ ws[0] @ ws[1]) ** 2))(ws)
        return [a - 0.1 * g for a, g in zip(ws, grads, strict=True)], loss

    arguments = [w, w], jnp.ones((16, 16))
    target = BenchTarget(name="twice", step=step, arguments=arguments, values=lambda: arguments)
    contenders = named_contenders(["data_parallel,pipeline"], CLUSTER)
    entries = list(planned_entries(contest_of(target, CLUSTER), contenders, [1], lambda _: None))
    rows = measured_rows(target, entries, 2, Progress())
    assert all(len(row.run.samples) == 2 for row in rows)
    assert not w.is_deleted()


def test_what_fails_on_the_devices_is_a_row_with_the_reason(entries, target, devices, monkeypatch):
    original = Running.__call__

    def fail(self):
        if len(self.compiled.plan.stages) > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        original(self)

    monkeypatch.setattr(Running, "__call__", fail)
    rows = measured_rows(target, [*entries[1:3], entries[2]], 2, Progress())
    assert rows[0].run is not None
    # The equal one is not compiled to fail again.
    assert [row.reason for row in rows[1:]] == ["It failed when it was run: RESOURCE_EXHAUSTED: out of memory"] * 2
    told = []
    measured_rows(target, entries[2:3], 2, Progress(), told.append)
    assert len(told) == 1 and "RESOURCE_EXHAUSTED" in told[0]


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 9), (1.0, 9), (4.0, 5), (6.0, 3), (100.0, 3)])
def test_rounds_take_some_seconds_within_limits(seconds, rounds):
    assert rounds_within(seconds) == rounds


def test_without_a_number_the_rounds_depend_on_the_steps(entries, target, devices):
    (row,) = measured_rows(target, entries[1:2], None, Progress())
    assert len(row.run.samples) == 9


@pytest.mark.parametrize("rounds", [1])
def test_one_round_is_enough(entries, target, devices, rounds):
    (row,) = measured_rows(target, entries[1:2], rounds, Progress())
    assert row.run.quartiles == (row.run.step_seconds,) * 2
