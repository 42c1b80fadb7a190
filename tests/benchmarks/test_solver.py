"""The solver's benchmark on a small file: its tables, and a child that fails."""

import json
from pathlib import Path

import pytest

from alpa_lite.intra_op.problem_file import write_problem
from benchmarks import solver
from tests.intra_op.instances import training_step


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    path = tmp_path / "test-Z.json.gz"
    write_problem(training_step(num_layers=2), path)
    return path


def test_one_row_for_each_solver(instance: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "best.csv").write_text("name,best_known_cost,timeout_seconds\nZ,1.0,30\n")
    arguments = [str(instance), "--best-known", str(tmp_path / "best.csv"), "--out", str(tmp_path / "kept.json")]
    solver.main([*arguments, "--solver", "portfolio", "--solver", "brute_force"])
    table = capsys.readouterr().out
    assert "optimal" in table
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [row["solver"] for row in kept] == ["portfolio", "brute_force"]
    assert kept[0]["timeout"] == 30.0
    assert "BruteForce tries at most" in kept[1]["status"]


def test_what_reductions_leave(instance: Path, capsys: pytest.CaptureFixture[str]):
    solver.main([str(instance), "--reductions"])
    table = capsys.readouterr().out
    for name in ("given", "edges", "degree 2", "all, to the end"):
        assert name in table
