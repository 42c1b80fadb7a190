"""What else a decision could have been: priced as planning with it would be."""

import json
from dataclasses import replace

import pytest

import alpa_lite as al
from alpa_lite.inspection.why.explain import explanation
from alpa_lite.plan.progress import Progress
from tests.inspection.conftest import make_plan


@pytest.fixture(scope="module")
def mesh_plan():
    return make_plan(al.planners.OnMesh(axes={"x": 8}))


def parameter(plan):
    return next(name for name in plan.stages[0].specs if name == "state/params/1/w")


@pytest.mark.parametrize(
    ("axes", "batch", "most"),
    [
        ({"x": 8}, (), 9),
        ({"data": 2, "model": 4}, (), 4),  # names of the search, but free of the roles that they have there
        ({"data": 2, "model": 4}, ("data",), 2),
    ],
)
def test_the_cost_to_change_a_parameter_is_that_of_planning_with_the_pin(axes, batch, most):
    mesh_plan = make_plan(al.planners.OnMesh(axes=axes, batch=batch))
    name = parameter(mesh_plan)
    found = explanation(mesh_plan, name).alternatives
    chosen, *others = found.rows
    assert chosen.chosen and chosen.step_seconds == mesh_plan.prediction.step_seconds
    assert chosen.what == str(mesh_plan.stages[0].specs[name]) and len(others) >= 2
    for row in others[:most]:
        dims = [None if dim == "-" else tuple(dim.split("·")) for dim in row.what.strip("[]").split(", ")]
        pinned = make_plan(al.planners.OnMesh(axes=axes, batch=batch, pins={name: dims}))
        assert row.step_seconds == pytest.approx(pinned.prediction.step_seconds, rel=6e-3)
    assert [r.step_seconds for r in others] == sorted(r.step_seconds for r in others)


def test_what_is_not_priced_in_time_is_counted(mesh_plan, monkeypatch):
    name = parameter(mesh_plan)
    every = explanation(mesh_plan, name).alternatives
    monkeypatch.setattr("alpa_lite.inspection.why.explain.PRICING_SECONDS", 0.0)
    found = explanation(mesh_plan, name).alternatives
    # One other value at least is priced, whatever the time.
    assert len(found.rows) == 2 and found.num_unpriced == len(every.rows) - 2
    assert every.num_unpriced == 0 and found.to_json()["num_unpriced"] == found.num_unpriced
    assert f"{found.num_unpriced} more were not priced" in str(explanation(mesh_plan, name))


def test_progress_tells_how_many_are_left(mesh_plan):
    said, left = [], []
    progress = Progress(said.append, lambda now: left.append(now.left.get("alternatives")))
    plan = replace(mesh_plan, request=replace(mesh_plan.request, progress=progress))
    rows = explanation(plan, parameter(plan)).alternatives.rows
    assert sum(f" of {len(rows)}: " in line for line in said) == len(rows)
    counted = [number for number in left if number is not None]
    assert counted[0] == len(rows) and counted[-1] == 0 and counted == sorted(counted, reverse=True)


def test_what_decides_is_named(mesh_plan):
    found = explanation(mesh_plan, parameter(mesh_plan))
    slower = [row for row in found.alternatives.rows[1:] if row.step_seconds > 1.01 * mesh_plan.prediction.step_seconds]
    assert slower and all(row.decides.startswith("+") and " ms " in row.decides for row in slower)
    text = str(found)
    assert "(chosen)" in text and "The cheapest change, to" in text
    assert json.loads(json.dumps(found.to_json()))["alternatives"]["rows"][0]["chosen"] is True


def test_an_op_and_a_line(mesh_plan):
    line = explanation(mesh_plan, "sequential_networks.py")
    assert line.kind == "source" and len(line.alternatives.rows) > 2
    (sentence,) = (s for s in line.sentences if s.startswith("What decides there is dot_general"))
    number = sentence.split("(op ")[1].split(",")[0]
    op = explanation(mesh_plan, f"op {number}")
    assert op.alternatives.rows[0].what == line.alternatives.rows[0].what
    assert "→" in op.alternatives.rows[0].what and "dot_general at" in op.sentences[0]


def test_other_meshes_of_a_stage(pipeline_plan):
    found = explanation(pipeline_plan, "stage 1").alternatives
    assert {row.what for row in found.rows} == {"data=4", "data=2 × model=2"}


def test_a_layer_at_a_border_may_move():
    plan = make_plan(al.planners.Auto(pipeline=2, num_layers=4, manual=()))
    first = plan.stages[0].layers
    found = explanation(plan, f"layer {first[1]}")
    if first[0] == first[1]:
        assert found.alternatives is None
    else:
        assert [row.what for row in found.alternatives.rows] == ["stage 0", "stage 1"]
        assert found.alternatives.rows[1].step_seconds > 0
    assert "live in it" in " ".join(found.sentences)


def test_memory_that_forbids_is_the_reason(mesh_plan):
    """With just the memory that the plan takes, a whole copy of the weights has no room."""
    lean = make_plan(al.planners.FSDP())
    name = parameter(lean)
    limit = 1.02 * max(lean.prediction.peak_bytes)
    from dataclasses import replace

    from cost_models.cluster import with_memory

    tight = replace(lean, cluster=with_memory(lean.cluster, limit))
    pattern = "params/*/w"
    found = explanation(tight, pattern).alternatives
    assert name
    whole = next(row for row in found.rows if row.what == "[-, -]")
    assert whole.step_seconds is None and whole.decides.startswith("memory: ") and "too much" in whole.decides


def test_without_the_step_it_says_how_to_get_them(mesh_plan, tmp_path):
    path = tmp_path / "plan.json"
    mesh_plan.save(path)
    loaded = al.Plan.load(path)
    found = explanation(loaded, parameter(mesh_plan))
    assert found.alternatives is None and "planner=plan" in found.sentences[-1]
    assert loaded == mesh_plan and loaded.request is None
