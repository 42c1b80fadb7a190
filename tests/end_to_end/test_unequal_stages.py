"""Pipelines whose stages differ in layers and devices compute what `jax.jit` computes, as it was planned."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.planners import Hybrid
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference
from tests.end_to_end.collectives import handed_over, planned

UNEQUAL = Hybrid(pipeline=3, devices=(4, 2, 2), shares=(2, 1, 1))


@pytest.mark.parametrize("model", ["mlp", "gpt_scan"])
def test_unequal_stages_compute_what_one_device_does(model: str, devices: Any) -> None:
    training = Training(model=model, optimizer="momentum+clip")
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=UNEQUAL, num_microbatches=2)
    assert_same(training.run(step), reference(training))
    compiled = step.compiled(training.start(), make_batch(MODELS[model], 0), jax.random.key(0))
    assert [stage.submesh.num_devices for stage in compiled.plan.stages] == [4, 2, 2]
    assert handed_over(compiled) == planned(compiled.plan)
