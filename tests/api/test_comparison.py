"""Planners side by side: prices are those of `al.plan`, verdicts those of the numbers, and a failure hides nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.planners import FSDP, DataParallel, Hybrid

SAMPLES, WIDTH, LAYERS = 64, 256, 4


def step(params: Any, x: Any) -> Any:
    """Square layers, written out."""

    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


ARGUMENTS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32),
)
FLAGS = "megatron:--micro-batch-size 4"


@pytest.fixture(scope="module")
def found() -> al.PlannerComparison:
    planners = [FLAGS, Hybrid(pipeline=4, data=2), "fsdp", "megatron:--tensor-model-parallel-size 3"]
    return al.compare(step, *ARGUMENTS, planners=planners, cluster="dgx-1", cache=False)


def test_plans_are_those_of_each_planner_alone(found: al.PlannerComparison) -> None:
    alone = [
        al.plan(step, *ARGUMENTS, planner=each, cluster="dgx-1") for each in (FLAGS, Hybrid(pipeline=4, data=2), FSDP)
    ]
    plans = [each.plan for each in found.candidates if each.plan is not None]
    assert [plan.prediction.step_seconds for plan in plans] == [plan.prediction.step_seconds for plan in alone]
    best = found.fastest
    assert best is not None and best.plan is min(plans, key=lambda plan: plan.prediction.step_seconds)


def test_verdicts_say_the_order_and_the_failure(found: al.PlannerComparison) -> None:
    best = found.fastest
    assert best is not None and best.plan is not None
    assert found.verdicts[0] == f"{best.name} is the fastest."
    for each in found.candidates:
        if each.plan is not None and each is not best:
            slower = each.plan.prediction.step_seconds / best.plan.prediction.step_seconds
            cannot = ", by so little that the prediction cannot tell which is faster"
            # The two ranges, as `Plan.diff` compares them.
            alike = "cannot tell" in str(best.plan.diff(each.plan))
            assert f"{each.name} is {slower:.2f}× slower than {best.name}{cannot if alike else ''}." in found.verdicts
    assert "product 3 does not divide the 8 devices" in found.verdicts[-1]
    assert "product 3 does not" in " ".join(str(found).split())


def test_the_table_has_what_differs_and_says_once_what_does_not(found: al.PlannerComparison) -> None:
    text = str(found)
    assert "4 pipeline × 2 data" in text and "8 data, ZeRO-3" in text
    assert "The same in all: recomputed: nothing." in text
    columns = next(line for line in text.splitlines() if "degrees" in line).split()
    assert columns == ["plan", "degrees", "micro-batches", "schedule"]


def test_equal_plans_cannot_be_told_apart() -> None:
    found = al.compare(step, *ARGUMENTS, planners=[DataParallel, "data_parallel"], cluster="dgx-1")
    assert [each.name for each in found.candidates] == ["data parallel (1)", "data parallel (2)"]
    assert found.verdicts[1] == "data parallel (2) is as fast as data parallel (1)."
    assert "What differs" not in str(found)
    data: Any = found.to_json()
    assert [each["indistinguishable"] for each in data["plans"]] == [True, True]


def test_no_planner_and_wrong_names_are_refused_before_any_work() -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    with pytest.raises(PlanError, match="name at least one planner"):
        al.compare(never, planners=[], cluster="dgx-1")
    with pytest.raises(PlanError, match="no planner 'fsdq'"):
        al.compare(never, planners=["auto", "fsdq"], cluster="dgx-1")
