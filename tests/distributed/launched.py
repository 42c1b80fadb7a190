"""Starts processes of a job for tests, as the command line does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from alpa_lite.api.doctor import virtual_environment
from alpa_lite.runtime.job.launch import reserved_port

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a free port of the loopback interface, for a coordinator."""
    with reserved_port() as reserved:
        return int(reserved.getsockname()[1])


def environment(devices: int) -> dict[str, str]:
    """For a process with so many virtual devices; XLA optimises little, which saves half of the time."""
    found = {**virtual_environment(devices), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    found["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    return {**found, "PYTHONUNBUFFERED": "1", "ALPA_LITE_CACHE": "off"}


def run(processes: int, devices: int, *program: str, timeout: float = 540, **variables: str) -> Any:
    """`alpa-lite launch` of a program, in this repository; XLA optimises little, which saves half of the time."""
    command = [sys.executable, "-m", "alpa_lite.cli", "launch", "--processes", str(processes)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "PYTHONWARNINGS": "error",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        **variables,
    }
    try:
        return subprocess.run(
            [*command, "--devices-per-process", str(devices), *program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        # Its text leaves out most of what the processes wrote, which says how far they came.
        written = b"\n".join(part for part in (late.stdout, late.stderr) if part)
        raise AssertionError(f"not over after {timeout:.0f} s:\n{written.decode()[-8000:]}") from None


def answers(done: Any) -> dict[int, list[Any]]:
    """What each process printed as JSON. Fails when the job did."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[int, list[Any]] = {}
    for line in done.stdout.splitlines():
        number, _, text = line.partition("] ")
        if text.startswith("{"):
            found.setdefault(int(number[1:]), []).append(json.loads(text))
    return found
