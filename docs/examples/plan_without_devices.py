"""Plan a train step for eight V100s on a machine that has none: shapes in, a plan out.

    python docs/examples/plan_without_devices.py

Nothing is compiled and no array is made. The plan is saved, loaded, and checked against the step again.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import alpa_lite as al

BATCH, WIDTH, NUM_LAYERS = 1024, 4096, 4


def train_step(params, batch):
    """A wide residual MLP with SGD; `w1` widens, `w2` narrows."""

    def loss_fn(params):
        x = batch["x"]
        for layer in params:
            x = x + jax.nn.gelu(x @ layer["w1"]) @ layer["w2"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), loss


def arguments():
    """The arguments of the step as shapes."""
    shape = jax.ShapeDtypeStruct
    layer = {"w1": shape((WIDTH, 4 * WIDTH), jnp.float32), "w2": shape((4 * WIDTH, WIDTH), jnp.float32)}
    data = shape((BATCH, WIDTH), jnp.float32)
    return [layer] * NUM_LAYERS, {"x": data, "y": data}


def example():
    """For the command line: `alpa-lite plan plan_without_devices:example --cluster p3.16xlarge`."""
    return train_step, arguments()


def main():
    """Plan, ask, save, load."""
    params, batch = arguments()
    plan = al.plan(train_step, params, batch, cluster="p3.16xlarge")
    print(plan)
    print()
    print(plan.explain("params/0/w1"))

    path = Path(tempfile.mkdtemp()) / "plan.json"
    plan.save(path)
    again = al.plan(train_step, params, batch, cluster="p3.16xlarge", planner=al.Plan.load(path))
    assert again == plan
    print(f"\nSaved {path.stat().st_size / 1024:.0f} KiB, loaded, and found to belong to the step.")


if __name__ == "__main__":
    main()
