"""One job writes: a second one is refused, a dead one is succeeded, and one that slept does not go on."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint import disk, lease
from alpa_lite.runtime.checkpoint.lease import Lease

ROOT = Path(__file__).parents[3]
STATE = {"x": np.arange(10)}


class Job:
    """Another process that saves into a folder."""

    def __init__(self, folder: Path, *seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("holding.py")), str(folder), *map(str, seconds)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def save(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        """Return when it is stopped: a signal is only sent, and a beat may still be under way."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Those that were started; none is left afterwards."""
    started: list[Job] = []
    yield started
    for job in started:
        job.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is silent for a second is dead."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 1.0)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of processes mean nothing to this one, as on another host."""
    monkeypatch.setattr(lease, "_link", lambda path: "")


def started(jobs: list[Job], folder: Path, *seconds: float) -> Job:
    jobs.append(Job(folder, *seconds))
    return jobs[-1]


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path: Path, jobs: list[Job]) -> None:
    first = started(jobs, tmp_path)
    assert first.read() == "owner 1\n"
    stranger = tmp_path / "9.unfinished-x"
    checkpoints = al.Checkpoints(tmp_path)
    assert checkpoints.restore({"x": np.zeros(1, int)})[0] == 1, "reading needs no lease"
    before = sorted(tmp_path.iterdir())
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"saves checkpoints into .*: process {first.process.pid} on .* began"):
        checkpoints.save(2, STATE)
    assert time.monotonic() - began < 20 and sorted(tmp_path.iterdir()) == before and not stranger.exists()
    assert first.save() == "saved 2\n"
    first.kill()  # it is not waited for: what is left of it is its exit code
    for _ in range(600):
        if lease._began(first.process.pid) == "over":
            break
        time.sleep(0.05)
    with checkpoints:
        checkpoints.save(3, STATE)
    assert checkpoints.steps == (1, 2, 3) and sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_what_a_living_job_has_half_written_stays(tmp_path: Path, jobs: list[Job]) -> None:
    first = started(jobs, tmp_path)
    assert first.read() == "owner 1\n"
    half = tmp_path / "2.unfinished-0123456789ab"
    half.mkdir()
    (half / "alpa_lite_checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Another job"):
        al.Checkpoints(tmp_path).save(2, STATE)
    assert half.exists()
    first.end()
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, STATE)
    assert not half.exists()


def test_a_job_on_another_host_is_known_by_its_heartbeat(
    tmp_path: Path, jobs: list[Job], quick: None, elsewhere: None
) -> None:
    first = started(jobs, tmp_path, 0.1, 60)
    assert first.read() == "owner 1\n"
    with pytest.raises(CheckpointError, match=r"Another job saves .* was last heard of at"):
        al.Checkpoints(tmp_path).save(2, STATE)
    first.kill()
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, STATE)
    assert checkpoints.steps == (1, 2)


def test_clocks_of_other_hosts_may_be_wrong(tmp_path: Path, quick: None, elsewhere: None) -> None:
    """What counts is whether the heartbeat changes, not what it says of the time."""
    dead = {
        "token": "a",
        "host": "far",
        "process": 7,
        "started": "2001",
        "heard": "2999-01-01 00:00:00 UTC",
        "beat": "1",
    }
    (tmp_path / "alpa_lite_writer.4.json").write_text(json.dumps(dead))
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
        assert [path.name for path in tmp_path.glob("*.json")] == ["alpa_lite_writer.5.json"]
    assert not [*tmp_path.glob("*.json")]


def test_the_time_of_silence_counts_from_the_beginning(tmp_path: Path, elsewhere: None, quick: None) -> None:
    """A job that restores and compiles first does not wait again when it saves."""
    (tmp_path / "alpa_lite_writer.1.json").write_text("")
    checkpoints = al.Checkpoints(tmp_path)
    time.sleep(1.1)
    sleeps: list[float] = []
    with pytest.MonkeyPatch.context() as patch, checkpoints:
        patch.setattr(lease, "time", type("clock", (), {"sleep": sleeps.append, **_clock()}))
        checkpoints.save(1, STATE)
    assert sleeps == []


