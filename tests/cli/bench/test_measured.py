"""Steps in turn: their order, whose time is whose, and plans that fail when they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.bench.contenders import named_contenders
from alpa_lite.cli.bench.measured import Running, in_turn, measured_rows
from alpa_lite.cli.bench.planned import planned_entries, traced_target
from alpa_lite.cli.bench.targets import BenchTarget
from tests.cli.bench.conftest import CLUSTER


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_every_round_runs_each_step_once_and_every_other_backwards():
    clock, ran = Clock(), []

    def step(name, seconds):
        def run():
            ran.append(name)
            clock.now += seconds * (10.0 if len(ran) <= 6 else 1.0)  # the first rounds are slow

        return run

    steps = {"a": step("a", 1.0), "b": step("b", 2.0), "c": step("c", 3.0)}
    said = []
    found = in_turn(steps, 2, said.append, warm_up=2, clock=clock)
    assert "".join(ran) == "abccbaabccba"
    assert found == {"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [3.0, 3.0]}
    assert said == [f"round {i} of 4" for i in (1, 2, 3, 4)]


def test_plans_are_measured_and_equal_ones_share_it(entries, target, devices):
    rows = measured_rows(target, entries, 3, lambda _: None)
    for row in rows[:-1]:
        assert len(row.measured_samples) == 3 and row.measured_step_seconds > 0
        assert row.measured_quartiles[0] <= row.measured_step_seconds <= row.measured_quartiles[1]
        assert row.allocated_peak_bytes > 0
    assert rows[3].same_as == rows[1].planner and rows[3].measured_samples == rows[1].measured_samples
    assert rows[1].measured_samples != rows[2].measured_samples
    assert rows[-1] == entries[-1].row  # it has no plan


def test_a_running_step_trains(entries, target, devices):
    """Each call starts from the state that the one before left: as `jax.jit`, three steps."""
    state, batch = target.values()
    running = Running.of(entries[2].lowered.compile(), jax.tree.leaves((state, batch)))
    want = state
    for _ in range(3):
        running()
        want, _ = jax.jit(target.step)(want, batch)
    got = running.leaves[: len(jax.tree.leaves(state))]
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_hook_may_name_one_array_twice(devices):
    """Both are given away; a second look at one buffer would end the interpreter."""
    w = jnp.eye(16)

    def step(ws, x):
        loss, grads = jax.value_and_grad(lambda ws: jnp.mean((x @ ws[0] @ ws[1]) ** 2))(ws)
        return [a - 0.1 * g for a, g in zip(ws, grads, strict=True)], loss

    arguments = [w, w], jnp.ones((16, 16))
    target = BenchTarget(name="twice", step=step, arguments=arguments, values=lambda: arguments)
    contenders = named_contenders("data_parallel,pipeline", CLUSTER)
    entries = list(planned_entries(target, traced_target(target), CLUSTER, contenders, [1], lambda _: None))
    rows = measured_rows(target, entries, 2, lambda _: None)
    assert all(len(row.measured_samples) == 2 for row in rows)
    assert not w.is_deleted()


def test_what_fails_on_the_devices_is_a_row_with_the_reason(entries, target, devices, monkeypatch):
    original = Running.__call__

    def fail(self):
        if len(self.compiled.plan.stages) > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        original(self)

    monkeypatch.setattr(Running, "__call__", fail)
    rows = measured_rows(target, entries[1:3], 2, lambda _: None)
    assert rows[0].measured_step_seconds is not None
    assert rows[1].reason == "It failed when it was run: RESOURCE_EXHAUSTED: out of memory"


@pytest.mark.parametrize("rounds", [1])
def test_one_round_is_enough(entries, target, devices, rounds):
    (row,) = measured_rows(target, entries[1:2], rounds, lambda _: None)
    assert row.measured_quartiles == (row.measured_step_seconds,) * 2
