"""A pipeline of four stages on sixteen virtual CPU devices, launched for several steps without a wait in between.

Run as a program in a process of its own: `python -m tests.runtime.stress NUM_MICROBATCHES NUM_STEPS`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_DEVICES, NUM_LAYERS, WIDTH = 16, 8, 32


def train_step(weights: list[Any], x: Any) -> Any:
    """Layers that are equal, so that stages are."""

    def loss(weights: list[Any]) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def main(num_microbatches: int, num_steps: int) -> None:
    """Run, compare with `jax.jit`, and print the time of a step."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    import alpa_lite as al
    from alpa_lite.planners import Hybrid

    rng = np.random.default_rng(0)
    weights = [np.asarray(rng.normal(size=(WIDTH, WIDTH)) / 6, np.float32) for _ in range(NUM_LAYERS)]
    x = np.asarray(rng.normal(size=(4 * num_microbatches, WIDTH)), np.float32)
    step = al.parallelize(
        train_step,
        cluster=al.cluster("p3.16xlarge", num_hosts=2),
        planner=Hybrid(pipeline=4, data=2, tensor=2),
        num_microbatches=num_microbatches,
        donate_argnums=0,
        watchdog_seconds=60,
    )
    got, losses = weights, []
    began = time.perf_counter()
    for number in range(num_steps):
        if number == 1:
            began = time.perf_counter()
        got, value = step(got, x)
        losses.append(value)
    jax.block_until_ready((got, losses))
    seconds = (time.perf_counter() - began) / max(1, num_steps - 1)
    want, reference = weights, jax.jit(train_step)
    for value in losses:
        want, wanted = reference(want, x)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
    stages = step.last_plan.stages
    assert len(stages) == 4 and all(stage.submesh.num_devices == 4 for stage in stages)
    print(f"{num_steps} steps of {num_microbatches} micro-batches, {seconds:.2f} s each")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
