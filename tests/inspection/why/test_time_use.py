"""Where a step's time goes."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.inspection.why.time_use import MAX_ITEMS, bubble_at, time_use
from tests.inspection.conftest import make_plan


def total(items, kind):
    return sum(item.seconds for item in items if item.kind == kind)


def test_compute_adds_up_to_that_of_the_plan(tensor_plan, pipeline_plan):
    """The plan's figure comes from the estimator of the search, this one from op by op."""
    for plan in (tensor_plan, pipeline_plan):
        found = time_use(plan)
        assert found.by_line
        assert found.compute_seconds == pytest.approx(total(found.items, "compute"))
        assert found.compute_seconds * len(plan.stages) == pytest.approx(plan.prediction.compute_seconds, rel=1e-6)


def test_collectives_are_those_of_the_plan(tensor_plan):
    found = time_use(tensor_plan)
    assert total(found.items, "collective") == pytest.approx(tensor_plan.prediction.collective_seconds)


def test_the_parts_make_the_step(tensor_plan, pipeline_plan):
    for plan in (tensor_plan, pipeline_plan):
        found = time_use(plan)
        parts = found.compute_seconds + found.exposed_seconds + found.waiting_seconds
        assert parts == pytest.approx(plan.prediction.step_seconds, rel=0.02)


def test_the_most_comes_first_with_its_line_and_advice(tensor_plan):
    found = time_use(tensor_plan)
    seconds = [item.seconds for item in found.items]
    assert seconds == sorted(seconds, reverse=True)
    product = next(item for item in found.items if item.what.startswith("matrix products"))
    assert "models/sequential_networks.py:" in product.source
    assert "float32" in product.suggestion and "16-bit" in product.suggestion
    assert all(item.suggestion for item in found.items)
    text = tensor_plan.explain_time()
    numbers = [int(number) for number in re.findall(r"^ *(\d+)  ", text, re.MULTILINE)]
    assert numbers == list(range(1, min(len(found.items), MAX_ITEMS) + 1))
    assert json.loads(json.dumps(found.to_json()))["kind"] == "time"


def test_a_bubble_is_told_with_what_more_micro_batches_would_do(pipeline_plan):
    (waiting,) = (item for item in time_use(pipeline_plan).items if item.kind == "waiting")
    count = pipeline_plan.num_microbatches
    assert bubble_at(pipeline_plan, 2 * count) < bubble_at(pipeline_plan, count)
    assert f"with {2 * count} micro-batches" in waiting.suggestion or "longer than the mean" in waiting.suggestion


def test_equal_stages_have_the_bubble_of_the_formula(pipeline_plan):
    """(p - 1) / (m + p - 1) under 1F1B."""
    first = pipeline_plan.stages[0]
    cost = replace(first.cost, forward_seconds=1.0, backward_seconds=2.0, weight_seconds=0.0)
    stage = replace(first, cost=cost)
    even = replace(pipeline_plan, stages=(stage, replace(stage, submesh=pipeline_plan.stages[1].submesh)))
    assert bubble_at(even, 8) == pytest.approx(1 / 9)


def test_unequal_stages_are_the_reason_where_they_are(pipeline_plan):
    second = pipeline_plan.stages[1]
    slow = replace(second, cost=replace(second.cost, forward_seconds=3 * second.cost.forward_seconds))
    plan = replace(pipeline_plan, stages=(pipeline_plan.stages[0], slow), request=None)
    (waiting,) = (item for item in time_use(replace(plan, prediction=longer(plan))).items if item.kind == "waiting")
    assert "stage 1 takes" in waiting.suggestion


@pytest.mark.parametrize(
    ("planner", "num_devices", "words"),
    [
        (al.planners.DataParallel(), 4, "devices update copies of the same state"),
        (al.planners.FSDP(), 4, "its state lies split over all devices already"),
        (al.planners.DataParallel(), 1, ": narrower types make it shorter"),
    ],
)
def test_copies_of_state_are_told_by_what_devices_hold(planner, num_devices, words):
    """Whatever the state is called."""

    def step(s, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(s["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], grads)
        return {"w": s["w"] - m, "m": m}

    array = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=num_devices)
    batch = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    plan = al.plan(step, {"w": array, "m": array}, batch, cluster=cluster, planner=planner)
    told = [item.suggestion for item in time_use(plan).items if item.phases == ("update",) and item.kind == "compute"]
    assert told and all(words in suggestion for suggestion in told)


def longer(plan):
    busy = max(plan.num_microbatches * (s.cost.forward_seconds + s.cost.backward_seconds) for s in plan.stages)
    return replace(plan.prediction, step_seconds=1.2 * busy)


def test_the_update_is_told_to_split_state():
    plan = make_plan(al.planners.DataParallel())
    update = [item for item in time_use(plan).items if item.phases == ("update",) and item.kind == "compute"]
    assert update and any("Zero" in item.suggestion for item in update)


def test_a_plan_from_a_file_knows_its_tasks(tensor_plan, tmp_path):
    tensor_plan.save(tmp_path / "plan.json")
    found = time_use(al.Plan.load(tmp_path / "plan.json"))
    assert not found.by_line and {item.kind for item in found.items} >= {"task", "collective"}
    assert "planner=plan" in " ".join(str(found).split())
