"""The time of planning as a command, on one device."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from alpa_lite.cli.models.alpa_cases import CASES
from benchmarks import large_models, planning_time


@pytest.fixture
def without_others() -> Iterator[None]:
    """The collector of cycles leaves what other tests made alone.

    To look at all of it takes as long as to plan, and it is due when the search ends, outside of all phases.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("without_others")
def test_the_last_line_is_one_object(capsys):
    given = ["--case", "gpt-350M", "--num-microbatches", "64", "--no-manual", "--no-cache", "--json"]
    assert planning_time.main(given) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["case"] == "gpt-350M" and row["cluster"] == "p3.16xlarge:1"
    assert row["num_microbatches"] == 64 and row["num_stages"] == 1
    assert row["peak_rss_bytes"] > 1e8 and 0 <= row["gap"] < 0.3
    assert 30 < row["predicted_tflops_per_device"] < 125
    assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
    assert list(row["phases"]) == list(planning_time.PHASES)
    assert all(row["phases"][name] > 0 for name in ("trace", "split", "layers", "survey", "stages"))
    assert 0 <= row["phases"]["rest"] < 0.3 * row["seconds"] and row["phases"]["manual"] == 0


def test_the_list_shows_every_case(capsys):
    assert planning_time.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in CASES)


def test_large_models_have_the_published_sizes():
    sizes = {case.id: round(case.parameters / 1e9) for case in large_models.CASES.values()}
    assert sizes == {"llama-8b-one-mesh": 8, "experts-one-mesh": 702, "llama-405b": 406, "experts": 702}
    assert [case.cluster.num_devices for case in large_models.CASES.values()] == [64, 256, 8192, 2048]


def test_without_manual_plans_the_options_of_a_case_stay():
    for case in large_models.CASES.values():
        planner = planning_time.planner_of(case, manual=False)
        assert planner == replace(planning_time.planner_of(case, manual=True), manual=(), host_memory=False)
        assert planner.intra_op_only == case.id.endswith("one-mesh")


def test_a_case_moves_to_another_cluster():
    case = planning_time.on_cluster(CASES["gpt-2.6B"], "dgx-a100:3")
    assert case.num_devices == 24
    assert (case.cluster.name, case.cluster.num_hosts) == ("dgx-a100", 3)


def test_the_cases_of_the_tables_grow():
    layers = [planning_time.growing_layers(n) for n in planning_time.LAYERS]
    assert [case.parameters for case in layers] == sorted(case.parameters for case in layers)
    for number in planning_time.DEVICES:
        assert planning_time.growing_devices(number).cluster.num_devices == number
