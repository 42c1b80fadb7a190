"""`Auto(measure_top=k)`: the k best plans are run, each of its own kind; those that fail are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto, DataParallel, Megatron, PlanRequest
from tests.end_to_end.cases import eager_cluster
from tests.inter_op.test_stage_costs import chain_step

MANUAL = (DataParallel(), Megatron())


@pytest.fixture
def said() -> list[str]:
    """What planning said."""
    return []


@pytest.fixture
def request_with(said: list[str]) -> Callable[[Any], PlanRequest]:
    """A request whose plans are run by the function given."""
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = al.parallelize(chain_step, progress=said.append).trace(weights, x)
    return lambda measure: replace(traced.request(eager_cluster()), measure=measure)


def test_the_fastest_of_the_best_is_taken(request_with: Any, said: list[str]) -> None:
    run: list[al.Plan] = []

    def measure(plan: al.Plan) -> float:
        run.append(plan)
        return (0.03, 0.01, 0.02)[len(run) - 1]

    plan = Auto(manual=MANUAL, measure_top=3).plan(request_with(measure))
    assert plan.stages == run[1].stages and run[1].name in plan.name
    predicted = [each.prediction.step_seconds for each in run]
    assert predicted == sorted(predicted)
    assert [seconds for _, seconds in plan.alternatives[:2]] == [predicted[0], predicted[2]]
    assert len({(each.name, each.num_microbatches) for each in run}) == 3
    assert [line.partition(": measured ")[2] for line in said[-3:]] == [f"{ms} ms per step" for ms in (30, 10, 20)]


@pytest.mark.parametrize("kind", [RuntimeError, jax.errors.JaxRuntimeError])
def test_what_fails_is_left_out(request_with: Any, said: list[str], kind: type[Exception]) -> None:
    run: list[al.Plan] = []

    def measure(plan: al.Plan) -> float:
        run.append(plan)
        if len(run) == 1:
            raise kind("RESOURCE_EXHAUSTED: Out of memory.\nwhere it happened")
        return 0.01 * len(run)

    plan = Auto(manual=MANUAL, measure_top=3).plan(request_with(measure))
    assert plan.stages == run[1].stages and len(run) == 3
    assert said[-3].endswith("failed when it was run: RESOURCE_EXHAUSTED: Out of memory")


def test_all_may_fail(request_with: Any) -> None:
    failures = [RuntimeError("no memory left"), RuntimeError("no memory either")]

    def measure(_: al.Plan) -> float:
        raise failures.pop(0)

    with pytest.raises(al.errors.ExecutionError, match=r"\(2 tried\)\. The first: .*: no memory left\. Leave"):
        Auto(manual=MANUAL, measure_top=2).plan(request_with(measure))
    assert not failures


def test_a_defect_of_a_plan_is_no_failure_of_devices(request_with: Any) -> None:
    def measure(_: al.Plan) -> float:
        raise al.errors.VerificationError("a defect")

    with pytest.raises(al.errors.VerificationError):
        Auto(manual=MANUAL, measure_top=2).plan(request_with(measure))


def test_without_devices_nothing_is_run(request_with: Any) -> None:
    with pytest.raises(al.errors.PlanError, match="there are none here"):
        Auto(manual=MANUAL, measure_top=1).plan(request_with(None))
