"""Training goes on as if nothing had happened: processes are killed, stopped, told to end, and fewer or more of them
take over."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alpa_lite.api.doctor import virtual_environment
from alpa_lite.runtime.job.launch import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from tests.distributed.launched import ROOT, free_port

pytest.importorskip("orbax.checkpoint")
psutil: Any = pytest.importorskip("psutil")

NUM_STEPS = 20
END_SECONDS = 30.0
"""So soon after the death of one process all must have ended."""


def environment() -> dict[str, str]:
    found = {**virtual_environment(1), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONUNBUFFERED": "1"}
    return {**found, "XLA_FLAGS": f"{found['XLA_FLAGS']} --xla_backend_optimization_level=0"}


@contextmanager
def launched(
    processes: int, folder: Path, seconds: float = 0.0, num_steps: int = NUM_STEPS, *, served: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """`alpa-lite launch` of the training; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "alpa_lite.cli", "launch", "--processes", str(processes), "--grace", "20"]
    program = ["-m", "tests.distributed.resumes", str(folder), str(num_steps), str(seconds), *["served"] * served]
    job = subprocess.Popen(
        [*command, *program], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield job
    finally:
        started = members(job)
        with suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=0)
        job.kill()
        job.communicate()
        gone, left = psutil.wait_procs(started, timeout=END_SECONDS)
        for process in left:
            process.kill()
        assert not left, f"{len(left)} processes of {len(gone) + len(left)} outlived their launcher"


def members(job: subprocess.Popen[str]) -> list[Any]:
    """The processes of a job, in order."""
    try:
        return [each for each in psutil.Process(job.pid).children() if is_member(each)]
    except psutil.NoSuchProcess:
        return []


def is_member(process: Any) -> bool:
    """Whether a process that the launcher started is one of the job, and has not ended."""
    with suppress(psutil.Error):
        return "launched.py" in " ".join(process.cmdline())
    return False


def until_logged(folder: Path, job: subprocess.Popen[str], step: int) -> None:
    """Wait for a step in the log."""
    while job.poll() is None and max(trajectory(folder), default=0) < step:
        time.sleep(0.02)


def trajectory(folder: Path) -> dict[int, set[float]]:
    """All losses that were logged for each step; steps that were done again have been logged again."""
    found: dict[int, set[float]] = {}
    log = folder / "log"
    for line in log.read_text().splitlines() if log.exists() else ():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(float(loss))
    return found


