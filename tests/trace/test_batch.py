"""Which arguments are taken for the batch where nobody names it: told, verified by tracing, never state or weights."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import BatchError, PlanError
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import DataParallel
from alpa_lite.trace.trace import Traced, trace


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _trained(loss: Any, params: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _batch(traced: Traced) -> dict[str, int]:
    return {n: d for n, d in zip(traced.inputs.names, traced.batch.dims, strict=True) if d is not None}


# --- found by trial ---------------------------------------------------------------------------------------------------


def _at_times(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        drift = jnp.interp(batch["x"][:, 0], batch["times"], batch["times"])
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"])[:, 0] + drift - batch["y"]) ** 2)

    return _trained(loss, params)


TIMES = {"x": _f32(16, 8), "y": _f32(16), "times": _f32(10)}


def test_an_array_of_another_size_within_the_batch() -> None:
    traced = trace(_at_times, ({"w": _f32(8, 4)}, TIMES))
    assert _batch(traced) == {"batch/x": 0, "batch/y": 0} and traced.batch.size == 16 and traced.batch.assumed


ADAPTERS = {"a": _f32(64, 4), "b": _f32(4, 256)}


def _adapted(adapters: Any, base: Any, batch: Any) -> Any:
    def loss(adapters: Any) -> Any:
        h = jnp.tanh(batch["x"] @ base["up"] + batch["x"] @ adapters["a"] @ adapters["b"] + base["bias"])
        return jnp.mean((h @ base["down"] - batch["y"]) ** 2)

    return _trained(loss, adapters)


def test_frozen_weights_are_not_the_batch() -> None:
    base = {"up": _f32(64, 256), "bias": _f32(256), "down": _f32(256, 64)}
    traced = trace(_adapted, (ADAPTERS, base, {"x": _f32(16, 64), "y": _f32(16, 64)}))
    assert _batch(traced) == {"batch/x": 0, "batch/y": 0}


def test_a_frozen_embedding_is_not_the_batch_though_any_vocabulary_would_do() -> None:
    def step(head: Any, base: Any, tokens: Any) -> Any:
        return _trained(lambda head: jnp.mean(jnp.tanh(base["embed"][tokens] @ base["w"]) @ head["w"]), head)

    base = {"embed": _f32(1000, 32), "w": _f32(32, 32)}
    assert _batch(trace(step, ({"w": _f32(32, 4)}, base, _i32(16, 12)))) == {"tokens": 0}


def test_a_hidden_width_of_frozen_weights_is_not_the_batch() -> None:
    def step(head: Any, base: Any, x: Any) -> Any:
        return _trained(lambda head: jnp.mean((jnp.tanh(x @ base["up"]) @ base["down"] @ head["w"]) ** 2), head)

    base = {"up": _f32(8, 256), "down": _f32(256, 8)}
    assert _batch(trace(step, ({"w": _f32(8, 4)}, base, _f32(16, 8)))) == {"x": 0}


def test_weights_as_wide_as_the_batch_is_long_are_not_the_batch() -> None:
    def step(head: Any, base: Any, x: Any, labels: Any) -> Any:
        hidden = jnp.tanh(x @ base["up"]) @ base["down"]
        return _trained(
            lambda head: -jnp.mean(jax.nn.log_softmax(hidden @ head["w"])[jnp.arange(len(x)), labels]), head
        )

    base = {"up": _f32(16, 32), "down": _f32(32, 16)}
    traced = trace(step, ({"w": _f32(16, 4)}, base, _f32(16, 16), _i32(16)))
    assert _batch(traced) == {"x": 0, "labels": 0}


def _recurrent(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            return jnp.tanh(x @ params["w"] + h @ params["u"]), None

        return jnp.mean((jax.lax.scan(cell, jnp.zeros((x.shape[1], 4)), x)[0] - y) ** 2)

    return _trained(loss, params)


def test_sequences_that_begin_with_time() -> None:
    traced = trace(_recurrent, ({"w": _f32(8, 4), "u": _f32(4, 4)}, _f32(12, 16, 8), _f32(16, 4)))
    assert _batch(traced) == {"x": 1, "y": 0} and traced.batch.size == 16


@pytest.mark.parametrize("num_keys", [1, 3])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_one_array_beside_keys(make: Any, num_keys: int) -> None:
    def step(params: Any, x: Any, keys: Any) -> Any:
        key = keys if num_keys == 1 else keys[0]
        return _trained(lambda p: jnp.mean(((x * jax.random.bernoulli(key, 0.5, x.shape)) @ p["w"]) ** 2), params)

    keys = jax.eval_shape(lambda: make(0) if num_keys == 1 else jax.random.split(make(0), num_keys))
    assert _batch(trace(step, ({"w": _f32(8, 4)}, _f32(16, 8), keys))) == {"x": 0}


@pytest.mark.parametrize("num_samples", [16, 1])
def test_a_table_per_class_is_not_the_batch(num_samples: int) -> None:
    def step(params: Any, table: Any, x: Any, labels: Any) -> Any:
        return _trained(lambda p: jnp.mean(table[labels] * jax.nn.logsumexp(x @ p["w"], -1)), params)

    arguments = ({"w": _f32(8, 10)}, _f32(10), _f32(num_samples, 8), _i32(num_samples))
    assert _batch(trace(step, arguments)) == {"x": 0, "labels": 0}


def test_micro_batches_of_an_assumed_batch_are_exact(devices: Any) -> None:
    report = al.check(_at_times, {"w": _f32(8, 4)}, TIMES, cluster="p3.16xlarge", num_microbatches=2)
    assert report.ok and report.plan.num_microbatches == 2


# --- told -------------------------------------------------------------------------------------------------------------


def _plan(**options: Any) -> Plan:
    return al.plan(_at_times, {"w": _f32(8, 4)}, TIMES, cluster="p3.16xlarge", planner=DataParallel(), **options)


def test_a_plan_tells_what_was_assumed_and_so_does_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        plan = _plan()
    line = "batch: 16 samples along dim 0 of batch/x, batch/y (assumed; name others with batch_argnums)"
    assert str(plan).splitlines().count(line) == 1
    messages = [record.message for record in caplog.records if record.name == "alpa_lite"]
    assert messages.count(f"_at_times: {line}") == 1
    assert line in plan._repr_html_()


def test_a_batch_that_was_named_is_told_as_such() -> None:
    plan = _plan(batch_argnums=("batch/x", "batch/y"))
    assert "batch: 16 samples along dim 0 of batch/x, batch/y\n" in str(plan) and plan.batch is not None
    assert not plan.batch.assumed and dict(plan.batch.dims) == {"batch/x": 0, "batch/y": 0}


def test_dims_that_differ_and_many_arrays_are_one_line() -> None:
    batch = al.plan(
        _recurrent, {"w": _f32(8, 4), "u": _f32(4, 4)}, _f32(12, 16, 8), _f32(16, 4), cluster="p3.16xlarge"
    ).batch
    assert str(batch) == "16 samples along dim 0 of y and dim 1 of x (assumed; name others with batch_argnums)"
    assert batch is not None
    many = dataclasses.replace(batch, dims={f"batch/{i}": 0 for i in range(20)}, assumed=False)
    assert str(many).endswith("batch/5 and 14 more")


def test_a_plan_file_keeps_the_batch_and_older_files_have_none() -> None:
    plan = _plan()
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan
    del data["batch"]
    older = Plan.from_json(data)
    assert older == dataclasses.replace(plan, batch=None) and "batch:" not in str(older)
    assert _plan().batch == al.plan(_at_times, {"w": _f32(8, 4)}, TIMES, planner=older, cluster=plan.cluster).batch


@pytest.mark.parametrize("batch", [3, {"size": 0, "dims": {}, "assumed": True}, {"size": 4, "dims": {"x": -1}}])
def test_a_plan_file_with_a_batch_that_makes_no_sense_is_refused(batch: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_json({**json.loads(json.dumps(_plan().to_json())), "batch": batch})


# --- not found --------------------------------------------------------------------------------------------------------


def _suggested(problem: str) -> list[Any]:
    """What a sentence says to write for `batch_argnums`."""
    return [eval(text) for text in re.findall(r"batch_argnums=(\(.*?\)|\{.*?\})", problem)]


def _returned(params: Any, batch: Any, rate: Any) -> Any:
    return params, batch, rate * (batch["x"] @ params["w"]).sum()


def test_a_batch_that_comes_back_is_said_to_be_state_and_proposed() -> None:
    arguments = ({"w": _f32(8, 4)}, {"x": _f32(16, 8)}, 0.1)
    problem = trace(_returned, arguments).batch.problem
    assert "comes back among the outputs counts as state (params, batch)" in problem
    assert "scalars and random keys hold no samples (rate)" in problem and "every array" not in problem
    assert _suggested(problem) == [("batch",)]
    assert _batch(trace(_returned, arguments, batch_argnums=("batch",))) == {"batch/x": 0}


def test_a_batch_in_state_beside_weights_that_do_not_come_back_is_proposed() -> None:
    def decode(params: Any, cache: Any, tokens: Any) -> Any:
        cache = jnp.concatenate([cache["seen"][:, 1:], params["embed"][tokens][:, None]], axis=1)
        return {"seen": cache}, (cache.mean(1) @ params["out"]).argmax(-1)

    arguments = {"embed": _f32(32, 8), "out": _f32(8, 32)}, {"seen": _f32(16, 5, 8)}, _i32(16)
    assert _suggested(trace(decode, arguments).batch.problem) == [("cache", "tokens")]
    assert trace(decode, arguments, batch_argnums=("cache", "tokens")).batch.size == 16


def test_a_scalar_in_the_batch_does_not_matter() -> None:
    def step(params: Any, batch: Any) -> Any:
        return _trained(lambda p: batch["scale"] * jnp.mean((batch["x"] @ p["w"]) ** 2), params)

    assert _batch(trace(step, ({"w": _f32(8, 4)}, {"x": _f32(16, 8), "scale": 0.1}))) == {"batch/x": 0}


def test_two_batches_that_are_equally_likely_are_both_proposed_and_work() -> None:
    def step(params: Any, real: Any, fake: Any) -> Any:
        return _trained(lambda p: jnp.mean((real["x"] @ p["w"]) ** 2) - jnp.mean((fake @ p["w"]) ** 2), params)

    arguments = ({"w": _f32(8, 4)}, {"x": _f32(16, 8), "note": _f32(3)}, _f32(12, 8))
    traced = trace(step, arguments)
    assert traced.batch.size is None
    with pytest.raises(BatchError, match="disagree on its size"):
        traced.require_batch()
    proposed = _suggested(traced.batch.problem)
    assert proposed == [("real/x",), ("fake",)]
    assert [trace(step, arguments, batch_argnums=each).batch.size for each in proposed] == [16, 12]


def test_a_step_without_data_proposes_nothing() -> None:
    problem = trace(lambda p, rate: jax.tree.map(lambda a: a * rate, p), ({"w": _f32(8, 4)}, 0.1)).batch.problem
    assert _suggested(problem) == [] and "The step takes p/w, rate." in problem
    problem = trace(lambda: jnp.ones(8), ()).batch.problem
    assert problem == "The batch cannot be found: the function takes no arrays. Pass the batch as an argument."


def test_named_arguments_that_disagree() -> None:
    problem = trace(_at_times, ({"w": _f32(8, 4)}, TIMES), batch_argnums="batch").batch.problem
    assert "what batch_argnums names disagrees on its size (batch/times [10], batch/x [16, 8]" in problem
