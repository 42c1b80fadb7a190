"""The commands that list clusters and planners."""

from __future__ import annotations

import json

import pytest

import alpa_lite as al
from alpa_lite.cli.entry import main
from alpa_lite.planners.by_name import PLANNERS, planner_by_name
from cost_models.cluster import Cluster, known_clusters


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_clusters_are_listed_as_data_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "clusters")["clusters"]
    assert isinstance(found, list)
    assert [Cluster.from_json(data) for data in found] == [al.cluster(name) for name in known_clusters()]
    assert main(["clusters"]) == 0
    text = capsys.readouterr().out
    assert all(f" {name} " in text for name in known_clusters())


def test_a_cluster_is_shown_with_the_sources_of_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "clusters", "p3.16xlarge:4")
    assert found["cluster"] == al.cluster("p3.16xlarge:4").to_json()
    assert main(["clusters", "p3.16xlarge:4"]) == 0
    text = capsys.readouterr().out
    assert "4 × 8 devices" in text and "device.memory_bandwidth" in text and "NVIDIA data sheet" in text
    assert main(["clusters", "p3.16xlarg"]) == 1
    assert "Did you mean 'p3.16xlarge'?" in capsys.readouterr().err


def test_planners_are_listed_with_options_that_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    listed = _json(capsys, "planners")["planners"]
    assert isinstance(listed, dict)
    assert list(listed) == list(PLANNERS) and all(listed.values())
    for name in PLANNERS:
        found = _json(capsys, "planners", name)
        assert str(found["about"]).startswith(listed[name])
        options = found["options"]
        assert isinstance(options, list)
        for option in options:
            # Numbers as they are shown are what the planner takes by name.
            if option["type"] == "int":
                given = planner_by_name("hybrid", [f"pipeline={option['default']}"]).pipeline
                assert str(given) == option["default"]
    assert main(["planners", "hybird"]) == 1
    assert "Did you mean 'hybrid'?" in capsys.readouterr().err
    assert main(["planners", "data-parallel"]) == 0
