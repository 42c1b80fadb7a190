"""What a survey says of equal stages that the layers cannot be dealt to."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto
from alpa_lite.schedule import OneFOneB
from cost_models.cluster import with_memory_limit


def _train(weights: jax.Array, x: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0])

    return weights - 0.1 * jax.grad(loss)(weights)


def _shapes(layers: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, 2048, 2048), (8192, 2048))]


@pytest.mark.parametrize(("layers", "counts"), [(6, (2, 4)), (10, (4, 8))])
def test_equal_stages_take_about_what_the_survey_of_other_layers_says(layers: int, counts: tuple[int, ...]) -> None:
    cluster = al.cluster("p3.16xlarge")
    request = al.parallelize(_train).trace(*_shapes(layers)).request(cluster)
    search = Auto()._search(request, math.inf)
    searches, guesses, _ = search._surveyed()
    assert any(searches.steps.natural.num_layers % count for count in counts)
    found = searches.in_equal_stages(search.space, counts, guesses)
    for count in counts:
        planner = Auto(pipeline=count, manual=(), remat="none", schedule=OneFOneB())
        plan = al.plan(_train, *_shapes(layers), cluster=cluster, planner=planner)
        # No transfers, no limit of memory, and no update that waits.
        assert found[count] <= 1.01 * plan.prediction.step_seconds <= 2 * found[count]


def test_stages_without_memory_are_never_looked_at() -> None:
    cluster = with_memory_limit(al.cluster("p3.16xlarge"), 2e7)
    search = Auto()._search(al.parallelize(_train).trace(*_shapes(6)).request(cluster), math.inf)
    searches, guesses, _ = search._surveyed()
    assert searches.in_equal_stages(search.space, (4,), guesses) == {4: math.inf}
