"""What is asked for cannot be, or does not fit: each is told by its own reason."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import InfeasibleError
from alpa_lite.planners import Auto
from cost_models.cluster import with_memory
from tests.inter_op.test_stage_costs import chain_step


@pytest.mark.parametrize(
    ("planner", "num_devices", "words"),
    [
        (Auto(pipeline=9), 8, "9 stages"),
        (Auto(pipeline=3, equal=("devices",)), 8, "No 3 stages .* equally many devices"),
        (Auto(pipeline=5, equal=("layers",), num_layers=8), 8, "No 5 stages .* equally many layers"),
        (Auto(pins={"1": ("replica",)}), 8, r"axes replica, but those of p3.16xlarge have \(x\)"),
        (Auto(pins={"1": ("model",)}, pipeline=3), 3, r"axes model, but those of p3.16xlarge have \(x\)"),
        (Auto(max_memory_bytes="40GB"), 8, "a number of bytes"),  # pyright: ignore[reportArgumentType]
        (Auto(pipeline="2"), 8, "an integer of at least 1"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_is_not_blamed_on_memory(planner: Auto, num_devices: int, words: str) -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=num_devices)
    with pytest.raises(al.errors.PlanError, match=words) as error:
        al.plan(chain_step, weights, batch, cluster=cluster, planner=planner)
    assert not isinstance(error.value, InfeasibleError)


def test_stages_of_loops_that_cannot_be_alike_are_told_so() -> None:
    weights = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=8)

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradients, value

    with pytest.raises(al.errors.PlanError, match=r"3 stages have to be alike.*8 devices are no multiple of 3"):
        al.plan(step, weights, jax.ShapeDtypeStruct((64, 64), jnp.float32), cluster=cluster, planner=Auto(pipeline=3))


def test_more_microbatches_are_proposed_where_one_alone_was_tried() -> None:
    """Devices that share a processor gain nothing from several, but memory."""
    host = al.cluster("p3.16xlarge")
    cluster = with_memory(replace(host, shared_processor=True), 3e5)
    weights, batch = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    with pytest.raises(InfeasibleError, match=r"The cheapest change that fits: num_microbatches=\d+"):
        al.plan(chain_step, weights, batch, cluster=cluster, planner=Auto(manual=(), host_memory=False))
