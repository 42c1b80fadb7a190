"""Plans of jitted steps: their shardings are those of the plan, and XLA's propagation has the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import PlanError, TraceError
from alpa_lite.planners import Auto, Custom, DataParallel, Jitted
from alpa_lite.planners.by_name import planner_by_name
from tests.planners.jitted_steps import (
    ARGS,
    AXES,
    BATCH,
    PARAMS,
    SAMPLES,
    SPECS,
    WIDTH,
    collectives,
    exported,
    mesh_of,
    on,
    parts,
    plan_of,
    step,
)

CHEAPEST = Jitted(inside="cheapest")


@pytest.mark.parametrize("on_devices", [False, True])
def test_shardings_of_jit_are_those_of_the_plan(on_devices: bool, devices: Any) -> None:
    mesh = mesh_of(devices) if on_devices else mesh_of()
    out = on(mesh, ({**SPECS[0], "up": P("data", "model")}, P()))
    plan = plan_of(Jitted(), jax.jit(step, in_shardings=on(mesh, SPECS), out_shardings=out))
    (stage,) = plan.stages
    assert plan.name == "as jitted" and dict(stage.mesh_shape.axis_sizes) == AXES
    found = {name: str(spec) for name, spec in stage.specs.items()}
    assert found["params/up"] == "[-, model]" and found["params/down"] == "[model, -]"
    assert {found[f"batch/{name}"] for name in "xyz"} == {"[data, -]"} and found["params/frozen"] == "[-]"
    # Weights come back as `out_shardings` says, whatever their own are.
    same = plan_of(CHEAPEST, jax.jit(step, in_shardings=on(mesh, SPECS), out_shardings=out))
    assert parts(same) == parts(plan)
    custom = plan_of(Custom(mesh=mesh, in_specs=SPECS, out_specs=({**SPECS[0], "up": P("data", "model")}, P())))
    assert same.prediction.step_seconds == pytest.approx(custom.prediction.step_seconds, rel=6e-3)


def test_placed_arguments_are_as_good_as_in_shardings() -> None:
    mesh = mesh_of()
    shardings = jax.tree.map(lambda spec, tree: jax.tree.map(lambda _: spec, tree), on(mesh, SPECS), ARGS)
    placed = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), ARGS, shardings)
    jitted = plan_of(Jitted(), jax.jit(step, in_shardings=on(mesh, SPECS)))
    plan = plan_of(Jitted(), step, placed)
    assert parts(plan) == parts(jitted) and plan.prediction == jitted.prediction
    # What `jax.jit` is told counts, wherever the arrays are.
    other = jax.jit(step, in_shardings=on(mesh, ({**SPECS[0], "up": P()}, SPECS[1])))
    assert parts(plan_of(CHEAPEST, other, placed))["params/up"] == (1, 1)


def test_values_in_between_lie_as_xla_propagates_them(devices: Any) -> None:
    """Data parallelism by `in_shardings` alone sends what `DataParallel` does, gradient by gradient."""
    mesh = mesh_of(data=8)
    jitted = jax.jit(step, in_shardings=on(mesh, (P(), P("data"))))
    plan, manual = plan_of(Jitted(), jitted), plan_of(DataParallel(), num_microbatches=1)
    assert collectives(plan) == collectives(manual)
    # The cheapest completion computes all samples on all devices here, which XLA would not.
    assert plan_of(CHEAPEST, jitted).prediction.step_seconds < 0.9 * plan.prediction.step_seconds
    text = jitted_text(devices)
    assert sum(count for (kind, _), count in collectives(plan).items() if kind == "all_reduce") == text.count(
        "channel_id="
    ) + _combined(text)


def jitted_text(devices: Any) -> Any:
    return jax.jit(step, in_shardings=on(mesh_of(devices, data=8), (P(), P("data")))).lower(*ARGS).compile().as_text()


def _combined(text: str) -> int:
    """The number of all_reduces that XLA has merged into others."""
    lines = [line for line in text.splitlines() if " all-reduce(" in line]
    return sum(line.partition(" all-reduce(")[2].partition(")")[0].count("%") - 1 for line in lines)


def test_constraints_inside_and_inner_jits_are_obeyed() -> None:
    mesh = mesh_of()
    rows = NamedSharding(mesh, P("data"))

    @jax.jit
    def constrained(params: Any, batch: Any) -> Any:
        inner = jax.jit(jnp.tanh, in_shardings=NamedSharding(mesh, P("model")), out_shardings=rows)
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ params["up"], NamedSharding(mesh, P(None, "model")))
        return params, jnp.sum(inner(hidden))

    plan = plan_of(Jitted(), constrained)
    assert {use.wanted for use in plan.user_shardings} == {"[-, model]", "[model, -]", "[data, -]"}
    assert all(use.follows for use in plan.user_shardings)
    assert dict(plan.stages[0].mesh_shape.axis_sizes) == AXES


def test_a_loop_over_layers_is_propagated_into() -> None:
    mesh = mesh_of()

    def scanned(layers: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, layers)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value

    layers = [jax.ShapeDtypeStruct((3, 32, 128), "float32"), jax.ShapeDtypeStruct((3, 128, 32), "float32")]
    args = (layers, jax.ShapeDtypeStruct((16, 32), "float32"))
    specs = ([P(None, None, "model"), P(None, "model")], P("data"))
    plan = plan_of(Jitted(), jax.jit(scanned, in_shardings=on(mesh, specs)), args)
    # One all_reduce over the tensor-parallel devices per layer and pass.
    sums = [u for u in plan.prediction.collectives if str(u.kind) == "all_reduce" and u.axis == "model"]
    assert [use.count for use in sums if use.phase == "forward"] == [3]


def test_a_callback_does_not_hinder_propagation() -> None:
    def called(params: Any, batch: Any) -> Any:
        scale = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), "float32"), batch["x"].sum())
        return step(params, {**batch, "x": batch["x"] * scale})

    plan = plan_of(Jitted(), jax.jit(called, in_shardings=on(mesh_of(), SPECS)))
    assert parts(plan)["params/up"] == (1, 4)


def test_the_plan_runs_and_computes_what_jit_does(devices: Any) -> None:
    jitted = jax.jit(step, in_shardings=on(mesh_of(devices), SPECS))
    values = _drawn()
    parallel = al.parallelize(jitted, planner=Jitted(), cluster="dgx-1", cache=False)
    found, expected = parallel(*values), jax.jit(step)(*values)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    (params, _) = found
    assert params["up"].sharding.shard_shape((64, 256)) == (64, 64)


@pytest.mark.parametrize("planner", [Jitted(), CHEAPEST], ids=lambda planner: planner.inside)
def test_micro_batches_lie_as_the_batch_does(planner: Any) -> None:
    jitted = jax.jit(step, in_shardings=on(mesh_of(), SPECS))
    whole, four = plan_of(planner, jitted), plan_of(planner, jitted, num_microbatches=4)
    assert (whole.num_microbatches, four.num_microbatches) == (1, 4)
    assert parts(four) == parts(whole)
    assert four.prediction.step_seconds > whole.prediction.step_seconds
    if planner == Jitted():
        # Activations of a quarter of the samples four times, and gradients once.
        expected = Counter[tuple[str, float]]()
        for (kind, size), count in collectives(whole).items():
            of_samples = size == SAMPLES // 2 * WIDTH * 4
            expected[kind, size / 4 if of_samples else size] += 4 * count if of_samples else count
        assert collectives(four) == expected


def accumulated_step(params: Any, batch: Any) -> Any:
    """What `step` computes, in four micro-batches of its own."""

    def one(sums, samples):
        def loss(params):
            return jnp.mean((jnp.tanh(samples["x"] @ params["up"]) @ params["down"] - samples["y"]) ** 2) / 4

        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params)), None

    samples = jax.tree.map(lambda x: x.reshape(4, x.shape[0] // 4, *x.shape[1:]), batch)
    (value, grads), _ = jax.lax.scan(one, (0.0, jax.tree.map(jnp.zeros_like, params)), samples)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _drawn() -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 8, ARGS)


@pytest.mark.parametrize(
    ("fun", "planner", "num_microbatches"),
    [(step, Jitted(), 4), (step, CHEAPEST, "auto"), (accumulated_step, Jitted(), "auto")],
)
def test_a_saved_plan_runs_with_the_shardings_that_it_was_made_for(
    fun: Any, planner: Any, num_microbatches: Any, tmp_path: Any, devices: Any
) -> None:
    jitted = jax.jit(fun, in_shardings=on(mesh_of(), SPECS))
    plan = plan_of(planner, jitted, num_microbatches=num_microbatches)
    plan.save(tmp_path / "mine.json")
    loaded, values = al.Plan.load(tmp_path / "mine.json"), _drawn()
    assert loaded == plan and loaded.demands == plan.demands is not None
    expected = jax.jit(step)(*values)
    # The step without its `jax.jit`, which the plan now stands for; and as a module of plain JAX.
    for each in (jitted, fun):
        replayed = plan_of(loaded, each)
        assert replayed == plan
        module = exported(replayed).parallel(each, *values)
        for run in (al.parallelize(each, planner=loaded, cluster="dgx-1", cache=False), module):
            for got, want in zip(jax.tree.leaves(run(*values)), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_pinned_plan_is_replayed_without_the_option() -> None:
    jitted = jax.jit(step, in_shardings=on(mesh_of(), SPECS))
    plan = plan_of(Auto(), jitted, user_shardings="pin")
    assert plan_of(plan, jitted) == plan_of(plan, step) == plan
    assert plan_of(Auto(), jitted).demands is None


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": [["data", 0], ["model", 4]]},
        {"mesh": [["data", 2], ["model", 2**40]]},
        {"mesh": []},
        {"mesh": [["data", 2], ["other", 4]]},
        {"dims": [["data"], ["data"]]},
        {"dims": [["data"]]},
    ],
)
def test_demands_of_a_damaged_file_end_in_a_sentence(change: Any) -> None:
    data = plan_of(Jitted(), jax.jit(step, in_shardings=on(mesh_of(), SPECS))).to_json()
    data["demands"]["arguments"]["params/up"] |= change  # type: ignore[index]
    with pytest.raises(PlanError):
        plan_of(al.Plan.from_json(data))


def test_without_a_demand_a_jitted_step_is_planned_as_any() -> None:
    plain, jitted = plan_of(Auto()), plan_of(Auto(), jax.jit(step, in_shardings=on(mesh_of(), SPECS)))
    assert jitted.prediction.step_seconds == pytest.approx(plain.prediction.step_seconds, rel=1e-9)
    uses = {use.source: use.wanted for use in jitted.user_shardings}
    assert uses["argument params/up"] == "[-, model]" and not plain.user_shardings
    # They are those of arguments alone, no constraints in the step as well.
    assert all(source.startswith("argument ") for source in uses)


@pytest.mark.parametrize(
    ("fun", "options", "why"),
    [
        (step, {}, "name no shardings to plan by"),
        ("jitted", {"user_shardings": "ignore"}, "name no shardings to plan by"),
        ("jitted", {"cluster": "dgx-1:2"}, "which has 8 devices, but dgx-1 has 16"),
        ("jitted", {"num_microbatches": 32}, r"batch/x of a micro-batch has the shape \(1, 64\), which its sharding"),
    ],
)
def test_what_is_no_plan_is_refused_with_a_sentence(fun: Any, options: Any, why: str) -> None:
    jitted = jax.jit(step, in_shardings=on(mesh_of(), SPECS)) if fun == "jitted" else fun
    with pytest.raises(PlanError, match=why):
        plan_of(Jitted(), jitted, **options)


def test_a_step_that_cannot_be_lowered_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from alpa_lite.trace.passes import propagated

    def fail(_: Any) -> Any:
        raise NotImplementedError("a kernel for GPUs.")

    monkeypatch.setattr(propagated, "_propagate", fail)
    jitted = jax.jit(step, in_shardings=on(mesh_of(), SPECS))
    with pytest.raises(TraceError, match=r'a kernel for GPUs\. Plan with inside="cheapest"'):
        plan_of(Jitted(), jitted)
    assert plan_of(CHEAPEST, jitted)


def test_the_name_on_the_command_line() -> None:
    assert planner_by_name("jitted", ()) == Jitted()
    assert planner_by_name("jitted:inside=cheapest", ()) == CHEAPEST != replace(CHEAPEST, inside="propagated")
    assert {*PARAMS, *BATCH} == {"up", "down", "frozen", "x", "y", "z"}
