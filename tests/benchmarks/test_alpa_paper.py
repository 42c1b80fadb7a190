"""The comparison with Alpa's evaluation as a command, on one device."""

from __future__ import annotations

import json
from dataclasses import replace

from alpa_lite.cli.models.alpa_cases import CASES
from benchmarks import alpa_paper
from benchmarks.alpa.price import Price


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


def test_the_search_is_given_the_micro_batches_of_each_rival():
    case = CASES["gpt-760M"]
    known = [price("Alpa", 2.0, 128), price("best manual", 3.0, 256), price("intra-op only", 1.0, 64)]
    assert alpa_paper.counts_to_search(case, known) == (128, 256, 64)
    assert alpa_paper.counts_to_search(case, []) == (case.num_microbatches,)
    smaller = replace(price("Megatron-LM", 1.0, 8), global_batch=128)
    assert alpa_paper.counts_to_search(case, [smaller]) == (128, 64)


def price(system: str, seconds: float, count: int) -> Price:
    return Price(
        case="gpt-760M",
        system=system,
        plan="p",
        global_batch=1024,
        num_microbatches=count,
        planning_seconds=0.0,
        seconds=seconds,
    )
