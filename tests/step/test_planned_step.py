"""The step as it is planned is made once for each cut into layers."""

from __future__ import annotations

from alpa_lite.program.passes import PassDriver
from alpa_lite.program.phases import StepGraph
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.planned_step import planned_step
from alpa_lite.step.recomputation import Remat
from tests.step.rematerialisation.steps import traced_model


def _step() -> StepGraph:
    return traced_model("gpt_remat", num_microbatches=4).step


def test_equal_layers_give_one_step() -> None:
    step = _step()
    of_op = make_layers(step, 2).of_op
    made = planned_step(step, of_op)
    # Else there would be one graph in any case.
    assert made.step.graph is not step.graph
    assert planned_step(step, list(of_op)) is made


def test_other_layers_and_policies_give_other_steps() -> None:
    step = _step()
    of_op = make_layers(step, 2).of_op
    one_layer = [None if layer is None else 0 for layer in of_op]
    policies: tuple[tuple[Remat, ...], ...] = ((), (Remat.FULL, Remat.NONE))
    made = [planned_step(step, of_op, remat).step for remat in policies] + [planned_step(step, one_layer).step]
    made.append(planned_step(step, of_op, host_optimizer=True).step)
    assert len({id(each) for each in made}) == len(made)


def test_a_driver_records_the_passes_each_time() -> None:
    step, seen = _step(), list[str]()
    of_op = make_layers(step, 2).of_op
    for _ in range(2):
        planned_step(step, of_op, driver=PassDriver(record=lambda run: seen.append(run.name)))
    assert seen == ["read within layers"] * 2
