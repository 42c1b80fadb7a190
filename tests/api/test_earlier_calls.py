"""The last batch of an epoch is smaller, and an evaluation reads what training updates: the state stays where it is."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.api.smaller_batch import smaller_microbatches
from alpa_lite.errors import PlanError
from tests.end_to_end.cases import eager_cluster

RNG = np.random.default_rng(0)


def _state() -> Any:
    params = {f"layer {i}": jnp.asarray(RNG.normal(size=(64, 64)) / 8, jnp.float32) for i in range(4)}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def _predict(params: Any, x: Any) -> Any:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x


def _train(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((_predict(params, batch["x"]) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


def _evaluate(params: Any, batch: Any) -> Any:
    return jnp.sum((_predict(params, batch["x"]) - batch["y"]) ** 2)


def _batch(size: int) -> Any:
    return {name: RNG.normal(size=(size, 64)).astype(np.float32) for name in ("x", "y")}


def _shardings(tree: Any) -> list[Any]:
    return [array.sharding for array in jax.tree.leaves(tree)]


def _assert_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


ONE_STAGE = {
    "FSDP": al.planners.FSDP(),
    "data": al.planners.DataParallel(),
    "tensor": al.planners.Megatron(tensor=4),
    "auto": al.planners.Auto(intra_op_only=True),
}


@pytest.mark.parametrize("name", ONE_STAGE)
def test_a_smaller_last_batch_leaves_the_state_where_it_is(name: str, devices: Any, caplog: Any) -> None:
    step = al.parallelize(_train, cluster=eager_cluster(), planner=ONE_STAGE[name], num_microbatches=2, cache=False)
    state, want = _state(), _state()
    want = jax.tree.map(jnp.copy, state)
    placed = None
    for size in (32, 32, 21, 32, 21):  # 21 samples: neither 8 devices nor 2 micro-batches divide them
        batch = _batch(size)
        with caplog.at_level(logging.INFO, logger="alpa_lite"):
            state, loss = step(state, batch)
        want, value = jax.jit(_train)(want, batch)
        _assert_close((state, loss), (want, value))
        placed = placed or _shardings(state)
        assert all(a.is_equivalent_to(b, 2) for a, b in zip(_shardings(state), placed, strict=True))
    assert len(step._compiled) == 2
    # A plan that splits no samples, which the search may choose, fits any number of them.
    whole, beside = (
        len([record for record in caplog.records if wanted in record.message])
        for wanted in ("samples run by the plan of the full batch", "8 arguments stay where that plan has them")
    )
    assert whole + beside == 1 and (beside == 1 or name == "auto")


def test_a_smaller_last_batch_of_a_pipeline_is_planned_anew(devices: Any, caplog: Any) -> None:
    planner = al.planners.Pipeline(pipeline=2)
    fixed = al.plan(_train, _state(), _batch(32), cluster=eager_cluster(), planner=planner, num_microbatches=4)
    for given in (planner, fixed):
        step = al.parallelize(_train, cluster=eager_cluster(), planner=given, num_microbatches=4, cache=False)
        state, want = _state(), None
        want = jax.tree.map(jnp.copy, state)
        for size in (32, 21, 32):
            batch = _batch(size)
            state, _ = step(state, batch)
            want, _ = jax.jit(_train)(want, batch)
            _assert_close(state, want)
        assert "a pipeline's stages lie apart" in caplog.text


PIPELINES = {
    "1F1B": al.planners.Pipeline(pipeline=4),
    "recomputing": al.planners.Hybrid(pipeline=2, tensor=2, remat="full"),
    "interleaved": al.planners.Hybrid(pipeline=2, schedule=al.schedule.Interleaved1F1B(num_chunks=2)),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_smaller_batch_of_a_pipeline_runs_by_its_plan(name: str, devices: Any, caplog: Any) -> None:
    step = al.parallelize(_train, cluster=eager_cluster(), planner=PIPELINES[name], num_microbatches=4, cache=False)
    state = _state()
    want = jax.tree.map(jnp.copy, state)
    plans = dict[int, al.Plan]()
    for size in (32, 24, 8, 32):
        batch = _batch(size)
        with caplog.at_level(logging.INFO, logger="alpa_lite"):
            state, loss = step(state, batch)
        want, value = jax.jit(_train)(want, batch)
        _assert_close((state, loss), (want, value))
        assert step.last_plan is not None
        plans[size] = step.last_plan
    full = plans.pop(32)
    for size, plan in plans.items():
        assert f"{size} samples run by the plan of the full batch" in caplog.text
        assert [stage.submesh for stage in plan.stages] == [stage.submesh for stage in full.stages]
        assert [stage.ops for stage in plan.stages] == [stage.ops for stage in full.stages]
        assert all(
            {k: v for k, v in stage.specs.items() if k in old.specs} == old.specs
            for stage, old in zip(plan.stages, full.stages, strict=True)
        )
        assert al.Plan.from_json(plan.to_json()) == plan and plan.remat == full.remat


def test_the_plan_for_fewer_samples_is_the_one_that_planning_them_gives(devices: Any) -> None:
    options: dict[str, Any] = {"cluster": eager_cluster(), "planner": al.planners.Pipeline(pipeline=2), "cache": False}
    step = al.parallelize(_train, num_microbatches=4, **options)
    step(_state(), _batch(32))
    step(_state(), _batch(24))
    found = al.plan(_train, _state(), _batch(24), num_microbatches=3, **options)
    assert step.last_plan is not None and step.last_plan.stages == found.stages
    assert step.last_plan.prediction == found.prediction and step.last_plan.fingerprint == found.fingerprint


def test_a_step_that_looks_at_its_batch_is_planned_anew(devices: Any, caplog: Any) -> None:
    def train(w: Any, x: Any) -> Any:
        slope = jax.grad(lambda w: jnp.mean((x @ w if len(x) > 20 else jnp.tanh(x @ w)) ** 2))(w)
        return w - 0.1 * slope

    step = al.parallelize(train, cluster=eager_cluster(), planner=al.planners.DataParallel(), cache=False)
    w = np.eye(64, dtype=np.float32)
    for size in (32, 16):
        x = _batch(size)["x"]
        _assert_close(step(w, x), jax.jit(train)(w, x))
    assert "samples run by the plan of the full batch" not in caplog.text


@pytest.mark.parametrize("name", ONE_STAGE)
def test_an_evaluation_reads_the_parameters_where_training_has_them(name: str, devices: Any) -> None:
    train = al.parallelize(_train, cluster=eager_cluster(), planner=ONE_STAGE[name], num_microbatches=1, cache=False)
    state, _ = train(_state(), _batch(32))
    evaluate = al.parallelize(_evaluate, cluster=eager_cluster(), like=train, cache=False, batch_argnums="batch")
    batch = _batch(16)
    compiled = evaluate.compiled(state["params"], batch)
    wanted = jax.tree.leaves(compiled.input_shardings()[0][0])
    assert all(a.is_equivalent_to(b, 2) for a, b in zip(_shardings(state["params"]), wanted, strict=True))
    _assert_close(evaluate(state["params"], batch), _evaluate(state["params"], batch))
    by_plan = al.parallelize(
        _evaluate, cluster=eager_cluster(), like=train.last_plan, batch_argnums="batch", cache=False
    )
    _assert_close(by_plan(state["params"], batch), _evaluate(state["params"], batch))


def test_a_step_without_a_plan_is_no_example(devices: Any) -> None:
    train = al.parallelize(_train, cluster=eager_cluster())
    with pytest.raises(PlanError, match=r"has no plan yet. Call it first"):
        al.parallelize(_evaluate, cluster=eager_cluster(), like=train, cache=False)(_state()["params"], _batch(8))
    with pytest.raises(PlanError, match=r"like='train' was given; it must be a function"):
        al.parallelize(_evaluate, like="train")  # type: ignore[call-overload]


@pytest.mark.parametrize(("size", "largest", "number"), [(21, 16, 3), (32, 8, 4), (7, 8, 1), (7, 2, 7), (12, 5, 3)])
def test_micro_batches_are_no_larger_than_they_were(size: int, largest: int, number: int) -> None:
    assert next(smaller_microbatches(size, largest)) == number


@pytest.mark.parametrize(
    ("shape", "dtype", "smaller"),
    [((8, 6), "float32", True), ((16, 6), "float32", False), ((8, 5), "float32", False), ((8, 6), "float16", False)],
)
def test_a_smaller_batch_differs_in_its_samples_alone(shape: tuple[int, int], dtype: str, smaller: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - x.sum().astype(w.dtype), x.mean()

    function, w = al.parallelize(step, batch_argnums=1), jnp.ones((4, 4))
    whole = function.trace(w, jax.ShapeDtypeStruct((16, 6), "float32"))
    assert function.trace(w, jax.ShapeDtypeStruct(shape, dtype)).is_smaller_batch_of(whole.traced) is smaller
