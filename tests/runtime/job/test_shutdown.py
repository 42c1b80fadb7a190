"""Who comes to an end is not waited for in vain; who still works is left alone. On a service of one table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import jax
import pytest

from alpa_lite import _jax
from alpa_lite.runtime.job import activity, shutdown
from alpa_lite.runtime.job.activity import Neighbours, busy, doing, idle, place, where
from alpa_lite.runtime.job.consensus import reasons_in_words
from alpa_lite.runtime.job.shutdown import (
    LOOK_SECONDS,
    STALE_SECONDS,
    STUCK_SECONDS,
    Heartbeat,
    RollCall,
    came_to_end,
)
from alpa_lite.runtime.job.start import HEARTBEAT_SECONDS, STOPPED_SHARE


class Service:
    """The keys of JAX's coordination service."""

    def __init__(self) -> None:
        self.table = dict[str, str]()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """As JAX's."""
        if key in self.table and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.table[key] = value

    def key_value_delete(self, key: str) -> None:
        """As JAX's."""
        self.table.pop(key, None)

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        """As JAX's."""
        return [(key, value) for key, value in [*self.table.items()] if key.startswith(folder)]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """As JAX's, but nothing comes while it waits."""
        if key not in self.table:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.table[key]

    def key_value_try_get(self, key: str) -> str:
        """As JAX's."""
        return self.blocking_key_value_get(key, 0)


@pytest.fixture
def rolls() -> list[RollCall]:
    """What three processes say and hear."""
    service: Any = Service()
    return [RollCall(_jax.JobInfo(client=service, process=number, num_processes=3)) for number in range(3)]


def test_launches_that_wait_for_one_that_has_ended_end_the_others(rolls: list[RollCall]) -> None:
    launches = {"step 7": frozenset({0, 1}), "step 8": frozenset({0, 2})}
    heartbeat = Heartbeat(rolls[0], lambda: launches)
    assert not heartbeat.look(0.0)
    rolls[1].say("1", "exit code 3")
    assert not heartbeat.look(1.0) and not heartbeat.look(0.9 + STUCK_SECONDS)
    found = heartbeat.look(1.1 + STUCK_SECONDS)
    assert found.startswith("process 1 came to its end (exit code 3), but process 0 has launched steps")


def test_one_that_has_ended_is_not_missed_by_what_moves_or_needs_it_not(rolls: list[RollCall]) -> None:
    launches = {0: frozenset({0, 2})}
    heartbeat = Heartbeat(rolls[0], lambda: launches)
    rolls[1].say("1", "")
    assert not any(heartbeat.look(now) for now in (0.0, 20.0, 40.0)), "process 1 takes no part in it"
    for number in range(1, 9):
        launches.clear()
        launches[number] = frozenset({0, 1})
        assert not heartbeat.look(40.0 + 0.9 * STUCK_SECONDS * number), "each time it is another one that waits"
    launches.clear()
    assert not heartbeat.look(500.0)


def test_one_that_leaves_is_missed_by_steps_and_no_more_when_it_stays(rolls: list[RollCall]) -> None:
    heartbeat = Heartbeat(rolls[0], lambda: {0: frozenset({0, 2})})
    rolls[2].say("leaving 2", "KeyError: 'x'")
    assert not rolls[0].ended(rolls[0].said()), "it still agrees with others that leave"
    assert not heartbeat.look(0.0)
    assert "process 2 came to its end (KeyError: 'x')" in heartbeat.look(STUCK_SECONDS)
    rolls[2].take_back("leaving 2")
    assert not heartbeat.look(3 * STUCK_SECONDS)


def test_a_failure_ends_all(rolls: list[RollCall]) -> None:
    heartbeat = Heartbeat(rolls[0], dict)
    rolls[2].say("first", '[2, "ValueError"]', once=True)
    rolls[1].say("first", '[1, "its consequence"]', once=True)
    assert heartbeat.look(0.0) and rolls[0].said()["first"] == '[2, "ValueError"]'


def test_the_roll_tells_who_is_lost(rolls: list[RollCall]) -> None:
    assert rolls[0].silent(0.1) == [], "nobody has said that he listens"
    for each in rolls:
        each.listen()
    assert rolls[0].silent(0.1) == [1, 2]
    answers = threading.Thread(target=lambda: _answer_soon(rolls[2]))
    answers.start()
    assert rolls[0].silent(2.0) == [1]
    answers.join()
    assert rolls[2].silent(0.1) == [], "the first one does not answer: JAX ends all"


