"""Values that users give for planners and clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.api.options import cluster_of, planner_of
from alpa_lite.errors import PlanError


@pytest.mark.parametrize("given", ["fsdp", al.planners.FSDP, al.planners.FSDP()])
def test_a_planner_may_be_given_by_name_or_class(given: Any) -> None:
    assert planner_of(given) == al.planners.FSDP()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fdsp", "Did you mean 'fsdp'"),
        ("nothing_like_it", "Choose one of"),
        (al.planners.Replay, "needs options"),
        (3, "planner=3 was given"),
        (int, "was given"),
    ],
)
def test_what_is_no_planner_is_told(given: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planner_of(given)


def test_a_cluster_may_be_given_by_path(tmp_path: Path) -> None:
    cluster = al.cluster("p3.16xlarge", num_hosts=2)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(cluster.to_json()))
    assert cluster_of(path) == cluster_of(str(path)) == cluster
    with pytest.raises(PlanError, match="cluster=3 was given"):
        cluster_of(3)  # type: ignore[arg-type]
