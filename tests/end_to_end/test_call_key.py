"""Calls that `jax.jit` tells apart are told apart: weak types, static arguments by type, JAX's configuration."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError, TraceError

X = np.arange(64, dtype=np.float32).reshape(16, 4) / 20


def _parallel(fun: Any, **options: Any) -> Any:
    given = {"cluster": "p3.16xlarge", "planner": al.planners.DataParallel(), "num_microbatches": 1, **options}
    return al.parallelize(fun, **given)


def _same_arrays(got: Any, want: Any) -> None:
    """Values, dtypes and weak types."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.aval.weak_type) == (w.dtype, w.aval.weak_type)
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=1e-5)


# --- weak types -------------------------------------------------------------------------------------------------------


def _scaled(p: Any, rate: Any, x: Any) -> Any:
    return {"w": p["w"] * rate}, x.mean()


def test_a_weak_and_a_strong_number_are_two_calls(devices: Any) -> None:
    p = {"w": jnp.full((4, 4), 1.01, jnp.bfloat16)}
    step, want = _parallel(_scaled, batch_argnums=2), jax.jit(_scaled)
    for rate in (0.1, jnp.asarray(0.1), jnp.float32(0.1), np.float32(0.1), 0.3):
        _same_arrays(step(p, rate, X), want(p, rate, X))
    assert len(step._compiled) == 2


