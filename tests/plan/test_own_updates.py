"""Steps whose stages cannot update their state without waiting for each other."""

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError


def loss_of(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def clipped(weights, x):
    grads = jax.grad(loss_of)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    return [w - 0.1 * g / norm for w, g in zip(weights, grads, strict=True)]


def tied(weights, x):
    grads = jax.grad(lambda ws: loss_of([*ws[:-1], ws[0]], x))(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


def untrained(weights, x):
    return jax.grad(loss_of)(weights, x)[0].sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (clipped, r"test_own_updates.py:.* in the update of stage . reads what stage . computes.*their global norm"),
        (tied, r"weights/0 is updated on stage 0 and read on stage 3 too"),
        (untrained, r"'untrained' returns none of its arguments updated"),
    ],
)
def test_updates_that_need_other_stages_are_refused(function, message):
    shape = jax.ShapeDtypeStruct
    weights, x = [shape((64, 64), jnp.float32)] * 4, shape((96, 64), jnp.float32)
    options = {"cluster": "p3.16xlarge", "num_microbatches": 8}
    planner = al.planners.Pipeline(pipeline=4, schedule=al.schedule.PipeDream())
    with pytest.raises(PlanError, match=message):
        al.plan(function, weights, x, planner=planner, **options)
    # Nothing is wrong with the steps themselves.
    al.plan(function, weights, x, planner=al.planners.Pipeline(pipeline=4), **options)
