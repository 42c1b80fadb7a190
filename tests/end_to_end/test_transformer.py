"""A transformer whose layers are one loop: numbers of `jax.jit` and collectives of the plan, under every degree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import FSDP, DataParallel, Hybrid, Planner
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import handed_over, planned
from tests.end_to_end.transformers import TINY, Training

PLAIN = Training(model=TINY, batch_size=32)
DROPPING = Training(model=replace(TINY, dropout=0.1), batch_size=32)


@cache
def wanted(training: Training) -> Any:
    """What `jax.jit` makes of one step."""
    return jax.tree.map(np.asarray, jax.jit(training.step)(*training.arguments()))


@pytest.mark.parametrize(
    ("training", "planner", "num_microbatches"),
    [
        pytest.param(PLAIN, DataParallel(), 4, id="data parallel, gradients wait"),
        pytest.param(PLAIN, Hybrid(tensor=2), 4, id="tensor parallel, gradients wait"),
        pytest.param(DROPPING, FSDP(), 1, id="FSDP, masks in parts"),
        pytest.param(PLAIN, Hybrid(data=8, zero=3, replicas=2), 2, id="replicas"),
        pytest.param(PLAIN, Hybrid(data=4, context=2), 1, id="context"),
        pytest.param(PLAIN, Hybrid(data=4, context=2, zero=1), 1, id="context, optimizer state in parts"),
        pytest.param(PLAIN, Hybrid(data=2, context=4, zero=3), 2, id="context, parameters in parts"),
    ],
)
def test_steps_equal_jit(training: Training, planner: Planner, num_microbatches: int, devices: Any) -> None:
    step = al.parallelize(training.step, cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
    arguments = training.arguments()
    compiled = step.compiled(*arguments)
    assert handed_over(compiled) == planned(compiled.plan)
    assert_same(compiled(*arguments), wanted(training))
