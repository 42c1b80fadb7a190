"""Modules stay short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import pytest

MAX_LINES = 600
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["alpa_lite", "cost_models", "benchmarks"])
def test_no_module_is_long(package: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py")}
    assert lines and not {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MAX_LINES}
