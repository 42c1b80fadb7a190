"""The stage of all layers of a step that recomputes values as it is written."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.api.stages import TracedFunction
from alpa_lite.planners import Auto, DataParallel, Planner
from cost_models.cluster import with_memory_limit

WIDTH, SAMPLES = 1024, 4096
ONE = replace(al.cluster("p4d.24xlarge"), devices_per_host=1)


def checkpointed_step(weights: Any, x: Any) -> Any:
    """Two blocks of four products, of which each saves its input alone; the search makes eight layers of them."""

    @jax.checkpoint
    def block(h: Any, of_block: Any) -> Any:
        last = h
        for w in of_block:
            last = jnp.tanh(last @ w)
        return h + last

    def loss(weights: Any) -> Any:
        h = x
        for of_block in weights:
            h = block(h, of_block)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@cache
def traced() -> TracedFunction:
    weights = [[jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4] * 2
    x = jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
    return al.parallelize(checkpointed_step, batch_argnums=(1,), cache=False).trace(weights, x)


def planned(planner: Planner, cluster: Any = ONE) -> al.Plan:
    plan = traced().plan(cluster=cluster, planner=planner, num_microbatches=2, cache=False).last_plan
    assert plan is not None
    return plan


SEARCH = Auto(manual=(), host_memory=False, remat="none")


def test_values_that_other_layers_read_are_saved_where_there_is_memory() -> None:
    roomy, written = planned(SEARCH), planned(DataParallel())
    assert roomy.prediction.step_seconds < written.prediction.step_seconds
    assert roomy.prediction.peak_bytes[0] > 1.1 * written.prediction.peak_bytes[0]


@pytest.mark.parametrize("share", [1.001, 1.02, 1.1])
def test_a_plan_that_fits_as_the_step_is_written_is_found(share: float) -> None:
    written = planned(DataParallel())
    limited = with_memory_limit(ONE, share * written.prediction.peak_bytes[0])
    found = planned(SEARCH, limited)
    assert found.prediction.step_seconds <= 1.001 * written.prediction.step_seconds
    assert found.prediction.peak_bytes[0] <= share * written.prediction.peak_bytes[0]
    with pytest.raises(al.errors.InfeasibleError):
        planned(SEARCH, with_memory_limit(ONE, 0.95 * written.prediction.peak_bytes[0]))


def test_such_a_plan_computes_what_jit_does() -> None:
    keys = jax.random.split(jax.random.key(0), 9)
    weights = [[jax.random.normal(keys[4 * i + j], (32, 32)) / 6 for j in range(4)] for i in range(2)]
    x = jax.random.normal(keys[8], (16, 32))
    cluster = al.local_cluster().part(0, 1)
    least = al.plan(checkpointed_step, weights, x, cluster=cluster, planner=DataParallel(), batch_argnums=(1,))
    limited = with_memory_limit(cluster, 1.001 * least.prediction.peak_bytes[0])
    step = al.parallelize(
        checkpointed_step, cluster=limited, planner=SEARCH, batch_argnums=(1,), donate_argnums=(), cache=False
    )
    got, want = step(weights, x), jax.jit(checkpointed_step)(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)