def finish(processes: int, folder: Path, num_steps: int = NUM_STEPS, *, served: bool = False) -> str:
    """Train to the end; what was printed."""
    with launched(processes, folder, num_steps=num_steps, served=served) as job:
        printed, _ = job.communicate(timeout=300)
    assert job.returncode == 0, printed[-4000:]
    return printed


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[float]]:
    """The losses of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(2, folder)
    found = trajectory(folder)
    assert sorted(found) == list(range(1, NUM_STEPS + 1)) and all(len(losses) == 1 for losses in found.values())
    return found


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_killed_at_random_the_run_is_what_it_would_have_been(kills: int, tmp_path: Path) -> None:
    num_steps, rng = 10 * kills, random.Random(kills)
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    for each in (undisturbed, folder):
        each.mkdir()
    finish(2, undisturbed, num_steps)
    for _ in range(kills):
        with launched(2, folder, seconds=0.1, num_steps=num_steps) as job:
            # Half of the kills come while the job starts, restores or compiles, the others while it trains and saves.
            if rng.random() < 0.5:
                until_logged(folder, job, max(trajectory(folder), default=0) + 1)
            time.sleep(rng.uniform(0.1, 1.0))
            while len(victims := members(job)) < 2:
                assert job.poll() is None, "it came to its end before"
            victim = rng.randrange(2)
            victims[victim].kill()
            began = time.monotonic()
            printed, _ = job.communicate(timeout=2 * END_SECONDS)
            assert time.monotonic() - began < END_SECONDS
            assert f"process {victim} was ended by SIGKILL" in printed and job.returncode == 128 + signal.SIGKILL
            assert not [process for process in victims if process.is_running()]
    finish(2, folder, num_steps)
    assert trajectory(folder) == trajectory(undisturbed) and len(trajectory(folder)) == num_steps


@pytest.mark.long
@pytest.mark.parametrize("victim", [1, 2])
def test_killed_worker_or_server_the_job_goes_on_where_it_was(victim: int, tmp_path: Path) -> None:
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    for each in (undisturbed, folder):
        each.mkdir()
    finish(3, undisturbed, served=True)
    with launched(3, folder, seconds=0.3, served=True) as job:
        until_logged(folder, job, 4)
        members(job)[victim].kill()
        printed, _ = job.communicate(timeout=2 * END_SECONDS)
    assert f"process {victim} was ended by SIGKILL" in printed
    reached = max(trajectory(folder))
    assert reached < NUM_STEPS and "goes on at step 0 " not in finish(3, folder, served=True)
    assert trajectory(folder) == trajectory(undisturbed)


def test_fewer_or_more_processes_take_over(uninterrupted: dict[int, set[float]], tmp_path: Path) -> None:
    for processes, step in ((2, 4), (3, 9)):
        with launched(processes, tmp_path, seconds=0.3) as job:
            until_logged(tmp_path, job, step)
            job.terminate()
            printed, _ = job.communicate(timeout=120)
        # What they were told is saved: the next ones go on right there.
        assert printed.count("told to end after step") == processes, printed[-4000:]
    reached = max(trajectory(tmp_path))
    assert reached < NUM_STEPS and f"goes on at step {reached} " in finish(1, tmp_path)
    found = trajectory(tmp_path)
    assert all(len(losses) == 1 for losses in found.values())
    mine, theirs = ([next(iter(run[step])) for step in sorted(run)] for run in (found, uninterrupted))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(
    which: int, uninterrupted: dict[int, set[float]], tmp_path: Path
) -> None:
    with launched(2, tmp_path, seconds=0.3) as job:
        until_logged(tmp_path, job, 3)
        members(job)[which].terminate()
        printed, _ = job.communicate(timeout=120)
    told = re.findall(r"told to end after step (\d+)", printed)
    assert job.returncode == 0 and len(told) == 2 and told[0] == told[1], printed[-4000:]
    assert f"goes on at step {told[0]} " in finish(2, tmp_path)
    assert trajectory(tmp_path) == uninterrupted


@pytest.mark.long
def test_a_process_that_stands_still_for_a_while_is_waited_for(
    uninterrupted: dict[int, set[float]], tmp_path: Path
) -> None:
    with launched(2, tmp_path, seconds=0.05) as job:
        until_logged(tmp_path, job, 3)
        still = members(job)[1]
        still.suspend()
        time.sleep(6.0)
        reached = max(trajectory(tmp_path))
        still.resume()
        printed, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and reached < NUM_STEPS, printed[-4000:]
    assert trajectory(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    "victim", [1, pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_without_a_launcher_the_others_end_and_tell_who_is_lost(
    how: signal.Signals, victim: int, tmp_path: Path
) -> None:
    """Also one that hangs for good, which breaks no connection."""
    job = {**environment(), NUM_PROCESSES: "3", COORDINATOR: f"127.0.0.1:{free_port()}"}
    program = [sys.executable, "-m", "tests.distributed.resumes", str(tmp_path), "1000", "0.1"]
    processes = list[subprocess.Popen[bytes]]()
    try:
        for number in range(3):
            with (tmp_path / f"printed {number}").open("w") as out:
                mine = {**job, PROCESS_ID: str(number)}
                processes.append(subprocess.Popen(program, cwd=ROOT, env=mine, stdout=out, stderr=subprocess.STDOUT))
        until_logged(tmp_path, processes[0], 3)
        processes[victim].send_signal(how)
        began = time.monotonic()
        others = [process for number, process in enumerate(processes) if number != victim]
        codes = [process.wait(timeout=2 * END_SECONDS) for process in others]
        seconds = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = [(tmp_path / f"printed {number}").read_text() for number in range(3) if number != victim]
    assert all(codes) and seconds < END_SECONDS, (codes, seconds, told)
    # JAX names the first process by what it does: without it there is no coordination service.
    named = rf"no word from process {victim}:|ask[: ]{victim}\b|heartbeats\):\s*{victim}\b|"
    named += rf"process {victim} \(its number is \d+\) was stopped"
    named += "|coordination_service|CoordinationService" if victim == 0 else ""
    assert all(re.search(named, text) for text in told), told
