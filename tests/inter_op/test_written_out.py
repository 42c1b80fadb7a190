"""Plans that write loops over layers out, so that gradients of weights fill the time in which stages wait."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.api.stages import TracedFunction
from alpa_lite.schedule import ZeroBubbleH1, ZeroBubbleH2, splits_backward
from cost_models.cluster import Cluster, with_memory_limit

LAYERS, WIDTH, SAMPLES = 8, 2048, 1024
CLUSTER = replace(al.cluster("p3.16xlarge"), num_hosts=2, devices_per_host=1)


def looped_step(weights: jax.Array, momentum: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Train a perceptron whose layers are a loop over stacked weights."""

    def loss_fn(weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, batch, weights)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    momentum = 0.9 * momentum + grads
    return weights - 0.1 * momentum, momentum, loss


@cache
def traced() -> TracedFunction:
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
    return al.parallelize(looped_step, batch_argnums=2, cache=False).trace(weights, weights, batch)


def planned(planner: al.planners.Planner) -> al.Plan:
    plan = traced().plan(cluster=CLUSTER, planner=planner, num_microbatches=4, cache=False).last_plan
    assert plan is not None
    return plan


def test_the_search_is_not_behind_pipelines_that_put_gradients_of_weights_off() -> None:
    best = planned(al.planners.Auto(manual=()))
    assert len(best.stages) == 2
    assert any(map(splits_backward, best.schedule.tasks(2, 4)))
    for schedule in (ZeroBubbleH1(), ZeroBubbleH2()):
        other = planned(al.planners.Hybrid(pipeline=2, schedule=schedule))
        assert best.prediction.step_seconds <= other.prediction.step_seconds * 1.005


def test_loops_stay_where_nothing_waits() -> None:
    """On one device nothing is gained by a larger step."""
    alone = traced().plan(cluster=replace(CLUSTER, num_hosts=1), planner=al.planners.Auto(manual=()), cache=False)
    assert alone.last_plan is not None
    assert alone.last_plan.loop_parts <= 1


def test_a_plan_with_loops_written_out_computes_what_jit_does() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) * WIDTH**-0.5
    momentum = jax.random.normal(keys[1], weights.shape) * 1e-3
    batch = jax.random.normal(keys[2], (SAMPLES, WIDTH))
    want = jax.jit(looped_step)(weights, momentum, batch)
    fast = al.parallelize(
        looped_step,
        planner=al.planners.Auto(manual=()),
        num_microbatches=4,
        cluster=CLUSTER,
        batch_argnums=2,
        cache=False,
        donate_argnums=(),
    )
    got = fast(weights, momentum, batch)
    assert fast.last_plan is not None
    assert any(map(splits_backward, fast.last_plan.schedule.tasks(2, 4)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


def saving_step(weights: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Train layers of which a loop saves the result of each op; written out, most of them are fused."""

    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        def layer(x: jax.Array, of_layer: list[jax.Array]) -> tuple[jax.Array, None]:
            return x + jax.nn.gelu(x @ of_layer[0]) @ of_layer[1], None

        return jnp.mean(jax.lax.scan(layer, batch, weights)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def test_what_loops_have_no_memory_for_is_not_recomputed_where_they_are_written_out() -> None:
    weights = [jax.ShapeDtypeStruct((LAYERS, 1024, 1024), jnp.float32)] * 2
    batch = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    step = al.parallelize(saving_step, batch_argnums=1, cache=False).trace(weights, batch)

    def planned_on(cluster: Cluster, planner: al.planners.Planner) -> al.Plan:
        plan = step.plan(cluster=cluster, planner=planner, num_microbatches=4, cache=False).last_plan
        assert plan is not None
        return plan

    by_hand = planned_on(CLUSTER, al.planners.Hybrid(pipeline=2, schedule=ZeroBubbleH1()))
    limited = with_memory_limit(CLUSTER, 1.1 * max(by_hand.prediction.peak_bytes))
    found = planned_on(limited, al.planners.Auto(manual=(), host_memory=False))
    assert found.prediction.step_seconds <= by_hand.prediction.step_seconds
    assert found.loop_parts > 2 and not found.remat
    # As loops they would have to recompute.
    with pytest.raises(al.errors.InfeasibleError):
        planned_on(limited, al.planners.Hybrid(pipeline=2))
