"""The benchmark of overhead, very small: it runs, and its numbers are those of what it says it measures."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks import overhead
from benchmarks.overhead import Sizes

SMALL = Sizes(
    num_devices=2, num_layers=1, hidden=16, batch_size=4, num_stages=2, num_microbatches=4, repeats=3, num_processes=1
)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_plan_and_jit_run_the_same_step(num_devices: int, devices: Any) -> None:
    pair = overhead.against_jit(SMALL, num_devices)
    assert pair.num_devices == num_devices and pair.num_arguments > 30
    assert pair.ratio_quartiles[0] <= pair.ratio <= pair.ratio_quartiles[1]
    assert 0 < pair.plan_launch_seconds <= pair.plan_seconds and 0 < pair.jit_launch_seconds <= pair.jit_seconds


def test_processes_count_by_their_median() -> None:
    pair = overhead.Pair(
        num_devices=2,
        num_arguments=3,
        plan_seconds=1.0,
        jit_seconds=2.0,
        ratio=0.5,
        ratio_quartiles=(0.4, 0.6),
        plan_launch_seconds=0.1,
        jit_launch_seconds=0.2,
    )
    rows = [dataclasses.replace(pair, ratio=ratio, plan_seconds=2 * ratio) for ratio in (0.9, 1.5, 1.1)]
    found = overhead.combined(rows)
    assert (found.ratio, found.ratio_quartiles) == (1.1, (0.9, 1.5))
    assert (found.plan_seconds, found.jit_seconds, found.num_devices) == (2.2, 2.0, 2)
    assert overhead.combined(rows[:1]).ratio_quartiles == (0.9, 0.9)


def test_the_driver_is_timed_per_instruction(devices: Any) -> None:
    row = overhead.driver(SMALL)
    assert row.num_instructions >= 2 * 2 * SMALL.num_microbatches
    assert row.seconds > 0 and row.thread_seconds > 0
    assert row.thread_seconds <= 1.1 * (row.seconds + row.waited_seconds)  # two clocks


def test_the_command_ends_with_one_object_and_the_second_start_plans_nothing(capsys: Any) -> None:
    sizes = json.dumps({name: getattr(SMALL, name) for name in Sizes.__dataclass_fields__})
    assert overhead.main(["--sizes", sizes, "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert [pair["num_devices"] for pair in found["pairs"]] == [2, 1]
    cold, warm = found["first_call"]["without caches"], found["first_call"]["with caches"]
    assert [*cold] == [*warm] == ["trace", "plan", "lower", "compile", "first step"]
    assert "per instruction" in printed and "with caches" in printed
