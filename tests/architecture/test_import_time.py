"""What importing the package does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "flax", "highspy", "matplotlib", "networkx", "numba", "optax", "orbax", "pulp", "scipy.optimize", "yaml",
)  # fmt: skip


@pytest.mark.parametrize("code", ("import alpa_lite", "import alpa_lite; alpa_lite.parallelize, alpa_lite.Plan"))
def test_heavy_libraries_wait_for_their_first_use(code: str) -> None:
    program = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("words", [["--version"], ["completion", "bash"]])
def test_the_version_and_completion_need_no_jax(words: list[str]) -> None:
    program = (
        f"import sys\nfrom alpa_lite.cli import main\nmain({words})\n"
        "print('loaded:', *(name for name in ('jax', 'numpy') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    printed, _, loaded = done.stdout.rpartition("loaded:")
    assert "alpa" in printed and loaded.split() == []


@pytest.mark.parametrize(
    "first", ("from alpa_lite.plan.plan import Plan", "import alpa_lite.plan", "import alpa_lite.planners")
)
def test_plan_is_the_function_whatever_is_imported_first(first: str) -> None:
    program = (
        f"{first}\nimport alpa_lite as al\nfrom alpa_lite import plan\nprint(type(al.plan).__name__, al.plan is plan)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["function", "True"]
