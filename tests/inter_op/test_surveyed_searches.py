"""What searches expect before they solve: of equal stages that the layers cannot be dealt to, and of schedules."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.inter_op.workers import Likely, Workers
from alpa_lite.planners import Auto
from alpa_lite.schedule import GPipe, OneFOneB, Schedule, ZeroBubbleH1
from cost_models.cluster import with_memory_limit


def _train(weights: jax.Array, x: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0])

    return weights - 0.1 * jax.grad(loss)(weights)


def _written_out(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h)

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


def _shapes(layers: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, 2048, 2048), (8192, 2048))]


@pytest.mark.parametrize(("layers", "counts"), [(6, (2, 4)), (10, (4, 8))])
def test_equal_stages_take_about_what_the_survey_of_other_layers_says(layers: int, counts: tuple[int, ...]) -> None:
    cluster = al.cluster("p3.16xlarge")
    request = al.parallelize(_train).trace(*_shapes(layers)).request(cluster)
    search = Auto()._search(request, math.inf)
    searches, guesses, _ = search._surveyed()
    assert any(searches.steps.natural.num_layers % count for count in counts)
    found = searches.in_equal_stages(search.space, counts, guesses, math.inf)
    for count in counts:
        planner = Auto(pipeline=count, manual=(), remat="none", schedule=OneFOneB())
        plan = al.plan(_train, *_shapes(layers), cluster=cluster, planner=planner)
        # No transfers, no limit of memory, and no update that waits.
        least = min(found[count].values())
        assert least <= 1.01 * plan.prediction.step_seconds <= 2 * least


def test_stages_without_memory_are_never_looked_at() -> None:
    cluster = with_memory_limit(al.cluster("p3.16xlarge"), 2e7)
    search = Auto()._search(al.parallelize(_train).trace(*_shapes(6)).request(cluster), math.inf)
    searches, guesses, _ = search._surveyed()
    assert searches.in_equal_stages(search.space, (4,), guesses, math.inf) == {4: {}}


def test_equal_stages_that_are_no_faster_than_what_is_known_are_left_out() -> None:
    search = Auto()._search(al.parallelize(_train).trace(*_shapes(6)).request(al.cluster("p3.16xlarge")), math.inf)
    searches, guesses, _ = search._surveyed()
    every = searches.in_equal_stages(search.space, (4,), guesses, math.inf)[4]
    at_most = sorted(every.values())[1]
    found = searches.in_equal_stages(search.space, (4,), guesses, at_most)[4]
    assert found == {number: seconds for number, seconds in every.items() if seconds < at_most}


def test_equal_stages_are_guessed_within_the_memory_that_they_have() -> None:
    def guessed(cluster: al.Cluster) -> float:
        search = planner._search(al.parallelize(_train).trace(*_shapes(6)).request(cluster), math.inf)
        searches, guesses, _ = search._surveyed()
        return searches.in_equal_stages(search.space, (4,), guesses, math.inf)[4][64]

    planner = Auto(manual=(), remat="none", schedule=OneFOneB())
    free = al.cluster("p3.16xlarge")
    tight = with_memory_limit(free, 5.5e7)
    least = guessed(tight)
    assert least > 1.05 * guessed(free)
    of_four = replace(planner, pipeline=4)
    plan = al.plan(_train, *_shapes(6), cluster=tight, planner=of_four, num_microbatches=64)
    assert least <= 1.01 * plan.prediction.step_seconds <= 2 * least


class Told(Workers):
    """Workers that answer nothing, and record what they are told and asked."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.asked = list[set[Hashable]](), list[Hashable]()

    @property
    def at_work(self) -> bool:
        return True

    def expect(self, questions: Mapping[Hashable, Likely], *, later: bool = False) -> None:
        self.told.append(set(questions))

    def take(self, key: Hashable) -> object:
        self.asked.append(key)
        return None


def test_workers_are_told_of_all_stages_that_are_tried() -> None:
    workers = Told()
    arguments = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 5, jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
    request = al.parallelize(_written_out).trace(*arguments).request(al.cluster("p3.16xlarge"))
    searches, *_ = Auto()._search(replace(request, workers=workers), math.inf)._surveyed()
    tried, before = 0, len(workers.told)
    for number in (2, 8, 32):
        workers.asked.clear()
        searches.tried_at(number)
        told = workers.told[before]
        assert told.issuperset(workers.asked)
        tried, before = tried + len(workers.asked), len(workers.told)
    assert tried > 1


def test_the_schedule_is_the_fastest_where_hosts_issue_programs_more_slowly_than_they_run() -> None:
    """A backward pass in two tasks starts more programs, but none for a gradient that no stage waits for."""
    cluster = replace(al.cluster("p4d.24xlarge", num_hosts=1), devices_per_host=2)
    arguments = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 12, jax.ShapeDtypeStruct((24, 1024), jnp.float32)

    def planned(schedule: Schedule | None) -> al.Plan:
        planner = Auto(pipeline=2, manual=(), schedule=schedule)
        return al.plan(_written_out, *arguments, cluster=cluster, planner=planner, num_microbatches=1)

    seconds = {s: planned(s).prediction.step_seconds for s in (OneFOneB(), GPipe(), ZeroBubbleH1())}
    assert seconds[ZeroBubbleH1()] < 0.95 * seconds[OneFOneB()]
    assert planned(None).prediction.step_seconds <= 1.005 * min(seconds.values())
