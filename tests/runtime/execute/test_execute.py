"""Launching a program: what is given away, what is freed, which devices share credits, and many launches at once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from alpa_lite.errors import ExecutionError
from alpa_lite.planners import DataParallel, Hybrid, Pipeline
from alpa_lite.runtime.execute.execute import device_groups
from alpa_lite.schedule import Interleaved1F1B
from tests.end_to_end.cases import assert_same
from tests.runtime.pipelines import arguments, compiled, step_with

EQUAL = [0.5] * 8
PLANNERS = {
    "data_parallel": (DataParallel(), 1),
    "data_parallel in micro-batches": (DataParallel(), 4),
    "pipeline": (Pipeline(pipeline=4), 4),
    "interleaved": (Hybrid(pipeline=2, schedule=Interleaved1F1B(num_chunks=2)), 4),
}


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("donate", [(), (0,), (1,)])
def test_only_what_the_caller_gives_away_is_overwritten(name: str, donate: tuple[int, ...], devices: Any) -> None:
    planner, num_microbatches = PLANNERS[name]
    found = compiled(EQUAL, planner, num_microbatches, donate_argnums=donate)
    weights, x = arguments(8)
    placed, batch = found.place(weights, x)
    kept = [w.copy() for w in weights]  # of what is placed JAX would keep a view, and not give it away
    got, _ = found(placed, batch)
    jax.block_until_ready(got)
    deleted = [w.is_deleted() for w in placed]
    assert all(deleted) if donate == (0,) else not any(deleted)
    assert donate == (1,) or not batch.is_deleted()
    if donate != (0,):
        for w, before in zip(placed, kept, strict=True):
            np.testing.assert_array_equal(w, before)
    want, _ = jax.jit(step_with(EQUAL))(weights, x)
    assert_same(got, want)


@pytest.mark.parametrize("name", PLANNERS)
def test_what_was_given_away_is_not_taken_again(name: str, devices: Any) -> None:
    planner, num_microbatches = PLANNERS[name]
    found = compiled(EQUAL, planner, num_microbatches, donate_argnums=0)
    placed, batch = found.place(*arguments(8))
    got, _ = found(placed, batch)
    with pytest.raises(ExecutionError, match=r"an array for \S+ that has been deleted.*Pass what that call returned"):
        found(placed, batch)
    found(got, batch)


def test_values_of_a_micro_batch_are_given_to_their_last_reader(devices: Any) -> None:
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    given = {
        executable.task.name: [i for i in executable.donated if i < len(executable.task.inputs)]
        for executable in found.executor.executables
    }
    assert given["stage 1 backward"] and given["stage 2 backward"]
    weights, x = arguments(8)
    for _ in range(2):
        got, value = found(weights, x)
        assert_same((got, value), jax.jit(step_with(EQUAL))(weights, x))


@pytest.mark.parametrize("name", PLANNERS)
def test_nothing_but_results_is_held_after_a_step(name: str, devices: Any) -> None:
    planner, num_microbatches = PLANNERS[name]
    executor = compiled(EQUAL, planner, num_microbatches).executor
    weights, x = arguments(8)
    slots = executor.bound.slots([*weights, x])
    executor.bound.run(slots)
    left = {i for i, value in enumerate(slots) if value is not None}
    assert left == {*executor.bound.outputs}


def test_a_step_that_is_one_task_runs_without_instructions_as_with_them(devices: Any) -> None:
    found = compiled(EQUAL, DataParallel(), 1)
    weights, x = arguments(8)
    assert found.executor._at_once is not None
    plain = found(weights, x)
    timed, record = found.timed(weights, x)
    assert_same(plain, timed)
    assert [span.kind for span in record].count("RUN") == 1
    assert_same(plain, jax.jit(step_with(EQUAL))(weights, x))


def test_launches_that_are_not_awaited_stay_within_the_credits(devices: Any) -> None:
    executor = compiled(EQUAL, Pipeline(pipeline=4), 16, watchdog_seconds=60).executor
    weights, x = arguments(8)
    executor.flight.limit = 3
    for _ in range(3):
        executor([*weights, x])
        assert max(map(len, executor.flight.queues)) <= 3


def test_stages_that_share_a_device_share_credits() -> None:
    def mesh(*numbers: int) -> Any:
        return Mesh(np.array([jax.devices()[i] for i in numbers]), ("x",))

    assert device_groups([mesh(0, 1), mesh(2, 3), mesh(0, 1)]) == (0, 1, 0)
    assert device_groups([mesh(0, 1), mesh(2, 3), mesh(1, 2), mesh(4)]) == (0, 0, 0, 1)


def _stressed(num_microbatches: int, num_steps: int, threads: int | None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    environment["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=60"
    if threads is not None:
        environment["NPROC"] = str(threads)
    command = [sys.executable, "-m", "tests.runtime.stress", str(num_microbatches), str(num_steps)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_sixteen_devices_with_no_settings_do_not_hang() -> None:
    assert "steps of 64 micro-batches" in _stressed(64, 2, None)


@pytest.mark.long
@pytest.mark.parametrize("threads", [None, 64])
def test_sixteen_devices_do_not_hang_in_many_steps(threads: int | None) -> None:
    assert "steps of 64 micro-batches" in _stressed(64, 40, threads)
