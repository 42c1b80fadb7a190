"""The collector of cycles runs rarely while something is planned, as before afterwards, and has nothing to do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto, DataParallel
from alpa_lite.program.collector import rare_collection


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_inside_and_as_before_outside() -> None:
    gc.set_threshold(700, 10, 10)
    with rare_collection():
        assert gc.get_threshold()[0] > 700
        with rare_collection():
            assert gc.get_threshold()[0] > 700
        assert gc.get_threshold()[0] > 700
    assert gc.get_threshold() == (700, 10, 10)


def test_an_exception_restores_what_was_there() -> None:
    gc.set_threshold(500, 5, 5)
    with pytest.raises(KeyError), rare_collection():
        raise KeyError("planning failed")
    assert gc.get_threshold() == (500, 5, 5)


@pytest.mark.parametrize("given", [(0, 10, 10), (10_000_000, 50, 50)])
def test_a_collector_that_is_off_or_runs_more_rarely_is_left_alone(given: tuple[int, int, int]) -> None:
    gc.set_threshold(*given)
    with rare_collection():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given


def test_what_was_made_inside_is_old_afterwards() -> None:
    gc.set_threshold(700, 10, 10)
    with rare_collection():
        made = [[i] for i in range(50_000)]
    young = {id(x) for generation in (0, 1) for x in gc.get_objects(generation)}
    assert not young & set(map(id, made))
    assert not set(map(id, made)) - set(map(id, gc.get_objects(2)))


def test_what_the_user_froze_stays_frozen() -> None:
    made = [[i] for i in range(50_000)]
    gc.freeze()
    try:
        with rare_collection():
            pass
        assert not set(map(id, made)) & {id(x) for x in gc.get_objects()}  # which holds nothing that is frozen
    finally:
        gc.unfreeze()


def _step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def test_what_a_search_made_goes_with_it() -> None:
    # Data parallelism does not fit: its problem is kept until the search ends.
    cluster = al.cluster("p3.16xlarge")
    arguments = jax.ShapeDtypeStruct((8, 18_000, 18_000), jnp.float32), jax.ShapeDtypeStruct((64, 18_000), jnp.float32)
    gc.collect()
    gc.disable()
    try:
        plan = al.plan(_step, *arguments, cluster=cluster, planner=Auto(manual=(DataParallel(),)), cache=False)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.enable()
    rooms = tuple(f"alpa_lite.{room}" for room in ("program", "step", "plan", "inter_op", "intra_op", "planners"))
    left = {type(x).__qualname__ for x in gc.garbage if str(type(x).__module__).startswith(rooms)}
    gc.garbage.clear()
    assert [seconds for name, seconds in plan.alternatives if "data parallel" in name] == [float("inf")]
    assert left == set()
