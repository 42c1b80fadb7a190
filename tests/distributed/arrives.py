"""A process of a job whose segments run in the order in which results arrive, with one slow process.

`arrives.py served CONSISTENCY...`: a parameter server; process 2 seems to take long for its passes.
`arrives.py messages`: a message-driven pipeline; the launches of each process seem to take random times.

Prints a line of JSON for each run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import alpa_lite as al

# Less than the test waits for, so that a job that hangs says where.
al.initialize(hang_timeout_seconds=180)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from alpa_lite.planners import Bounded, ParameterServer, Pipeline  # noqa: E402
from alpa_lite.runtime.execute.arrivals import ServedRun  # noqa: E402
from alpa_lite.schedule import MessageDriven, OneFOneB  # noqa: E402
from tests.end_to_end import test_message_driven as messages  # noqa: E402
from tests.end_to_end import test_parameter_server as served  # noqa: E402

ROUNDS, SLOW = 4, 2


def cluster() -> Any:
    known = al.cluster("p3.16xlarge")
    return dataclasses.replace(known, num_hosts=jax.process_count(), devices_per_host=jax.local_device_count())


def compiled_of(function: Any, arguments: Any, planner: Any, num_microbatches: int) -> Any:
    parallel: Any = al.parallelize(function, cluster=cluster(), planner=planner, num_microbatches=num_microbatches)
    return parallel.compiled(*arguments)


def whole(array: Any) -> np.ndarray:
    """An array of the job, on all processes."""
    if len(array.sharding.device_set) == jax.process_count():
        return np.asarray(array)  # a scalar, which is delivered to all
    (home,) = {device.process_index for device in array.sharding.device_set}
    block = np.asarray(array.addressable_data(0)) if jax.process_index() == home else np.zeros(array.shape, array.dtype)
    return multihost_utils.broadcast_one_to_all(block, is_source=jax.process_index() == home)


def run_served(consistency: str) -> dict[str, Any]:
    workers = jax.device_count() - 1
    m = ROUNDS * workers
    state, batch = served.state_of(), served.batch_of(m)
    given = Bounded(int(consistency)) if consistency.isdecimal() else consistency
    compiled = compiled_of(served.step, (state, batch), ParameterServer(servers=1, consistency=given), m)
    home = compiled.executor.meshes
    slow = next(w for w in range(workers) if home[1 + w].devices.flat[0].process_index == SLOW)
    if jax.process_index() == SLOW:
        served.with_slow_worker(compiled, slow, looks=400)
    events, note = list[Any](), ServedRun.note

    def noted(self: Any, event: Any) -> None:
        events.append(event)
        note(self, event)

    ServedRun.note = noted
    new, metrics = compiled(state, batch)
    ServedRun.note = note
    want, loss = served.by_equations(events, compiled.plan.schedule, ROUNDS, workers)
    served.close(jax.tree.map(whole, new), want)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    return {"workers": workers, "staleness": compiled.staleness(), "events": events}


def run_messages() -> dict[str, Any]:
    stages, m = jax.device_count(), messages.MICROBATCHES
    arguments = messages.arguments()
    want = compiled_of(messages.step, arguments, Pipeline(pipeline=stages, schedule=OneFOneB()), m)(*arguments)
    schedule = MessageDriven(limit=3)
    compiled = compiled_of(messages.step, arguments, Pipeline(pipeline=stages, schedule=schedule), m)
    orders = list[Any]()
    for _ in range(2):
        got = compiled(*arguments)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(
                [x.data for x in a.addressable_shards], [x.data for x in b.addressable_shards]
            )
        orders.append([str(task) for task in compiled.executor.arrivals.begun])
        messages.delayed(compiled, seed=jax.process_index())
    return {"orders": orders, "under way": compiled.executor.arrivals.most_under_way}


if __name__ == "__main__":
    for each in sys.argv[2:] or [""]:
        print(json.dumps(run_served(each) if sys.argv[1] == "served" else run_messages()), flush=True)
