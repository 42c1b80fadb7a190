"""A process of a job that trains with checkpoints and goes on where it was.

`resumes.py FOLDER STEPS [SECONDS [served]]`

The first process appends a line "step loss" to FOLDER/log for each step. SECONDS: that each step takes longer. With
"served" the first process is a parameter server, and the others are workers; else each process is a stage.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import alpa_lite as al

al.initialize()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from alpa_lite.planners import DataParallel, ParameterServer, Pipeline  # noqa: E402

WIDTH, SAMPLES, LAYERS = 24, 24, 3


def start() -> dict[str, Any]:
    """Parameters, momentum, and a key that draws noise, so that a step lost or done twice shows in all that follow."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    return {"weights": weights, "momentum": [jnp.zeros_like(w) for w in weights], "key": keys[0], "step": jnp.int32(0)}


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def train_step(state: Any, x: Any, y: Any) -> Any:
    key, draw = jax.random.split(state["key"])
    loss, grads = jax.value_and_grad(loss_of)(state["weights"], x + 0.1 * jax.random.normal(draw, x.shape), y)
    momentum = [0.9 * m + g for m, g in zip(state["momentum"], grads, strict=True)]
    weights = [w - 0.3 * m for w, m in zip(state["weights"], momentum, strict=True)]
    return {"weights": weights, "momentum": momentum, "key": key, "step": state["step"] + 1}, loss


def batch(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    return x, np.tanh(x[:, ::-1])


def main(folder: Path, num_steps: int, seconds: float, *, served: bool) -> None:
    """Train to the end, or until SIGTERM."""
    count = jax.process_count()
    planner = Pipeline(pipeline=count) if count > 1 else DataParallel()
    planner = ParameterServer(servers=1) if served else planner
    parallel = al.parallelize(train_step, cluster=_cluster(), planner=planner, num_microbatches=2, donate_argnums=0)
    compiled = parallel.compiled(jax.eval_shape(start), *batch(0))
    with al.Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        step = 0
        if checkpoints.latest is None:
            state = al.init_sharded(start, like=compiled)
        else:
            step, state = checkpoints.restore(compiled)
        print(f"goes on at step {step} as {os.getpid()}", flush=True)
        while step < num_steps:
            state, loss = parallel(state, *batch(step))
            step += 1
            told = float(loss)
            assert int(state["step"]) == step
            if jax.process_index() == 0:
                with open(folder / "log", "a", encoding="ascii") as log:
                    log.write(f"{step} {told!r}\n")
            checkpoints.save(step, state, plan=compiled.plan)
            if checkpoints.stop_requested(step):
                print(f"told to end after step {step}", flush=True)
                return
            time.sleep(seconds)


def _cluster() -> Any:
    """The devices of the job as data: nothing is measured."""
    import dataclasses

    known = al.cluster("p3.16xlarge")
    return dataclasses.replace(
        known, num_hosts=jax.process_count(), devices_per_host=jax.local_device_count(), name="the job's"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float((*sys.argv[3:], "0")[0]), served="served" in sys.argv[4:])
