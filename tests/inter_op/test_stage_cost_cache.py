"""Steps in layers at numbers of micro-batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.inter_op.stage_cost_cache import Layering, StageCostCache
from alpa_lite.inter_op.stage_costs import SolveEffort
from alpa_lite.step.clustering import make_layers
from tests.inter_op.test_stage_costs import chain_step

NUM_LAYERS = 10


def test_layers_are_the_same_at_every_number_of_microbatches() -> None:
    """What 32 equal products have in 10 layers is a tie, which other sizes decide in other ways."""
    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 32
    traced = al.parallelize(chain_step).trace(weights, jax.ShapeDtypeStruct((1024, 2048), jnp.float32))
    request = traced.request(al.cluster("p3.16xlarge"))
    steps = StageCostCache(
        request=request,
        layering=Layering(num_layers=NUM_LAYERS, stages=(1,), equal="flops"),
        pins={},
        effort=SolveEffort(relative_gap=0.05, time_limit_seconds=3.0, peaks="none"),
    )
    numbers = (32, 1, 256)
    found = [steps.of(number, steps.natural).layers.of_op for number in numbers]
    assert found[0] == found[1] == found[2] and max(filter(None, found[0])) == NUM_LAYERS - 1
    alone = [make_layers(request.step_at(number, NUM_LAYERS), NUM_LAYERS).of_op for number in numbers]
    assert len(set(alone)) > 1
