"""PipeDream's plans of steps: their stages, what they run, and the grid of PipeDream-2BW."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.inter_op.loop_cuts import natural_layers
from alpa_lite.planners import GridSearch, Hybrid, PipeDream, PipeDream2BW
from alpa_lite.planners.pipedream import layer_profile
from tests.end_to_end.cases import eager_cluster


def _step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for weights in params:
            # Positions end where the width changes, as in a network that ends in dense layers.
            x = jnp.tanh((x if weights.shape[0] == weights.shape[1] or x.ndim == 2 else x.mean(1)) @ weights)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def _arguments(widths, batch, make):
    return [make(pair) for pair in pairwise(widths)], {"x": make((batch, widths[0])), "y": make((batch, widths[-1]))}


def _shape(dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


# Much work and few weights at first, few samples and many weights at the end.
DEEP = (256,) * 9 + (8192, 8192)


def _deep():
    params, batch = _arguments(DEEP, 64, _shape)
    return params, {**batch, "x": _shape((64, 1024, 256))}


def test_a_model_with_heavy_weights_at_the_end_gets_unequal_stages():
    plan = al.plan(_step, *_deep(), cluster="p3.16xlarge", planner=PipeDream())
    devices = [stage.submesh.num_devices for stage in plan.stages]
    assert sum(devices) == 8 and len(set(devices)) > 1 and devices[0] > devices[-1]
    assert plan.name == f"PipeDream ({'-'.join(map(str, devices))})"
    # Replicas share each micro-batch.
    assert all(64 % count == 0 for count in devices)


def test_the_profile_is_that_of_the_step():
    traced = al.parallelize(_step).trace(*_deep())
    request = traced.request(al.cluster("p3.16xlarge"))
    cut = natural_layers(request, (1,), range(1, 9))
    profile = layer_profile(request, cut)
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * (8 * 256**2 + 256 * 8192 + 8192**2)
    assert all(layer.activation_bytes >= 4 * 64 * 256 for layer in profile.layers[:-1])
    assert profile.layers[-1].activation_bytes == 0
    whole = al.plan(_step, *_deep(), cluster=request.cluster.part(0, 1), planner="data_parallel")
    (stage,) = whole.stages
    total = sum(layer.seconds for layer in profile.layers)
    assert total == pytest.approx(stage.cost.forward_seconds + stage.cost.backward_seconds, rel=0.05)


def test_stages_are_the_blocks_of_the_hybrid():
    arguments = _arguments((64,) * 9, 96, _shape)
    hybrid = Hybrid(pipeline=2, devices=(6, 2), blocks=(6, 2))
    plan = al.plan(_step, *arguments, cluster="p3.16xlarge", planner=hybrid)
    assert [stage.submesh.num_devices for stage in plan.stages] == [6, 2]
    weights = [sum(name.startswith("params") for name in stage.specs) for stage in plan.stages]
    assert weights == [6, 2]
    with pytest.raises(PlanError, match="Give a number of layers for each"):
        al.plan(_step, *arguments, cluster="p3.16xlarge", planner=replace(hybrid, blocks=(8,)))
    with pytest.raises(PlanError, match="the step has"):
        al.plan(_step, *arguments, cluster="p3.16xlarge", planner=replace(hybrid, blocks=(99, 2)))


@pytest.mark.slow
def test_replicated_stages_run_as_on_one_device(devices):
    hybrid = Hybrid(pipeline=3, devices=(4, 2, 2), blocks=(4, 3, 1))
    keys = iter(jax.random.split(jax.random.key(0), 20))
    arguments = _arguments((16,) * 9, 16, lambda dims: jax.random.normal(next(keys), dims))
    step = al.parallelize(_step, planner=hybrid, num_microbatches=2, cluster=eager_cluster())
    found, wanted = step(*arguments), jax.jit(_step)(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert [stage.submesh.num_devices for stage in step.last_plan.stages] == [4, 2, 2]


def test_2bw_tries_recomputation_at_every_depth():
    arguments = _arguments((64,) * 5, 16, _shape)
    cluster = al.cluster("p3.16xlarge").part(0, 2)
    plan = al.plan(_step, *arguments, cluster=cluster, planner=PipeDream2BW())
    grid = al.plan(_step, *arguments, cluster=cluster, planner=GridSearch(max_tensor=1))
    assert plan.prediction.step_seconds <= grid.prediction.step_seconds
    assert plan.name.startswith("PipeDream-2BW's planner (")
    tried = {plan.name, *(name for name, _ in plan.alternatives)}
    assert {"full remat" in name for name in tried} == {False, True} and any("pp2" in name for name in tried)
