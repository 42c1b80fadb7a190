"""Processes that run programs, so that a crash of one is a result, not the end.

Each is replaced after `PROGRAMS` programs: every program that XLA compiles takes memory maps, which Linux counts.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from typing import IO

from tests.fuzz.grammar import Program
from tests.fuzz.oracle import Outcome

PROGRAMS = 60
SECONDS = 180.0
NUM_DEVICES = 8
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": str(4 * NUM_DEVICES),
    "ALPA_LITE_CACHE": "off",
    "ALPA_LITE_WORKERS": "0",
    "XLA_FLAGS": " ".join(
        [
            f"--xla_force_host_platform_device_count={NUM_DEVICES}",
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20",
            "--xla_cpu_collective_call_terminate_timeout_seconds=60",
            "--xla_backend_optimization_level=0",
        ]
    ),
}


class Worker:
    """A process, started when it is first needed."""

    def __init__(self) -> None:
        """No process yet."""
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._programs = 0

    def outcome(self, program: Program) -> Outcome:
        """Run a program; "died" if the process ends, or does not answer in time."""
        if self._programs == PROGRAMS:
            self.close()
        process = self._start() if self._process is None else self._process
        self._programs += 1
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(program.to_json() + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._died("the process had ended")
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            return self._died("the process ended" if ready else f"no answer in {SECONDS:.0f} seconds")
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._errors is not None:
            self._errors.close()
        self._programs = 0

    def _start(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        return self._process

    def _died(self, what: str) -> Outcome:
        assert self._process is not None and self._errors is not None
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-2000:]
        self.close()
        return Outcome(kind="died", detail=f"{what} (status {status}): {said}")
