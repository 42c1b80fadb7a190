"""The environment of a reader's Python: eight virtual CPU devices that cannot hang, this repository first."""

import os
from pathlib import Path

import pytest

from alpa_lite.inspection.doctor import virtual_cpu_environment

ROOT = Path(__file__).parents[2]


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
