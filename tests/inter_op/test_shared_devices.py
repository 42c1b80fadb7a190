"""Stages that share devices: what they hold together, and how their memory is shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.inter_op.shared_devices import device_peak, held_at_peak, solve_together
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.stage import StageSolution
from alpa_lite.plan.parts import NO_COST, Choice
from alpa_lite.schedule import Interleaved1F1B, Task, TaskKind

CHOICE = Choice(inputs={}, ops={}, accumulators={})


def _solution(*, state: float, activations: float, temporaries: float = 0.0, in_flight: int = 1) -> StageSolution:
    return StageSolution(
        choice=CHOICE,
        status=Status.OPTIMAL,
        objective=1.0,
        bound=1.0,
        peak_bytes=state + in_flight * activations + temporaries,
        cost=replace(NO_COST, state_bytes=state, activation_bytes=activations, temporary_bytes=temporaries),
    )


@given(p=st.integers(1, 4), v=st.integers(1, 3), n=st.integers(1, 3), data=st.data())
def test_the_peak_is_that_of_looking_after_every_task(p: int, v: int, n: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=p * v, max_size=p * v))
    for processor, tasks in enumerate(Interleaved1F1B(num_chunks=v).tasks(p * v, n * p)):
        mine = range(processor, p * v, p)
        solutions = {
            i: _solution(state=sizes[i][0], activations=sizes[i][1], temporaries=sizes[i][2]) for i in mine
        }  # fmt: skip
        held, most, counts = dict.fromkeys(mine, 0), 0, []
        for task in tasks:
            held[task.stage] += 1 if task.kind is TaskKind.FORWARD else -1
            most = max(most, sum(held[i] * sizes[i][1] for i in mine))
            counts.append(sum(held.values()))
        wanted = sum(sizes[i][0] for i in mine) + most + max(sizes[i][2] for i in mine)
        assert device_peak({i: each.cost for i, each in solutions.items()}, tasks) == wanted
        assert sum(held_at_peak(tasks).values()) >= max(counts)
        assert all(1 <= count <= n * p for count in held_at_peak(tasks).values())


def _tasks(stages: Sequence[int]) -> list[Task]:
    kinds = ((TaskKind.FORWARD, stages), (TaskKind.BACKWARD, reversed(stages)))
    return [Task(stage=s, microbatch=0, kind=kind) for kind, order in kinds for s in order]


class Stages:
    """Stages that can do with less memory, down to some least; the more the better."""

    def __init__(self, wanted: dict[int, float], least: dict[int, float]) -> None:
        self.wanted, self.least, self.asked = wanted, least, list[tuple[int, float]]()

    def __call__(self, stage: int, in_flight: int, limit_bytes: float) -> StageSolution:
        self.asked.append((stage, limit_bytes))
        if self.least[stage] > limit_bytes:
            lacking, least = Status.INFEASIBLE, self.least[stage]
            return StageSolution(choice=None, status=lacking, objective=1.0, bound=1.0, peak_bytes=least)
        return _solution(state=min(self.wanted[stage], limit_bytes), activations=0.0)


def test_what_fits_together_is_left_as_it_is() -> None:
    stages = Stages({0: 40.0, 2: 60.0}, {0: 10.0, 2: 10.0})
    found = solve_together(stages, _tasks([0, 2]), 100.0)
    assert found.fits and found.peak_bytes == 100.0
    assert stages.asked == [(0, 100.0), (2, 100.0)]


@pytest.mark.parametrize(
    ("wanted", "least"),
    [
        ({0: 80.0, 2: 80.0}, {0: 10.0, 2: 10.0}),
        ({0: 90.0, 2: 30.0}, {0: 10.0, 2: 29.0}),  # the small one cannot shrink in proportion
        ({0: 100.0, 2: 100.0, 4: 100.0}, {0: 5.0, 2: 60.0, 4: 5.0}),
        ({0: 100.0, 2: 100.0}, {0: 50.0, 2: 50.0}),
    ],
)
def test_memory_is_shared_out_until_all_fit(wanted: dict[int, float], least: dict[int, float]) -> None:
    found = solve_together(Stages(wanted, least), _tasks(sorted(wanted)), 100.0)
    assert found.fits and found.peak_bytes <= 100.0
    assert all(found.solutions[s].peak_bytes >= least[s] for s in wanted)


def test_what_cannot_fit_says_how_much_it_needs() -> None:
    found = solve_together(Stages({0: 90.0, 2: 90.0}, {0: 60.0, 2: 70.0}), _tasks([0, 2]), 100.0)
    assert not found.fits and found.peak_bytes == 130.0
    found = solve_together(Stages({0: 200.0}, {0: 150.0}), _tasks([0]), 100.0)
    assert not found.fits and found.peak_bytes == 150.0


def test_what_is_alone_keeps_to_the_memory_by_its_own_limit() -> None:
    """Its peak is that of its solver, which may know that saved values and state do not meet."""

    def solve(stage: int, in_flight: int, limit_bytes: float) -> StageSolution:
        return _solution(state=60.0, activations=60.0)

    assert solve_together(solve, _tasks([0]), 100.0).fits


def test_no_stage_is_solved_where_less_than_no_memory_is_left() -> None:
    stages = Stages({0: 4.0}, {0: 1.0})
    together = solve_together(stages, _tasks([0]), -1.0)
    assert not together.fits and not stages.asked
