"""Which unit a gather waits for, and which bucket of gradients a reduction."""

from __future__ import annotations

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.intra_op.stage_ops import stage_ops
from alpa_lite.intra_op.stored_values import KernelModel, StoredValues, gathered_after
from alpa_lite.lower import emission, local_machine
from alpa_lite.lower.local_machine import Buckets, Gathered, LocalMachine, first_numbers, once_there
from alpa_lite.planners import FSDP, DataParallel, Hybrid, Planner
from alpa_lite.program.ir import Op
from alpa_lite.step.clustering import make_layers
from tests.end_to_end.cases import eager_cluster


def _recomputed(weights: Any, x: Any) -> Any:
    """Written-out layers that are computed again."""

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


def _arguments() -> tuple[Any, Any]:
    return [jnp.ones((8, 8)) for _ in range(4)], jnp.ones((16, 8))


def _in_a_loop(weights: Any, x: Any) -> Any:
    """The same layers in a loop before a head, with the loss."""

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        h = h @ w
        return jnp.where(h > 0, h, 0.1 * h) * jnp.argmax(h, axis=1, keepdims=True), None

    def loss(weights: Any) -> Any:
        stack, head = weights
        return jnp.mean(jax.lax.scan(layer, x, stack)[0] @ head)

    value, gradients = jax.value_and_grad(loss)(weights)
    return *jax.tree.map(lambda w, g: w - g, weights, gradients), value


def _loop_arguments() -> tuple[Any, Any]:
    return [jnp.ones((4, 8, 8)), jnp.ones((8, 8))], jnp.ones((16, 8))


def _waits(sizes: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """For units of some arrays each: the number of the unit that the last array of each waits for."""
    results = [jnp.full((), float(i)) for i in range(len(sizes))]
    monkeypatch.setattr(local_machine, "once_there", lambda _, number: number)
    units, found = Gathered(), list[int | None]()
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
    units = Gathered()
    for _ in range(5):
        array = jnp.zeros(())
        assert units.held(array, 1.0) is array
        units.read(None)


@pytest.mark.parametrize("barriers_stay", [False, True])
def test_a_bucket_waits_for_all_of_the_bucket_before_it(barriers_stay: bool) -> None:
    """Behind a barrier with all of them, one stands for all."""
    buckets = Buckets([[0, 1], [2, 3], [4]], barriers_stay=barriers_stay)
    for value in (0, 1):
        assert buckets.awaited(value) == ()
        buckets.reduced(value)
    assert buckets.awaited(2) == (0, 1)
    buckets.reduced(2)
    assert buckets.awaited(3) == ((0,) if barriers_stay else (0, 1))
    buckets.reduced(3)
    assert buckets.awaited(4) == (2, 3)


@pytest.mark.parametrize("empty", [(0,), (4, 0)])
def test_an_empty_array_delays_nothing(empty: tuple[int, ...]) -> None:
    number = first_numbers([jnp.zeros(empty), jnp.full((2, 2), 3 + 4j), jnp.ones(2, jnp.int8)])
    assert number.dtype == jnp.float32 and number == 4.0
    assert (once_there(jnp.ones(2), first_numbers([jnp.zeros(empty)])) == 1).all()


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf, 0.0])
def test_what_waits_for_a_number_does_not_change_by_it(number: float) -> None:
    array, key = jnp.arange(4), jax.random.key(3)
    assert (once_there(array, jnp.float32(number)) == array).all()
    assert (jax.random.key_data(once_there(key, jnp.float32(number))) == jax.random.key_data(key)).all()


def test_what_is_recomputed_waits_for_the_results_that_the_account_of_memory_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward pass begins with a broadcast scalar, which is made where it is read: nothing waits for it."""

    found = dict[int, int | None]()
    handed_back = LocalMachine._handed_back

    def recorded(self: LocalMachine, op: Op, operands: list[Any]) -> list[Any]:
        result = handed_back(self, op, operands)
        if result is not operands:
            ((waited, *_), _) = self.numbers.popitem()
            found[op.id] = self.step.graph.producer[waited]
        return result

    monkeypatch.setattr(LocalMachine, "_handed_back", recorded)
    al.parallelize(_recomputed, batch_argnums=(1,), planner=DataParallel(), num_microbatches=1)(*_arguments())
    train = al.parallelize(_recomputed, batch_argnums=(1,)).trace(*_arguments()).step(1).step
    stage = stage_ops(train, make_layers(train, 1), 0, 0)
    stored = StoredValues(train.graph, KernelModel(fuses_siblings=False, breadth_first=True), stage)
    assert found and found == {
        o: before for program in stored.programs for o, before in stored.delayed(program).items()
    }


PLANNERS = {
    "data parallel": DataParallel(),
    "buckets": DataParallel(bucket_bytes=2000),
    "FSDP": FSDP(),
    "offload": Hybrid(data=8, remat="offload"),
    "pipeline": Hybrid(pipeline=2, data=2, tensor=2, remat="full"),
}


STEPS = {"written out": (_recomputed, _arguments), "in a loop": (_in_a_loop, _loop_arguments)}


@pytest.mark.parametrize("program", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_nothing_falls_out_of_a_barrier(planner: Planner, program: Any, devices: Any) -> None:
    """XLA's simplifier drops from a barrier what nothing reads behind it, and with that the order."""
    step, arguments = program
    text = al.parallelize(step, planner=planner, cluster=eager_cluster()).lower(*arguments()).as_text(platform="cuda")
    barriers = re.findall(r"(%\d+)(?::(\d+))? = stablehlo\.optimization_barrier", text)
    shared = [(name, int(number)) for name, number in barriers if number]
    # A result of several is "%5#1" where it is read; names repeat in other functions of the text.
    assert shared and len(shared) == len({name for name, _ in shared})
    assert all(re.search(rf"{name}#{i}\b", text) for name, number in shared for i in range(number))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("program", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_programs_with_barriers_give_the_same_numbers(
    planner: Planner, program: Any, num_microbatches: int, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs for GPUs, run here."""

    def machine(*given: Any, barriers_stay: bool) -> LocalMachine:
        return LocalMachine(*given, barriers_stay=True)

    monkeypatch.setattr(emission, "LocalMachine", machine)
    step, given = program
    weights, x = given()
    arguments = [w * (i + 1) / 8 for i, w in enumerate(weights)], x - jnp.arange(128.0).reshape(16, 8) / 64
    parallel = al.parallelize(step, planner=planner, cluster=eager_cluster(), num_microbatches=num_microbatches)
    got, want = parallel(*arguments), jax.jit(step)(*arguments)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
