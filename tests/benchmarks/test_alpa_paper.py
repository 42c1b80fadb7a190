"""The comparison with Alpa's evaluation as a command, on one device."""

from __future__ import annotations

import json

from benchmarks import alpa_paper


def test_a_case_from_end_to_end(tmp_path, capsys):
    path = tmp_path / "paper.json"
    given = ["--case", "gpt-350M", "--no-grid", "--no-orderings", "--out", str(path)]
    assert alpa_paper.main(given) == 0
    kept = json.loads(path.read_text())
    rows = {row["system"]: row for row in kept["rows"]}
    assert list(rows) == ["alpa_lite", "Alpa", "Megatron-LM", "intra-op only"]
    assert rows["alpa_lite"]["seconds"] <= rows["Alpa"]["seconds"] * 1.0001
    assert 0.85 < rows["Alpa"]["ratio"] < 1.15
    shown = capsys.readouterr().out
    assert "gpt-350M, Alpa: predicted within 15%" in shown
    assert "gpt-350M: our plan is priced no worse than the best manual plan" in shown
