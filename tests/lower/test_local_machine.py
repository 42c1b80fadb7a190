"""Which unit a gather waits for, and which bucket of gradients a reduction."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.intra_op.stage_ops import stage_ops
from alpa_lite.intra_op.stored_values import KernelModel, StoredValues, gathered_after
from alpa_lite.lower import local_machine
from alpa_lite.lower.local_machine import Buckets, Gathered, LocalMachine
from alpa_lite.planners import DataParallel
from alpa_lite.step.clustering import make_layers


def _waits(sizes: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """For units of some arrays each: the number of the unit that the last array of each waits for."""
    results = [jnp.full((), float(i)) for i in range(len(sizes))]
    monkeypatch.setattr(local_machine, "once_there", lambda _, result, barriers_stay: result)
    units, found = Gathered(barriers_stay=True), list[int | None]()
    for arrays, result in zip(sizes, results, strict=True):
        waits: Any = None
        for size in arrays:
            array = jnp.zeros(())
            waits = units.held(array, size)
            waits = None if waits is array else int(waits)
        found.append(waits)
        units.read(result)
    return found


def test_equal_units_wait_for_the_last_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _waits([[4.0]] * 5, monkeypatch) == [None, None, 0, 1, 2]


def test_small_units_go_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _waits([[8.0], [2.0], [2.0], [2.0], [2.0], [2.0], [8.0]], monkeypatch) == [None] * 4 + [None, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_account_of_memory_gathers_as_far_ahead(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 12))]
    waits = _waits([[float(size)] for size in sizes], monkeypatch)
    assert gathered_after([*enumerate(sizes)]) == {i: other for i, other in enumerate(waits) if other is not None}


def test_what_one_op_reads_is_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _waits([[3.0, 3.0], [3.0, 3.0], [6.0]], monkeypatch) == [None, None, 0]


def test_ops_without_numbers_are_not_waited_for() -> None:
    units = Gathered(barriers_stay=True)
    for _ in range(5):
        array = jnp.zeros(())
        assert units.held(array, 1.0) is array
        units.read(None)


@pytest.mark.parametrize("empty", [(0,), (4, 0)])
def test_an_empty_value_of_a_bucket_delays_nothing(empty: tuple[int, ...]) -> None:
    buckets = Buckets([[0, 1], [2]], barriers_stay=True)
    buckets.reduced(0, jnp.zeros(empty))
    array = jnp.ones((2,))
    assert buckets.held(2, array) is array
    buckets.reduced(1, jnp.ones((2,)))
    assert (buckets.held(2, array) == array).all()


def test_what_is_recomputed_waits_for_the_results_that_the_account_of_memory_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward pass begins with a broadcast scalar, which is made where it is read: nothing waits for it."""

    def step(weights: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            h = h @ w
            return jnp.where(h > 0, h, 0.1 * h) * jnp.argmax(h, axis=1, keepdims=True)

        def loss(weights: Any) -> Any:
            h = x
            for w in weights:
                h = layer(h, w)
            return jnp.mean(h)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    current, latest, found = -1, -1, dict[int, int]()
    apply, held_back, noted = LocalMachine.apply, LocalMachine._held_back, LocalMachine._noted

    def applied(self: LocalMachine, application: Any, operands: Any) -> Any:
        nonlocal current
        current = application.op.id
        return apply(self, application, operands)

    def held(self: LocalMachine, value: int, array: Any) -> Any:
        result = held_back(self, value, array)
        if result is not array:
            found[current] = latest
        return result

    def recorded(self: LocalMachine, application: Any, results: Any) -> Any:
        nonlocal latest
        before = self.latest
        noted(self, application, results)
        latest = latest if self.latest is before else application.op.id
        return results

    monkeypatch.setattr(LocalMachine, "apply", applied)
    monkeypatch.setattr(LocalMachine, "_held_back", held)
    monkeypatch.setattr(LocalMachine, "_noted", recorded)
    weights, x = [jnp.ones((4, 4)) for _ in range(4)], jnp.ones((8, 4))
    al.parallelize(step, batch_argnums=(1,), planner=DataParallel(), num_microbatches=1)(weights, x)
    train = al.parallelize(step, batch_argnums=(1,)).trace(weights, x).step(1).step
    stage = stage_ops(train, make_layers(train, 1), 0, 0)
    stored = StoredValues(train.graph, KernelModel(fuses_siblings=False, breadth_first=True), stage)
    assert found and found == {
        o: before for program in stored.programs for o, before in stored.delayed(program).items()
    }
