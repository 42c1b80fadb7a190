"""Shardings that the user's code gives: what a plan says of them, and that it obeys them where it is told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.inspection.why.sharding_costs import sharding_costs

RNG = np.random.default_rng(0)
STATE = {name: RNG.normal(size=shape).astype(np.float32) / 4 for name, shape in (("up", (8, 32)), ("down", (32, 8)))}
BATCH = RNG.normal(size=(16, 8)).astype(np.float32)


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    sizes = axes or {"data": 2, "model": 4}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def training(hidden: Any, out: Any) -> Any:
    """A step of a scanned network whose layers pass their two products through functions."""

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            def layer(x: Any, _: None) -> tuple[Any, None]:
                return out(hidden(jnp.tanh(x @ state["up"])) @ state["down"]), None

            x, _ = jax.lax.scan(layer, batch, length=3)
            return jnp.mean(x**2)

        value, slope = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, slope), value

    return step


def constrained(**axes: int) -> Any:
    mesh = mesh_of(**axes)
    rows, both = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", "model"))
    constrain = jax.lax.with_sharding_constraint
    return training(lambda x: constrain(x, both), lambda x: constrain(x, rows))


def plan_of(step: Any, *arguments: Any, **options: Any) -> al.Plan:
    return al.plan(step, *(arguments or (STATE, BATCH)), cluster="p3.16xlarge", cache=False, **options)


def check_equal(step: Any, **options: Any) -> al.Plan:
    """Three steps give the numbers of `jax.jit`; the plan."""
    parallel = al.parallelize(step, cluster="p3.16xlarge", cache=False, **options)
    got, want = STATE, STATE
    for _ in range(3):
        (got, loss), (want, expected) = parallel(got, BATCH), jax.jit(step)(want, BATCH)
        for a, b in zip(jax.tree.leaves((got, loss)), jax.tree.leaves((want, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert parallel.last_plan is not None
    return parallel.last_plan


@pytest.mark.parametrize("planner", [al.planners.DataParallel(), al.planners.Megatron(tensor=4)], ids=["dp", "tp"])
def test_a_hint_is_listed_and_changes_nothing(planner: Any, devices: Any) -> None:
    hinted = plan_of(constrained(), planner=planner)
    ignored = plan_of(constrained(), planner=planner, user_shardings="ignore")
    assert hinted.prediction == ignored.prediction and hinted.stages == ignored.stages
    assert hinted.fingerprint == ignored.fingerprint and not ignored.user_shardings
    assert {(use.wanted, use.mesh) for use in hinted.user_shardings} == {
        ("[data, model]", (("data", 2), ("model", 4))),
        ("[data, -]", (("data", 2), ("model", 4))),
    }
    assert "Shardings that your code gives" in str(hinted) and "test_user_shardings.py" in str(hinted)
    assert al.Plan.from_json(hinted.to_json()) == hinted


def test_a_plan_says_which_hints_it_follows(devices: Any) -> None:
    # Data parallelism over eight devices splits rows in eight parts, and columns not at all.
    rows, columns = mesh_of(data=8), mesh_of(model=8)
    step = training(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(rows, P("data"))),
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(columns, P(None, "model"))),
    )
    found = plan_of(step, planner=al.planners.DataParallel()).user_shardings
    assert {use.wanted: use.follows for use in found} == {"[data, -]": True, "[-, model]": False}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_pin_is_obeyed(num_microbatches: int, devices: Any) -> None:
    plan = check_equal(constrained(), user_shardings="pin", num_microbatches=num_microbatches)
    assert len(plan.user_shardings) == 2 and all(use.follows for use in plan.user_shardings)
    (stage,) = plan.stages
    assert dict(stage.mesh_shape.axis_sizes) == {"data": 2, "model": 4}


def test_pins_on_explicit_types(devices: Any) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        step = training(
            lambda x: jax.sharding.reshard(x, P("data", "model")), lambda x: jax.sharding.reshard(x, P("data", None))
        )
        state = jax.device_put(STATE, NamedSharding(jax.sharding.get_mesh(), P()))
        plan = plan_of(step, state, BATCH, user_shardings="pin")
    assert {use.wanted for use in plan.user_shardings} >= {"[data, model]", "[data, -]"}
    assert all(use.follows for use in plan.user_shardings if use.divides)


def test_pinned_arguments_lie_where_the_user_put_them(devices: Any) -> None:
    mesh = mesh_of()
    specs = {"up": P(None, "model"), "down": P("model", "data")}
    state = {name: jax.device_put(STATE[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
    step = training(lambda x: x, lambda x: x)
    plan = plan_of(step, state, BATCH, user_shardings="pin")
    (stage,) = plan.stages
    assert str(stage.specs["state/up"]) == "[-, model]" and str(stage.specs["state/down"]) == "[model, data]"
    assert all(use.follows for use in plan.user_shardings)
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state[n].sharding) for n, x in STATE.items()}
    (same,) = plan_of(step, shapes, BATCH, user_shardings="pin").stages
    assert same.inputs == stage.inputs
    parallel = al.parallelize(step, cluster="p3.16xlarge", cache=False, user_shardings="pin")
    (got, _), (want, _) = parallel(state, BATCH), jax.jit(step)(STATE, BATCH)
    for name in STATE:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
        assert got[name].sharding.shard_shape(got[name].shape) == state[name].sharding.shard_shape(got[name].shape)


def test_each_placement_of_explicit_types_has_its_pins(devices: Any) -> None:
    mesh = mesh_of(AxisType.Explicit)
    parallel = al.parallelize(
        lambda w, x: (w * 0.9, jnp.sum((x @ w) ** 2)), cluster="p3.16xlarge", cache=False, user_shardings="pin"
    )
    with jax.set_mesh(mesh):
        for spec in (P("data", "model"), P(None, "model")):
            parallel(jax.device_put(STATE["up"], NamedSharding(mesh, spec)), BATCH)
            assert parallel.last_plan is not None
            assert [dim or None for dim in parallel.last_plan.stages[0].specs["w"].dims] == [
                None if axis is None else (axis,) for axis in spec
            ]


def test_an_open_dim_is_free(devices: Any) -> None:
    mesh = mesh_of(data=4, model=2)
    step = training(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", P.UNCONSTRAINED))), lambda x: x
    )
    (use,) = plan_of(step, user_shardings="pin").user_shardings
    assert use.wanted == "[data, ?]" and use.follows


def test_unequal_parts_are_listed_and_demand_nothing(devices: Any) -> None:
    mesh = mesh_of(data=8)
    step = training(
        lambda x: (
            jax.lax.with_sharding_constraint(x[:, :30], NamedSharding(mesh, P(None, "data"))) @ jnp.ones((30, 32))
        ),
        lambda x: x,
    )
    (use,) = plan_of(step, user_shardings="pin").user_shardings
    assert not use.divides and not use.follows


def test_what_each_would_cost(devices: Any) -> None:
    text = plan_of(constrained(), planner=al.planners.DataParallel()).explain_user_shardings()
    assert text.count("data=2 × model=4") == 2 and "costs ms" in text
    plain = plan_of(training(lambda x: x, lambda x: x), planner=al.planners.DataParallel())
    assert "name no shardings" in plain.explain_user_shardings()


STAGED = {
    "pipeline": al.planners.Pipeline(pipeline=2),
    "auto": al.planners.Auto(pipeline=2),
    "recomputed": al.planners.Hybrid(pipeline=2, remat="full"),
    "interleaved": al.planners.Pipeline(pipeline=2, schedule=al.schedule.Interleaved1F1B(num_chunks=2)),
}


@pytest.mark.parametrize("planner", [STAGED["pipeline"], al.planners.DataParallel()], ids=["pp", "dp"])
def test_a_mesh_of_a_stage_has_a_price(planner: Any, devices: Any) -> None:
    """The price is the difference of the plans that obey all shardings of the line, and none."""
    mesh = jax.sharding.Mesh(np.array(devices[:4]).reshape(2, 2), ("data", "model"))
    wide = NamedSharding(mesh, P(("data", "model"), None))
    step = training(lambda x: jax.lax.with_sharding_constraint(x, wide), lambda x: x)
    plan = plan_of(step, planner=planner, num_microbatches=2)
    (row,) = sharding_costs(plan).rows
    assert row.mesh == (("data", 2), ("model", 2)) and row.seconds is not None
    assert isinstance(row.given, al.Plan) and isinstance(row.free, al.Plan)
    assert len(row.given.stages) == len(row.free.stages) == 2
    pinned = plan_of(step, planner=STAGED["pipeline"], num_microbatches=2, user_shardings="pin")
    assert row.given.prediction.step_seconds == pinned.prediction.step_seconds
    # Without the sharding the plan is at least as good, since it may have it.
    assert row.free.prediction.step_seconds <= row.given.prediction.step_seconds * (1 + 1e-9)
    assert "no plan" not in plan.explain_user_shardings()


@pytest.mark.parametrize("num_devices", [8, 4])
def test_each_line_has_a_price_of_its_own(num_devices: int, devices: Any) -> None:
    """Splits that no plan would choose: each is obeyed in the plan that prices it, and in no other."""
    mesh = jax.sharding.Mesh(np.array(devices[:num_devices]).reshape(2, -1), ("data", "model"))
    one, other = (NamedSharding(mesh, P("model", "data")), NamedSharding(mesh, P(None, ("model", "data"))))
    constrain = jax.lax.with_sharding_constraint
    step = training(lambda x: constrain(x, one), lambda x: constrain(x, other))
    rows = sharding_costs(plan_of(step, planner=al.planners.DataParallel())).rows
    assert len({row.source for row in rows}) == len(rows) == 2
    for row in rows:
        assert isinstance(row.given, al.Plan) and isinstance(row.free, al.Plan)
        assert not any(use.follows for use in row.free.user_shardings)
        assert [use.source for use in row.given.user_shardings if use.follows] == [row.source]


def test_a_mesh_of_the_devices_that_a_plan_uses_has_a_price(devices: Any) -> None:
    """Four of eight devices, on which there is one stage."""
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("data",))
    step = training(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))), lambda x: x)
    eight = al.cluster("p3.16xlarge")
    whole, part = (
        al.plan(step, STATE, BATCH, cluster=cluster, planner=al.planners.DataParallel(), cache=False)
        for cluster in (eight, eight.part(0, 4))
    )
    (row,) = sharding_costs(replace(part, request=whole.request, idle_devices=4)).rows
    assert isinstance(row.given, al.Plan) and row.given.cluster == part.cluster and len(row.given.stages) == 1
    (of_half,) = sharding_costs(whole).rows
    assert isinstance(of_half.given, al.Plan) and len(of_half.given.stages) == 2


def test_what_cannot_be_obeyed_is_refused(devices: Any) -> None:
    with pytest.raises(al.errors.PlanError, match=r"FSDP lays out its own mesh.*OnMesh or Custom"):
        plan_of(constrained(), planner=al.planners.FSDP(), user_shardings="pin")
    two = training(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(data=8), P("data"))),
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(model=8), P(None, "model"))),
    )
    with pytest.raises(
        al.errors.PlanError, match=r"one mesh, but .*test_user_shardings.py.* names .*test_user_shardings"
    ):
        plan_of(two, user_shardings="pin")
    with pytest.raises(al.errors.PlanError, match=r"8 devices, but .* has 16"):
        al.plan(constrained(), STATE, BATCH, cluster="p3.16xlarge:2", user_shardings="pin", cache=False)
    with pytest.raises(al.errors.PlanError, match="Give the planner that mesh"):
        plan_of(constrained(), planner=al.planners.OnMesh(axes={"x": 8}), user_shardings="pin")
    with pytest.raises(al.errors.PlanError, match=r'user_shardings=.* must be "pin" or "hint" or "ignore"'):
        plan_of(constrained(), user_shardings="force")


def layers(mesh: jax.sharding.Mesh, *, scanned: bool) -> tuple[Any, Any]:
    """A step of four layers with constraints, as a scan or written out, and its placed state."""
    rng = np.random.default_rng(3)

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        both, rows = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("data"))
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ weights["up"]), both)
        return jax.lax.with_sharding_constraint(hidden @ weights["down"], rows), None

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            x = batch
            if scanned:
                return jnp.mean(jax.lax.scan(layer, x, state)[0] ** 2)
            for weights in state:
                x, _ = layer(x, weights)
            return jnp.mean(x**2)

        value, slope = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, slope), value

    def put(array: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(array.astype(np.float32) / 4, NamedSharding(mesh, P(*spec)))

    up, down = rng.normal(size=(4, 8, 32)), rng.normal(size=(4, 32, 8))
    if scanned:
        return step, {"up": put(up, None, None, "model"), "down": put(down, None, "model")}
    return step, [{"up": put(up[i], None, "model"), "down": put(down[i], "model")} for i in range(4)]


@pytest.mark.parametrize("scanned", [True, False], ids=["scan", "written out"])
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"pipe": 2, "data": 2, "model": 2}, {"data": 4, "model": 1}])
@pytest.mark.parametrize("planner", STAGED)
def test_each_stage_obeys_pins(planner: str, axes: dict[str, int], scanned: bool, devices: Any) -> None:
    mesh = jax.sharding.Mesh(np.array(devices[: np.prod([*axes.values()])]).reshape(*axes.values()), tuple(axes))
    step, state = layers(mesh, scanned=scanned)
    parallel = al.parallelize(
        step, planner=STAGED[planner], cluster="p3.16xlarge", cache=False, user_shardings="pin", num_microbatches=2
    )
    got, want = state, state
    for _ in range(2):
        (got, loss), (want, expected) = parallel(got, BATCH), jax.jit(step)(want, BATCH)
        for a, b in zip(jax.tree.leaves((got, loss)), jax.tree.leaves((want, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    plan = parallel.last_plan
    assert plan is not None and len(plan.stages) == (4 if planner == "interleaved" else 2)
    wide = {axis: size for axis, size in axes.items() if size > 1 and axis != "pipe"}
    assert all(dict(stage.mesh_shape.axis_sizes) == wide for stage in plan.stages)
    assert len(plan.user_shardings) == (4 if scanned else 10)
    assert all(use.follows for use in plan.user_shardings)


def test_the_search_takes_micro_batches_that_pins_divide(devices: Any) -> None:
    step, state = layers(jax.sharding.Mesh(np.array(devices[:4]).reshape(4, 1), ("data", "model")), scanned=False)
    plan = plan_of(step, state, BATCH, planner=STAGED["pipeline"], user_shardings="pin")
    assert plan.num_microbatches == 4 and all(use.divides and use.follows for use in plan.user_shardings)


def test_a_mesh_that_stages_cannot_have_is_refused(devices: Any) -> None:
    step, state = layers(mesh_of(), scanned=True)
    with pytest.raises(al.errors.PlanError, match=r"2 stages on p3.16xlarge have 4 devices.*they name data, model"):
        plan_of(step, state, BATCH, planner=STAGED["pipeline"], user_shardings="pin")
    with pytest.raises(al.errors.PlanError, match="pp2 × tp2 has degrees of its own"):
        plan_of(step, state, BATCH, planner=al.planners.Pipeline(pipeline=2, tensor=2), user_shardings="pin")


def test_the_plan_cache_tells_shardings_apart(devices: Any, tmp_path: Any) -> None:
    modes = ("hint", "pin", "ignore")
    plans = [
        al.plan(constrained(), STATE, BATCH, cluster="p3.16xlarge", cache=tmp_path, user_shardings=mode)
        for mode in modes
    ]
    assert [len(plan.user_shardings) for plan in plans] == [2, 2, 0]
    assert [plan.name for plan in plans][1] != plans[0].name
