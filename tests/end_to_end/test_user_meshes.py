"""Steps that name meshes of their own, or run under one, give what `jax.jit` gives, and plan as if they did not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite import _jax

PLANNERS = {"data_parallel": al.planners.DataParallel(), "pipeline": al.planners.Pipeline(num_stages=2)}
WEIGHTS = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) / 3
BATCH = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def training(of_batch: Any) -> Any:
    """A step whose loss sees the batch through `of_batch`."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            def layer(x: Any, _: None) -> tuple[Any, None]:
                return jnp.tanh(of_batch(x @ weights)), None

            x, _ = jax.lax.scan(layer, of_batch(batch), length=3)
            return jnp.mean(x**2)

        value, slope = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * slope, value

    return step


def check(step: Any, planner: Any) -> None:
    expected = jax.device_get(jax.jit(step)(WEIGHTS, BATCH))
    parallel = al.parallelize(step, planner=planner, cluster="p3.16xlarge", cache=False)
    for got, want in zip(jax.device_get(parallel(WEIGHTS, BATCH)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_in_force_makes_no_difference(kind: AxisType, planner: str, devices: Any) -> None:
    with jax.set_mesh(mesh_of(kind)):
        check(training(lambda x: x), PLANNERS[planner])


@pytest.mark.parametrize("planner", PLANNERS)
def test_reshardings_of_explicit_types(planner: str, devices: Any) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        check(training(lambda x: jax.sharding.reshard(x, P("data", None))), PLANNERS[planner])


@pytest.mark.parametrize("planner", PLANNERS)
def test_constraints_on_a_mesh_of_the_step(planner: str, devices: Any) -> None:
    rows = NamedSharding(mesh_of(AxisType.Auto), P("data"))
    check(training(lambda x: jax.lax.with_sharding_constraint(x, rows)), PLANNERS[planner])


@pytest.mark.parametrize("planner", PLANNERS)
def test_constraints_plan_like_the_step_without_them(planner: str, devices: Any) -> None:
    rows = NamedSharding(mesh_of(AxisType.Auto), P("data"))
    plans = [
        al.plan(training(of_batch), WEIGHTS, BATCH, cluster="p3.16xlarge", planner=PLANNERS[planner], cache=False)
        for of_batch in (lambda x: x, lambda x: jax.lax.with_sharding_constraint(x, rows))
    ]
    assert plans[0].prediction == plans[1].prediction
    assert not plans[1].opaque


def test_the_step_is_traced_at_other_sizes_under_the_mesh_of_the_call(devices: Any) -> None:
    def step(weights: Any, batch: Any) -> Any:
        assert not jax.sharding.get_abstract_mesh().empty
        return training(lambda x: x)(weights, batch)

    with jax.set_mesh(mesh_of(AxisType.Auto)):
        traced = al.parallelize(step).trace(WEIGHTS, BATCH)
    assert traced.plan(cluster="p3.16xlarge", planner=PLANNERS["pipeline"], num_microbatches=4, cache=False)


def test_no_mesh_is_left_in_a_program(devices: Any) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        traced = jax.make_jaxpr(training(lambda x: jax.sharding.reshard(x, P("data", None))))(WEIGHTS, BATCH)
    assert "data" in str(traced)
    plain = _jax.without_meshes(traced)
    assert "data" not in str(plain) and "reshard" not in str(plain)
    assert _jax.without_meshes(plain) is plain
    np.testing.assert_allclose(jax.core.eval_jaxpr(plain.jaxpr, plain.consts, WEIGHTS, BATCH)[1], 0.05, atol=0.5)


def test_donated_state_may_lie_on_the_mesh_of_the_user(devices: Any) -> None:
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        step = training(lambda x: x)
        expected = jax.device_get(jax.jit(step)(WEIGHTS, BATCH))
        weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P()))
        batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        parallel = al.parallelize(
            step, planner=PLANNERS["pipeline"], cluster="p3.16xlarge", donate_argnums=0, cache=False
        )
        got = jax.device_get(parallel(weights, batch))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
