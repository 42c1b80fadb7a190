"""Credits bound un-awaited launches per group of devices; when nothing ends, what is not done is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from alpa_lite.errors import ExecutionError, HangError
from alpa_lite.runtime.job.activity import Flight, HangPolicy, InstructionInfo, Patience, Timer


@dataclass
class Time:
    """A clock that only sleeping moves; what is planned for a time happens then."""

    now: float = 0.0
    planned: list[tuple[float, Token]] = field(default_factory=list)

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Until later."""
        self.now += seconds
        for when, token in self.planned:
            token.ready = token.ready or when <= self.now


@dataclass
class Token:
    """A launch that is done when it is told so."""

    ready: bool = False

    def is_ready(self) -> bool:
        """See `ready`."""
        return self.ready


def flight(
    time: Time,
    *,
    limit: int = 2,
    patience: float | None = 10.0,
    num_groups: int = 2,
    end: Callable[[str], object] | None = None,
) -> Flight:
    return Flight(
        num_groups,
        limit=limit,
        instructions=InstructionInfo(explain=lambda number: f"instruction {number}"),
        hang_policy=HangPolicy(patience=patience, end=end),
        timer=Timer(clock=time, sleep=time.sleep),
    )


def test_a_launch_waits_for_the_oldest_of_its_group_only() -> None:
    time = Time()
    found, tokens = flight(time), [Token() for _ in range(4)]
    found.launched(0, 0, tokens[0])
    found.launched(0, 1, tokens[1])
    found.launched(1, 2, tokens[2])
    assert time.now == 0 and [x.instruction for x in found.pending()] == [0, 1, 2]
    time.planned = [(5.0, tokens[0])]
    found.launched(0, 3, tokens[3])
    assert 5.0 <= time.now < 5.01 and found.waited_seconds == time.now
    assert [x.instruction for x in found.pending()] == [1, 2, 3]
    assert [len(queue) for queue in found.queues] == [2, 1]


def test_what_is_done_is_not_waited_for() -> None:
    time = Time()
    found = flight(time)
    for number in range(100):
        found.launched(0, number, Token(ready=True))
    assert time.now == 0 and len(found.queues[0]) == 2 and not found.pending()


def test_a_hang_names_the_first_launch_that_is_not_done() -> None:
    time = Time()
    found = flight(time)
    found.launched(1, 4, Token(ready=True))
    found.launched(1, 5, Token())
    found.launched(0, 6, Token())
    found.launched(0, 7, Token())
    with pytest.raises(HangError, match=r"for 10 s, and 4 are not done\. The first of them: instruction 5"):
        found.launched(0, 8, Token())
    assert 10.0 <= time.now < 12.6 and issubclass(HangError, ExecutionError)


def test_a_slow_step_that_moves_is_no_hang() -> None:
    time = Time()
    found, tokens = flight(time), [Token() for _ in range(5)]
    time.planned = [(9.0, tokens[3]), (18.0, tokens[4]), (27.0, tokens[0])]
    for group, token in zip((0, 0, 1, 1), (tokens[0], tokens[1], tokens[3], tokens[4]), strict=True):
        found.launched(group, 0, token)
    found.launched(0, 0, tokens[2])
    assert 27.0 <= time.now < 27.1


def test_other_work_of_those_that_take_part_is_no_hang() -> None:
    time, token = Time(), Token()
    found, busy = flight(time, limit=1), {3: 25.0}
    found._instructions = replace(found._instructions, processes=lambda instruction: frozenset({0, 3}))
    found._at_work = lambda processes: any(time.now < busy.get(process, 0.0) for process in processes)
    found.launched(0, 0, token)
    with pytest.raises(HangError):
        found.launched(0, 1, Token())
    assert 30.0 <= time.now < 45.0, "ten seconds after it was last seen at work"


def test_a_hang_ends_the_process_where_it_is_to() -> None:
    ended: list[str] = []
    found = flight(Time(), limit=1, num_groups=1, end=ended.append)
    assert found.ends and found.last_instruction() == ""
    found.launched(0, 4, Token(ready=True))
    assert found.last_instruction() == "has done 4"
    found.launched(0, 5, Token())
    with pytest.raises(HangError):  # only where `end` returns, which it does not
        found.launched(0, 6, Token())
    assert len(ended) == 1 and "instruction 5" in ended[0]
    assert found.last_instruction() == "waits for 5"


def test_without_patience_it_waits_for_ever() -> None:
    time, token = Time(), Token()
    found = flight(time, limit=1, patience=None)
    time.planned = [(1e4, token)]
    found.launched(0, 0, token)
    found.launched(0, 1, Token())
    assert time.now >= 1e4


def test_what_the_watchdog_found_is_raised_as_long_as_it_hangs() -> None:
    found, token = flight(Time()), Token()
    found.launched(0, 0, token)
    found.hang = "instruction 0 hangs"
    with pytest.raises(HangError, match="instruction 0 hangs"):
        found.raise_if_hung()
    token.ready = True
    found.raise_if_hung()
    assert not found.hang


def test_patience_ends_when_the_same_is_pending_for_too_long() -> None:
    time = Time()
    patience = Patience(5.0, time)
    assert not patience.is_over(frozenset({1, 2}))
    time.now = 4.0
    assert not patience.is_over(frozenset({2}))
    time.now = 8.9
    assert not patience.is_over(frozenset({2}))
    time.now = 9.0
    assert patience.is_over(frozenset({2})) and not patience.is_over(frozenset())
