"""A job one of whose processes hangs ends, tells where all processes are, and leaves none; work is no hang."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from alpa_lite.runtime.job.launch import COORDINATOR, HUNG, NUM_PROCESSES, PROCESS_ID
from tests.distributed.hangs import AT, STEPS
from tests.distributed.launched import ROOT, environment, free_port, run

psutil: Any = pytest.importorskip("psutil")

NUM_PROCESSES_HERE = 3
LONGEST_SECONDS = 60.0
"""From the beginning of the hang to the end of the last process, on a slow machine."""


def started(how: str, victim: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The processes, without a launcher, each with a file for what it prints."""
    job = {**environment(1), NUM_PROCESSES: str(NUM_PROCESSES_HERE), COORDINATOR: f"127.0.0.1:{free_port()}"}
    processes = list[subprocess.Popen[bytes]]()
    for number in range(NUM_PROCESSES_HERE):
        with (folder / f"printed {number}").open("w") as out:
            command = [sys.executable, "-m", "tests.distributed.hangs", how, str(victim)]
            mine = {**job, PROCESS_ID: str(number)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=mine, stdout=out, stderr=subprocess.STDOUT))
    return processes


def ended(how: str, victim: int, folder: Path) -> tuple[list[int], list[str], float]:
    """Exit codes, what was printed, and the seconds from the beginning of the hang to the last end."""
    processes = started(how, victim, folder)
    printed = [folder / f"printed {number}" for number in range(NUM_PROCESSES_HERE)]
    try:
        codes = [process.wait(timeout=240) for process in processes]
        now = time.time()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [path.read_text() for path in printed]
    began = re.search(r"hangs now ([\d.]+)", "".join(found))
    return codes, found, now - float(began[1]) if began else 0.0


@pytest.mark.parametrize(
    ("how", "victim", "place"),
    [
        ("sleeps", 1, "sleeps"),
        pytest.param("sleeps", 0, "sleeps", marks=pytest.mark.long),
        pytest.param("sleeps before the plan", 1, "sleeps", marks=pytest.mark.long),
        pytest.param("loops", 0, "loops", marks=pytest.mark.long),
        ("is stopped", 1, "is_stopped"),
        ("is stopped, seen late", 1, "is_stopped"),
        pytest.param("is stopped", 0, "is_stopped", marks=pytest.mark.long),
        pytest.param("gathers", 1, "gathers", marks=pytest.mark.long),
    ],
)
def test_a_hang_ends_all_and_tells_where_they_are(how: str, victim: int, place: str, tmp_path: Path) -> None:
    codes, printed, seconds = ended(how, victim, tmp_path)
    assert codes == [HUNG] * NUM_PROCESSES_HERE, (codes, printed)
    assert seconds < LONGEST_SECONDS
    for number, text in enumerate(printed):
        assert "found a hang" in text
        assert f"process {number} is at " in text and "most recent call first" in text, text
        assert ("in main" in text) or how == "sleeps before the plan"
    assert re.search(rf"File .*hangs\.py\", line \d+ in {place}\b", printed[victim]), printed[victim]
    for number in range(NUM_PROCESSES_HERE):  # the first process has all of it in its log
        line = re.search(rf"process {number} was at .*hangs\.py:\d+ \((\w+)\); (.*)", printed[0])
        assert line is not None, printed[0]
        assert line[1] == place if number == victim else True
        if how != "sleeps before the plan":
            assert "'stage 0 step', instruction" in line[2]
            assert line[2].startswith("has done" if number == victim else "waits for")


@pytest.mark.long
def test_where_python_does_not_run_the_others_say_so_and_jax_ends_it(tmp_path: Path) -> None:
    codes, printed, seconds = ended("keeps the lock", 1, tmp_path)
    assert codes == [HUNG, -signal.SIGABRT, HUNG] and seconds < LONGEST_SECONDS, (codes, printed)
    assert "no word from process 1: lost, or Python does not run there." in printed[0]
    assert "in keeps_the_lock" in printed[1], "its stacks are told when it is aborted"


@pytest.mark.parametrize(
    ("how", "victim"),
    [("compiles", 1), pytest.param("compiles", 0, marks=pytest.mark.long), ("plans", 0)],
)
def test_work_that_takes_longer_than_the_patience_is_no_hang(how: str, victim: int, tmp_path: Path) -> None:
    codes, printed, _ = ended(how, victim, tmp_path)
    assert codes == [0] * NUM_PROCESSES_HERE, printed
    assert all("all done" in text and "hang:" not in text for text in printed)
    assert AT < STEPS


@pytest.mark.long
@pytest.mark.parametrize("how", ["sleeps", "is stopped", "keeps the lock"])
def test_under_the_launcher_the_exit_code_is_that_of_a_hang(how: str) -> None:
    done = run(3, 1, "-m", "tests.distributed.hangs", how, "1", timeout=240)
    assert done.returncode == HUNG, done.stderr[-4000:]
    assert done.stderr.count("most recent call first") >= 3
    left = [each for each in psutil.process_iter() if "tests.distributed.hangs" in " ".join(_command(each))]
    assert not left


def _command(process: Any) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []
