"""Layers in a `lax.scan`, cut into pipeline stages without a word about it in the model.

    python docs/examples/scan_over_layers.py

Planned for two hosts of eight GPUs, of which none needs to be there.
"""

import jax
import jax.numpy as jnp
from jax import lax

import alpa_lite as al

LAYERS, WIDTH, BATCH = 8, 2048, 512


@jax.checkpoint
def layer(x, weights):
    """A residual block, computed again in the backward pass."""
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def train_step(params, batch):
    """A plain train step; the weights of all layers are stacked."""

    def loss_fn(params):
        out, _ = lax.scan(layer, batch["x"], params)
        return jnp.mean((out - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), loss


def main():
    """The same step as a pipeline, and as the search wants it."""
    shape = jax.ShapeDtypeStruct
    params = {
        "up": shape((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
        "down": shape((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
    }
    batch = {name: shape((BATCH, WIDTH), jnp.float32) for name in "xy"}
    cluster = al.cluster("p3.16xlarge", num_hosts=2)
    pipeline = al.plan(train_step, params, batch, cluster=cluster, planner=al.planners.Pipeline(pipeline=4))
    found = al.plan(train_step, params, batch, cluster=cluster)
    print(pipeline)
    print(pipeline.diff(found))
    print(f"the pipeline has {len(pipeline.stages)} stages of {LAYERS // len(pipeline.stages)} layers each")


if __name__ == "__main__":
    main()
