"""Long jobs hold no more memory, descriptors, threads and words of agreements at their end than at their beginning.

As processes of a job:  `alpa-lite launch --processes 2 -m tests.distributed.long_runs agreements|steps|saves NUMBER`
As one process:         `python -m tests.distributed.long_runs alone|shapes|jit-shapes NUMBER`

Prints a line of JSON now and then. `shapes` calls one parallel function with so many different shapes, `jit-shapes` one
of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import alpa_lite as al

LOOKS = 5


def held(done: int, **more: Any) -> None:
    """What this process holds after so much was done."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "Threads"))}
    told = {
        "done": done,
        "megabytes": round(int(found["VmRSS"]) / 1024, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(found["Threads"]),
        "python_threads": threading.active_count(),
        "seconds": round(time.monotonic() - BEGAN, 1),
    }
    print(json.dumps({**told, **more}), flush=True)


BEGAN = time.monotonic()


def keys() -> int:
    """Words in the service that coordinates the job."""
    from alpa_lite import _jax

    job = _jax.job()
    assert job is not None
    return len(job.client.key_value_dir_get_bytes("alpa_lite/"))


def agreements(number: int) -> None:
    """As many of each kind."""
    import jax

    from alpa_lite.runtime.job.consensus import agreed_data, everywhere, meet, same_everywhere

    kinds: list[Any] = [
        lambda i: agreed_data({"number": i} if jax.process_index() == 0 else None) == {"number": i},
        lambda i: everywhere([i, jax.process_index()]) == [[i, p] for p in range(jax.process_count())],
        lambda i: same_everywhere({"number": str(i)}) is None,
        lambda _: meet(range(jax.process_count())) is None,
        lambda _: meet([1, 2] if jax.process_count() > 2 and jax.process_index() else [1]) is None,
    ]
    for kind, agree in enumerate(kinds):
        most = 0
        for i in range(number):
            assert agree(i)
            if i % max(1, number // 20) == 0:
                most = max(most, keys())
        held(number, kind=kind, most_keys=most, keys=keys())


def train_step(w: Any, x: Any) -> Any:
    """A small step."""
    import jax
    import jax.numpy as jnp

    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def steps(number: int) -> None:
    """As many of one compiled step, on all processes."""
    import jax
    import numpy as np

    count = jax.process_count()
    cluster = dataclasses.replace(al.cluster("p3.16xlarge"), num_hosts=count, devices_per_host=jax.local_device_count())
    planner = al.planners.Pipeline(pipeline=2) if count > 1 else al.planners.DataParallel()
    run = al.parallelize(train_step, cluster=cluster, planner=planner, donate_argnums=0, num_microbatches=2)
    w, x = np.ones((64, 64), np.float32), np.ones((32, 64), np.float32)
    w, loss = run(w, x)
    for i in range(number):
        w, loss = run(w, x)
        if i % 10 == 0:
            float(loss)
        if (i + 1) % (number // LOOKS) == 0:
            float(loss)
            held(i + 1, **({"keys": keys()} if count > 1 else {}))


def saves(number: int) -> None:
    """As many checkpoints."""
    import jax
    import numpy as np

    from alpa_lite.runtime.job.consensus import agreed_data

    folder = sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp()
    folder = str(agreed_data(folder))
    state = {"w": jax.device_put(np.ones((8, 64), np.float32), jax.local_devices()[0])}
    with al.Checkpoints(folder, keep=2) as checkpoints:
        for i in range(number):
            checkpoints.save(i + 1, state)
            checkpoints.wait()
            if (i + 1) % (number // LOOKS) == 0:
                held(i + 1, keys=keys())


def shapes(number: int, *, plain: bool = False) -> None:
    """One function, as many batch sizes."""
    import jax
    import numpy as np

    cluster = dataclasses.replace(al.cluster("p3.16xlarge"), devices_per_host=jax.local_device_count())
    run: Any = jax.jit(train_step) if plain else None
    run = run or al.parallelize(train_step, cluster=cluster, planner=al.planners.DataParallel(), cache=False)
    w = np.ones((64, 64), np.float32)
    for i in range(number):
        _, loss = run(w, np.ones((8 * (i + 1), 64), np.float32))
        float(loss)
        if (i + 1) % (number // LOOKS) == 0:
            held(i + 1)


if __name__ == "__main__":
    how, count = sys.argv[1], int(sys.argv[2])
    if how in ("agreements", "steps", "saves"):
        al.initialize()
    {
        "agreements": agreements,
        "steps": steps,
        "alone": steps,
        "saves": saves,
        "shapes": shapes,
        "jit-shapes": lambda n: shapes(n, plain=True),
    }[how](count)
