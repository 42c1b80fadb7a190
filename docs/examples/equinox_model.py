"""An Equinox model: its arrays are the state, the rest is captured.

python docs/examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite as al

BATCH, FEATURES, NUM_STEPS = 64, 32, 10

arrays, static = eqx.partition(
    eqx.nn.MLP(FEATURES, FEATURES, width_size=128, depth=2, key=jax.random.key(0)), eqx.is_array
)
optimizer = optax.adamw(1e-2)


@al.parallelize(donate_argnums=(0, 1))
def train_step(arrays, opt, batch):
    """A plain train step on the arrays of the model."""

    def loss_fn(arrays):
        model = eqx.combine(arrays, static)
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(arrays)
    updates, opt = optimizer.update(grads, opt, arrays)
    return eqx.apply_updates(arrays, updates), opt, loss


def main():
    """Train on all devices that JAX sees."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    batch = {"x": x, "y": np.roll(x, 1, axis=1)}
    state, opt, losses = jax.tree.map(jnp.array, arrays), optimizer.init(arrays), []
    for _ in range(NUM_STEPS):
        state, opt, loss = train_step(state, opt, batch)
        losses.append(float(loss))
    np.testing.assert_array_less(losses[-1], losses[0])
    print(train_step.last_plan)
    print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} on {len(jax.devices())} devices")


if __name__ == "__main__":
    main()
