"""`parallelize(step)` computes what `jax.jit(step)` computes: losses, gradients and state, for every model and planner.

States are compared strictly under momentum, which is linear in the gradients. Adam divides by the size of each gradient
and so turns the rounding noise of a gradient that is zero into steps of full length: there the yardstick is how far
`jax.jit` on one device moves when the samples of the batch are merely written in another order (reordering_noise).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite import _jax
from alpa_lite.planners import Auto
from tests.end_to_end.cases import (
    MODELS,
    PLANNERS,
    TOLERANCE,
    Training,
    assert_same,
    eager_cluster,
    make_batch,
    reference,
)

QUICK = [
    *[("mlp", planner, m, "mean", "momentum") for planner in PLANNERS for m in (1, 4)],
    *[("mlp", planner, 4, "sum", "momentum+clip") for planner in ("auto", "zero_2", "pipeline_4", "hybrid")],
    ("cnn", "fsdp", 4, "sum", "momentum+clip"),
    ("gpt", "hybrid", 4, "mean", "momentum+clip"),
    ("gpt_untied", "pipeline_4", 4, "mean", "momentum"),
    ("gpt_scan", "fsdp", 4, "mean", "momentum"),
    ("gpt_scan", "pipeline_2", 4, "mean", "momentum"),
    ("gpt_remat", "gpipe_2", 4, "mean", "momentum+clip"),
]
"""Every planner on the smallest model; every other model under planners that differ in kind."""

_VARIANTS = [("mean", "momentum"), ("sum", "momentum"), ("mean", "momentum+clip"), ("sum", "momentum+clip")]
FULL = [
    (model, planner, m, *_VARIANTS[(i + j + m) % 4])
    for i, model in enumerate(MODELS)
    for j, planner in enumerate(PLANNERS)
    for m in (1, 4)
]
"""Every model under every planner; the four kinds of loss and optimizer take turns."""

Case = tuple[str, str, int, str, str]


def _run(case: Case) -> tuple[al.Plan, Any]:
    model, planner, num_microbatches, reduction, optimizer = case
    training = Training(model=model, reduction=reduction, optimizer=optimizer)
    step = al.parallelize(
        training.step(), cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    result = training.run(step)
    assert step.last_plan is not None
    return step.last_plan, result


def _check(case: Case) -> None:
    plan, result = _run(case)
    assert plan.num_microbatches == case[2]
    assert_same(result, reference(Training(model=case[0], reduction=case[3], optimizer=case[4])))


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_five_steps_give_the_same_loss_gradients_and_state(case: Case, devices: Any) -> None:
    _check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in FULL if c not in QUICK], ids=lambda case: "-".join(map(str, case)))
def test_five_steps_give_the_same_loss_gradients_and_state_everywhere(case: Case, devices: Any) -> None:
    _check(case)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_step_that_returns_only_loss_and_gradients(planner: str, devices: Any) -> None:
    model = MODELS["mlp"]

    def loss_and_grads(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(model.loss_fn)(params, batch)

    args = model.init(jax.random.key(0)), make_batch(model, 0)
    step = al.parallelize(
        loss_and_grads,
        cluster=eager_cluster(),
        planner=PLANNERS[planner],
        num_microbatches=4,
        batch_argnums=1,
    )
    assert_same(step(*args), jax.jit(loss_and_grads)(*args))


def test_the_search_splits_the_work_of_these_models(devices: Any) -> None:
    # Without this the cases above would hold for a planner that leaves everything on one device.
    plan, _ = _run(("mlp", "auto", 4, "mean", "momentum"))
    assert len(plan.stages) > 1 or any(spec.axes for spec in plan.stages[0].specs.values())


def test_the_default_options_plan_for_this_machine(devices: Any) -> None:
    training = Training(model="mlp")
    step = al.parallelize(training.step())
    assert_same(training.run(step, 2), training.run(jax.jit(training.step()), 2))
    assert step.last_plan.cluster.num_devices == len(devices)


@pytest.mark.parametrize("planner", ["pipeline_2", "hybrid"])
def test_a_program_without_name_stacks(planner: str, devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax, "name_stack", lambda eqn: "")
    plan, result = _run(("mlp", planner, 4, "mean", "momentum"))
    assert_same(result, reference(Training(model="mlp")))
    assert all(stage.cost.backward_seconds > 0 for stage in plan.stages)


# --- Adam -------------------------------------------------------------------------------------------------------------


@functools.cache
def reordering_noise(training: Training, num_orders: int = 3) -> tuple[Any, Any]:
    """What `jax.jit` gives without dropout, and per leaf the largest L2 distance to runs with reordered samples."""
    step = jax.jit(training.step())
    want = _run_without_dropout(training, step, None)
    noise = jax.tree.map(lambda _: 0.0, want)
    for seed in range(num_orders):
        other = _run_without_dropout(training, step, np.random.default_rng(seed))
        noise = jax.tree.map(max, noise, jax.tree.map(_distance, other, want))
    return want, noise


def _distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a, float) - np.asarray(b, float)))


def _run_without_dropout(training: Training, step: Any, rng: np.random.Generator | None) -> Any:
    state, metrics = training.start(), None
    for i in range(5):
        batch = make_batch(MODELS[training.model], i)
        if rng is not None:
            order = rng.permutation(jax.tree.leaves(batch)[0].shape[0])
            batch = jax.tree.map(lambda x, order=order: x[order], batch)
        state, metrics = step(state, batch, None)
    return jax.tree.map(np.asarray, (state, metrics))


ADAM_SLOW = [
    *[("mlp", planner, 1, "sum", "adamw+clip") for planner in PLANNERS],
    ("gpt_untied", "pipeline_2", 4, "sum", "adamw+clip"),
    ("gpt", "hybrid", 4, "mean", "adamw+clip"),
]
ADAM: list[Any] = [
    *[("mlp", planner, 4, "mean", "adamw+clip") for planner in ("auto", "fsdp", "pipeline_2", "hybrid")],
    ("mlp", "zero_2", 1, "sum", "adamw"),
    ("gpt", "zero_2", 4, "mean", "adamw"),
    *[pytest.param(case, marks=pytest.mark.long) for case in ADAM_SLOW],
]


@pytest.mark.parametrize("case", ADAM, ids=lambda case: "-".join(map(str, case)))
def test_adam_moves_no_further_than_rounding_moves_it_on_one_device(case: Case, devices: Any) -> None:
    model, planner, num_microbatches, reduction, optimizer = case
    training = Training(model=model, reduction=reduction, optimizer=optimizer)
    want, noise = reordering_noise(training)
    step = al.parallelize(
        training.step(), cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    got = _run_without_dropout(training, step, None)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), jax.tree.leaves(noise), strict=True)
    for (path, a), b, reordered in leaves:
        error = _distance(a, b)
        allowed = max(TOLERANCE * np.linalg.norm(np.asarray(b, float)), 4 * reordered)
        assert error <= allowed, f"{jax.tree_util.keystr(path)}: {error:.1e}, reordering gives {reordered:.1e}"


def test_reordering_noise_makes_room_for_key_biases_alone() -> None:
    # The measure above is no loophole: the bias of attention keys, whose true gradient is zero, is all that it serves.
    want, noise = reordering_noise(Training(model="gpt", optimizer="adamw"))
    for (path, leaf), moved in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(noise), strict=True):
        if "b_qkv" not in jax.tree_util.keystr(path):
            assert 4 * moved <= TOLERANCE * np.linalg.norm(leaf), jax.tree_util.keystr(path)
    for layer in want[1]["grads"]["layers"]:
        query, keys, value = (np.linalg.norm(part) for part in np.split(layer["attention"]["b_qkv"], 3))
        assert keys < 1e-5 * max(query, value)


def test_automatic_search_with_its_manual_plans_gives_the_same_result(devices: Any) -> None:
    training = Training(model="mlp", optimizer="momentum+clip")
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=Auto(num_layers=2), num_microbatches="auto")
    assert_same(training.run(step), reference(training))
