"""`al.check` and `parallelize(check=True)`: right steps pass in every precision, wrong ones raise and name the leaf."""

from __future__ import annotations

import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import alpa_lite as al
from alpa_lite.errors import CheckError, ExecutionError
from alpa_lite.planners import DataParallel, Hybrid
from alpa_lite.runtime.check_report import CheckReport
from alpa_lite.runtime.compare import change, coarsest_units

OPTIONS: dict[str, Any] = {"cluster": "p3.16xlarge", "planner": DataParallel(), "num_microbatches": 4}


def _arguments(dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 16)), "v": rng.normal(size=(16, 4))}
    tree = (params, rng.normal(size=(32, 8)), rng.normal(size=(32, 4)))
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def _loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def _step(params: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    new = jax.tree.map(lambda p, g: p - jnp.asarray(0.1, p.dtype) * g, params, grads)
    return new, {"loss": loss, "grads": grads}


class _Drifting:
    """A step that counts on the host how often it is traced, and scales one of its results by that."""

    def __init__(self, factor: float) -> None:
        self.factor, self.__name__ = factor, "drifting"

    def __call__(self, params: Any, x: Any, y: Any) -> Any:
        new, metrics = _step(params, x, y)
        self.factor *= self.factor
        return {**new, "v": new["v"] * jnp.asarray(self.factor, x.dtype)}, metrics


# --- right steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_right_step_passes_in_every_precision(dtype: str, devices: Any) -> None:
    with jax.enable_x64(dtype == "float64"):
        report = al.check(_step, *_arguments(dtype), **OPTIONS)
    assert report.ok and {leaf.dtype for leaf in report.leaves} == {dtype}
    assert [leaf.name for leaf in report.leaves] == ["0/v", "0/w", "1/grads/v", "1/grads/w", "1/loss"]
    assert all(leaf.error <= leaf.limit and leaf.rounding_steps <= leaf.allowed_steps for leaf in report.leaves)
    assert all(0 < leaf.limit < 1000 * float(jnp.finfo(dtype).eps) for leaf in report.leaves)
    assert {leaf.allowed_steps for leaf in report.leaves} == {8.0 if dtype.endswith("16") else 32.0}
    assert report.plan.num_microbatches == 4 and not report.drawn


def test_weights_that_are_cast_to_low_precision_round_as_that_does(devices: Any) -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x, y))
        grads = jax.tree.map(lambda a: a.astype(jnp.float32), jax.grad(_loss)(*low))
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), grads

    updated = {leaf.name: leaf for leaf in al.check(step, *_arguments(), **OPTIONS).leaves}
    # A gradient may be off as bfloat16 is; the weight that takes a small part of it may not.
    assert updated["1/w"].limit > 1e-2 > 1e-3 > updated["0/w"].limit


def test_an_ill_conditioned_step_passes_since_rounding_alone_moves_it_as_far(devices: Any) -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        new, metrics = _step(params, x, y)
        chaos = 0.3 + 0.1 * jnp.sin(metrics["loss"])
        for _ in range(20):
            chaos = 3.99 * chaos * (1 - chaos)  # each turn may double what rounding did before
        return new, chaos

    # Sums in another order change the loss by some units in the last place, whichever they are here.
    report = al.check(step, *_arguments(), **OPTIONS)
    chaos = report.leaves[-1]
    assert report.ok and chaos.limit > 1e-3


def test_integers_booleans_and_keys_are_equal(devices: Any) -> None:
    def step(params: Any, x: Any, y: Any, key: Any, count: Any) -> Any:
        new, metrics = _step(params, x, y)
        return new, metrics, jnp.argmax(x @ params["w"], -1), x > 0, jax.random.split(key)[0], count + 1

    report = al.check(step, *_arguments(), jax.random.key(0), np.int32(3), **OPTIONS)
    exact = report.leaves[-4:]
    assert [leaf.dtype for leaf in exact] == ["int32", "bool", "key<fry>", "int32"]
    assert all(leaf.ok and leaf.error == leaf.limit == 0 for leaf in exact)