def test_roll_calls_before_the_last_one_are_removed(rolls: list[RollCall]) -> None:
    rolls[0].listen()
    for _ in range(5):
        assert rolls[0].silent(0.1) == []
    assert sorted(rolls[0].said()) == ["call 4", "here 4 0", "silent 4"]


def test_last_words_take_longer_where_there_are_more() -> None:
    service: Any = Service()
    few, many = (RollCall(_jax.JobInfo(client=service, process=0, num_processes=n)) for n in (2, 1000))
    assert few.last_words_seconds() < 5 and 20 <= many.last_words_seconds() <= 60


def test_one_that_is_busy_says_so_again_and_again(rolls: list[RollCall], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said long ago does not count: Python may not run there any more."""
    now = [100.0]
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(shutdown._watched, "heard", {})
    assert rolls[0].doing(2) == ""
    rolls[2].say_doing("compiling", 1)
    assert rolls[0].doing(2) == "compiling"
    now[0] += STALE_SECONDS - 1
    assert rolls[0].doing(2) == "compiling"
    now[0] += 2
    assert rolls[0].doing(2) == ""
    rolls[2].say_doing("compiling", 2)
    assert rolls[0].doing(2) == "compiling"
    rolls[2].say_doing("", 3)
    assert rolls[0].doing(2) == ""


def test_a_process_is_busy_until_it_waits() -> None:
    assert doing() == ""
    with busy("planning"):
        assert doing() == "planning"
        with idle():
            assert doing() == ""
        with busy("compiling"):
            assert doing() == "compiling"
        assert doing() == "planning"
    assert doing() == ""
    assert where().startswith(__file__) and where().endswith("(test_a_process_is_busy_until_it_waits)")


@pytest.mark.skipif(not place(), reason="there is no /proc")
def test_a_neighbour_that_is_stopped_is_seen_and_told_to_go_on() -> None:
    """Not one that has the number of a process that is gone, nor one of another machine."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            machine, space, _, _ = place().split()
            started = int(activity._stat(other.pid)[activity._STARTED])
            places = {
                0: place(),
                1: f"{machine} {space} {other.pid} {started}",
                2: f"{machine} {space} {other.pid} {started + 1}",
                3: f"another {space} {other.pid} {started}",
            }
            seen = Neighbours(0, lambda: places, 4, 5.0)
            assert not seen.stopped(0.0)
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            assert not seen.stopped(10.0) and not seen.stopped(14.0)
            assert f"process 1 (its number is {other.pid}) was stopped" in seen.stopped(15.0)
            seen.wake()
            os.waitid(os.P_PID, other.pid, os.WCONTINUED)
            assert not seen.stopped(30.0)
        finally:
            other.kill()


@pytest.mark.parametrize("timeout", [10, HEARTBEAT_SECONDS, 200])
def test_a_stopped_process_is_reported_before_jax_takes_it_for_lost(timeout: int) -> None:
    # It gives a sign of life each half of the timeout, and the last one may be as long before it is stopped. The stop
    # is seen at the next look, and its length at one after that.
    assert STOPPED_SHARE * timeout + 2 * LOOK_SECONDS < timeout / 2


def _answer_soon(roll: RollCall) -> None:
    while "call 1" not in (said := roll.said()):
        pass
    roll.answer(said)


def test_at_its_exit_a_process_waits_for_the_others(rolls: list[RollCall]) -> None:
    vigils = [Heartbeat(each, dict, seconds=0.2) for each in rolls]
    assert vigils[0].wait_for_all() == "processes 1, 2 went on for 0 s after process 0 had come to its end"
    rolls[1].say("1", "")
    assert "process 1 went on" not in vigils[0].wait_for_all()
    assert vigils[2].wait_for_all() == "" and vigils[0].wait_for_all() == ""
    rolls[1].say("first", '[1, "it failed"]')
    assert vigils[0].wait_for_all() == "another process failed", "those that fail have said that they end, too"


def test_one_that_has_left_the_job_waits_for_nobody_at_its_exit(rolls: list[RollCall]) -> None:
    """As after `jax.distributed.shutdown()`: JAX knows of no job, as here."""
    Heartbeat(rolls[0], lambda: {0: frozenset({0, 1})}, seconds=60.0)._at_exit()
    assert rolls[0].said() == {}


def test_words() -> None:
    assert came_to_end([1, 2], {1: "", 2: "exit code 3"}) == "processes 1, 2 came to their ends (exit code 3)"
    assert reasons_in_words([None, None]) == "" and reasons_in_words(["full", "full"]) == "full"
    assert reasons_in_words([None, "full", "full", "gone"]) == "full (processes 1, 2); gone (process 3)"
