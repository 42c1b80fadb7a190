"""Cluster descriptions that are damaged or hostile: a sentence, or a cluster."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.catalogue import known_clusters
from cost_models.checks import ClusterError
from cost_models.cluster import Cluster, cluster_sources, load_cluster
from tests.mutations import damaged, mutated

FILES = Path(__file__).parents[2] / "cost_models" / "clusters"
REAL: list[dict[str, Any]] = [
    *(json.loads((FILES / f"{name}.json").read_text()) for name in known_clusters()[:8]),
    load_cluster("p3.16xlarge").to_json(),
]
FUZZ = pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])


@FUZZ
def test_any_change_is_a_sentence_or_a_cluster(count: int) -> None:
    @settings(max_examples=count)
    @given(data=st.sampled_from(REAL), seed=st.integers(0, 2**32), changes=st.sampled_from((1, 2, 4)))
    def run(data: dict[str, Any], seed: int, changes: int) -> None:
        try:
            cluster = Cluster.from_json(mutated(data, random.Random(seed), changes=changes))
        except ClusterError as error:
            assert str(error).endswith((".", "?"))
        else:
            assert Cluster.from_json(cluster.to_json()) == cluster

    run()


@FUZZ
def test_any_damage_of_a_file_is_a_sentence_or_a_cluster(count: int, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"

    @settings(max_examples=count)
    @given(data=st.sampled_from(REAL), seed=st.integers(0, 2**32))
    def run(data: dict[str, Any], seed: int) -> None:
        path.write_bytes(damaged(json.dumps(data).encode(), random.Random(seed)))
        try:
            load_cluster(str(path))
            cluster_sources(str(path))
        except ClusterError:
            pass

    run()


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "9" * 10**5, "null", ""])
def test_what_is_no_description_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ClusterError, match=r"cluster\.json"):
        load_cluster(str(tmp_path / "cluster.json"))
