"""Manual plans beside the search: with which numbers of micro-batches they are priced."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.errors import BatchError, InfeasibleError
from alpa_lite.inspection.text.tables import alternatives_table
from alpa_lite.inter_op.plan_request import SentSteps
from alpa_lite.inter_op.workers import Likely, Workers
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import FSDP, Auto, Pipeline, Planner, PlanRequest, Zero
from alpa_lite.planners.manual import MANUAL_PLANNERS, ManualPlans, NoPlan
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import GPipe, Interleaved1F1B, ZeroBubbleH1
from tests.end_to_end.cases import MODELS, Training, make_batch


def _request(num_microbatches: int | str = "auto") -> PlanRequest:
    training = Training(model="mlp", optimizer="momentum")
    args = jax.eval_shape(lambda: (training.start(), make_batch(MODELS["mlp"], 0, 64), jax.random.key(0)))
    traced = al.parallelize(training.step()).trace(*args)
    return traced.request(al.cluster("p3.16xlarge"), num_microbatches=num_microbatches)


@dataclass(frozen=True, kw_only=True)
class Priced(Planner):
    """A planner whose plans take so long, by their number of micro-batches; "auto" is 3."""

    plan_: Plan = field(repr=False)
    seconds: Mapping[int | str, float]
    waits: bool = False

    @property
    def name(self) -> str:
        return "priced"

    def slowdown(self, num_microbatches: int) -> float:
        return 1.0 + self.waits / num_microbatches

    def plan(self, request: PlanRequest) -> Plan:
        if request.num_microbatches not in self.seconds:
            raise InfeasibleError(f"{request.num_microbatches} do not fit.")
        return _lasting(self.plan_, self.seconds[request.num_microbatches], request.num_microbatches)


def _lasting(plan: Plan, seconds: float, number: Any) -> Plan:
    number = 3 if number == "auto" else number
    return replace(plan, num_microbatches=number, prediction=replace(plan.prediction, step_seconds=seconds))


@pytest.fixture(scope="module")
def some_plan() -> Plan:
    return FSDP().plan(_request())


@pytest.mark.parametrize(
    ("waits", "seconds", "too_large", "tried", "refused"),
    [
        # Of a pipeline, whose stages wait: down from that of the best, while faster,
        (True, {16: 1.05, 8: 1.02, 4: 1.01, 2: 1.03, 1: 0.9, 32: 0.5}, (), {16: 1.05, 8: 1.02, 4: 1.01}, []),
        (True, {16: 1.05, 8: 1.02, 2: 0.9}, (), {16: 1.05, 8: 1.02}, []),  # while it fits
        (True, {16: 1.05, 8: 1.02, 4: 1.01, 2: 1.0}, (4,), {16: 1.05, 8: 1.02}, []),  # nothing fits with 4, nor fewer
        (True, {16: 5.0, 8: 1.0}, (), {16: 5.0}, []),  # hopeless
        (True, {8: 1.0, 32: 1.0}, (), {}, [16]),
        (True, {"auto": 1.0}, (), {}, [16]),
        # Without a bubble: up from the fewest, while faster,
        (False, {1: 1.0, 2: 0.9, 4: 1.0, 8: 0.5, 16: 0.5}, (), {1: 1.0, 2: 0.9}, []),
        (False, {4: 1.0, 8: 1.1, 16: 0.5}, (), {4: 1.0}, []),  # from the fewest that fit
        (False, {1: 0.5, 4: 1.0, 8: 1.1}, (2,), {4: 1.0}, []),  # nothing fits with 2, nor fewer
        (False, {1: 5.0, 2: 1.0}, (), {1: 5.0}, []),  # hopeless
        (False, {32: 1.0}, (), {}, [16]),
    ],
)
def test_numbers_go_from_the_likely_best_while_plans_get_faster(
    waits: bool,
    seconds: Mapping[int | str, float],
    too_large: tuple[int, ...],
    tried: Mapping[int, float],
    refused: list[int],
    some_plan: Plan,
) -> None:
    planner = Priced(plan_=some_plan, seconds=seconds, waits=waits)
    best = _lasting(some_plan, 1.0, 16)
    manual = ManualPlans([planner], _request())
    found = [*manual.plans(best, too_large=too_large)]
    plans = [plan for plan in found if isinstance(plan, Plan)]
    assert {plan.num_microbatches: plan.prediction.step_seconds for plan in plans} == tried
    missing = [(name, str(error)) for name, error in found[len(plans) :]]
    assert missing == [("priced", f"{number} do not fit.") for number in refused]


def test_what_waits_longer_than_the_best_takes_is_not_planned(some_plan: Plan) -> None:
    """A pipeline whose stages wait; with 16 micro-batches it may yet be as fast."""

    @dataclass(frozen=True, kw_only=True)
    class Waiting(Priced):
        def slowdown(self, num_microbatches: int) -> float:
            return 1e9 if num_microbatches < 16 else 1.0

    seconds = some_plan.prediction.step_seconds
    planner, best = Waiting(plan_=some_plan, seconds={16: seconds, 8: seconds / 2}), _lasting(some_plan, seconds, 16)
    (plan,) = ManualPlans([planner], _request()).plans(best)
    assert isinstance(plan, Plan) and plan.num_microbatches == 16
    (missing,) = ManualPlans([planner], _request()).plans(_lasting(some_plan, seconds, 8))
    assert isinstance(missing, NoPlan) and missing.name == "priced"
    assert "longer than the chosen plan" in str(missing.error)


@pytest.mark.parametrize("number", [1, "auto"])
def test_every_manual_planner_is_listed_with_its_price_or_its_reason(number: int | str) -> None:
    found = Auto().plan(_request(number))
    for planner in MANUAL_PLANNERS:
        seconds = [s for name, s in found.alternatives if f"{name},".startswith(f"{planner.name},")]
        reason = dict(found.refusals).get(planner.name, "")
        chosen = planner.name in found.name
        assert chosen or (seconds and (min(seconds) < math.inf) == (not reason))
        assert not reason or reason.partition(". ")[0].rstrip(".") in " ".join(cells(found, planner.name).split())


def cells(plan: Plan, name: str) -> str:
    (row,) = (row for row in alternatives_table(plan).rows if row[0] == name)
    return " ".join(row)


def test_what_pipelines_wait_for_is_known_of_those_that_must() -> None:
    assert Pipeline(pipeline=2).slowdown(4) == pytest.approx(8 / 7)
    assert Pipeline(pipeline=2, schedule=GPipe()).slowdown(1) == pytest.approx(2)
    for schedule in (ZeroBubbleH1(), Interleaved1F1B(num_chunks=2)):
        assert Pipeline(pipeline=2, schedule=schedule).slowdown(4) == 1


@pytest.mark.parametrize("microbatches", [None, 1])
def test_beside_one_micro_batch_or_nothing_planners_decide_themselves(
    microbatches: int | None, some_plan: Plan
) -> None:
    best = None if microbatches is None else _lasting(some_plan, 1.0, microbatches)
    planner = Priced(plan_=some_plan, seconds={"auto": 2.0, 1: 1.5})
    (found,) = ManualPlans([planner], _request()).plans(best)
    assert (found.num_microbatches, found.prediction.step_seconds) == (3, 2.0)


def test_a_number_that_was_asked_for_is_the_only_one(some_plan: Plan) -> None:
    planner = Priced(plan_=some_plan, seconds={4: 1.0, 2: 0.5, 1: 0.5})
    (found,) = ManualPlans([planner], _request(4)).plans(_lasting(some_plan, 1.0, 4))
    assert found.num_microbatches == 4


def test_the_search_is_no_slower_than_tuned_manual_plans() -> None:
    found = Auto().plan(_request())
    for planner in (Zero(stage=2), FSDP()):
        for number in (1, 2, 4, 8):
            other = planner.plan(_request(number))
            assert found.prediction.step_seconds <= other.prediction.step_seconds


class Waiting(FSDP):
    """A planner whose devices wait for each other, for less long with more micro-batches."""

    def slowdown(self, num_microbatches: int) -> float:
        return 1.0 + 1 / num_microbatches


class AtWork(Workers):
    """Workers that are told what is expected of them."""

    told: Mapping[Any, Likely] = {}

    @property
    def at_work(self) -> bool:
        return True

    def expect(self, questions: Mapping[Any, Likely], *, later: bool = False) -> None:
        assert later
        self.told = questions


@pytest.mark.parametrize(
    ("number", "traces", "expected"),
    [
        # Without a bubble the fewest micro-batches are the first, whatever the best plan will be.
        (8, True, [("manual", 0, 1), ("manual", 0, 2), ("manual", 1, 8)]),
        (8, False, [("manual", 0, 1)]),
        # Each planner decides on the number.
        (1, True, [("manual", 0, "auto"), ("manual", 1, "auto")]),
    ],
)
def test_workers_are_told_of_plans_whose_steps_can_be_traced(
    number: int, traces: bool, expected: Any, some_plan: Plan
) -> None:
    request, workers = _request(), AtWork()

    @dataclass(frozen=True, kw_only=True)
    class Steps(SentSteps):
        def at(self, num_microbatches: int, loop_parts: int) -> StepGraph:
            if num_microbatches > 1 and not traces:
                raise BatchError("This batch cannot be divided.")
            return request.step_at(num_microbatches, loop_parts)

    manual = ManualPlans([FSDP(), Waiting()], replace(request, steps=Steps(), workers=workers))
    best = _lasting(some_plan, 1.0, number)
    manual.expect(best)
    assert [*workers.told] == expected
    for (*_, asked), question in workers.told.items():
        # A worker is another process: whatever a question is about has to reach it.
        sent = pickle.loads(pickle.dumps(question))
        made = sent.answer({}, *sent.about, sent.rest)
        assert isinstance(made, Plan) and made.num_microbatches == (1 if asked == "auto" else asked)
    # Of those that this process has begun workers are not told again.
    if number == 1:
        next(manual.plans(best))
        assert [*workers.told] == expected[1:]