def _clock() -> dict[str, Any]:
    return {name: staticmethod(getattr(time, name)) for name in ("monotonic", "strftime", "gmtime")}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[" * 5000, b'{"process": 1e400}', b'{"host": "\\u001b[2J\\ud800", "process": "\\n"}'],
)
def test_a_lease_that_cannot_be_read_is_awaited_and_taken(content: bytes, tmp_path: Path, quick: None) -> None:
    (tmp_path / "alpa_lite_writer.1.json").write_bytes(content)
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
    assert checkpoints.latest == 1


def test_what_a_lease_says_reaches_no_terminal(tmp_path: Path, quick: None) -> None:
    path = tmp_path / "alpa_lite_writer.1.json"
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(0.05):
            number += 1
            path.write_text(
                json.dumps({"host": "\x1b[2J\ud800" + "x" * 500, "process": "\n\x07", "beat": f"{number:09d}"})
            )

    thread = threading.Thread(target=beat)
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    with pytest.raises(CheckpointError) as caught:
        al.Checkpoints(tmp_path).save(1, STATE)
    stop.set()
    thread.join()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize("how", ["taken over", "removed", "taken over and given back"])
def test_an_owner_that_slept_notices_before_it_changes_anything(how: str, tmp_path: Path, quick: None) -> None:
    sleeper = al.Checkpoints(tmp_path, keep=1)
    sleeper.save(1, STATE)
    sleeper.wait()
    if how == "removed":
        (tmp_path / "alpa_lite_writer.1.json").unlink()
    else:
        taker = {"token": "other", "host": "far", "process": 7, "started": "now", "heard": "now"}
        (tmp_path / "alpa_lite_writer.2.json").write_text(json.dumps(taker))
        (tmp_path / "alpa_lite_writer.1.json").unlink()
        if how == "taken over and given back":
            (tmp_path / "alpa_lite_writer.2.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"was taken over from this process.* Nothing more is written"):
            sleeper.save(2, STATE)
    sleeper.close()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("when", "step"), [("rename", 1), ("sync_tree", 1), ("sync_tree", 2)])
def test_an_owner_that_sleeps_during_a_save_does_not_complete_it(
    when: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with al.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.save(1, STATE)
        checkpoints.wait()
        real = getattr(disk, when)

        def sleep(*args: Any) -> None:
            (tmp_path / "alpa_lite_writer.2.json").write_text('{"token": "other", "host": "far"}')
            real(*args)

        monkeypatch.setattr(disk, when, sleep)
        with pytest.raises(CheckpointError, match=r"taken over from this process by process . on far"):
            checkpoints.save(step, STATE)
            checkpoints.wait()
        monkeypatch.undo()
    assert checkpoints.steps == (1,) and checkpoints.restore(STATE)[0] == 1


def test_an_owner_that_is_stopped_and_woken_does_not_go_on(
    tmp_path: Path, jobs: list[Job], quick: None, elsewhere: None
) -> None:
    first = started(jobs, tmp_path, 0.1, 1)
    assert first.read() == "owner 1\n"
    first.stop()
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, STATE)
        checkpoints.wait()
        first.process.send_signal(signal.SIGCONT)
        told = first.save()
        assert told.startswith("refused ") and "taken over from this process" in told and f"{os.getpid()}" in told
        checkpoints.save(3, STATE)
    assert checkpoints.steps == (1, 2, 3)


@pytest.fixture
def nothing_to_collect() -> Iterator[None]:
    """Whoever is refused by a lease of its own process collects garbage, also what other tests have left."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_to_collect")
def test_of_many_that_take_it_at_once_one_succeeds(tmp_path: Path) -> None:
    for _ in range(8):
        takers = [Lease(tmp_path) for _ in range(8)]
        begin, got = threading.Barrier(len(takers)), list[Lease]()

        def take(taker: Lease, begin: threading.Barrier = begin, got: list[Lease] = got) -> None:
            begin.wait()
            try:
                taker.hold()
                got.append(taker)
            except CheckpointError:
                pass

        threads = [threading.Thread(target=take, args=(taker,)) for taker in takers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        got[0].check()
        # A dead owner's is there for the next round.
        dead = {**got[0]._held.me, "process": 2**22 + 1, "token": "dead"}  # type: ignore[union-attr]
        got[0].give_back()
        (tmp_path / "alpa_lite_writer.3.json").write_text(json.dumps(dead))


def test_another_checkpoints_of_the_same_process_is_refused_until_the_first_is_closed_or_gone(tmp_path: Path) -> None:
    first, second = al.Checkpoints(tmp_path), al.Checkpoints(tmp_path)
    first.save(1, STATE)
    with pytest.raises(CheckpointError, match="this process, through another Checkpoints, which must be closed"):
        second.save(2, STATE)
    first.close()
    second.save(2, STATE)
    second.wait()
    del second
    third = al.Checkpoints(tmp_path)
    third.save(3, STATE)
    third.close()
    assert third.steps == (1, 2, 3)


def test_the_lease_is_given_back_and_its_thread_ends(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "alpa_lite checkpoint lease" for thread in threading.enumerate())

    before = threads()
    for step in range(20):
        with al.Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(step, STATE)
    until = time.monotonic() + 20
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() == before and [path.name for path in tmp_path.iterdir()] == ["19"]


def test_a_fork_of_the_owner_neither_writes_nor_gives_back(tmp_path: Path) -> None:
    """As workers that load data are: what they have of the owner's memory is not theirs."""
    held = Lease(tmp_path)
    held.hold()
    real = held._held
    assert real is not None
    real.process += 1  # what a fork sees: the lease of its parent
    with pytest.raises(CheckpointError, match="does not own the right"):
        held.check()
    real.end()
    assert [*tmp_path.glob("*.json")]
    real.process -= 1
    held.give_back()
    assert not [*tmp_path.glob("*.json")]


def test_a_thread_that_gets_no_turn_for_long_keeps_the_lease(tmp_path: Path, quick: None) -> None:
    """Expiry is far longer than the longest time for which a compiler held the interpreter."""
    assert lease.__dict__["EXPIRY_SECONDS"] == 1.0  # as set here
    interval = sys.getswitchinterval()
    held = Lease(tmp_path)
    held.hold()
    try:
        sys.setswitchinterval(5.0)
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            pass
    finally:
        sys.setswitchinterval(interval)
    held.check()
    held.give_back()
