"""The environment of a reader's Python: eight virtual CPU devices that cannot hang, this repository first."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from alpa_lite.api.doctor import virtual_cpu_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def printed_by_python(python_environment: dict[str, str]) -> Callable[..., str]:
    """Runs `python *arguments` in a folder; returns what it printed, and fails when it did."""

    def run(*arguments: str, cwd: Path, timeout: float) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=python_environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def python_environment() -> dict[str, str]:
    """Environment variables of a subprocess; warnings are errors there as well."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **virtual_cpu_environment(8),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "error",
    }
