"""The ranking benchmark: its figures, and one small case from end to end."""

import numpy as np
import pytest
from rich.console import Console

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.planners import DataParallel, Megatron
from benchmarks import ranking
from benchmarks.ranking import Case, Row


def rows(model, predicted, measured):
    return [
        Row(model=model, plan=f"plan {i}", predicted_seconds=p, measured_seconds=m, spread=0.1)
        for i, (p, m) in enumerate(zip(predicted, measured, strict=True))
    ]


def test_correlation_is_of_ranks():
    found = ranking.correlations([*rows("a", [1, 2, 3], [10, 20, 1000]), *rows("b", [4, 5, 6], [3, 2, 1])])
    assert found["a"] == pytest.approx(1)
    assert found["b"] == pytest.approx(-1)
    # Ranks 1..6 against 4, 5, 6, 3, 2, 1: 1 - 6 * sum d² / (6 * 35) with d² = 9 + 9 + 9 + 1 + 9 + 25.
    assert found["all"] == pytest.approx(1 - 62 / 35)


def test_the_table_is_in_the_order_of_the_measured_times():
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(ranking.rendered(rows("a", [1.0, 2.0], [4.0, 3.0])))
    text = captured.get()
    assert text.index("plan 1") < text.index("plan 0")
    assert "0.25" in text and "-1.00" in text


def test_a_case_from_end_to_end(devices, monkeypatch):
    monkeypatch.setattr(ranking, "PLANNERS", (DataParallel(), Megatron(), DataParallel()))
    batch = {"inputs": np.ones((16, 8), np.float32), "targets": np.ones((16, 8), np.float32)}
    case = Case(name="MLP", model=MLP(in_features=8, hidden=16, out_features=8, num_layers=2), batch=batch)
    cluster = al.cluster("dgx-1")
    found = ranking.run_case(case, cluster, 2, lambda _: None)
    assert [row.plan for row in found] == ["data parallel", "Megatron tensor parallel"]
    assert all(row.predicted_seconds > 0 and row.measured_seconds > 0 for row in found)
    data = ranking.to_json(found, cluster)
    assert data["rows"][0]["ratio"] == found[0].predicted_seconds / found[0].measured_seconds


def test_the_cases_are_different_models():
    cases = ranking.cases()
    assert len({type(case.model) for case in cases}) == len({case.name for case in cases}) == len(cases) >= 3
