"""A Flax Linen classifier with dropout, trained by a decorated step.

    python docs/examples/flax_linen.py

Parameters, optimizer state and the dropout key are arguments like any other; the step is the one for `jax.jit`.
"""

import jax
import numpy as np
import optax
from flax import linen as nn

import alpa_lite as al

BATCH, FEATURES, CLASSES, NUM_STEPS = 64, 32, 10, 10


class Classifier(nn.Module):
    """Two dense layers with dropout between them."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


model, optimizer = Classifier(), optax.adam(1e-2)


def init(key):
    """Variables and optimizer state."""
    params = model.init(key, np.zeros((1, FEATURES), np.float32), train=False)["params"]
    return {"params": params, "opt": optimizer.init(params)}


@al.parallelize(donate_argnums=0)
def train_step(state, batch, key):
    """A plain train step."""

    def loss_fn(params):
        logits = model.apply({"params": params}, batch["x"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def main():
    """Dropout masks, and so the losses, are those of `jax.jit`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    batch = {"x": x, "y": np.argmax(x[:, :CLASSES], axis=1)}
    state = init(jax.random.key(0))
    reference_state, reference_step = init(jax.random.key(0)), jax.jit(train_step.fun)
    for number in range(NUM_STEPS):
        key = jax.random.fold_in(jax.random.key(1), number)
        state, loss = train_step(state, batch, key)
        reference_state, expected = reference_step(reference_state, batch, key)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    print(train_step.last_plan)
    print(f"after {NUM_STEPS} steps the loss is {float(loss):.4f}, as with jax.jit")


if __name__ == "__main__":
    main()