def test_nan_in_the_same_place_is_equal_and_a_leaf_of_nothing_else_is_noted(devices: Any) -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        new, metrics = _step(params, x, y)
        return new, metrics["loss"], jnp.log(x), 0 * jnp.log(-1 - x * x)

    report = al.check(step, *_arguments(), **OPTIONS)
    assert report.ok
    assert [leaf.note for leaf in report.leaves[-2:]] == ["", "not finite anywhere: nothing was compared"]


def test_arguments_are_drawn_for_shapes_always_the_same(devices: Any) -> None:
    seen: list[Any] = []

    def step(state: Any, batch: Any, key: Any, raw: Any) -> Any:
        jax.debug.callback(lambda *a: seen.append([np.asarray(x) for x in a]), state["nu"], batch["label"], batch["on"])
        noise = jax.random.normal(key) + jax.random.normal(raw)
        return {"w": state["w"] / (1 + jnp.sqrt(state["nu"])), "nu": state["nu"]}, noise, batch["x"].sum()

    shape = jax.ShapeDtypeStruct
    state = {"w": shape((8,), jnp.float32), "nu": shape((8,), jnp.float32)}
    batch = {"x": shape((16, 2), jnp.bfloat16), "label": shape((16,), jnp.int32), "on": shape((16,), jnp.bool_)}
    keys = jax.eval_shape(lambda: (jax.random.key(0), jax.random.PRNGKey(0)))
    report = al.check(step, state, batch, *keys, cluster="p3.16xlarge", planner=DataParallel())
    assert report.ok and report.drawn and not any("not finite" in leaf.note for leaf in report.leaves)
    again = al.check(step, state, batch, *keys, cluster="p3.16xlarge", planner=DataParallel())
    assert again.leaves == report.leaves
    nu, label, on = seen[-1]
    assert (nu >= 0).all() and set(label) == {0, 1} and set(on) == {False, True}


def test_what_is_not_given_counts_as_decorated(devices: Any) -> None:
    decorated = al.parallelize(_step, **OPTIONS)
    assert al.check(decorated, *_arguments()).plan.num_microbatches == 4
    changed = al.check(decorated, *_arguments(), num_microbatches=2, planner=Hybrid(pipeline=2, data=4))
    assert changed.ok and changed.plan.num_microbatches == 2 and len(changed.plan.stages) == 2
    assert decorated.last_plan is None


def test_donated_arguments_stay_those_of_the_caller(devices: Any) -> None:
    arguments = _arguments()
    assert al.check(_step, *arguments, donate_argnums=(0, 1), **OPTIONS).ok
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments))


def test_arguments_that_lie_on_all_devices_and_static_ones(devices: Any) -> None:
    step = al.parallelize(lambda kind, params, x, y: _step(params, x, y)[kind], static_argnums=0, **OPTIONS)
    params, x, y = _arguments()
    spread = jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec("d"))
    assert al.check(step, 0, params, jax.device_put(x, spread), y=y).ok


# --- wrong steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 0.9999), ("float16", 0.95), ("bfloat16", 0.7)])
def test_a_step_that_counts_on_the_host_raises_with_the_leaf_named(dtype: str, factor: float, devices: Any) -> None:
    with pytest.raises(CheckError, match=rf"1 of 5 outputs differs\. 0/v \({dtype}\[16, 4\]\) is off by \d") as raised:
        al.check(_Drifting(factor), *_arguments(dtype), cluster="p3.16xlarge", planner=DataParallel())
    report: CheckReport = raised.value.report
    assert "depend on its arguments alone" in str(raised.value)
    assert not report.ok and report.worst[0].name == "0/v" and [leaf.ok for leaf in report.leaves].count(False) == 1
    assert (
        report.worst[0].rounding_steps > report.worst[0].allowed_steps and report.worst[0].error > report.worst[0].limit
    )


