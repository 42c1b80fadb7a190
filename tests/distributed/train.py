"""A process of a job that trains a small GPT under plans given by name, and compares with `jax.jit` on its own device.

`alpa-lite launch --processes P --devices-per-process D -m tests.distributed.train MODEL PLAN:FEED...`; of several plans
each runs after the other. Prints a line of JSON for each.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from typing import Any

import alpa_lite as al

al.initialize()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Megatron, ParameterServer, Pipeline, Planner  # noqa: E402
from tests.end_to_end.cases import MODELS, TOLERANCE, Training, eager_cluster, make_batch, relative_error  # noqa: E402

NUM_STEPS = 3


def planner_of(name: str) -> tuple[Planner, int]:
    """A planner and a number of micro-batches for all devices of the job."""
    count, processes = jax.device_count(), jax.process_count()
    half = count // 2
    return {
        "data_parallel": (DataParallel(), 1),
        "data_parallel in micro-batches": (DataParallel(), 2),
        "fsdp": (FSDP(), 1),
        "megatron": (Megatron(), 1),
        "auto": (Auto(num_layers=2, manual=()), 4),
        "a stage per process": (Pipeline(pipeline=processes), 4),
        "two stages": (Pipeline(pipeline=2), 4),
        "a stage per device": (Pipeline(pipeline=count), 4),
        "uneven": (Hybrid(pipeline=3, devices={4: (2, 1, 1), 6: (4, 1, 1), 8: (2, 4, 2)}[count]), 4),
        "workers and servers": (ParameterServer(servers=half, workers=half), half),
        "two-dimensional stages": (Hybrid(pipeline=2, data=half // 2, tensor=2), 4),
    }[name]


def cluster() -> Any:
    """All devices on one host, so that stages need not respect where processes end."""
    return dataclasses.replace(eager_cluster(), num_hosts=1, devices_per_host=jax.device_count())


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


@functools.cache
def reference(model: str, size: int) -> list[Any]:
    """What `jax.jit` makes of each step on one device: state and metrics."""
    training = Training(model=model)
    step, state, found = jax.jit(training.step()), training.start(), list[Any]()
    for number in range(NUM_STEPS):
        state, metrics = step(state, make_batch(training.architecture, number, size), jax.random.key(number))
        found.append(jax.tree.map(np.asarray, (state, metrics)))
    return found


def fed(batch: Any, how: str, shardings: Any) -> Any:
    """A batch as each process may give it: `whole`, as its `rows` of it, or as the `blocks` that it is to hold."""
    if how == "whole":
        return batch

    def blocks(x: Any, sharding: Any) -> Any:
        return jax.make_array_from_callback(x.shape, sharding, lambda i: np.asarray(x)[i], dtype=x.dtype)

    if how == "blocks":
        return jax.tree.map(blocks, batch, shardings)

    def mine(x: Any) -> Any:
        rows = len(x) // jax.process_count()
        first = jax.process_index() * rows
        return jax.make_array_from_process_local_data(al.batch_sharding(), np.asarray(x)[first : first + rows])

    return jax.tree.map(mine, batch)


def run(name: str, model: str, feed: str) -> dict[str, Any]:
    """Some steps of a plan."""
    training = Training(model=model)
    planner, num_microbatches = planner_of(name)
    step = al.parallelize(
        training.step(), cluster=cluster(), planner=planner, num_microbatches=num_microbatches, donate_argnums=0
    )
    size = 48 if jax.device_count() % 3 == 0 else 32
    expected = reference(model, size)
    begun = time.perf_counter()
    batch, key = make_batch(training.architecture, 0, size), jax.random.key(0)
    state = training.start()
    compiled = step.compiled(state, batch, key)
    shardings = compiled.input_shardings()[0]
    if feed != "whole":
        state = al.init_sharded(training.start, like=compiled)
    for number in range(NUM_STEPS):
        batch = fed(make_batch(training.architecture, number, size), feed, shardings[1])
        state, metrics = step(state, batch, jax.random.key(number))
        loss = float(expected[number][1]["loss"])
        assert abs(float(metrics["loss"]) - loss) < 1e-5 * abs(loss)
        assert int(state.step) == number + 1
    assert_same((state, metrics), expected[-1])
    return {
        "plan": name,
        "feed": feed,
        "stages": [str(stage.submesh) for stage in step.last_plan.stages],
        "sent_bytes": sum(i.bytes for i in compiled.executor.program.instructions),
        "seconds": round(time.perf_counter() - begun, 2),
    }


if __name__ == "__main__":
    MODELS["gpt_plain"] = dataclasses.replace(MODELS["gpt"], dropout=0.0)  # compiles in half of the time
    MODELS["gpt_stacked"] = dataclasses.replace(MODELS["gpt_scan"], dropout=0.0)
    _, of_model, *plans = sys.argv
    for each in plans:
        plan, _, feed = each.partition(":")
        print(json.dumps(run(plan, of_model, feed or "whole")), flush=True)
