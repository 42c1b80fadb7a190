"""Stages that hold rows of stacked weights in different forms are brought to one."""

from __future__ import annotations

import alpa_lite as al
from alpa_lite.inter_op.refine import agreeing
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.schedule import OneFOneB
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.clustering import make_layers
from cost_models.composed import ComposedCostModel
from tests.planners.test_auto import _shapes, _step

MESH = LogicalMesh(axis_names=("x",), shape=(4,))
FORMS = Spec(((), ("x",), ())), Spec(((), (), ("x",)))


def test_each_form_is_tried_on_all_stages() -> None:
    step = al.parallelize(_step).trace(*_shapes()).step(8, loop_parts=2).step
    costs = StageCosts(step=step, layers=make_layers(step, 2), cost_model=ComposedCostModel(al.cluster("p3.16xlarge")))
    stages: list[PlacedStage] = []
    for number, form in enumerate(FORMS):
        rows = zip(step.graph.inputs, step.input_parts, costs.layers.of_input, strict=True)
        pins = {v: form for v, part, home in rows if part.rows is not None and home == number}
        assert len(pins) == 2
        submesh = Submesh(first_device=4 * number, num_hosts=1, devices_per_host=4)
        solution = costs.with_pins(pins).solution(StagePlace(number, number, submesh, MESH))
        stages.append(PlacedStage(first=number, last=number, submesh=submesh, mesh=MESH, solution=solution))
    ways = list(agreeing(costs, stages, OneFOneB()))
    assert len(ways) == len(FORMS)
    for way, form in zip(ways, FORMS, strict=True):
        held = [
            stage.solution.choice.inputs[v]
            for stage in way
            if stage.solution.choice is not None
            for v, part in zip(step.graph.inputs, step.input_parts, strict=True)
            if part.rows is not None and v in stage.solution.choice.inputs
        ]
        assert len(held) == 4 and set(held) == {form}
