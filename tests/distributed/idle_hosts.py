"""A plan that leaves the devices of one process idle; run by `test_idle_hosts`. Arguments: the first device in use."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import alpa_lite as al

al.initialize()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402


def _step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def main(first: int) -> None:
    """Print the losses of a few steps of two plans, each beside those of one device."""
    rng = np.random.default_rng(0)
    weights: Any = [np.asarray(rng.normal(size=(32, 32)) / 6, np.float32) for _ in range(4)]
    x, cluster = np.asarray(rng.normal(size=(16, 32)), np.float32), al.local_cluster()
    part = cluster.part(first, cluster.devices_per_host)
    for planner, count in ((al.planners.Pipeline(pipeline=2), 2), (al.planners.FSDP(), 1)):
        plan = al.plan(_step, weights, x, cluster=part, planner=planner, num_microbatches=count)
        plan = replace(plan, first_device=first, idle_devices=cluster.num_devices - part.num_devices)
        step = al.parallelize(_step, planner=plan, cluster=cluster)
        state, expected = weights, weights
        for _ in range(3):
            state, loss = step(state, x)
            expected, wanted = jax.jit(_step)(expected, x)
            print(json.dumps({"loss": float(loss), "wanted": float(wanted)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
