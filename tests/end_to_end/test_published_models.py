"""BERT, AlexNet, VGG, U-Net and a recurrent translator, small: steps equal `jax.jit` under every planner.

The quick cases are one plan per model, of kinds that differ; the whole table is slow.
"""

from __future__ import annotations

from typing import Any

import pytest

import alpa_lite as al
from tests.end_to_end.cases import PLANNERS, PUBLISHED, Training, assert_same, eager_cluster, reference

QUICK = [
    ("bert", "fsdp", 4),
    ("alexnet", "hybrid", 1),
    ("vgg16", "zero_2", 4),
    ("unet", "pipeline_2", 4),
    ("unet", "auto", 1),
    ("translator", "pipeline_2", 4),
]
TABLE = [(model, planner, count) for model in PUBLISHED for planner in PLANNERS for count in (1, 4)]


def _check(model: str, planner: str, num_microbatches: int) -> al.Plan:
    training = Training(model=model, num_steps=1)
    step = al.parallelize(
        training.step(), cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    assert_same(training.run(step), reference(training))
    assert step.last_plan.num_microbatches == num_microbatches
    return step.last_plan


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_steps_equal_jit(case: tuple[str, str, int], devices: Any) -> None:
    _check(*case)


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in TABLE if c not in QUICK], ids=lambda case: "-".join(map(str, case)))
def test_steps_equal_jit_everywhere(case: tuple[str, str, int], devices: Any) -> None:
    _check(*case)


def test_the_search_splits_what_it_is_given(devices: Any) -> None:
    plan = _check("unet", "auto", 4)
    assert len(plan.stages) > 1 or any(spec.axes for spec in plan.stages[0].specs.values())
