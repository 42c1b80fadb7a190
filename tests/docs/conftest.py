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
    virtual = virtual_cpu_environment(8)
    # Programs run for seconds at most: what LLVM would optimise is not worth its time.
    virtual["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    return {
        **os.environ,
        **virtual,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "error",
    }


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation as it is built, warnings being errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
