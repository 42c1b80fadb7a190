"""Train a small MLP with a decorated step, and check every loss against plain `jax.jit`.

    python docs/examples/train_mlp.py

It plans for the devices that JAX sees; with one CPU device it is a plan for one device. For eight virtual ones set the
variables that `alpa-lite doctor` recommends before Python starts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite as al

BATCH, WIDTH, NUM_STEPS = 64, 128, 20
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


def batches(seed):
    """Random inputs, and what a fixed random layer makes of them."""
    rng = np.random.default_rng(seed)
    teacher = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    for _ in range(NUM_STEPS):
        x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.maximum(x @ teacher, 0).astype(np.float32)}


def main():
    """Train twice from the same state, and compare."""
    parallel_step = al.parallelize(train_step, donate_argnums=0)
    reference_step = jax.jit(train_step)

    first_batch = next(batches(0))
    shapes = jax.eval_shape(init, jax.random.key(0))
    compiled = parallel_step.compiled(shapes, first_batch)
    print(compiled.plan)

    # Every device builds only the blocks that it will hold.
    state = al.init_sharded(init, jax.random.key(0), like=compiled)
    reference_state = init(jax.random.key(0))
    for number, batch in enumerate(batches(0)):
        state, loss = parallel_step(state, batch)
        reference_state, expected = reference_step(reference_state, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        if number % 5 == 0 or number == NUM_STEPS - 1:
            print(f"step {number:2}  loss {float(loss):.4f}  plain jax.jit {float(expected):.4f}")
    print("sharding of the first weight:", state["params"][0]["w"].sharding)


if __name__ == "__main__":
    main()
