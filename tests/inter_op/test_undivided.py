"""Dims that the devices do not divide: kept whole, listed, and priced as padding them would have it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.planners import FSDP, DataParallel
from tests.end_to_end.cases import eager_cluster

F32 = jnp.float32


def _step(p: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["odd"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, g: a - g, p, grads), value


def _plan(hidden: int, width: int, planner: Any) -> al.Plan:
    params = {"w": jax.ShapeDtypeStruct((64, hidden), F32), "odd": jax.ShapeDtypeStruct((hidden, width), F32)}
    x, y = jax.ShapeDtypeStruct((32, 64), F32), jax.ShapeDtypeStruct((32, width), F32)
    return al.plan(_step, params, x, y, cluster=eager_cluster(), planner=planner, num_microbatches=1)


def test_a_dim_that_does_not_divide_is_priced() -> None:
    plan = _plan(49, 33, FSDP())
    found = {(d.name, d.dim): d for d in plan.undivided}
    assert set(found) == {("p/odd", 0), ("p/odd", 1)}
    dim = found["p/odd", 1]
    assert (dim.size, dim.padded, dim.num_devices, dim.axis, dim.stage) == (33, 40, 8, "data", 0)
    # Of 49 × 33 numbers on each device 49 × 5 would be left.
    assert dim.bytes_saved == 4 * 49 * 28 and dim.seconds_saved >= 0
    text = str(plan)
    assert "do not divide" in text and "p/odd" in text and "1 (33)" in text
    assert al.Plan.from_json(plan.to_json()) == plan


def test_what_divides_or_is_whole_by_choice_is_not_listed() -> None:
    assert _plan(48, 33, FSDP()).undivided == ()
    # Data parallel plans keep all parameters whole, whatever their size.
    assert _plan(49, 33, DataParallel()).undivided == ()
