"""Steps that train inside of scans, as in reinforcement learning: minibatches of an epoch, all in one step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.program.phases import Phase
from tests.end_to_end.cases import eager_cluster


def _policy(weights: Any, seen: Any) -> Any:
    for w in weights:
        seen = jnp.tanh(seen @ w)
    return seen


def _epoch(state: Any) -> Any:
    """Act for some steps, then train on what was seen, one minibatch per trip of a scan."""

    def act(seen: Any, _: Any) -> Any:
        return jnp.sin(seen + _policy(weights, seen)), seen

    def train(carry: Any, seen: Any) -> Any:
        weights, momenta = carry
        loss, grads = jax.value_and_grad(lambda ws: jnp.mean((_policy(ws, seen) - 0.1) ** 2))(weights)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momenta), momenta), loss

    weights, momenta, seen = state
    seen, path = jax.lax.scan(act, seen, None, 4)
    value = _policy(weights, seen)
    (weights, momenta), losses = jax.lax.scan(train, (weights, momenta), path + 0.01 * value)
    return (weights, momenta, seen), losses


def _state() -> Any:
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=(32, 32)) / 6, jnp.float32) for i in range(4)]
    return weights, [jnp.zeros((32, 32))] * 4, jnp.ones((16, 32))


@pytest.mark.parametrize("loop_parts", [0, 1, 2, 4])
def test_all_views_of_a_step_have_the_same_phases(loop_parts: int) -> None:
    step = al.parallelize(_epoch, cache=False).trace(_state()).step(1, loop_parts=loop_parts).step
    assert set(step.phases) == {Phase.FORWARD}


@pytest.mark.parametrize("options", [{}, {"pipeline": 2}, {"num_layers": 4}], ids=str)
def test_a_step_that_trains_in_scans_runs(options: dict[str, Any], devices: Any) -> None:
    step = al.parallelize(_epoch, cluster=eager_cluster(), planner=al.planners.Auto(**options), cache=False)
    state = want = _state()
    for _ in range(2):
        (state, losses), (want, others) = step(state), jax.jit(_epoch)(want)
        for a, b in zip(jax.tree.leaves((state, losses)), jax.tree.leaves((want, others)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_planner_that_needs_a_batch_says_so_at_planning(devices: Any) -> None:
    for planner in (al.planners.DataParallel(), al.planners.FSDP(), al.planners.Pipeline(pipeline=2)):
        with pytest.raises(al.errors.PlanError, match=r"splits the batch over . devices, but there is no batch"):
            al.plan(_epoch, _state(), cluster=eager_cluster(), planner=planner, cache=False)
