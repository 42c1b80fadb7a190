"""Adam and LAMB: against optax, and that weights of low precision do not lose small steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_lite.cli.models.optimizers import adam

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
        (adam(0.1), optax.adam(0.1)),
        (adam(0.1, b1=0.8, b2=0.9, weight_decay=0.1), optax.adamw(0.1, b1=0.8, b2=0.9, weight_decay=0.1)),
        (adam(0.1, eps=1e-6, weight_decay=0.1, trust_ratio=True), optax.lamb(0.1, weight_decay=0.1)),
    ],
    ids=["adam", "adamw", "lamb"],
)
def test_equals_optax(ours, theirs):
    found, _ = run(ours, PARAMS)
    expected, _ = run(theirs, PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_master_weights_add_up_steps_that_rounding_would_lose():
    low = {"w": jnp.full((4,), 100.0, jnp.bfloat16)}
    lost, _ = run(adam(0.1), low, steps=20)
    kept, state = run(adam(0.1, master_weights=True), low, steps=20)
    assert (lost["w"] == 100.0).all()
    assert (kept["w"] < 99.5).all() and kept["w"].dtype == jnp.bfloat16
    assert state.master["w"].dtype == jnp.float32
    np.testing.assert_array_equal(kept["w"], state.master["w"].astype(jnp.bfloat16))


def test_arrays_of_one_shape_share_a_rule():
    params = [jax.ShapeDtypeStruct((3, 4), jnp.float32)] * 50
    optimizer = adam()
    closed = jax.make_jaxpr(optimizer.update)(params, jax.eval_shape(optimizer.init, params), params)
    rules = [eqn.params["jaxpr"] for eqn in closed.jaxpr.eqns if "jaxpr" in eqn.params]
    assert len(rules) == 50 and len({id(rule) for rule in rules}) == 1
