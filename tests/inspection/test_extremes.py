"""Every way to look at a plan, for steps at the edges of what a step can be, under every planner."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.cli import main
from alpa_lite.inspection.text.timeline import predicted_timeline
from alpa_lite.planners.by_name import PLANNERS
from tests.inspection.extremes import CLUSTERS, EXTREMES, VERY_MANY, Extreme
from tests.inspection.markup import parse

MOST_EXPLAINED = 25


def _planner(name: str, num_devices: int) -> al.planners.Planner:
    if name == "mesh_tensorflow":
        return al.planners.MeshTensorFlow(layout="auto", mesh={"x": num_devices})
    return al.planners.OnMesh(axes={"x": num_devices}) if name == "on_mesh" else PLANNERS[name]()


def _check_text(text: str) -> None:
    """A text is there, and a terminal writes it and obeys nothing in it."""
    text.encode()
    assert text.strip() and not any(unicodedata.category(each) in ("Cc", "Cs") for each in text.replace("\n", ""))


def _check_plan(plan: al.Plan, other: al.Plan, folder: Path) -> None:
    """All texts and the page of a plan."""
    for text in (str(plan), plan.explain_time(), plan.explain_memory(), str(predicted_timeline(plan))):
        _check_text(text)
    _check_text(str(plan.diff(other)))
    arguments = [name for stage in plan.stages for name in stage.specs][:MOST_EXPLAINED]
    for subject in (*(f"stage {n}" for n in range(len(plan.stages))), "layer 0", "op 0", *arguments):
        try:
            _check_text(plan.explain(subject))
        except al.errors.PlanError as error:
            assert subject in ("op 0", "layer 0") and "There is no" in str(error)
    plan.to_html(folder / "plan.html")
    parse((folder / "plan.html").read_text(encoding="utf-8"))
    assert plan._repr_html_()


def _check(extreme: Extreme, cluster: al.Cluster, planner: str, folder: Path) -> None:
    """A plan of an extreme as it was found, from a file, and for its step again; and its program."""
    options = {"cluster": cluster, "cache": False}
    function = al.parallelize(extreme.step, planner=_planner(planner, cluster.num_devices), **options)
    try:
        planned = function.trace(*extreme.args).plan()
    except al.errors.AlpaLiteError as error:
        _check_text(str(error))
        return
    plan = planned.last_plan
    plan.save(folder / "plan.json")
    loaded = al.Plan.load(folder / "plan.json")
    assert loaded == plan
    replayed = al.plan(extreme.step, *extreme.args, planner=loaded, cluster=cluster)
    _check_plan(plan, loaded, folder)
    _check_plan(loaded, replayed, folder)
    _check_plan(replayed, plan, folder)
    lowered = planned.lower()
    simulated = lowered.simulate()
    for text in (str(planned), str(lowered), str(simulated)):
        _check_text(text)
    plan.to_html(folder / "simulated.html", simulated=simulated.times)
    parse((folder / "simulated.html").read_text(encoding="utf-8"))


# Of a compiled program there is a plan where there is its text.
_NAMES = [name for name in PLANNERS if name != "compiled"]
# These make many plans, and take long.
_SEARCHERS = ("coloc_rl", "flexflow", "pipedream", "pipedream_2bw")


@pytest.mark.parametrize(
    "planner",
    [pytest.param(name, marks=pytest.mark.long) if name in _SEARCHERS else name for name in _NAMES],
)
@pytest.mark.parametrize("name", EXTREMES)
def test_all_planners(name: str, planner: str, tmp_path: Path) -> None:
    for cluster in CLUSTERS.values() if planner in ("auto", "data_parallel") else [CLUSTERS["eight devices"]]:
        _check(EXTREMES[name], cluster, planner, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("planner", _NAMES)
def test_very_many_parameters(planner: str, tmp_path: Path) -> None:
    _check(VERY_MANY, CLUSTERS["eight devices"], planner, tmp_path)


@pytest.mark.parametrize("name", EXTREMES)
def test_all_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.py").write_text(
        "from tests.inspection.extremes import EXTREMES\n\n\n"
        f"def example():\n    extreme = EXTREMES[{name!r}]\n    return extreme.step, extreme.args\n"
    )
    monkeypatch.chdir(tmp_path)
    step = "steps.py:example"

    def run(*words: str) -> Any:
        assert main([*words]) == 0
        printed = capsys.readouterr()
        _check_text(printed.out)
        return printed.out

    run("plan", step, "--cluster", "p3.16xlarge", "--output", "a.json", "--no-cache")
    run("plan", step, "--cluster", "p3.16xlarge", "--output", "b.json", "--planner", "on_mesh", "--option", "axes=x:8")
    for words in (["explain", "a.json"], ["simulate", "a.json"]):
        for more in ([], ["--step", step]):
            run(*words, *more, "--html", "page.html")
            parse((tmp_path / "page.html").read_text(encoding="utf-8"))
            json.loads(run(*words, *more, "--json"))
    for more in ([], ["--step", step]):
        for subject in ("stage 0", "--time", "--memory"):
            run("explain", "a.json", subject, *more)
            json.loads(run("explain", "a.json", subject, *more, "--json"))
    run("simulate", "a.json", "--step", step, "--trace", "trace.json")
    json.loads((tmp_path / "trace.json").read_text())
    run("diff", "a.json", "b.json")
