"""Optimizers against optax, and train steps against gradient descent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.cli.models.train import Adam, TrainState, init_state, make_optimizer, make_train_step

PARAMS = {"a": jnp.linspace(-1.0, 2.0, 6).reshape(2, 3), "b": [jnp.zeros(3)]}


def run(optimizer, params, steps=4):
    @jax.jit
    def step(params, state, scale):
        grads = jax.tree.map(lambda p: (scale * jnp.cos(p.astype(jnp.float32))).astype(p.dtype), params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for i in range(steps):
        params, state = step(params, state, 1.0 + i)
    return params, state


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (Adam(0.1), optax.adam(0.1)),
        (Adam(0.1, b1=0.8, b2=0.9, weight_decay=0.1), optax.adamw(0.1, b1=0.8, b2=0.9, weight_decay=0.1)),
        (Adam(0.1, eps=1e-6, weight_decay=0.1, trust_ratio=True), optax.lamb(0.1, weight_decay=0.1)),
    ],
    ids=["adam", "adamw", "lamb"],
)
def test_equals_optax(ours, theirs):
    found, _ = run(ours, PARAMS)
    expected, _ = run(theirs, PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_master_weights_add_up_steps_that_rounding_would_lose():
    low = {"w": jnp.full((4,), 100.0, jnp.bfloat16)}
    lost, _ = run(Adam(0.1), low, steps=20)
    kept, state = run(Adam(0.1, master_weights=True), low, steps=20)
    assert (lost["w"] == 100.0).all()
    assert (kept["w"] < 99.5).all() and kept["w"].dtype == jnp.bfloat16
    assert state.master["w"].dtype == jnp.float32
    np.testing.assert_array_equal(kept["w"], state.master["w"].astype(jnp.bfloat16))


def test_arrays_of_one_shape_share_a_rule():
    params = [jax.ShapeDtypeStruct((3, 4), jnp.float32)] * 50
    optimizer = Adam()
    closed = jax.make_jaxpr(optimizer.update)(params, jax.eval_shape(optimizer.init, params), params)
    rules = [eqn.params["jaxpr"] for eqn in closed.jaxpr.eqns if "jaxpr" in eqn.params]
    assert len(rules) == 50 and len({id(rule) for rule in rules}) == 1


MODEL = MLP(in_features=4, hidden=8, out_features=2, num_layers=2)
BATCH = {"inputs": np.ones((6, 4), np.float32), "targets": np.zeros((6, 2), np.float32)}


def test_state_is_a_pytree():
    state = init_state(MODEL.init(jax.random.key(0)), make_optimizer())
    leaves, treedef = jax.tree.flatten(state)
    assert isinstance(jax.tree.unflatten(treedef, leaves), TrainState)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".params[0]['w']" in paths
    assert ".step" in paths


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_step_equals_gradient_descent(reduction):
    params = MODEL.init(jax.random.key(0))
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_train_step(MODEL.loss_fn, optimizer, reduction=reduction))
    state, metrics = step(init_state(params, optimizer), BATCH)
    loss, grads = jax.value_and_grad(MODEL.loss_fn)(params, BATCH, reduction=reduction or "mean")
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, expected)
    assert int(state.step) == 1


def test_metrics_of_the_loss_function_are_returned():
    def loss_fn(params, batch, key=None):
        out = MODEL.apply(params, batch["inputs"])
        return jnp.mean(out**2), {"largest": jnp.max(out)}

    optimizer = make_optimizer()
    step = jax.jit(make_train_step(loss_fn, optimizer, has_aux=True))
    _, metrics = step(init_state(MODEL.init(jax.random.key(0)), optimizer), BATCH)
    assert set(metrics) == {"loss", "largest"}


def test_the_gradient_norm_is_clipped():
    params = {"w": jnp.zeros(3)}
    optimizer = make_optimizer(1.0, weight_decay=0.0, max_grad_norm=0.5)
    for gradient, length in ((jnp.array([3.0, 4.0, 0.0]), 0.5), (jnp.array([0.0, 0.3, 0.0]), 0.3)):
        _, state = optimizer.update({"w": gradient}, optimizer.init(params), params)
        first_moment = state.first["w"]  # (1 - b1) * clipped gradient
        np.testing.assert_allclose(jnp.linalg.norm(first_moment), 0.1 * length, rtol=1e-5)
