"""A Flax NNX model: split once, trained as a pytree, merged where it is used.

python docs/examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import alpa_lite as al

BATCH, FEATURES, NUM_STEPS = 64, 32, 10


class Network(nnx.Module):
    """Two linear layers with a norm between them."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(FEATURES, 128, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.second = nnx.Linear(128, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.gelu(self.norm(self.first(x))))


graph, params = nnx.split(Network(rngs=nnx.Rngs(0)), nnx.Param)
optimizer = optax.adamw(1e-2)


@al.parallelize
def train_step(params, opt, batch):
    """The model is put together inside, from its graph, which is no array, and its parameters, which are."""

    def loss_fn(params):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt = optimizer.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss


def main():
    """Train, and use the model outside of the step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    batch = {"x": x, "y": np.roll(x, 1, axis=1)}
    state, opt, losses = params, optimizer.init(params), []
    for _ in range(NUM_STEPS):
        state, opt, loss = train_step(state, opt, batch)
        losses.append(float(loss))
    model = nnx.merge(graph, state)
    np.testing.assert_array_less(losses[-1], losses[0])
    print(train_step.last_plan.explain("params/first/kernel"))
    print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}; outputs have shape {model(x).shape}")


if __name__ == "__main__":
    main()
