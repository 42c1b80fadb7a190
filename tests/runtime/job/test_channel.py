"""Decisions, reports and losses over the connections of a job whose processes are threads here."""

from __future__ import annotations

import json
import queue
import socket
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job import channel as job_channel
from alpa_lite.runtime.job.channel import Channel, joined_groups
from tests.runtime.job.test_consensus import Table

PROCESSES = 3


def until(condition: Any) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def channels() -> Iterator[list[Channel]]:
    """The ends of all processes, which connect at the same time; a stranger knocks as well."""
    table: Any = Table()
    jobs = [_jax.JobInfo(client=table, process=me, num_processes=PROCESSES) for me in range(PROCESSES)]
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(Channel, jobs[0])
        port, secret = json.loads(_unpacked(table))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(json.dumps(["guess", 1]).encode() + b"\n")
            # It is shown out.
            assert len(secret) >= 32 and stranger.recv(1) == b""
        others = [pool.submit(Channel, job) for job in jobs[1:]]
        ends = [each.result() for each in (leader, *others)]
    yield ends
    for each in ends:
        each.close()


def _unpacked(table: Any) -> bytes:
    return zlib.decompress(table.blocking_key_value_get_bytes("alpa_lite/channel", 0))


def test_all_hear_the_same_decisions_in_order(channels: list[Channel]) -> None:
    first, *others = channels
    for each in channels:
        each.begin()
    for number in (3, 1, -1):
        first.tell(number)
    assert [[each.heard(30) for _ in range(3)] for each in others] == [[3, 1, -1]] * 2
    assert others[0].heard(0.01) is None


def test_reports_count_for_the_step_in_which_they_were_made(channels: list[Channel]) -> None:
    first, other, _ = channels
    for step in range(2):
        first.begin()
        other.begin()
        assert not first.is_reported(5), step
        other.report(5)
        until(lambda: first.is_reported(5))
    assert not first.is_reported(4)


def test_steps_that_differ_are_a_sentence(channels: list[Channel]) -> None:
    first, other, _ = channels
    first.begin()
    first.tell(0)
    with pytest.raises(ExecutionError, match="is at step 1, and process 1 at step 0"):
        other.heard(30)


def test_losses_are_seen_by_the_first_process_and_that_of_the_first_by_all(channels: list[Channel]) -> None:
    first, second, third = channels
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    third.close()
    until(lambda: first.lost == [2])
    # Also those from before it was asked.
    first.on_loss(seen.put)
    assert seen.get(timeout=30) == 2
    first.begin()
    second.begin()
    first.tell(7)
    assert second.heard(30) == 7
    first.close()
    with pytest.raises(ExecutionError, match=r"Process 0, which decides .*, has ended"):
        second.heard(30)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[{1}, {2}]], [{1}, {2}]),
        ([[{1, 2}]], [{1, 2}]),
        # What one step needs the job needs, and who shares work with it in another step.
        ([[{1}, {2}], [{2}]], [{2}]),
        ([[{1, 2}], [{2}]], []),
        ([[{1}, {2}], [{1, 2}]], [{1, 2}]),
        ([[{1}, {2}], []], []),
    ],
)
def test_all_steps_can_go_on_without_a_process_and_its_company(
    channels: list[Channel], steps: list[list[set[int]]], expected: list[set[int]]
) -> None:
    first = channels[0]
    assert not first.company_of(1)
    for step in steps:
        first.add_step([*map(frozenset, step)])
    assert joined_groups([first.company_of(process) for process in range(PROCESSES)]) == expected


def test_the_company_of_a_lost_process_is_told(channels: list[Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """And another one that fails because of it waits for that word before it ends the job."""
    told, waits = queue.SimpleQueue[tuple[int, int]](), list[float]()
    monkeypatch.setattr(job_channel, "_end_with", lambda process, me: told.put((process, me)))
    monkeypatch.setattr(job_channel.time, "sleep", waits.append)
    for each in channels:
        each.wait_for_company()
        each.add_step([frozenset({1, 2})])
    assert not waits
    for each in channels:
        each.wait_for_company()
    assert waits == [job_channel.COMPANY_SECONDS] * 2
    channels[0].tell_company(channels[0].company_of(2), 2)
    assert told.get(timeout=30) == (2, 1) and told.empty()
    # A decision still arrives after that.
    for each in channels:
        each.begin()
    channels[0].tell([7])
    assert channels[1].heard(30) == [7]
