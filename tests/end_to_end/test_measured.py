"""Plans are run on devices to see which is the fastest: `Auto(measure_top=k)`."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto, DataParallel, Megatron
from tests.end_to_end import cases
from tests.end_to_end.cases import TOLERANCE, Training, assert_same, eager_cluster, reference

TRAINING = Training(model="mlp")


def test_the_best_plans_are_run_and_the_fastest_is_taken(devices: Any) -> None:
    lines: list[str] = []
    planner = Auto(manual=(DataParallel(), Megatron()), measure_top=2)
    step = al.parallelize(TRAINING.step(), cluster=eager_cluster(), planner=planner, progress=lines.append)
    assert_same(TRAINING.run(step), reference(TRAINING), TOLERANCE)
    measured = [line.split(": measured ") for line in lines if ": measured " in line]
    seconds = {label: float(rest.removesuffix(" ms per step")) for label, rest in measured}
    assert len(measured) == len(seconds) == 2 and min(seconds.values()) > 0
    taken = step.last_plan
    name = taken.name.removeprefix("auto (").removesuffix(")")
    label = name if taken.num_microbatches == 1 else f"{name}, {taken.num_microbatches} micro-batches"
    assert seconds[label] == min(seconds.values())


def test_measuring_needs_devices() -> None:
    cluster = al.cluster("p3.16xlarge", num_hosts=64)
    arguments = TRAINING.start(), cases.make_batch(cases.MODELS["mlp"], 0), jax.random.key(0)
    with pytest.raises(al.AlpaLiteError, match="512 devices"):
        al.plan(TRAINING.step(), *arguments, cluster=cluster, planner=Auto(manual=(), measure_top=1))
    with pytest.raises(al.AlpaLiteError, match="number of plans"):
        al.plan(TRAINING.step(), *arguments, cluster=cluster, planner=Auto(measure_top=-1))
