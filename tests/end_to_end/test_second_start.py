"""A second start of the same step plans nothing and, where JAX's compilation cache is on, has XLA compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def _start(folder: Path) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "tests.end_to_end.second_start", str(folder)]
    done = subprocess.run(command, env=dict(os.environ), check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_second_start_takes_plan_and_executables_from_the_caches(tmp_path: Path) -> None:
    (first, _), (second, said) = _start(tmp_path), _start(tmp_path)
    assert not first["cached"] and second["cached"]
    assert first["hits"] == 0 and second["hits"] == second["requests"] == first["requests"] > 0
    assert first["counts"] == second["counts"]
    assert first["value"] == second["value"]
    assert "rror" not in said and "arning" not in said
