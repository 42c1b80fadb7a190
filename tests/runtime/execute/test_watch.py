"""Measured spans of a step whose instructions overlap."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from alpa_lite.errors import HangError
from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind
from alpa_lite.planners import Hybrid
from alpa_lite.runtime.execute.watch import Watch, spans
from alpa_lite.schedule import Interleaved1F1B, OneFOneB
from tests.end_to_end.cases import assert_same
from tests.runtime.pipelines import arguments, compiled, step_with


def _buffer(value: int, stage: int) -> Buffer:
    return Buffer(value=value, stage=stage, microbatch=0)


def test_a_span_begins_when_all_that_it_waits_for_has_ended() -> None:
    sent, received, later = _buffer(0, 0), _buffer(0, 1), _buffer(1, 0)
    program: Any = SimpleNamespace(
        tasks=[SimpleNamespace(name="first"), SimpleNamespace(name="second")],
        instructions=[
            Instruction(kind=InstructionKind.RUN, stage=0, task=0, microbatch=0, writes=(sent,)),
            Instruction(
                kind=InstructionKind.SEND, stage=1, source_stage=0, microbatch=0, reads=(sent,), writes=(received,)
            ),
            Instruction(kind=InstructionKind.RUN, stage=0, task=0, microbatch=1, writes=(later,)),
            Instruction(kind=InstructionKind.RUN, stage=1, task=1, microbatch=0, reads=(received,)),
            Instruction(kind=InstructionKind.RUN, stage=1, task=1, microbatch=1),
        ],
    )
    launches = {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 9.0}
    found = spans(program, [0, 1], launches, {0: 2.0, 1: 3.0, 2: 5.0, 3: 4.5, 4: 10.0})
    assert [(x.start_seconds, x.end_seconds) for x in found] == [(0, 2), (2, 3), (2, 5), (3, 4.5), (9, 10)]
    assert [x.name for x in found] == ["first", "SEND", "first", "second", "second"]
    # The first task was seen to end after its reader's reader had: it ended before.
    late = spans(program, [0, 1], launches, {0: 7.0, 1: 6.0, 2: 8.0, 3: 4.5, 4: 10.0})
    assert [x.end_seconds for x in late] == [4.5, 4.5, 8.0, 4.5, 10.0]
    # Of a transfer whose end nobody saw, what reads it is known to come after its source.
    unseen = spans(program, [0, 1], launches, {0: 2.0, 2: 5.0, 3: 4.5, 4: 10.0})
    assert (unseen[1].start_seconds, unseen[1].end_seconds, unseen[3].start_seconds) == (2, 2, 2)


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved1F1B(num_chunks=2)], ids=str)
def test_instructions_overlap_but_not_with_what_they_wait_for(schedule: Any, devices: Any) -> None:
    found = compiled([0.5] * 8, Hybrid(pipeline=2, data=4, schedule=schedule), 4)
    executor, (weights, x) = found.executor, arguments(8)
    record: list[Any] = []
    outputs = executor(found.step.inputs(jax.tree.leaves((weights, x))), record, awaited=False)
    assert executor.flight.observer is None
    want = jax.jit(step_with([0.5] * 8))(weights, x)
    assert_same(jax.tree.unflatten(jax.tree.structure(want), outputs), want)
    instructions = [i for i in executor.program.instructions if i.kind != "FREE"]
    assert [span.kind for span in record] == [i.kind for i in instructions]
    ended: dict[Any, float] = {}
    busy: dict[Any, float] = {}
    for instruction, span in zip(instructions, record, strict=True):
        assert all(span.start_seconds >= ended[b] for b in instruction.reads if b in ended)
        ended.update(dict.fromkeys(instruction.writes, span.end_seconds))
        if instruction.kind == "RUN":
            assert span.end_seconds >= span.start_seconds >= busy.get(executor._groups[span.stage], 0.0)
            busy[executor._groups[span.stage]] = span.end_seconds
    sends = [span for span in record if span.kind == "SEND"]
    assert sends and all(span.end_seconds >= span.start_seconds for span in sends)
    assert sum(span.end_seconds > span.start_seconds for span in record if span.kind == "RUN") > len(busy)


class _Never:
    """The token of a launch that never ends."""

    def block_until_ready(self) -> None:
        threading.Event().wait()


def test_a_step_that_fails_does_not_wait_for_what_it_launched(devices: Any) -> None:
    executor = compiled([0.5] * 8, Hybrid(pipeline=2, data=4), 4).executor
    weights, x = arguments(8)

    def fail(_: list[Any]) -> None:
        executor.flight.observer(0, 0, _Never())
        raise HangError("no instruction ends")

    executor.bound = replace(executor.bound, actions=((fail, ()),), instructions=(0,))
    with pytest.raises(HangError, match="no instruction ends"):
        executor([*weights, x], [], awaited=False)
    assert executor.flight.observer is None


def test_many_copies_are_waited_for_at_once() -> None:
    watch, pending = Watch(1), threading.Event()
    copies: list[Any] = [SimpleNamespace(block_until_ready=pending.wait) for _ in range(64)]
    for number, copy in enumerate(copies):
        watch.copied(number, copy)  # none of them has ended
    pending.set()
    assert sorted(watch.finish()) == [*range(64)]


def test_ends_are_those_of_the_launches() -> None:
    times = iter(np.arange(1.0, 9.0))
    watch = Watch(2, clock=lambda: float(next(times)))
    array = jax.numpy.zeros(3)
    watch.launched(0, 7, array)
    watch._threads[0].join(timeout=0.2)
    watch.copied(8, array)
    watch.launched(0, 7, array)  # a transfer may launch two programs
    deleted = jax.numpy.zeros(2)
    deleted.delete()
    watch.launched(1, 9, deleted)
    ends = watch.finish()
    assert sorted(ends) == [7, 8] and ends[7] >= 2.0
