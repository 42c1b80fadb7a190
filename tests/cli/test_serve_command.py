"""The command `serve`: text, JSON, a page, and what cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alpa_lite.cli.entry import main
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.serving import read_serving_problem, write_serving_problem
from tests.cli.schema import documented


def test_the_plan_is_printed_beside_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "vqa-medium", "--threshold", "56"]) == Exit.DONE
    text = capsys.readouterr().out
    assert "$7.5088 per hour = $6.2420 for workers + $1.2668 for links, accuracy 56.59" in text
    assert all(words in text for words in ("resnet18", "cpu-6", "93.0 %", "cloud-only", "$22.0335", "65.9 %"))


def test_json_is_documented_and_a_file_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "problem.json", tmp_path / "plan.html"
    write_serving_problem(read_serving_problem("vqa-medium"), path)
    words = ["serve", str(path), "--threshold", "58.3", "--solver", "exact", "--html", str(page), "--json"]
    assert main(words) == Exit.DONE
    found = documented("serve", json.loads(capsys.readouterr().out))
    assert found["solver"] == "exact" and found["accuracy"] == 58.33
    assert {each["solver"] for each in found["refusals"]} == {"edge-first", "cloud-only"}
    assert [each["solver"] for each in found["others"]] == ["jellybean", "best-accuracy"]
    assert "</html>" in page.read_text() and "cloud-only finds no workers" in page.read_text()


def test_what_cannot_be_had_ends_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "vqa-medium", "--threshold", "60"]) == Exit.INFEASIBLE
    assert "the best is 58.33" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none.json")]) == Exit.ERROR
    assert main(["serve", "vqa-medium", "--html", str(tmp_path / "no" / "plan.html")]) == Exit.ERROR
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "vqa-medium", "--threshold", "nan"])
