"""The rank order of DeepSpeed: pipe outermost, model innermost; and what its axes carry."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import DeepSpeed3D
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference

TRAINING = Training(model="mlp")


def _compiled(planner: DeepSpeed3D) -> Any:
    step = al.parallelize(TRAINING.step(), cluster=eager_cluster(), planner=planner, num_microbatches=2)
    return step.compiled(TRAINING.start(), make_batch(MODELS["mlp"], 0), jax.random.key(0))


def test_coordinates_are_row_major_in_pipe_data_model(devices: Any) -> None:
    compiled = _compiled(DeepSpeed3D(pipeline=2, data=2, tensor=2))
    placed = {}
    for pipe, stage in enumerate(compiled.plan.stages):
        assert stage.mesh_shape.axis_sizes == {"data": 2, "model": 2}
        numbers = np.array(stage.submesh.devices).reshape(stage.mesh_shape.shape)
        placed |= {(pipe, d, m): int(numbers[d, m]) for d, m in product(range(2), range(2))}
    assert placed == {(p, d, m): (p * 2 + d) * 2 + m for p, d, m in product(range(2), repeat=3)}
    # And so do the devices that the arrays of each stage are on.
    meshes = {executable.task.stage: executable.mesh for executable in compiled.executor.executables}
    for pipe, mesh in meshes.items():
        assert mesh.axis_names == ("data", "model")
        assert [[d.id for d in row] for row in mesh.devices] == [[pipe * 4, pipe * 4 + 1], [pipe * 4 + 2, pipe * 4 + 3]]


def test_optimizer_state_is_split_over_data_alone(devices: Any) -> None:
    compiled = _compiled(DeepSpeed3D(pipeline=2, data=2, tensor=2))
    for stage in compiled.plan.stages:
        moments = [spec for name, spec in stage.specs.items() if "opt_state" in name and spec.dims]
        weights = [spec for name, spec in stage.specs.items() if "opt_state" not in name and "params" in name]
        assert all("data" in spec.axes for spec in moments) and moments
        assert all("data" not in spec.axes for spec in weights) and weights


def test_five_steps(devices: Any) -> None:
    planner = DeepSpeed3D(pipeline=2, tensor=2)
    step = al.parallelize(TRAINING.step(), cluster=eager_cluster(), planner=planner, num_microbatches=2)
    assert_same(TRAINING.run(step), reference(TRAINING))


def test_degrees_that_are_not_the_devices_are_refused() -> None:
    with pytest.raises(al.errors.PlanError, match=r"= 12 devices were asked for, but .* has 8"):
        _compiled(DeepSpeed3D(pipeline=3, data=2, tensor=2))