@pytest.mark.parametrize(
    "planner", [al.planners.DataParallel(), al.planners.Megatron(tensor=2), al.planners.Pipeline(pipeline=2)]
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_state_with_numbers_of_python_compiles_once(planner: Any, num_microbatches: int, devices: Any) -> None:
    def step(s: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return (jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(s["w"])
        new = jax.tree.map(lambda w, g: w - s["rate"] * g, s["w"], grads)
        return {"w": new, "rate": s["rate"] * 0.5, "count": s["count"] + 1, "scale": 2.0}, value

    state = {"w": {"a": jnp.eye(4), "b": jnp.eye(4)}, "rate": 0.1, "count": 0, "scale": 1.0}
    parallel, want = _parallel(step, planner=planner, num_microbatches=num_microbatches), jax.jit(step)
    mine, theirs = state, state
    for _ in range(3):
        (mine, got), (theirs, expected) = parallel(mine, X), want(theirs, X)
        _same_arrays((mine, got), (theirs, expected))
    assert (mine["rate"] * jnp.bfloat16(1)).dtype == jnp.bfloat16
    assert len(parallel._compiled) == 1


def test_a_strong_state_after_a_weak_one_keeps_the_plan(devices: Any) -> None:
    def step(s: Any, x: Any) -> Any:
        return {"ema": 0.9 * s["ema"] + 0.1 * x.mean()}, x.sum()

    planner = _Counting()
    parallel = _parallel(step, planner=planner)
    state, _ = parallel({"ema": 0.0}, X)
    for _ in range(2):
        state, _ = parallel(state, X)
    assert len(parallel._compiled) == 2
    assert planner.calls == [1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counting(al.planners.Planner):
    calls: list[int] = dataclasses.field(default_factory=lambda: [0])

    @property
    def name(self) -> str:
        return "counting"

    def plan(self, request: Any) -> Any:
        self.calls[0] += 1
        return al.planners.DataParallel().plan(request)


# --- static arguments -------------------------------------------------------------------------------------------------


def _flagged(p: Any, kind: Any, x: Any) -> Any:
    of = kind[0] if isinstance(kind, tuple) else kind
    return p, x.mean() * {bool: 1.0, int: 10.0, float: 100.0}[type(of)]


def test_static_arguments_differ_by_type_as_for_jit(devices: Any) -> None:
    p = {"w": jnp.ones(4)}
    step = _parallel(_flagged, static_argnums=1, batch_argnums=2)
    want = jax.jit(_flagged, static_argnums=1)
    for kind in (1, True, 1.0, 1, (1,), (True,), (1.0,), 0.0, -0.0):
        assert float(step(p, kind, X)[1]) == float(want(p, kind, X)[1])


def test_a_static_argument_without_hash_is_named(devices: Any) -> None:
    step = _parallel(_flagged, static_argnums=1, batch_argnums=2)
    for kind in ([1], np.ones(2)):
        with pytest.raises(TraceError, match=r"kind is a static argument.*has no hash"):
            step({"w": jnp.ones(4)}, kind, X)


# --- the configuration of JAX -----------------------------------------------------------------------------------------


def _wide(p: Any, x: Any) -> Any:
    return p, (x.astype(float) + 1e-9 - x.astype(float)).sum()


def test_64_bits_are_another_call(devices: Any) -> None:
    p, step, want = {"w": jnp.ones(4)}, _parallel(_wide, batch_argnums=1), jax.jit(_wide)
    _same_arrays(step(p, X)[1], want(p, X)[1])
    with jax.enable_x64(True):
        _same_arrays(step(p, X)[1], want(p, X)[1])
        assert step(p, X)[1].dtype == jnp.float64
    _same_arrays(step(p, X)[1], want(p, X)[1])
    assert len(step._compiled) == 2


def _drawn(p: Any, x: Any) -> Any:
    draws = jax.random.normal(jax.random.key(0), x.shape)
    return {"w": p["w"] - (x * draws).mean() * (x @ p["w"]).mean()}, draws.sum()


@pytest.mark.parametrize(
    "changed",
    [jax.threefry_partitionable(False), jax.default_prng_impl("rbg"), jax.default_matmul_precision("highest")],
)
def test_what_changes_a_trace_is_another_call(changed: Any, devices: Any) -> None:
    p, step = {"w": jnp.ones((4, 4))}, _parallel(_drawn, batch_argnums=1)
    _same_arrays(step(p, X), jax.jit(_drawn)(p, X))
    with changed:
        _same_arrays(step(p, X), jax.jit(lambda *args: _drawn(*args))(p, X))
        step(p, X)
    step(p, X)
    assert len(step._compiled) == 2


def test_strict_promotion_is_asked_for_each_time(devices: Any) -> None:
    p, step = (
        {"w": jnp.ones(4, jnp.bfloat16)},
        _parallel(lambda p, x: ({"w": p["w"] * x[0]}, x.mean()), batch_argnums=1),
    )
    step(p, X)
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        step(p, X)


def test_the_default_device_changes_nothing(devices: Any) -> None:
    p, step = {"w": jnp.ones((4, 4))}, _parallel(_drawn, batch_argnums=1)
    step(p, X)
    with jax.default_device(devices[1]):
        step(p, X)
    assert len(step._compiled) == 1


def test_without_jit_the_function_itself_runs(devices: Any) -> None:
    p, step, seen = (
        {"w": jnp.ones((4, 4))},
        _parallel(lambda p, x: (p, seen.append(x) or x.mean()), batch_argnums=1),
        [],
    )
    for _ in range(2):
        step(p, X)
        with jax.disable_jit():
            step(p, X)
            assert seen.pop() is X


def test_invalid_numbers_are_found(devices: Any) -> None:
    p, step = {"w": jnp.full((4, 4), jnp.nan)}, _parallel(_simple)
    step(p, X)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        step(p, X)


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_tells_what_differs(devices: Any, caplog: pytest.LogCaptureFixture) -> None:
    def step(p: Any, batch: Any, depth: int) -> Any:
        return {"w": p["w"] * depth}, batch["x"].astype(float).mean()

    caplog.set_level(logging.INFO, logger="alpa_lite")
    parallel = _parallel(step, static_argnums=2)
    p = {"w": jnp.ones(4)}
    parallel(p, {"x": X}, 1)
    parallel(p, {"x": X}, 1)
    assert not [message for message in caplog.messages if "compiled again" in message]
    calls = (
        (p, {"x": X[:8]}, 1),
        (p, {"x": X[:8]}, 2),
        (p, {"x": X[:8]}, 2.0),
        ({"w": 1.0}, {"x": X[:8]}, 2.0),
        ({"w": jnp.float32(1)}, {"x": X[:8]}, 2.0),
        ({"w": jnp.float32(1)}, {"x": X[:8], "y": X[:8]}, 2.0),
    )
    for args in calls:
        parallel(*args)
    with jax.enable_x64(True):
        parallel(*calls[-1])
    told = [message.partition("the last: ")[2] for message in caplog.messages if "compiled again" in message]
    assert told == [
        "batch/x: float32[16, 4] → float32[8, 4]",
        "depth: int 1 → int 2",
        "depth: int 2 → float 2.0",
        "p/w: float32[4] → float32[] with a weak type",
        "p/w: float32[] with a weak type → float32[]",
        "batch/y: not given → float32[8, 4]",
        "jax_enable_x64: False → True",
    ]
    assert not logging.getLogger("alpa_lite").handlers


# --- calls that cannot run --------------------------------------------------------------------------------------------


def _simple(p: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["w"]) ** 2).mean())(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss


TRANSFORMED = {
    "eval_shape": lambda f, p, x: jax.eval_shape(f, p, x),
    "jit": lambda f, p, x: jax.jit(f)(p, x),
    "jit over captured arrays": lambda f, p, x: jax.jit(lambda: f(p, x))(),
    "grad": lambda f, p, x: jax.grad(lambda p: f(p, x)[1])(p),
    "vmap": lambda f, p, x: jax.vmap(f, in_axes=(None, 0))(p, x[None]),
    "scan": lambda f, p, x: jax.lax.scan(lambda p, _: f(p, x), p, None, length=2),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_a_transformation_the_step_is_the_plain_function(name: str, devices: Any) -> None:
    p, x, step = {"w": jnp.eye(4)}, jnp.asarray(X), _parallel(_simple)
    got, want = (jax.tree.leaves(TRANSFORMED[name](f, p, x)) for f in (step, step.fun))
    assert len(got) == len(want) and not step._compiled
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if name != "eval_shape":
            np.testing.assert_array_equal(a, b)
    step(p, x)


def test_without_jit_the_step_is_the_plain_function(devices: Any) -> None:
    seen: list[Any] = []

    def step(p: Any, x: Any) -> Any:
        seen.append(type(x))
        return _simple(p, x)

    with jax.disable_jit():
        _parallel(step)({"w": jnp.eye(4)}, jnp.asarray(X))
    assert issubclass(seen[0], jax.Array) and not issubclass(seen[0], jax.core.Tracer)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_compiled_step_under_a_transformation_says_what_to_do(name: str, devices: Any) -> None:
    p, x, step = {"w": jnp.eye(4)}, jnp.asarray(X), _parallel(_simple)
    compiled = step.compiled(p, x)
    with pytest.raises(TraceError, match=r"_simple.*outside of the transformation.*_simple.fun"):
        TRANSFORMED[name](compiled, p, x)
    compiled(p, x)


def test_shapes_in_the_place_of_arrays_are_refused_before_planning(devices: Any) -> None:
    step = _parallel(_simple)
    p, shape = {"w": jnp.eye(4)}, jax.ShapeDtypeStruct(X.shape, X.dtype)
    for _ in range(2):
        with pytest.raises(TraceError, match=r"called with a jax.ShapeDtypeStruct.*needs arrays"):
            step(p, shape)
        step(p, X)
    assert len(step._compiled) == 1
    step.compiled(p, shape)
    assert len(step._compiled) == 1


def test_numbers_that_do_not_fit_are_named(devices: Any) -> None:
    step = _parallel(lambda p, n, x: (p, x.mean() * n), batch_argnums=2)
    with pytest.raises(TraceError, match=f"{2**40}, which an integer of int32 cannot hold"):
        step({"w": jnp.ones(4)}, 2**40, X)


def test_a_compiled_step_refuses_other_dtypes(devices: Any) -> None:
    p = {"w": jnp.eye(4)}
    compiled = _parallel(_simple).compiled(p, X)
    compiled(p, X.astype(np.float64))  # NumPy's wide numbers are narrowed, as by `jax.jit`
    with pytest.raises(PlanError, match="compiled for x of dtype float32, but int32 was given"):
        compiled(p, X.astype(np.int32))
