"""A process of a job that builds a large state in place and tells how much memory that took at most.

`python -m tests.distributed.builds MEGABYTES` under `alpa-lite launch`.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from tests.end_to_end.cases import eager_cluster

WIDTH = 4096


def peak() -> int:
    """Bytes that this process held at most so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """One step of as many square layers."""

    def loss(state: list[jax.Array]) -> jax.Array:
        h = x
        for w in state:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value


def main(megabytes: int) -> None:
    """Build a state of so many megabytes under FSDP and under a pipeline."""
    al.initialize()
    count = megabytes * 2**20 // (4 * WIDTH**2)

    def init(key: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(k, (WIDTH, WIDTH)) for k in jax.random.split(key, count)]

    cluster = dataclasses.replace(eager_cluster(), num_hosts=jax.process_count(), devices_per_host=1)
    shapes, x = jax.eval_shape(init, jax.random.key(0)), np.zeros((jax.device_count(), WIDTH), np.float32)
    for planner in (al.planners.FSDP(), al.planners.Pipeline(pipeline=jax.process_count())):
        compiled = al.parallelize(step, cluster=cluster, planner=planner, num_microbatches=1).compiled(shapes, x)
        before = peak()
        state = jax.block_until_ready(al.init_sharded(init, jax.random.key(0), like=compiled))
        held = sum(shard.data.nbytes for w in state for shard in w.addressable_shards)
        print(json.dumps({"held": held, "grown": peak() - before}), flush=True)
        for shard in state[0].addressable_shards:
            whole = jax.random.normal(jax.random.split(jax.random.key(0), count)[0], (WIDTH, WIDTH))
            np.testing.assert_array_equal(shard.data, whole[shard.index])
        del state


if __name__ == "__main__":
    main(int(sys.argv[1]))
