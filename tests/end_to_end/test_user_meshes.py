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
from alpa_lite.trace.passes.plain_jaxpr import without_meshes

PLANNERS = {"data_parallel": al.planners.DataParallel(), "pipeline": al.planners.Pipeline(pipeline=2)}
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
    plain = without_meshes(traced)
    assert "data" not in str(plain) and "reshard" not in str(plain)
    assert without_meshes(plain) is plain
    expected = jax.jit(training(lambda x: x))(WEIGHTS, BATCH)
    for got, want in zip(jax.core.eval_jaxpr(plain.jaxpr, plain.consts, WEIGHTS, BATCH), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


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


TYPED = {
    "data_parallel": al.planners.DataParallel(),
    "fsdp": al.planners.FSDP(),
    "tensor": al.planners.Megatron(tensor=4),
    "pipeline": al.planners.Pipeline(pipeline=2),
}


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
@pytest.mark.parametrize("spec", [P(), P("data")], ids=str)
@pytest.mark.parametrize("planner", TYPED)
def test_results_have_the_types_that_jit_gives_them(planner: str, spec: Any, donate: Any, devices: Any) -> None:
    mesh, step = mesh_of(AxisType.Explicit), training(lambda x: x)
    options: dict[str, Any] = {"planner": TYPED[planner], "cluster": "p3.16xlarge", "cache": False}
    with jax.set_mesh(mesh):
        parallel, expected = al.parallelize(step, donate_argnums=donate, **options), jax.jit(step)
        mine, theirs = (jax.device_put(WEIGHTS, NamedSharding(mesh, spec)) for _ in range(2))
        batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        other = jax.device_put(WEIGHTS, NamedSharding(mesh, spec))
        for _ in range(3):
            before = mine
            (mine, loss), (theirs, value) = parallel(mine, batch), expected(theirs, batch)
            assert jax.typeof(mine) == jax.typeof(theirs) and jax.typeof(loss) == jax.typeof(value)
            # Operations of the user's own.
            mine, theirs = mine * 0.9 + other * loss, theirs * 0.9 + other * value
            np.testing.assert_allclose(jax.device_get(mine), jax.device_get(theirs), rtol=1e-5, atol=1e-6)
            if donate == 0 and planner == "data_parallel" and spec == P():
                assert before.is_deleted()


def test_state_that_was_placed_stays_on_the_mesh_of_the_plan(devices: Any) -> None:
    mesh, step = mesh_of(AxisType.Explicit), training(lambda x: x)
    parallel = al.parallelize(step, planner=al.planners.FSDP(), cluster="p3.16xlarge", cache=False)
    with jax.set_mesh(mesh):
        state, _ = parallel.compiled(WEIGHTS, BATCH).place(WEIGHTS, BATCH)
        sharding = state.sharding
        state, loss = parallel(state, BATCH)
        assert state.sharding == sharding and loss.sharding == NamedSharding(mesh, P())


def test_other_results_under_explicit_types(devices: Any) -> None:
    def step(key: Any, numbers: Any, batch: Any) -> Any:
        slope = jax.grad(lambda n: jnp.float32(n.sum()), allow_int=True)(numbers)
        return jax.random.split(key)[0], slope, batch.sum(1), jnp.float32(1) * 2.0

    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        options: dict[str, Any] = {"batch_argnums": "batch", "cluster": "p3.16xlarge", "cache": False}
        parallel = al.parallelize(step, planner=al.planners.DataParallel(), **options)
        batch = jax.device_put(BATCH, P("data"))
        arguments = jax.random.key(0), np.arange(3), batch
        for got, want in zip(parallel(*arguments), jax.jit(step)(*arguments), strict=True):
            assert jax.typeof(got) == jax.typeof(want)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_shard_map_on_explicit_types(num_microbatches: int, devices: Any) -> None:
    mesh = mesh_of(AxisType.Explicit)

    def step(weights: Any, batch: Any) -> Any:
        rows = jax.shard_map(lambda x, w: jnp.tanh(x @ w), in_specs=(P("data"), P()), out_specs=P("data"))
        value, slope = jax.value_and_grad(lambda w: jnp.mean(rows(batch, w) ** 2))(weights)
        return weights - 0.1 * slope, value

    with jax.set_mesh(mesh):
        batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P()))
        parallel = al.parallelize(
            step,
            planner=PLANNERS["data_parallel"],
            num_microbatches=num_microbatches,
            cluster="p3.16xlarge",
            cache=False,
        )
        for got, want in zip(parallel(weights, batch), jax.jit(step)(weights, batch), strict=True):
            assert jax.typeof(got) == jax.typeof(want)
            np.testing.assert_allclose(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-6)


