"""A mixture of experts: tokens travel to the devices of their experts and back.

    python docs/examples/mixture_of_experts.py

Routing with a capacity per expert as in GShard; experts are found from the graph, not from names.
"""

import jax
import jax.numpy as jnp

import alpa_lite as al

EXPERTS, WIDTH, GROUPS, TOKENS = 8, 1024, 64, 512
CAPACITY = 2 * TOKENS // EXPERTS


def mixture(params, x):
    """Each token of each group [groups, tokens, width] goes to its best expert, as long as that has room."""
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), EXPERTS)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1  # in the queue of the expert
    dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), CAPACITY)
    to_experts = jnp.einsum("gtec,gtd->egcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", to_experts, params["up"]))
    back = jnp.einsum("egcf,efd->egcd", hidden, params["down"])
    return jnp.einsum("gtec,egcd->gtd", dispatch * gates[..., None], back)


def train_step(params, batch):
    """A plain train step."""

    def loss_fn(params):
        return jnp.mean((batch["x"] + mixture(params, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), loss


def main():
    """Expert parallelism by hand, and the search."""
    shape = jax.ShapeDtypeStruct
    params = {
        "gate": shape((WIDTH, EXPERTS), jnp.float32),
        "up": shape((EXPERTS, WIDTH, 4 * WIDTH), jnp.float32),
        "down": shape((EXPERTS, 4 * WIDTH, WIDTH), jnp.float32),
    }
    batch = {name: shape((GROUPS, TOKENS, WIDTH), jnp.float32) for name in "xy"}
    for planner in (al.planners.DataParallel(), al.planners.GShard(), al.planners.Auto()):
        plan = al.plan(train_step, params, batch, cluster="p3.16xlarge", planner=planner)
        kinds = sorted({use.kind for use in plan.prediction.collectives})
        print(f"{plan.name:20} {1e3 * plan.prediction.step_seconds:7.1f} ms  {', '.join(kinds)}")
    print("experts of the last plan:", plan.stages[0].specs["params/up"])


if __name__ == "__main__":
    main()
