"""Eager 1F1B on devices: the numbers of one device, and as many micro-batches in flight as it says."""

from __future__ import annotations

from typing import Any

import alpa_lite as al
from alpa_lite.planners import Hybrid
from alpa_lite.schedule import EagerOneFOneB
from tests.end_to_end.cases import Training, assert_same, eager_cluster, reference


def test_four_stages_give_the_numbers_of_one_device(devices: Any) -> None:
    training = Training(model="mlp")
    planner = Hybrid(pipeline=4, schedule=EagerOneFOneB())
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=planner, num_microbatches=8)
    state, metrics = training.run(step)
    assert_same((state, metrics), reference(training))
    assert step.last_plan.schedule == EagerOneFOneB()
    assert [EagerOneFOneB().in_flight(stage, 4, 8) for stage in range(4)] == [7, 5, 3, 1]
