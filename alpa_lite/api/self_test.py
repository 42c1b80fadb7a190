"""A self-test of some seconds: plan a small step for a described cluster, run it on this machine, compare with jit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.api.parallelize import cluster, parallelize
from alpa_lite.api.parallelize import plan as make_plan
from alpa_lite.planners.data_parallel import DataParallel

LIMIT_SECONDS = 10.0
"""How long a step may hang before the test fails."""

_TOLERANCE = 1e-4
_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What was tried, and how long it took; `error` is empty when all of it worked."""

    planned: str
    ran: str
    seconds: float
    error: str

    def __str__(self) -> str:
        return self.error or f"{self.planned}; {self.ran}; {self.seconds:.1f} s in all"


def self_test() -> SelfTest:
    """Plan and run; a failure of any kind is what it reports."""
    start, parts = time.perf_counter(), {"planned": "", "ran": ""}
    error = ""
    try:
        parts["planned"] = _planned()
        parts["ran"] = _ran()
    except Exception as failure:  # whatever fails on this machine is what the test is there to tell
        error = f"The self-test failed: {type(failure).__name__}: {failure}"
    return SelfTest(**parts, seconds=time.perf_counter() - start, error=error)


def _step(params: list[Any], x: Any) -> tuple[list[Any], Any]:
    def loss(params: list[Any]) -> Any:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value


def _arguments(make: Callable[[tuple[int, int]], Any], num_samples: int) -> tuple[Any, Any]:
    return [make((_WIDTH, _WIDTH)) for _ in range(2)], make((num_samples, _WIDTH))


def _planned() -> str:
    """The search, on shapes alone."""
    shapes = _arguments(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), 64)
    plan = make_plan(_step, *shapes, cluster=cluster("p3.16xlarge"), cache=False)
    return f"plans a step for {plan.cluster.num_devices} described devices"


def _ran() -> str:
    """One step on all devices of this process."""
    devices = jax.devices()
    described = replace(cluster("p3.16xlarge", num_hosts=1), name="these devices", devices_per_host=len(devices))
    rng = np.random.default_rng(0)
    arguments = _arguments(lambda shape: rng.normal(size=shape).astype(np.float32), 8 * len(devices))
    step = parallelize(_step, cluster=described, planner=DataParallel(), cache=False, watchdog_seconds=LIMIT_SECONDS)
    found, expected = jax.device_get((step(*arguments), jax.jit(_step)(*arguments)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ArithmeticError(
                f"a step on {len(devices)} devices differs from jax.jit by {np.max(np.abs(np.subtract(a, b))):.3g}"
            )
    return f"runs it on {len(devices)} device{'s' if len(devices) > 1 else ''} as jax.jit does"
