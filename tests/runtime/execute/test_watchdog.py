"""A step that does not end is noticed while nobody launches anything, and its executor leaves no thread behind."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import HangError
from alpa_lite.planners import Hybrid
from alpa_lite.runtime.execute.watch import Watchdog
from alpa_lite.runtime.job.activity import Flight, HangPolicy, InstructionInfo
from tests.end_to_end.cases import eager_cluster


class Never:
    """The token of a launch that does not end, until it is let go."""

    ready = False

    def is_ready(self) -> bool:
        """See `ready`."""
        return self.ready


def _flight(patience: float | None) -> Flight:
    instructions = InstructionInfo(explain=lambda number: f"instruction {number}")
    return Flight(1, limit=4, instructions=instructions, hang_policy=HangPolicy(patience=patience))


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "alpa_lite watchdog"}


def test_it_says_what_hangs_once_and_the_next_call_raises() -> None:
    flight, said, token = _flight(0.05), list[str](), Never()
    watchdog = Watchdog(flight, say=said.append)
    flight.launched(0, 3, token)
    watchdog.watch()
    _until(lambda: flight.hang)
    assert "No instruction has ended for 0.05 s" in said[0] and "instruction 3" in said[0]
    with pytest.raises(HangError, match="instruction 3"):
        flight.raise_if_hung()
    token.ready = True
    _until(lambda: not watchdog.is_watching)
    flight.raise_if_hung()
    assert len(said) == 1


def test_it_ends_when_nothing_is_left_and_starts_again() -> None:
    flight = _flight(0.02)
    watchdog = Watchdog(flight, say=lambda text: None)
    for _ in range(2):
        flight.launched(0, 0, token := Never())
        watchdog.watch()
        assert watchdog.is_watching
        token.ready = True
        _until(lambda: not watchdog.is_watching)


def test_no_thread_is_left_when_the_executor_goes() -> None:
    # One thread watches all steps: what an earlier test left in flight would have it already.
    gc.collect()
    _until(lambda: not _threads())
    flight = _flight(1000.0)
    watchdog = Watchdog(flight)
    flight.launched(0, 0, Never())
    watchdog.watch()
    (thread,) = _threads()
    del flight
    gc.collect()
    _until(lambda: not thread.is_alive())


def test_one_thread_watches_all_steps() -> None:
    flights = [_flight(patience) for patience in (1000.0, 0.05, 1000.0, 0.05)]
    said, tokens = list[str](), [Never() for _ in flights]
    watchdogs = [Watchdog(flight, say=said.append) for flight in flights]
    for watchdog, flight, token in zip(watchdogs, flights, tokens, strict=True):
        flight.launched(0, 0, token)
        watchdog.watch()
    assert len(_threads()) == 1
    _until(lambda: flights[1].hang and flights[3].hang)
    assert len(said) == 2 and not flights[0].hang
    for token in tokens:
        token.ready = True
    _until(lambda: not any(watchdog.is_watching for watchdog in watchdogs))
    _until(lambda: not _threads())


def test_without_a_limit_there_is_no_thread() -> None:
    flight = _flight(None)
    watchdog = Watchdog(flight)
    flight.launched(0, 0, Never())
    watchdog.watch()
    assert not watchdog.is_watching


class Stuck:
    """An executable whose launches never end, though their results are handed over."""

    def __init__(self, compiled: Any) -> None:
        """Around one that works."""
        self.compiled = compiled

    def __call__(self, *operands: Any) -> Any:
        """The results, and a token that never comes."""
        *results, _ = self.compiled(*operands)
        return (*results, Never())


def _pipeline(watchdog_seconds: float) -> Any:
    def train_step(weights: dict[str, Any], x: Any) -> Any:
        def loss(weights: dict[str, Any]) -> Any:
            return jnp.mean((jnp.tanh(x @ weights["first"]) @ weights["second"]) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weights = {name: np.eye(16, dtype=np.float32) for name in ("first", "second")}
    step = al.parallelize(
        train_step,
        cluster=eager_cluster(),
        planner=Hybrid(pipeline=2),
        num_microbatches=32,
        watchdog_seconds=watchdog_seconds,
    )
    x = np.ones((128, 16), np.float32)
    return step.compiled(weights, x), weights, x


def _with_stuck_task(executor: Any, name: str) -> None:
    """Make one of its tasks hang."""
    for number, executable in enumerate(executor.executables):
        if executable.task.name == name:
            executor.executables[number] = replace(executable, compiled=Stuck(executable.compiled))
    executor.bind()


def test_a_hang_in_a_step_names_task_micro_batch_stage_inputs_and_devices(devices: Any) -> None:
    compiled, weights, x = _pipeline(watchdog_seconds=0.3)
    _with_stuck_task(compiled.executor, "stage 1 forward+backward")
    with pytest.raises(HangError) as caught:
        compiled(weights, x)
    text = str(caught.value)
    assert "'stage 1 forward+backward' of micro-batch 0" in text and "on stage 1" in text
    assert "weights/second float32[16, 16] as [" in text and "sent by stage 0" in text
    assert "test_watchdog.py:" in text and str(devices[4]) in text
    assert "watchdog_seconds" in text


def test_a_hang_after_the_launches_is_raised_by_the_next_call(devices: Any, capfd: Any) -> None:
    compiled, weights, x = _pipeline(watchdog_seconds=0.2)
    _with_stuck_task(compiled.executor, "stage 0 update")
    compiled(weights, x)
    _until(lambda: compiled.executor.flight.hang)
    with pytest.raises(HangError, match="'stage 0 update'"):
        compiled(weights, x)
    assert "'stage 0 update'" in capfd.readouterr().err
