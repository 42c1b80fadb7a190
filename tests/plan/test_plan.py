"""Plans: they survive a file, are replayed to the same program, and belong to one step and cluster."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.plan.plan import FORMAT, Plan, fingerprint
from alpa_lite.planners import Hybrid
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import GPipe, Interleaved1F1B
from alpa_lite.step.recomputation import Remat
from alpa_lite.trace.trace import trace
from tests.end_to_end.cases import MODELS, PLANNERS, Training, assert_same, eager_cluster, make_batch, reference
from tests.end_to_end.programs import PARAMS, X, Y, descend, squared
from tests.step.splitting import split_step

CASES = [
    *[("mlp", planner) for planner in PLANNERS],
    ("gpt_scan", "fsdp"),
    ("gpt_scan", "pipeline_2"),
    ("gpt", "hybrid"),
]


def _arguments(model: str) -> Any:
    args = Training(model=model).start(), make_batch(MODELS[model], 0), jax.random.key(0)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


@cache
def planned(model: str, planner: str) -> Any:
    """A planned function, planned once."""
    step = al.parallelize(
        Training(model=model).step(), cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=4
    )
    return step.trace(*_arguments(model)).plan()


@pytest.mark.parametrize(("model", "planner"), CASES)
def test_a_saved_plan_is_equal_and_gives_the_same_program(model: str, planner: str, tmp_path: Path) -> None:
    made = planned(model, planner)
    made.last_plan.save(tmp_path / "plan.json")
    loaded = al.Plan.load(tmp_path / "plan.json")
    assert loaded == made.last_plan
    replayed = made.function.plan(planner=loaded)
    assert replayed.last_plan == made.last_plan
    a, b = made.lower().program, replayed.lower().program
    assert str(a) == str(b) and a == b


@pytest.mark.parametrize(("model", "planner"), CASES[:3])
def test_planning_twice_decides_the_same(model: str, planner: str) -> None:
    made = planned(model, planner)
    again = made.function.plan().last_plan
    assert _without_clock(again) == _without_clock(made.last_plan)


def test_a_plan_that_computes_values_again_survives_a_file_and_belongs_to_the_step_as_traced(tmp_path: Path) -> None:
    options: Any = {"cluster": eager_cluster(), "num_microbatches": 4}
    traced = al.parallelize(Training(model="gpt").step(), **options).trace(*_arguments("gpt"))
    plain, made = (traced.plan(planner=Hybrid(pipeline=2, remat=remat)) for remat in ("none", "full"))
    plan = made.last_plan
    plan.save(tmp_path / "plan.json")
    loaded = al.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and set(plan.remat) == {"full", "none"}
    assert plan.fingerprint == plain.last_plan.fingerprint and not plain.last_plan.remat
    assert len(plan.op_layers) > len(plan.traced_layers) == len(plain.last_plan.op_layers)
    assert str(made.function.plan(planner=loaded).lower().program) == str(made.lower().program)
    assert plan.recomputed == "layers 0–2: full" and f"rematerialised: {plan.recomputed}" in " ".join(str(plan).split())
    assert plain.last_plan.recomputed == "" and "rematerialised" in str(plain.last_plan.diff(plan))
    edited = dataclasses.replace(plan, remat=(Remat.NONE,) * len(plan.remat))
    with pytest.raises(MismatchError, match="computes values again, but not those"):
        made.function.plan(planner=edited).lower()


def _without_clock(plan: Plan) -> Plan:
    return dataclasses.replace(plan, solver=dataclasses.replace(plan.solver, seconds=0.0))


def test_a_replayed_plan_runs(tmp_path: Path, devices: Any) -> None:
    training = Training(model="mlp")
    planned("mlp", "hybrid").last_plan.save(tmp_path / "plan.json")
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=al.Plan.load(tmp_path / "plan.json"))
    assert_same(training.run(step), reference(training))


def test_the_file_is_plain_json_of_a_known_format(tmp_path: Path) -> None:
    planned("mlp", "hybrid").last_plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["format"] == FORMAT
    assert data["function"] == "train_step" and data["num_microbatches"] == 4
    assert data["cluster"]["device"]["name"] == "V100 SXM2 16GB"
    assert set(data["stages"][0]["specs"]) >= {"state/params/0/w", "batch/inputs"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stages", 3),
        ("stages", [{}]),
        ("schedule", {}),
        ("cluster", None),
        ("prediction", []),
        ("op_layers", "x"),
        ("num_microbatches", "many"),
        ("alternatives", [1]),
    ],
)
def test_a_file_with_a_wrong_value_is_a_sentence(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**planned("mlp", "hybrid").last_plan.to_json(), name: value}))
    with pytest.raises(PlanError, match=f"'{name}' of the plan file"):
        Plan.load(path)


def test_schedules_survive_the_file() -> None:
    plan = planned("mlp", "gpipe_2").last_plan
    assert plan.schedule == GPipe() and Plan.from_json(plan.to_json()).schedule == GPipe()


def test_chunks_survive_the_file(tmp_path: Path) -> None:
    schedule = Interleaved1F1B(num_chunks=2)
    args = Training(model="mlp").start(), make_batch(MODELS["mlp"], 0), jax.random.key(0)
    step = al.parallelize(Training(model="mlp").step()).trace(*args)
    made = step.plan(cluster=eager_cluster(), planner=Hybrid(pipeline=2, schedule=schedule), num_microbatches=2)
    made.last_plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made.last_plan and loaded.schedule == schedule
    assert str(dataclasses.replace(made, last_plan=loaded).lower()) == str(made.lower())


@pytest.mark.parametrize("key", ["stages", "schedule", "fingerprint", "op_layers", "cluster"])
def test_a_file_without_one_of_its_parts_is_refused(key: str) -> None:
    data = json.loads(json.dumps(planned("mlp", "hybrid").last_plan.to_json()))
    del data[key]
    with pytest.raises(PlanError, match=key):
        Plan.from_json(data)


@pytest.mark.parametrize("value", [3, "text", None, {"a": 1}])
def test_a_stage_of_the_wrong_kind_is_refused_in_a_sentence(value: Any) -> None:
    data = json.loads(json.dumps(planned("mlp", "hybrid").last_plan.to_json()))
    data["stages"][0] = value
    with pytest.raises(PlanError):
        Plan.from_json(data)


def test_plans_are_frozen_values() -> None:
    plan = planned("mlp", "hybrid").last_plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_microbatches = 2
    assert dataclasses.replace(plan, name="mine") != plan


def test_stages_are_found_by_layer() -> None:
    plan = planned("mlp", "pipeline_4").last_plan
    assert [plan.stage_of_layer(layer) for layer in range(plan.num_layers)] == [0, 1, 2, 3]


def test_causes_of_time_are_those_of_the_prediction() -> None:
    prediction = planned("gpt", "hybrid").last_plan.prediction
    causes = prediction.breakdown()
    collectives = sum(v for k, v in causes.items() if k not in ("compute", "transfers"))
    assert causes["compute"] == prediction.compute_seconds and causes["transfers"] == prediction.transfer_seconds
    assert collectives == pytest.approx(prediction.collective_seconds)
    assert set(causes) - {"compute", "transfers"} == {use.kind for use in prediction.collectives}


def test_every_collective_names_its_line_axis_and_stage() -> None:
    plan = planned("gpt", "hybrid").last_plan
    for use in plan.prediction.collectives:
        stage = plan.stages[use.stage]
        assert use.num_devices == stage.mesh_shape.size(use.axis)
        assert use.bytes > 0 and use.count > 0 and use.seconds > 0
        assert use.phase in ("forward", "backward", "update")
    named = [use for use in plan.prediction.collectives if use.source]
    assert named and all(re.search(r"\.py:\d+", use.source) for use in named)


# --- fingerprints -----------------------------------------------------------------------------------------------------


def _step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    return descend(p, grads), loss


def _split(fun: Any, args: Any, num_microbatches: int = 1) -> StepGraph:
    return split_step(trace(fun, args), num_microbatches).step


def test_fingerprints_are_equal_for_equal_steps_and_only_for_those() -> None:
    base = fingerprint(_split(_step, (PARAMS, X, Y)))
    assert fingerprint(_split(_step, (PARAMS, X, Y))) == base
    half = jax.tree.map(lambda a: a.astype(np.float16), PARAMS)
    others = {
        "literal": _split(lambda p, x, y: _step(p, x * 2.0, y), (PARAMS, X, Y)),
        "other literal": _split(lambda p, x, y: _step(p, x * 3.0, y), (PARAMS, X, Y)),
        "shape": _split(_step, (PARAMS, X[:8], Y[:8])),
        "dtype": _split(_step, (half, X, Y)),
        "micro-batches": _split(_step, (PARAMS, X, Y), 4),
        "order of outputs": _split(lambda p, x, y: _step(p, x, y)[::-1], (PARAMS, X, Y)),
    }
    prints = {name: fingerprint(step) for name, step in others.items()}
    assert len({base, *prints.values()}) == 1 + len(prints)


def test_fingerprints_see_into_loops() -> None:
    def looped(factor: float) -> Any:
        return lambda c: jax.lax.scan(lambda c, _: (c * factor, None), c, None, length=3)[0]

    assert fingerprint(_split(looped(2.0), (X,))) != fingerprint(_split(looped(3.0), (X,)))


def test_names_and_lines_do_not_count() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return descend(p, grads), loss

    assert fingerprint(_split(step, (PARAMS, X, Y))) == fingerprint(_split(_step, (PARAMS, X, Y)))


def test_a_plan_verifies_its_step_and_cluster() -> None:
    made = planned("mlp", "hybrid")
    plan, step = made.last_plan, made.function.step(4, loop_parts=made.last_plan.loop_parts).step
    plan.verify(step, eager_cluster())
    with pytest.raises(MismatchError, match="fingerprint"):
        plan.verify(made.function.step(2, loop_parts=plan.loop_parts).step)
    with pytest.raises(MismatchError, match="4"):
        plan.verify(step, dataclasses.replace(eager_cluster(), devices_per_host=4))
