"""Steps on parameters and data of every dtype, and on typed keys of every implementation, give what `jax.jit` gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al

PLANNERS = {
    "data": al.planners.DataParallel(),
    "tensor": al.planners.Megatron(tensor=2),
    "stages": al.planners.Pipeline(pipeline=2),
}
NARROW = ["int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"]
USUAL = ["bool", "uint8", "int16", "float16", "bfloat16", "complex64"]
WIDE = ["float64", "complex128", "int64", "uint64"]


def _parallel(fun: Any, planner: str, num_microbatches: int, **options: Any) -> Any:
    return al.parallelize(
        fun,
        cluster="p3.16xlarge",
        planner=PLANNERS[planner],
        num_microbatches=num_microbatches,
        batch_argnums=1,
        **options,
    )


@pytest.fixture
def bits(dtype: str) -> Iterator[None]:
    with jax.enable_x64(dtype in WIDE):
        yield


def _as_float(x: Any) -> Any:
    return jnp.abs(x) if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def _step(s: Any, data: Any) -> Any:
    """The dtype among parameters that are read, among state that moves, in data, and in what is returned."""

    def loss(w: Any) -> Any:
        h = jnp.tanh(_as_float(data) @ w["a"])
        return jnp.mean(jnp.tanh(h @ (_as_float(s["q"]) @ w["b"])) ** 2)

    value, grads = jax.value_and_grad(loss)(s["w"])
    new = jax.tree.map(lambda w, g: w - 0.1 * g, s["w"], grads)
    return {"w": new, "q": s["q"], "r": jnp.roll(s["r"], 1, 0)}, value, data, s["q"]


@pytest.mark.parametrize("dtype", NARROW + USUAL + WIDE)
@pytest.mark.parametrize(("planner", "num_microbatches"), [("data", 1), ("tensor", 2), ("stages", 2)])
def test_arrays_of_every_dtype(planner: str, num_microbatches: int, dtype: str, bits: None, devices: Any) -> None:
    raw = np.random.default_rng(0).integers(0, 2, (16, 8))
    data = jnp.asarray(raw).astype(jnp.dtype(dtype))

    def state() -> Any:
        w = {"a": jnp.eye(8, dtype=jnp.float32) * 0.4, "b": jnp.eye(8, dtype=jnp.float32)}
        return {"w": w, "q": jnp.copy(data[:8]), "r": jnp.copy(data[8:])}

    step, reference = _parallel(_step, planner, num_microbatches, donate_argnums=0), jax.jit(_step)
    mine, theirs = state(), state()
    for _ in range(2):
        got, want = step(mine, data), reference(theirs, data)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(np.asarray(g).astype(complex), np.asarray(w).astype(complex), rtol=2e-5)
        mine, theirs = got[0], want[0]


@pytest.mark.parametrize("implementation", ["threefry2x32", "threefry4x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize(("planner", "num_microbatches"), [("data", 1), ("tensor", 2), ("stages", 2)])
def test_keys_of_every_implementation(planner: str, num_microbatches: int, implementation: str, devices: Any) -> None:
    def step(s: Any, x: Any) -> Any:
        now, later = jax.random.split(s["key"])

        def loss(w: Any) -> Any:
            h = jnp.tanh(x @ w["a"]) * jax.random.bernoulli(now, 0.5, (8,))
            return (jnp.tanh(h @ w["b"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(s["w"])
        return {"w": jax.tree.map(lambda w, g: w - 0.1 * g, s["w"], grads), "key": later}, value

    try:
        key = jax.random.key(3, impl=implementation)
    except ValueError:
        pytest.skip(f"this JAX has no {implementation}")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    mine = theirs = {"w": {"a": jnp.eye(8), "b": jnp.eye(8)}, "key": key}
    parallel, reference = _parallel(step, planner, num_microbatches), jax.jit(step)
    for _ in range(2):
        (mine, got), (theirs, want) = parallel(mine, x), reference(theirs, x)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert mine["key"].dtype == theirs["key"].dtype
        assert (jax.random.key_data(mine["key"]) == jax.random.key_data(theirs["key"])).all()
    assert parallel.compiled(mine, x).measure()


def _with_gradients(p: Any, x: Any, grads_before: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["w"]) ** 2).mean() * p["n"], allow_int=True)(p)
    new = {"w": p["w"] - 0.1 * grads["w"] - 0.1 * grads_before["w"], "n": p["n"]}
    return new, loss, grads


@pytest.mark.parametrize("planner", PLANNERS)
def test_gradients_of_integers_have_no_bytes(planner: str, devices: Any) -> None:
    p, x = {"w": jnp.eye(8), "n": jnp.int32(3)}, jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    step, reference = _parallel(_with_gradients, planner, 1), jax.jit(_with_gradients)
    mine = theirs = p, {"w": jnp.zeros((8, 8)), "n": np.zeros((), jax.dtypes.float0)}
    for _ in range(2):
        got, want = step(mine[0], x, mine[1]), reference(theirs[0], x, theirs[1])
        assert got[2]["n"].dtype == want[2]["n"].dtype == jax.dtypes.float0
        assert got[2]["n"].shape == want[2]["n"].shape
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
        np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-5, atol=1e-6)
        mine, theirs = (got[0], got[2]), (want[0], want[2])
    assert len(step._compiled) == 1


def test_starts_of_slices_of_64_bits_along_a_split_dim() -> None:
    """Under 64 bits JAX makes starts of int64; those that the plan adds must be of the same type."""
    program = """
import tests.conftest
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import alpa_lite as al

def step(state, batch):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    buffer = jax.lax.dynamic_update_slice(state["buffer"], state["w"][:1] * 2, (state["n"], 0))
    row = jax.lax.dynamic_slice(state["buffer"], (state["n"], 0), (1, 16))
    return {"w": state["w"] - 0.1 * slope + row, "n": state["n"] + 1, "buffer": buffer}, loss

state = {"w": jnp.ones((16, 16)) / 16, "n": jnp.asarray(3), "buffer": jnp.arange(256.0).reshape(16, 16)}
assert state["n"].dtype == jnp.int64
rows = al.planners.Custom(mesh={"m": 8}, in_specs=({"w": None, "n": None, "buffer": P("m", None)}, None))
parallel = al.parallelize(step, planner=rows, cluster="p3.16xlarge", num_microbatches=1)
got, expected = state, state
for _ in range(2):
    got, _ = parallel(got, jnp.ones((16, 16)))
    expected, _ = jax.jit(step)(expected, jnp.ones((16, 16)))
for name in state:
    np.testing.assert_allclose(got[name], expected[name])
print("equal")
"""
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "equal", done.stderr
