"""Plans on a logical mesh of the user's own: one to four named axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.planners import OnMesh
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference

TRAINING = Training(model="mlp", optimizer="momentum+clip")


def _traced(model: str = "mlp") -> Any:
    training = Training(model=model, optimizer="momentum+clip")
    step = al.parallelize(training.step(), cluster=eager_cluster(), num_microbatches=1)
    return step.trace(training.start(), make_batch(MODELS[model], 0), jax.random.key(0))


@pytest.mark.parametrize(
    ("axes", "batch"),
    [
        ({"data": 2, "fsdp": 2, "model": 2}, ("data", "fsdp")),
        ({"a": 2, "b": 2, "c": 2}, ()),
        ({"one": 1, "all": 8, "none": 1}, ("one",)),
    ],
)
def test_five_steps_on_meshes_of_several_axes(axes: Mapping[str, int], batch: tuple[str, ...], devices: Any) -> None:
    planner = OnMesh(axes=axes, batch=batch)
    step = al.parallelize(TRAINING.step(), cluster=eager_cluster(), planner=planner, num_microbatches=1)
    assert_same(TRAINING.run(step), reference(TRAINING))
    assert step.last_plan is not None
    (stage,) = step.last_plan.stages
    assert stage.mesh_shape.axis_sizes == {name: size for name, size in axes.items() if size > 1}
    assert step.last_plan.solver.status == "optimal"


def test_batch_axes_split_the_batch_and_free_ones_are_no_worse() -> None:
    traced, axes = _traced(), {"a": 2, "b": 2, "c": 2}
    both, free = (traced.plan(planner=OnMesh(axes=axes, batch=b)).last_plan for b in (("a", "b"), ()))
    assert both.stages[0].specs["batch/inputs"].dims[0][:2] == ("a", "b")
    one_axis = traced.plan(planner=OnMesh(axes={"x": 8})).last_plan
    assert free.prediction.step_seconds <= 1.001 * both.prediction.step_seconds
    # Eight devices in a row can do no more than those of a 2 × 2 × 2 mesh.
    assert free.solver.bound <= 1.001 * one_axis.solver.bound


def test_four_axes_over_two_hosts() -> None:
    axes = {"data": 2, "fsdp": 2, "expert": 2, "model": 2}
    cluster = al.cluster("p3.16xlarge", num_hosts=2)
    plan = _traced().plan(cluster=cluster, planner=OnMesh(axes=axes, batch=("data", "fsdp"))).last_plan
    assert plan.stages[0].mesh_shape.axis_sizes == axes and plan.solver.status == "optimal"


@pytest.mark.parametrize(
    ("axes", "batch", "fragment"),
    [
        ({"data": 4}, (), "have 4 devices, but slow devices, fast link has 8"),
        ({}, (), "Choose sizes whose product is 8"),
        ({"data": 8}, ("batch",), r"names the axes \['batch'\]"),
    ],
)
def test_axes_that_make_no_sense(axes: Mapping[str, int], batch: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(al.errors.PlanError, match=fragment):
        _traced().plan(planner=OnMesh(axes=axes, batch=batch))
