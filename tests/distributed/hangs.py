"""A process of a job one of whose processes hangs: `python -m tests.distributed.hangs HOW VICTIM`.

Steps that wait for longer than `PATIENCE` seconds hang; the same holds for what must be agreed upon. At step `AT` the
process whose number is VICTIM does what HOW says; those that are no hangs end in "all done" on all processes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
import signal
import sys
import time
from typing import Any

import alpa_lite as al

PATIENCE = 5.0
AT, STEPS = 5, 12

if __name__ == "__main__":
    seen_late = {"heartbeat_timeout_seconds": 200} if sys.argv[1] == "is stopped, seen late" else {}
    al.initialize(hang_timeout_seconds=PATIENCE, **seen_late)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402


def step(w: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def sleeps() -> None:
    time.sleep(1e6)


def loops() -> None:
    while True:
        pass


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1e6)


def gathers() -> None:
    """A collective of the user's own, in which nobody else takes part."""
    multihost_utils.process_allgather(np.ones(3))


def keeps_the_lock() -> None:
    """Nothing of Python runs in this process any more."""
    ctypes.PyDLL(None).sleep(1_000_000)


def compiles() -> None:
    """A function of the user's own, for longer than the others' patience."""
    compiler: Any = importlib.import_module("jax._src.compiler")
    compile_now = compiler.backend_compile_and_load

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(3 * PATIENCE)
        return compile_now(*args, **kwargs)

    compiler.backend_compile_and_load = slowly
    print("compiled", float(jax.jit(lambda x: x * 2.5 + 1)(1.0)), flush=True)
    compiler.backend_compile_and_load = compile_now


@dataclasses.dataclass(frozen=True)
class Slow(al.planners.Planner):
    """Plans for longer than the others' patience."""

    @property
    def name(self) -> str:
        return "slow"

    def plan(self, request: Any) -> Any:
        time.sleep(3 * PATIENCE)
        return al.planners.DataParallel().plan(request)


KINDS = {
    "sleeps": sleeps,
    "loops": loops,
    "is stopped": is_stopped,
    "is stopped, seen late": is_stopped,  # what waits for its steps finds the hang first
    "gathers": gathers,
    "keeps the lock": keeps_the_lock,
    "compiles": compiles,
}


def main(how: str, victim: int) -> None:
    """Some steps, of data parallelism."""
    mine = jax.process_index() == victim
    if how == "sleeps before the plan" and mine:
        sleeps()
    cluster = dataclasses.replace(al.cluster("p3.16xlarge"), num_hosts=jax.process_count(), devices_per_host=1)
    planner = Slow() if how == "plans" else al.planners.DataParallel()
    run = al.parallelize(step, cluster=cluster, planner=planner, cache=False, watchdog_seconds=PATIENCE)
    w, x = np.ones((8, 8), np.float32), np.ones((24, 8), np.float32)
    for number in range(STEPS):
        if number == AT and mine and how in KINDS:
            print("hangs now", time.time(), flush=True)
            KINDS[how]()
        w, loss = run(w, x)
        float(loss)
    print("all done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
