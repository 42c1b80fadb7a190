"""The FLOPs that the results of a step need."""

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.step.model_flops import needed_flops

WIDTH, BATCH, LAYERS = 512, 512, 4
#: A product forward, two backward (one in the first layer, whose input needs no gradient).
BY_HAND = 2.0 * WIDTH**2 * BATCH * (3 * LAYERS - 1)


def written_out(body):
    """The layers one after the other."""

    def forward(weights, x):
        for w in weights:
            x = body(x, w)
        return x

    return forward


def in_a_loop(body):
    """The layers as a scan."""
    return lambda weights, x: jax.lax.scan(lambda h, w: (body(h, w), None), x, weights)[0]


def step_of(forward):
    """A train step."""

    def step(weights, batch):
        loss = lambda weights: jnp.mean((forward(weights, batch["x"]) - batch["y"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def counted(forward, num_microbatches):
    shape = jax.ShapeDtypeStruct
    batch = {name: shape((BATCH, WIDTH), jnp.float32) for name in "xy"}
    weights = shape((LAYERS, WIDTH, WIDTH), jnp.float32)
    traced = al.parallelize(step_of(forward), num_microbatches=num_microbatches).trace(weights, batch)
    return needed_flops(traced.step(num_microbatches).step)


def layer(x, w):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("loop", [written_out, in_a_loop])
@pytest.mark.parametrize("policy", [None, "full", "dots"])
def test_what_is_computed_again_counts_once(loop, policy, num_microbatches):
    policies = {"full": None, "dots": jax.checkpoint_policies.checkpoint_dots}
    body = layer if policy is None else jax.checkpoint(layer, policy=policies[policy])
    found = counted(loop(body), num_microbatches)
    # A loop computes the gradient of its first input as that of all others; sums and means are small.
    more = 2.0 * WIDTH**2 * BATCH if loop is in_a_loop else 0.0
    assert set(found) == {"float32"}
    assert found["float32"] == pytest.approx(BY_HAND + more, rel=0.03)


def test_products_of_two_dtypes_are_told_apart():
    def forward(weights, x):
        half = weights.astype(jnp.bfloat16)
        return (x.astype(jnp.bfloat16) @ half[0]).astype(jnp.float32) @ weights[1]

    found = counted(forward, 1)
    assert found["bfloat16"] > 0 and found["float32"] > 0


def test_utilisations_of_a_plan():
    shape = jax.ShapeDtypeStruct
    batch = {name: shape((4096, 1024), jnp.float32) for name in "xy"}
    weights = shape((LAYERS, 1024, 1024), jnp.float32)
    rates = {}
    for again in (False, True):
        body = jax.checkpoint(layer) if again else layer
        plan = al.plan(
            step_of(written_out(body)), weights, batch, cluster="p3.16xlarge", planner=al.planners.DataParallel()
        )
        prediction = plan.prediction
        needed = 2.0 * 1024**2 * 4096 * (3 * LAYERS - 1)
        peak = 8 * plan.cluster.device.peak("float32")
        assert prediction.mfu == pytest.approx(needed / prediction.step_seconds / peak, rel=0.02)
        rates[again] = prediction
    assert rates[False].hfu == pytest.approx(rates[False].mfu, rel=0.02)
    # Each layer but the last is computed once more: 4 products instead of 3.
    assert rates[True].hfu > 1.2 * rates[True].mfu
    assert rates[True].mfu < rates[False].mfu
