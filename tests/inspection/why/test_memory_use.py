"""The peak of each stage and what is alive then, against the program on the cost model."""

import json

import jax
import pytest

import alpa_lite as al
from alpa_lite.cli.bench.request import find_target
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inspection.why.memory_use import COPY, memory_use
from tests.inspection.conftest import BATCH_SIZE, MODEL


@pytest.fixture(scope="module", params=["one stage", "pipeline", "fsdp"])
def planned(request):
    """A plan with its program."""
    planner = {
        "one stage": al.planners.OnMesh(axes={"x": 8}),
        "pipeline": al.planners.Pipeline(pipeline=2),
        "fsdp": al.planners.FSDP(),
    }[request.param]
    optimizer = make_optimizer()
    state = jax.eval_shape(lambda key: init_state(MODEL.init(key), optimizer), jax.random.key(0))
    batch = {
        "inputs": jax.ShapeDtypeStruct((BATCH_SIZE, MODEL.in_features), "float32"),
        "targets": jax.ShapeDtypeStruct((BATCH_SIZE, MODEL.out_features), "float32"),
    }
    step = al.parallelize(make_train_step(MODEL.loss_fn, optimizer), cluster=al.cluster("p3.16xlarge"), planner=planner)
    return step.trace(state, batch).plan()


def test_the_peak_is_that_of_the_simulated_program(planned):
    simulated = planned.lower().simulate()
    found = memory_use(planned.last_plan)
    for stage, use in zip(found.stages, simulated.submeshes, strict=True):
        assert stage.peak_bytes == pytest.approx(use.peak_bytes, rel=0.1)


def test_what_is_alive_adds_up_to_the_peak(planned):
    """The prediction counts a copy only where no choice of its reader could do without, so that it may lack some."""
    for stage in memory_use(planned.last_plan).stages:
        copies = sum(each.bytes for each in stage.alive if each.kind == COPY)
        assert stage.alive_bytes > 0.98 * stage.peak_bytes
        assert stage.alive_bytes - copies < 1.02 * stage.peak_bytes
        assert stage.moment.startswith(("when ", "at the end"))
        sizes = [each.bytes for each in stage.alive]
        assert sizes == sorted(sizes, reverse=True)


def test_what_is_alive_in_a_loop_lies_as_planned():
    """Sums over the samples of a batch are the smaller part of what is decided about gradients of activations."""
    target = find_target("gpt-tiny")
    step = al.parallelize(target.step, cluster="p3.16xlarge", planner=al.planners.FSDP())
    (stage,) = memory_use(step.trace(*target.arguments).plan().last_plan).stages
    copies = sum(each.bytes for each in stage.alive if each.kind == COPY)
    assert 0.98 * stage.peak_bytes < stage.alive_bytes - copies < 1.05 * stage.peak_bytes


def test_state_is_what_the_arguments_take(planned):
    """Counted from shapes and specs alone."""
    plan = planned.last_plan
    leaves = dict(zip(planned.function.traced.inputs.names, planned.function.traced.inputs.leaves, strict=True))
    for number, stage in enumerate(memory_use(plan).stages):
        sizes = plan.stages[number].mesh_shape.axis_sizes
        expected = 0.0
        for name, spec in plan.stages[number].specs.items():
            if not name.startswith("batch"):
                leaf, parts = leaves[name], 1
                for axis in spec.axes:
                    parts *= sizes[axis]
                expected += leaf.size * leaf.dtype.itemsize / parts
        held = sum(each.bytes for each in stage.alive if each.kind in ("parameter", "optimizer state"))
        assert held == pytest.approx(expected, rel=1e-3)


def test_text_and_json(planned, tmp_path):
    plan = planned.last_plan
    text = plan.explain_memory()
    assert "Peak memory per device" in text and "Alive on stage 0" in text and "optimizer state" in text
    assert max(map(len, text.splitlines())) <= 120
    assert json.loads(json.dumps(memory_use(plan).to_json()))["stages"][0]["alive"]
    plan.save(tmp_path / "plan.json")
    loaded = memory_use(al.Plan.load(tmp_path / "plan.json"))
    assert not loaded.stages[0].alive and "planner=plan" in " ".join(str(loaded).split())
