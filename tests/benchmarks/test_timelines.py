"""Measured steps over predicted ones: a small model from end to end, and what is kept."""

from pathlib import Path

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.planners import Pipeline
from benchmarks import timelines
from benchmarks.ranking import Case

PAGE = Path(__file__).parents[2] / "docs" / "cost-model.md"


def test_a_case_from_end_to_end(devices):
    batch = {"inputs": np.ones((16, 8), np.float32), "targets": np.ones((16, 8), np.float32)}
    case = Case(name="MLP", model=MLP(in_features=8, hidden=16, out_features=8, num_layers=2), batch=batch)
    found = timelines.run_case(case, al.cluster("dgx-1"), Pipeline(pipeline=2), 2)
    row = timelines.row_of("MLP", "pipeline", found)
    differences = sum(each["seconds"] for each in row["differences"]) + row["other_seconds"]
    assert differences == pytest.approx(sum(each.seconds for each in found.rows))
    assert {span[0] for span in row["predicted"]} == {span[0] for span in row["measured"]} == {0, 1}
    assert max(span[4] for span in row["measured"]) == pytest.approx(row["measured_seconds"], abs=1e-6)


def test_every_model_and_plan_is_kept():
    rows = timelines.kept()["rows"]
    assert [(row["model"], row["plan"]) for row in rows] == [
        (model, plan) for model in timelines.MODELS for plan in timelines.PLANS
    ]
    assert all(len(row["differences"]) == timelines.MAX_DIFFERENCES for row in rows)


@pytest.mark.parametrize("model", timelines.MODELS)
def test_the_page_shows_what_is_kept(model):
    assert timelines.differences_table(model) in PAGE.read_text(encoding="utf-8")
