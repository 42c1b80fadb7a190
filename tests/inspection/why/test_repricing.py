"""Plans priced again with something in them given."""

import jax
import pytest

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inspection.why.repricing import Repricing, placed_stage
from alpa_lite.schedule import ZeroBubbleH1

MODEL = MLP(in_features=512, hidden=2048, out_features=512, num_layers=4)
OPTIMIZER = make_optimizer()
STEP = make_train_step(MODEL.loss_fn, OPTIMIZER)
CLUSTER = al.cluster("p3.16xlarge")


def arguments(batch_size=512):
    state = jax.eval_shape(lambda key: init_state(MODEL.init(key), OPTIMIZER), jax.random.key(0))
    shapes = ((batch_size, MODEL.in_features), (batch_size, MODEL.out_features))
    inputs, targets = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return state, {"inputs": inputs, "targets": targets}


def planned(planner, **options):
    return al.plan(STEP, *arguments(), cluster=CLUSTER, planner=planner, cache=False, **options)


def repriced(plan):
    return Repricing.of(plan, plan.request)


PLANNERS = {
    "on a mesh": al.planners.OnMesh(axes={"x": 8}),
    "tensor": al.planners.Hybrid(data=2, tensor=4),
    "pipeline": al.planners.Pipeline(pipeline=2),
    "interleaved": al.planners.Hybrid(pipeline=2, schedule=al.schedule.Interleaved1F1B(num_chunks=2)),
    "two parts": al.planners.Hybrid(pipeline=2, schedule=ZeroBubbleH1()),
    "rematerialised": al.planners.Hybrid(pipeline=2, remat="full"),
    "fsdp": al.planners.FSDP(),
}


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_a_plan_priced_again_is_the_plan(planner):
    plan = planned(planner)
    again = repriced(plan).as_planned
    assert again.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
    assert again.peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=1e-6)


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_a_step_of_many_microbatches_is_predicted_from_few(planner):
    """The prediction of the plan itself simulates all 32 of them."""
    plan = planned(planner, num_microbatches=32)
    repricing = repriced(plan)
    assert all(step.num_microbatches < 32 for step in repricing._steps)
    again = repricing.as_planned
    assert again.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-4)
    assert again.peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=1e-6)


def test_the_choices_of_a_searched_plan_mean_its_decisions():
    plan = planned(al.planners.OnMesh(axes={"x": 8}))
    (stage,) = repriced(plan).stages
    choice = stage.builder.choice(stage.choices)
    assert choice.inputs == dict(plan.stages[0].inputs)
    assert choice.ops == dict(plan.stages[0].ops)
    assert choice.accumulators == dict(plan.stages[0].accumulators)


def test_what_is_given_costs_what_planning_with_that_pin_does():
    """The search with a pin builds its own problem, and knows nothing of repricing."""
    plan = planned(al.planners.OnMesh(axes={"x": 8}))
    repricing = repriced(plan)
    (stage,) = repricing.stages
    names = {stage.view.graph.values[v].name: v for v in stage.view.external}
    (name,) = (name for name in names if name == "state/params/1/w")
    table = stage.strategies_of_input(names[name])
    assert len(table) == 3
    for spec, given in table.items():
        found = repricing.predicted({0: placed_stage(stage, repricing.solve(stage, given))})
        pins = {name: [dim[0] if dim else None for dim in spec.dims]}
        pinned = planned(al.planners.OnMesh(axes={"x": 8}, pins=pins))
        assert pinned.stages[0].specs[name] == spec
        assert found.step_seconds == pytest.approx(pinned.prediction.step_seconds, rel=6e-3)


def test_equal_stages_are_solved_once():
    repricing = repriced(planned(al.planners.Pipeline(pipeline=2)))
    for stage in repricing.stages:
        solution = repricing.solve(stage)
        values = set(stage.view.external)
        assert solution.choice is not None and set(solution.choice.inputs) == values
