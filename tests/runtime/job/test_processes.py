"""What is proven of the order in which processes launch: one list for all gets done, orders that differ do not."""

from __future__ import annotations

from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.errors import VerificationError
from alpa_lite.planners import Pipeline
from alpa_lite.runtime.job.processes import orders, participants, verify_order
from tests.end_to_end.cases import eager_cluster
from tests.runtime.pipelines import arguments, step_with


@pytest.fixture(scope="module")
def program() -> Any:
    """A pipeline of two stages in four micro-batches."""
    step = al.parallelize(
        step_with([0.5] * 4), cluster=eager_cluster(), planner=Pipeline(pipeline=2), num_microbatches=4
    )
    return step.trace(*arguments(4)).plan().lower().program


@pytest.mark.parametrize(
    "processes", [[(0,), (1,)], [(0, 1), (2, 3)], [(0, 1), (1, 2)], [(0, 1), (0, 1)], [(0,), (0,)]]
)
def test_one_list_for_all_gets_done(program: Any, processes: list[tuple[int, ...]]) -> None:
    verify_order(program, processes)
    found = orders(program, processes)
    assert set(found) == {p for stage in processes for p in stage}
    for process, order in found.items():
        assert order == sorted(order)
        for number in order:
            assert process in participants(program.instructions[number], processes)


def sends(program: Any) -> list[int]:
    return [i for i, instruction in enumerate(program.instructions) if instruction.kind == "SEND"]


def swapped(order: list[int], first: int, second: int) -> list[int]:
    places = {first: second, second: first}
    return [places.get(number, number) for number in order]


def test_transfers_in_another_order_on_one_process_are_refused(program: Any) -> None:
    """Forward and backward in opposite orders: the classic deadlock of pipelines."""
    processes = [(0,), (1,)]
    there = next(i for i in sends(program) if program.instructions[i].stage == 1)
    back = next(i for i in sends(program) if program.instructions[i].stage == 0)
    found = orders(program, processes)
    found[1] = swapped(found[1], there, back)
    with pytest.raises(VerificationError, match=r"wait for each other for ever: process 0 at instruction \d+ \(SEND"):
        verify_order(program, processes, found)


def test_two_transfers_of_one_direction_in_another_order_are_refused(program: Any) -> None:
    processes = [(0,), (1,)]
    first, second, *_ = (i for i in sends(program) if program.instructions[i].stage == 1)
    found = orders(program, processes)
    found[1] = swapped(found[1], first, second)
    with pytest.raises(VerificationError):
        verify_order(program, processes, found)


def test_a_transfer_that_one_process_leaves_out_is_refused(program: Any) -> None:
    processes = [(0, 1), (2,)]
    found = orders(program, processes)
    found[1].remove(sends(program)[0])
    with pytest.raises(VerificationError):
        verify_order(program, processes, found)
