"""A training job that saves checkpoints, goes on where it was, and ends in order when it is told to.

    python docs/examples/checkpointed_training.py --folder run --steps 100

Run it twice: the second run goes on from the last checkpoint and by its plan, or plans anew if it has other devices.
SIGTERM makes it save and leave with exit code 75, for whoever started it to start it again. One of several processes
gets `--distributed`, which finds the others under SLURM, Kubernetes and on Cloud TPUs, or `--coordinator`,
`--num-processes` and `--process-id`.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite as al

BATCH, WIDTH = 64, 128
TOLD_TO_STOP = 75
"""Exit code of a run that was told to stop: it did not fail, and is not done."""

optimizer = optax.adamw(1e-3)


def init(key):
    """Weights of three dense layers, and the optimizer's state for them."""
    keys = jax.random.split(key, 3)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)} for k in keys]
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params, batch):
    """Mean squared error."""
    x = batch["x"]
    for layer in params:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state, batch):
    """A plain train step; it knows nothing of devices."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def compiled_step(plan):
    """The compiled train step: by a saved plan, so that a restart plans nothing, or by a new one for other devices."""
    shapes = jax.eval_shape(init, jax.random.key(0)), batch_of(0)
    try:
        return al.parallelize(train_step, planner=plan).compiled(*shapes)
    except al.errors.MismatchError:
        return al.parallelize(train_step).compiled(*shapes)


def batch_of(step):
    """The batch of a step, the same whenever it is asked for: so the data goes on where it was, too."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.maximum(x[:, ::-1], 0)}


def arguments():
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="run", help="where checkpoints are; all processes must see it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--distributed", action="store_true", help="find the other processes of the job")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the first process listens")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    return parser.parse_args()


def main():
    """Train from the newest checkpoint on; returns the exit code."""
    given = arguments()
    if given.distributed or given.coordinator:
        al.initialize(given.coordinator, given.num_processes, given.process_id)
    with al.Checkpoints(given.folder, keep=3) as checkpoints:
        compiled = compiled_step(None if checkpoints.latest is None else checkpoints.plan())
        if checkpoints.latest is None:
            done, state = 0, al.init_sharded(init, jax.random.key(0), like=compiled)
        else:
            done, state = checkpoints.restore(compiled)
            print(f"going on from step {done}", flush=True)
        for step in range(done + 1, given.steps + 1):
            state, loss = compiled(state, batch_of(step))
            stop = checkpoints.stop_requested(step)
            if stop or step % given.save_every == 0 or step == given.steps:
                print(f"step {step}  loss {float(loss):.4f}", flush=True)
                checkpoints.save(step, state, plan=compiled.plan)
            if stop:
                return TOLD_TO_STOP
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
