"""Who comes to an end is not waited for in vain; who still works is left alone. On a service of one table."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from alpa_lite import _jax
from alpa_lite.runtime.checkpoint.trouble import in_words
from alpa_lite.runtime.ending import STUCK_SECONDS, Roll, Vigil, came_to_end


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


@pytest.fixture
def rolls() -> list[Roll]:
    """What three processes say and hear."""
    service: Any = Service()
    return [Roll(_jax.Job(client=service, process=number, num_processes=3)) for number in range(3)]


def test_launches_that_wait_for_one_that_has_ended_end_the_others(rolls: list[Roll]) -> None:
    launches = {"step 7": frozenset({0, 1}), "step 8": frozenset({0, 2})}
    vigil = Vigil(rolls[0], lambda: launches)
    assert not vigil.look(0.0)
    rolls[1].say("1", "exit code 3")
    assert not vigil.look(1.0) and not vigil.look(0.9 + STUCK_SECONDS)
    found = vigil.look(1.1 + STUCK_SECONDS)
    assert found.startswith("process 1 came to its end (exit code 3), but process 0 has launched steps")


def test_one_that_has_ended_is_not_missed_by_what_moves_or_needs_it_not(rolls: list[Roll]) -> None:
    launches = {0: frozenset({0, 2})}
    vigil = Vigil(rolls[0], lambda: launches)
    rolls[1].say("1", "")
    assert not any(vigil.look(now) for now in (0.0, 20.0, 40.0)), "process 1 takes no part in it"
    for number in range(1, 9):
        launches.clear()
        launches[number] = frozenset({0, 1})
        assert not vigil.look(40.0 + 0.9 * STUCK_SECONDS * number), "each time it is another one that waits"
    launches.clear()
    assert not vigil.look(500.0)


def test_one_that_leaves_is_missed_by_steps_and_no_more_when_it_stays(rolls: list[Roll]) -> None:
    vigil = Vigil(rolls[0], lambda: {0: frozenset({0, 2})})
    rolls[2].say("leaving 2", "KeyError: 'x'")
    assert not rolls[0].ended(rolls[0].said()), "it still agrees with others that leave"
    assert not vigil.look(0.0)
    assert "process 2 came to its end (KeyError: 'x')" in vigil.look(STUCK_SECONDS)
    rolls[2].take_back("leaving 2")
    assert not vigil.look(3 * STUCK_SECONDS)


def test_a_failure_ends_all(rolls: list[Roll]) -> None:
    vigil = Vigil(rolls[0], dict)
    rolls[2].say("first", '[2, "ValueError"]', once=True)
    rolls[1].say("first", '[1, "its consequence"]', once=True)
    assert vigil.look(0.0) and rolls[0].said()["first"] == '[2, "ValueError"]'


def test_the_roll_tells_who_is_lost(rolls: list[Roll]) -> None:
    assert rolls[0].silent(0.1) == [], "nobody has said that he listens"
    for each in rolls:
        each.listen()
    assert rolls[0].silent(0.1) == [1, 2]
    answers = threading.Thread(target=lambda: _answer_soon(rolls[2]))
    answers.start()
    assert rolls[0].silent(2.0) == [1]
    answers.join()
    assert rolls[2].silent(0.1) == [], "the first one does not answer: JAX ends all"


def _answer_soon(roll: Roll) -> None:
    while "call 1" not in (said := roll.said()):
        pass
    roll.answer(said)


def test_at_its_exit_a_process_waits_for_the_others(rolls: list[Roll]) -> None:
    vigils = [Vigil(each, dict, seconds=0.2) for each in rolls]
    assert vigils[0].wait_for_all() == "processes 1, 2 went on for 0 s after process 0 had come to its end"
    rolls[1].say("1", "")
    assert "process 1 went on" not in vigils[0].wait_for_all()
    assert vigils[2].wait_for_all() == "" and vigils[0].wait_for_all() == ""
    rolls[1].say("first", '[1, "it failed"]')
    assert vigils[0].wait_for_all() == "another process failed", "those that fail have said that they end, too"


def test_one_that_has_left_the_job_waits_for_nobody_at_its_exit(rolls: list[Roll]) -> None:
    """As after `jax.distributed.shutdown()`: JAX knows of no job, as here."""
    Vigil(rolls[0], lambda: {0: frozenset({0, 1})}, seconds=60.0)._at_exit()
    assert rolls[0].said() == {}


def test_words() -> None:
    assert came_to_end([1, 2], {1: "", 2: "exit code 3"}) == "processes 1, 2 came to their ends (exit code 3)"
    assert in_words([None, None]) == "" and in_words(["full", "full"]) == "full"
    assert in_words([None, "full", "full", "gone"]) == "full (processes 1, 2); gone (process 3)"
