"""What long jobs hold does not grow, two jobs do not meet, and they listen on loopback; `long_runs` goes further."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.distributed.launched import ROOT, answers, environment, run


def assert_constant(rows: list[Any], megabytes: float = 12.0) -> None:
    """Nothing of what is held has grown since the first look; threads and descriptors come and go by a few."""
    first, last = rows[0], rows[-1]
    assert last["megabytes"] - first["megabytes"] < megabytes, rows
    assert last["descriptors"] <= first["descriptors"] + 2 and last["threads"] <= first["threads"] + 2, rows
    assert last["python_threads"] <= first["python_threads"] + 1, rows


def test_words_of_agreements_do_not_pile_up() -> None:
    for rows in answers(run(3, 1, "-m", "tests.distributed.long_runs", "agreements", "150")).values():
        assert len(rows) == 5 and all(row["most_keys"] <= 40 for row in rows), rows


def test_steps_of_a_job_hold_nothing() -> None:
    for rows in answers(run(2, 1, "-m", "tests.distributed.long_runs", "steps", "500")).values():
        assert_constant(rows)
        assert rows[-1]["keys"] <= rows[0]["keys"] + 1, rows


@pytest.mark.long
def test_saves_of_a_job_leave_no_words() -> None:
    pytest.importorskip("orbax.checkpoint")
    for rows in answers(run(2, 1, "-m", "tests.distributed.long_runs", "saves", "20")).values():
        assert rows[-1]["keys"] <= rows[0]["keys"] + 20, rows


def alone(*arguments: str) -> list[Any]:
    """What a process without others prints."""
    command = [sys.executable, "-m", "tests.distributed.long_runs", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(4), capture_output=True, text=True, timeout=540, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_steps_of_one_process_hold_nothing() -> None:
    assert_constant(alone("alone", "1000"))


@pytest.mark.long
def test_shapes_hold_their_executables_and_no_threads_or_descriptors() -> None:
    """About as much memory as `jax.jit` holds for each."""
    mine, jits = alone("shapes", "40"), alone("jit-shapes", "40")
    assert_constant(mine, megabytes=40 * 5.0)
    grown = [rows[-1]["megabytes"] - rows[0]["megabytes"] for rows in (mine, jits)]
    assert grown[0] < 3 * grown[1], (mine, jits)


LISTENS = """
import os, time
import alpa_lite as al
al.initialize()
import jax, numpy as np
from jax.experimental import multihost_utils
assert multihost_utils.process_allgather(np.ones(2)).sum() == 2 * jax.process_count()
files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
held = {os.readlink(file) for file in files if os.path.islink(file)}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
            print("listens", fields[1].partition(":")[0], flush=True)
multihost_utils.sync_global_devices("all have looked")
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="there is no /proc/net/tcp")
def test_a_launched_job_listens_on_loopback_alone(tmp_path: Any) -> None:
    """JAX's coordinator, and gloo of the CPU's collectives, whatever this machine's name stands for."""
    program = tmp_path / "listens.py"
    program.write_text(LISTENS)
    done = run(2, 1, str(program))
    found = [line.split()[-1] for line in done.stdout.splitlines() if "listens" in line]
    assert done.returncode == 0 and len(found) >= 3, done.stdout + done.stderr
    assert set(found) <= LOOPBACK, found


def test_two_jobs_at_once_do_not_meet() -> None:
    """Neither their ports, nor what they agree upon, nor their programs."""
    command = [sys.executable, "-m", "alpa_lite.cli", "launch", "--processes", "2", "--devices-per-process", "1"]
    command += ["-m", "tests.distributed.long_runs", "steps", "50"]
    variables = {**environment(1), "ALPA_LITE_CACHE": "on"}
    jobs = [
        subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        printed = [job.communicate(timeout=300) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    for job, (out, err) in zip(jobs, printed, strict=True):
        assert job.returncode == 0, err
        assert out.count('"done": 50,') == 2