def centred(x: Any) -> Any:
    """Rows less their mean on each device: with `in_specs` of the types, the type of the rows decides the numbers."""
    return jax.shard_map(lambda x: x - x.mean(0, keepdims=True), out_specs=P("data"))(x)


def scaled(x: Any) -> Any:
    return x * (2.0 if jax.typeof(x).sharding.spec[0] is None else 3.0)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("of_batch", [centred, scaled])
def test_code_that_reads_types_sees_those_of_each_call(of_batch: Any, num_microbatches: int, devices: Any) -> None:
    mesh = mesh_of(AxisType.Explicit)

    def step(weights: Any, batch: Any) -> Any:
        value, slope = jax.value_and_grad(lambda w: jnp.mean((of_batch(batch) @ w) ** 2))(weights)
        return weights - 0.1 * slope, value

    options: dict[str, Any] = {"cluster": "p3.16xlarge", "cache": False}
    with jax.set_mesh(mesh):
        parallel = al.parallelize(step, planner=PLANNERS["data_parallel"], num_microbatches=num_microbatches, **options)
        for spec in (P("data"), P(), P(None, "data"), P("data")):
            batch = jax.device_put(BATCH, NamedSharding(mesh, spec))
            if of_batch is centred and spec == P(None, "data"):
                continue  # its results are no rows
            for got, want in zip(parallel(WEIGHTS, batch), jax.jit(step)(WEIGHTS, batch), strict=True):
                np.testing.assert_allclose(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-6)
        assert len(parallel._compiled) == 2 + (of_batch is scaled)


def over_devices(names: dict[str, int]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(*names.values()), tuple(names))


def sums(x: Any, w: Any) -> Any:
    return jnp.tanh(jax.lax.psum(x @ w, "a")) * (1 + jax.lax.axis_index("a"))


def gathered(x: Any, w: Any) -> Any:
    return jax.lax.all_gather(x, "a", axis=0, tiled=True)[::2][: x.shape[0]] @ w


def scattered(x: Any, w: Any) -> Any:
    parts = jnp.tile(x @ w, (jax.lax.axis_size("a"), 1))
    return jax.lax.psum_scatter(parts, "a", scatter_dimension=0, tiled=True)


def exchanged(x: Any, w: Any) -> Any:
    parts = jax.lax.all_to_all(jnp.tile(x, (1, jax.lax.axis_size("a"))), "a", split_axis=1, concat_axis=0, tiled=True)
    return jnp.sum(parts.reshape(-1, *x.shape), 0) @ w


def ring(x: Any, w: Any) -> Any:
    """What ring attention does: blocks go round while each device works at the one that it has."""
    n = jax.lax.axis_size("a")

    def turn(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        total, block = carry
        total = total + jnp.tanh(x @ block.T) @ block @ w
        return (total, jax.lax.ppermute(block, "a", [(i, (i + 1) % n) for i in range(n)])), None

    return jax.lax.scan(turn, (jnp.zeros_like(x), x), length=n)[0][0]


@pytest.mark.parametrize("sizes", [{"a": 8}, {"a": 2, "b": 4}, {"b": 4, "a": 2}])
@pytest.mark.parametrize("body", [sums, gathered, scattered, exchanged, ring])
def test_a_shard_map_of_the_step(body: Any, sizes: dict[str, int], devices: Any) -> None:
    mesh = over_devices(sizes)
    axes = tuple(sizes)

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(axes), check_vma=False)
            return jnp.mean(mapped(jnp.tanh(batch @ weights), weights) ** 2)

        value, slope = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * slope, value

    check(step, PLANNERS["data_parallel"])


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_shard_map_whose_types_tell_what_varies(planner: str, devices: Any) -> None:
    mesh = over_devices({"a": 4, "b": 2})

    def step(weights: Any, batch: Any) -> Any:
        def product(x: Any, w: Any) -> Any:
            return jax.lax.psum(jnp.tanh(x @ w), "b")

        def loss(weights: Any) -> Any:
            mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("a", "b"), P("b", None)), out_specs=P("a", None))
            return jnp.mean(mapped(jnp.tanh(batch @ weights), weights) ** 2)

        value, slope = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * slope, value

    check(step, PLANNERS[planner])
    plan = al.plan(step, WEIGHTS, BATCH, cluster="p3.16xlarge", planner=PLANNERS[planner], cache=False)
    assert not plan.opaque