def _with_batch_norm(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = x @ params["w"]
        normed = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
        return jnp.mean((normed @ params["v"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), grads, value


def test_means_over_micro_batches_of_batch_norm_are_told_apart(devices: Any) -> None:
    with pytest.raises(CheckError, match=r"outputs differ\. 1/w .*mean_of_means.*num_microbatches=1"):
        al.check(_with_batch_norm, *_arguments(), **OPTIONS, on_non_additive="mean_of_means")
    one = {**OPTIONS, "num_microbatches": 1}
    assert al.check(_with_batch_norm, *_arguments(), **one, on_non_additive="mean_of_means").ok


def test_an_integer_that_differs_is_named(devices: Any) -> None:
    counter = iter(range(1000))
    with pytest.raises(CheckError, match=r"1 \(int32\[\]\) differs in 1 of its elements, and must be equal"):
        al.check(lambda p, x: (p, jnp.int32(next(counter))), *_arguments()[:2], cluster="p3.16xlarge")


def test_an_integer_that_jit_itself_changes_is_noted(devices: Any) -> None:
    arguments = _arguments()

    def step(params: Any, x: Any, y: Any) -> Any:
        new, metrics = _step(params, x, y)
        return new, metrics["loss"], jax.lax.bitcast_convert_type(metrics["loss"], jnp.int32)

    report = al.check(step, *arguments, **OPTIONS)
    bits = report.leaves[-1]
    assert bits.ok and (bits.error == 0 or "jax.jit itself changes it" in bits.note)


def test_a_cluster_of_another_size_is_a_sentence(devices: Any) -> None:
    with pytest.raises(ExecutionError, match=r"has 16 devices and this process 8.*--devices 16"):
        al.check(_step, *_arguments(), cluster="p3.16xlarge:2")


# --- once at the first call -------------------------------------------------------------------------------------------


def test_parallelize_checks_each_step_that_it_compiles_and_goes_on(devices: Any) -> None:
    step = al.parallelize(_step, donate_argnums=0, check=True, **OPTIONS)
    params, x, y = _arguments()
    new, _ = step(params, x, y)
    first = step.last_check
    assert first is not None and first.ok and params["w"].is_deleted()
    step(new, x, y)
    assert step.last_check is first
    step(_arguments()[0], jnp.tile(x, (2, 1)), jnp.tile(y, (2, 1)))
    assert step.last_check is not first
    assert al.parallelize(_step).last_check is None


def test_parallelize_raises_before_it_takes_the_arguments(devices: Any) -> None:
    step = al.parallelize(_with_batch_norm, donate_argnums=0, check=True, on_non_additive="mean_of_means", **OPTIONS)
    arguments = _arguments()
    for _ in range(2):
        with pytest.raises(CheckError, match="1/w"):
            step(*arguments)
    assert not arguments[0]["w"].is_deleted()


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_is_data_and_a_table(devices: Any) -> None:
    report = al.check(_step, *_arguments(), **OPTIONS)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["ok"] is True and found["num_microbatches"] == 4 and found["plan"] == "data parallel"
    assert found["leaves"][-1]["name"] == "1/loss" and found["leaves"][0]["shape"] == [16, 4]
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for text in (printed, str(report)):
        assert "gives what jax.jit gives: 5 outputs" in " ".join(text.split()) and "1/grads/w" in text


def test_changes_of_arrays() -> None:
    nan, inf = np.nan, np.inf
    assert change(np.array([1.0, nan, inf]), np.array([1.5, nan, inf])) == 0.5
    assert change(np.array([1.0, nan]), np.array([nan, 1.0])) == inf
    assert change(np.array([inf]), np.array([-inf])) == inf
    assert change(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    assert change(np.zeros(0), np.zeros(0)) == 0


def test_the_lowest_precision_on_the_way_to_each_output() -> None:
    def step(x: Any, n: Any) -> Any:
        low = jax.lax.scan(lambda c, _: (c.astype(jnp.bfloat16).astype(jnp.float32), None), x, None, length=2)[0]
        return x + 1, low * 2, n + 1, (x.astype(jnp.float16) > 0).astype(jnp.int32)

    jaxpr = jax.make_jaxpr(step)(np.ones(3, np.float32), np.int32(1))
    units = [float(jnp.finfo(dtype).eps) for dtype in (jnp.float32, jnp.bfloat16)]
    assert coarsest_units(jaxpr.jaxpr) == [*units, 0.0, float(jnp.finfo(jnp.float16).eps)]
