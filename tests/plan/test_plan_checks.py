"""Hostile and damaged plans: each ends in a sentence or is a plan that lowers, and nothing else ever happens."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inspection.page.html import plan_html
from alpa_lite.plan.codec import CHECKSUM
from alpa_lite.plan.plan import Plan, check_plan
from alpa_lite.schedule import Interleaved1F1B
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.recomputation import Remat
from tests.mutations import damaged, mutated
from tests.plan.test_plan import planned

FEW = (("mlp", "hybrid"), ("mlp", "zero_2"))
REAL = (*FEW, ("gpt_scan", "pipeline_2"), ("gpt", "hybrid"), ("mlp", "zero_bubble_4"))
PARTS = ("ops", "accumulators", "inputs", "specs")
SECONDS = 120


@cache
def data_of(model: str, planner: str) -> str:
    """A real plan's JSON."""
    return json.dumps(planned(model, planner).last_plan.to_json())


@contextmanager
def no_hang() -> Iterator[None]:
    """Fails what takes too long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"This takes more than {SECONDS} s.")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_out(data: Any, model: str, planner: str, *, whole: bool) -> str:
    """What comes of the data of a plan: the step at which a sentence ended it, or "lowered".

    whole: with its page, which takes time.
    """
    made, step = planned(model, planner), "read"
    with no_hang():
        try:
            plan = Plan.from_json(data)
            step = "shown"
            _ = str(plan), str(plan.diff(made.last_plan)), plan.explain_time(), plan_html(plan) if whole else ""
            step = "replayed"
            replayed = made.function.plan(planner=plan, cluster=plan.cluster)
            step = "lowered"
            replayed.lower()
        except AlpaLiteError as error:
            assert str(error).endswith((".", "?", ")", "…")) and len(str(error)) <= 3000, str(error)
            return f"refused before it was {step}"
    return step


def _plans(count: int) -> Any:
    return st.sampled_from(REAL if count > 100 else FEW)


FUZZ = pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.long)])


@FUZZ
def test_any_change_is_a_sentence_or_a_plan(count: int) -> None:
    seen = Counter[str]()

    @settings(max_examples=count)
    @given(
        case=st.sampled_from(REAL if count > 100 else FEW),
        seed=st.integers(0, 2**32),
        changes=st.sampled_from((1, 1, 2, 5)),
    )
    def run(case: tuple[str, str], seed: int, changes: int) -> None:
        seen[
            try_out(mutated(json.loads(data_of(*case)), random.Random(seed), changes=changes), *case, whole=count > 100)
        ] += 1

    run()
    assert seen["refused before it was read"] > count / 4


@FUZZ
def test_changes_that_look_right_are_a_sentence_or_a_plan(count: int) -> None:
    """Of specs, placements and layers, to what stands elsewhere in their stead."""
    seen = Counter[str]()

    @settings(max_examples=count)
    @given(
        case=st.sampled_from(REAL if count > 100 else FEW),
        seed=st.integers(0, 2**32),
        changes=st.sampled_from((1, 2, 5)),
    )
    def run(case: tuple[str, str], seed: int, changes: int) -> None:
        chance, data = random.Random(seed), json.loads(data_of(*case))
        places = [(stage, part) for stage in data["stages"] for part in PARTS]
        places += [(data, part) for part in ("stages", "op_layers", "input_layers")]
        container, part = chance.choice(places)
        container[part] = mutated(container[part], chance, changes=changes, subtle=True)
        seen[try_out(data, *case, whole=False)] += 1

    run()
    assert seen["lowered"] and seen["refused before it was read"] and seen["refused before it was lowered"]


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_any_damage_of_a_file_is_a_sentence(count: int, tmp_path: Path) -> None:
    """Flipped, lost and added bytes: the checksum says so, or it is no JSON any more."""
    path = tmp_path / "plan.json"
    planned("mlp", "hybrid").last_plan.save(path)
    whole = path.read_bytes()

    @settings(max_examples=count)
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        path.write_bytes(damaged(whole, random.Random(seed)))
        with no_hang():
            try:
                assert Plan.load(path) == planned("mlp", "hybrid").last_plan  # a space more is no damage
            except PlanError as error:
                assert str(path) in str(error)

    run()


def test_a_plan_that_was_edited_is_read_without_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned("mlp", "hybrid").last_plan.save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "name": "mine"}))
    with pytest.raises(PlanError, match="its checksum is not that of its content"):
        Plan.load(path)
    del data[CHECKSUM]
    path.write_text(json.dumps({**data, "name": "mine"}))
    assert Plan.load(path) == replace(planned("mlp", "hybrid").last_plan, name="mine")


# --- each check -------------------------------------------------------------------------------------------------------


def _stage(plan: Plan, number: int = 0, **changes: Any) -> Plan:
    stages = list(plan.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(plan, stages=tuple(stages))


def _op(plan: Plan, **changes: Any) -> Plan:
    ops = dict(plan.stages[0].ops)
    number = next(number for number, placement in ops.items() if any(placement.factors))
    ops[number] = replace(ops[number], **changes)
    return _stage(plan, ops=ops)


CONTRADICTIONS: dict[str, Any] = {
    "it has no stage": lambda p: replace(p, stages=()),
    "it has 0 micro-batches": lambda p: replace(p, num_microbatches=0),
    "it has 16777216 micro-batches in 2 stages": lambda p: replace(p, num_microbatches=2**24),
    "cut into -1 parts": lambda p: replace(p, loop_parts=-1),
    "stage 0 has the layers 1 to 1": lambda p: _stage(p, layers=(1, 1)),
    "its stages have": lambda p: replace(p, num_layers=p.num_layers + 1),
    "layer 99 of": lambda p: replace(p, op_layers=(99, *p.op_layers[1:])),
    "layer -1 of": lambda p: replace(p, input_layers=(-1, *p.input_layers[1:])),
    "rematerialisation policies": lambda p: replace(p, remat=(Remat.NONE,) * 99),
    r"devices 6\.\.9, of 8": lambda p: _stage(p, submesh=Submesh(first_device=6, num_hosts=1, devices_per_host=4)),
    "in a mesh of 3": lambda p: _stage(p, mesh_shape=LogicalMesh(axis_names=("data",), shape=(3,))),
    r"the axes \['expert'\] are named": lambda p: _stage(p, inputs={0: Spec((("expert",),))}),
    "an axis is used twice": lambda p: _stage(p, specs={"x": Spec((("data",), ("data",)))}),
    r"\['expert'\]": lambda p: _op(p, factors=(("expert",),)),
    "used twice in": lambda p: _op(p, partial=("data", "data")),
    "beyond": lambda p: _stage(p, ops={10**6: next(iter(p.stages[0].ops.values()))}),
    "memory of 1 stages": lambda p: replace(p, prediction=replace(p.prediction, peak_bytes=(1.0,))),
    "something of stage 7": lambda p: replace(
        p, prediction=replace(p.prediction, collectives=(replace(p.prediction.collectives[0], stage=7),))
    ),
    "3 stages per group": lambda p: replace(p, schedule=Interleaved1F1B(num_chunks=3)),
}


@pytest.mark.parametrize("sentence", CONTRADICTIONS)
def test_a_plan_that_contradicts_itself_is_refused(sentence: str) -> None:
    plan = planned("mlp", "hybrid").last_plan
    check_plan(plan)
    with pytest.raises(PlanError, match=sentence):
        Plan.from_json(json.loads(json.dumps(CONTRADICTIONS[sentence](plan).to_json())))


@pytest.mark.parametrize(
    ("planner", "number", "said"),
    [
        (al.planners.DataParallel(), 2**18, r"num_microbatches=262144 was given.*from 1 to 131072"),
        (al.planners.Hybrid(pipeline=2), 2**17, r"in 2 stage\(s\) was asked for.*num_microbatches=65536 or fewer"),
    ],
)
def test_no_plan_is_made_that_could_not_be_loaded(planner: al.planners.Planner, number: int, said: str) -> None:
    def step(weights: tuple[jax.Array, ...], batch: jax.Array) -> tuple[jax.Array, ...]:
        def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
            return jnp.mean(jnp.tanh(batch @ weights[0]) @ weights[1])

        return jax.tree.map(lambda weight, slope: weight - slope, weights, jax.grad(loss)(weights))

    shapes = tuple(jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))
    batch = jax.ShapeDtypeStruct((2**18, 8), jnp.float32)
    with pytest.raises(PlanError, match=said):
        al.plan(step, shapes, batch, cluster="p3.16xlarge", planner=planner, num_microbatches=number)
