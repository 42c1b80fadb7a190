"""A process of a job that uses compiled steps in the ways that a user may, each compared with `jax.jit`.

`python -m tests.distributed.uses` under `alpa-lite launch`, on two processes. Prints a line of JSON for each use.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import alpa_lite as al
from tests.end_to_end.cases import TOLERANCE, eager_cluster
from tests.runtime.pipelines import arguments, step_with

STEP = step_with([0.5] * 4)


def uses() -> Iterator[tuple[str, float, float]]:
    """What is done, the loss that it gave, and the one that it should have given."""
    cluster = dataclasses.replace(eager_cluster(), num_hosts=2, devices_per_host=jax.local_device_count())
    weights, x = arguments(4)
    losses, moved = list[float](), weights
    for _ in range(3):
        moved, loss = jax.jit(STEP)(moved, x)
        losses.append(float(loss))

    def step(planner: Any, num_microbatches: int) -> Any:
        return al.parallelize(STEP, cluster=cluster, planner=planner, num_microbatches=num_microbatches)

    chosen = step(al.planners.Auto(measure_top=2, num_layers=2), 2)
    yield "plans chosen by running them on all processes", float(chosen(weights, x)[1]), losses[0]

    pipeline = step(al.planners.Pipeline(pipeline=2), 4).compiled(weights, x)
    result, spans = pipeline.timed(weights, x)
    yield "a timed step", float(result[1]), losses[0]
    assert {span.kind for span in spans} >= {"RUN", "SEND", "PLACE"}
    assert pipeline.measure(awaited=False) and pipeline.measure(awaited=True)

    placed, batch = pipeline.place(weights, x)
    assert {w.is_fully_addressable for w in placed} == {True, False}, "each process has the weights of one stage"
    state, loss = pipeline(placed, batch)
    yield "arguments placed before", float(loss), losses[0]

    spread = step(al.planners.FSDP(), 1)
    state, loss = spread(state, x)
    yield "state of a pipeline under another plan", float(loss), losses[1]
    yield "and back", float(pipeline(state, x)[1]), losses[2]

    mesh = jax.make_mesh((jax.device_count(),), ("mine",))
    batch = jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec("mine")), lambda index: x[index])
    yield "a batch on the user's mesh, in micro-batches", float(pipeline(weights, batch)[1]), losses[0]
    yield "a batch on the user's mesh, whole", float(spread(weights, batch)[1]), losses[0]

    described = al.parallelize(STEP)
    yield "devices that are measured", float(described(weights, x)[1]), losses[0]
    assert described.last_plan.cluster.num_hosts == 2

    yield from odd_arguments(step)


def odd_arguments(step: Callable[..., Any]) -> Iterator[tuple[str, float, float]]:
    """Random keys, whole numbers and truth values, and results of several kinds."""

    def draw(state: dict[str, Any], x: Any) -> Any:
        key, noise = jax.random.split(state["key"])
        scaled = x * jax.random.uniform(noise, x.shape) + state["count"]
        loss = jax.numpy.mean(scaled**2)
        found = {"loss": loss, "rows": scaled.sum(axis=1), "any": loss > 0, "count": state["count"]}
        return {"key": key, "count": state["count"] + 1}, found

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    state = wanted = {"key": jax.random.key(3), "count": np.int32(2)}
    run = al.parallelize(draw, cluster=step(None, 1).options.cluster, planner=al.planners.DataParallel())
    for _ in range(2):
        state, found = run(state, x)
        wanted, expected = jax.jit(draw)(wanted, x)
    assert bool(found["any"]) and int(found["count"]) == 3 and int(state["count"]) == 4
    np.testing.assert_allclose(np.asarray(found["rows"]), np.asarray(expected["rows"]), rtol=1e-5)
    yield "random keys as state", float(found["loss"]), float(expected["loss"])


if __name__ == "__main__":
    al.initialize()
    for what, got, want in uses():
        assert abs(got - want) <= TOLERANCE * abs(want), (what, got, want)
        print(json.dumps({"use": what}), flush=True)
