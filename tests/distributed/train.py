"""A process of a job that trains a small GPT under plans given by name, and compares with `jax.jit` on its own device.

`alpa-lite launch --processes P --devices-per-process D -m tests.distributed.train NAME...`; with several names each plan
runs after the other. Prints a line of JSON for each.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import alpa_lite as al

al.initialize()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Megatron, Pipeline, Planner  # noqa: E402
from tests.end_to_end.cases import TOLERANCE, Training, eager_cluster, make_batch, relative_error  # noqa: E402

NUM_STEPS = 3


def planner_of(name: str) -> tuple[Planner, int]:
    """A planner and a number of micro-batches for all devices of the job."""
    count, processes = jax.device_count(), jax.process_count()
    uneven = (count // 2, *[1] * (count - count // 2)) if count < 5 else (count // 2, 1, count - count // 2 - 1)
    return {
        "data_parallel": (DataParallel(), 1),
        "data_parallel in micro-batches": (DataParallel(), 2),
        "fsdp": (FSDP(), 1),
        "megatron": (Megatron(), 1),
        "auto": (Auto(num_layers=2, manual=()), 4),
        "a stage per process": (Pipeline(num_stages=processes), 4),
        "two stages over all": (Pipeline(num_stages=2), 4),
        "a stage per device": (Pipeline(num_stages=count), 4),
        "uneven": (Hybrid(pipeline=len(uneven), devices=uneven), 4),
        "data and model parallel stages": (Hybrid(pipeline=2, model=2), 4),
    }[name]


def cluster() -> Any:
    """A host per process."""
    return dataclasses.replace(
        eager_cluster(), num_hosts=jax.process_count(), devices_per_host=jax.local_device_count()
    )


def assert_same(got: Any, want: Any) -> None:
    """What this process holds of each array, against the whole of it."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert isinstance(a.sharding, NamedSharding), path
        for shard in a.addressable_shards:
            part = np.asarray(b)[shard.index]
            error = relative_error(shard.data, part) * np.linalg.norm(part) / max(np.linalg.norm(b), 1e-30)
            assert error <= TOLERANCE, f"{path}: relative error {error:.1e}"


def run(name: str, training: Training) -> dict[str, Any]:
    """Some steps of a plan."""
    planner, num_microbatches = planner_of(name)
    step = al.parallelize(training.step(), cluster=cluster(), planner=planner, num_microbatches=num_microbatches)
    reference = jax.jit(training.step())
    state = want = training.start()
    size = 48 if jax.device_count() % 3 == 0 else 32
    begun = time.perf_counter()
    for number in range(NUM_STEPS):
        batch = make_batch(training.architecture, number, size)
        key = jax.random.key(number)
        state, metrics = step(state, batch, key)
        want, wanted = reference(want, batch, key)
        assert abs(float(metrics["loss"]) - float(wanted["loss"])) < 1e-5 * abs(float(wanted["loss"]))
        assert int(state.step) == number + 1
    assert_same((state, metrics), (want, wanted))
    program = step.compiled(state, batch, key).executor.program
    return {
        "plan": name,
        "stages": [str(stage.submesh) for stage in step.last_plan.stages],
        "sent_bytes": sum(i.bytes for i in program.instructions),
        "seconds": round(time.perf_counter() - begun, 2),
    }


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(run(each, Training(model="gpt"))), flush=True)
