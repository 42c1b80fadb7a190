"""A process of a job in which a worker of a parameter server dies, and the others go on.

`survives.py CONSISTENCY WHEN SIZE FOLDER`: the last process kills itself `between` two steps, or `within` one, when its
second micro-batch begins, and a step is saved in FOLDER after that. Workers have SIZE processes each. With `bsp` the
job is to end.

Prints a line of JSON for each step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import alpa_lite as al

HEARTBEAT_SECONDS = 6
al.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)

import jax  # noqa: E402
import numpy as np  # noqa: E402

from alpa_lite.planners import Bounded, ParameterServer  # noqa: E402
from alpa_lite.runtime.execute.arrivals import ServedRun  # noqa: E402
from tests.end_to_end import test_parameter_server as served  # noqa: E402

ROUNDS, NUM_STEPS, DIES_AT = 4, 4, 1


def cluster() -> Any:
    known = al.cluster("p3.16xlarge")
    return dataclasses.replace(known, num_hosts=jax.process_count(), devices_per_host=jax.local_device_count())


def main(consistency: str, when: str, size: int, folder: Path) -> None:
    """Train; process 0, which has the state, compares each step with its equations."""
    me, dies = jax.process_index(), jax.process_count() - 1
    workers = (jax.device_count() - 1) // size
    m, bsp = ROUNDS * workers, consistency == "bsp"
    batch = served.batch_of(m)
    planner = ParameterServer(
        servers=1, workers=workers, consistency=Bounded(int(consistency)) if consistency.isdecimal() else consistency
    )
    parallel = al.parallelize(served.step, cluster=cluster(), planner=planner, num_microbatches=m, donate_argnums=0)
    compiled = parallel.compiled(served.state_of(), batch)
    state = al.init_sharded(served.state_of, like=compiled)
    events, note = list[Any](), ServedRun.note

    def noted(self: Any, event: Any) -> None:
        events.append(event)
        if (me, when, step) == (dies, "within", DIES_AT) and event == (2 * workers - 1, False):
            os.kill(os.getpid(), signal.SIGKILL)
        note(self, event)

    ServedRun.note = noted
    with al.Checkpoints(folder) as checkpoints:
        for step in range(NUM_STEPS):
            if (me, when, step) == (dies, "between", DIES_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            before = None if me or bsp else jax.tree.map(np.array, state)
            events.clear()
            state, metrics = compiled(state, batch)
            if before is not None:
                run: Any = compiled.executor.arrivals
                applied = [*run.staleness.lacking]
                want, losses = served.by_equations(events, compiled.plan.schedule, ROUNDS, workers, before, applied)
                served.close(state, want)
                print(json.dumps({"step": step, "applied": sorted(applied), "of": m, "equations": losses}), flush=True)
            print(
                json.dumps({"step": step, "loss": float(metrics["loss"]), "count": int(metrics["count"])}), flush=True
            )
            if not bsp:
                checkpoints.save(step, state, plan=compiled.plan)
            assert not checkpoints.stop_requested(step)
            if (when, step) == ("between", DIES_AT):
                time.sleep(2 * HEARTBEAT_SECONDS)  # JAX has noticed, too
        checkpoints.wait()
        print(json.dumps({"saved": checkpoints.latest}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
