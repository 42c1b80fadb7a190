"""The reference tells every public name, with what its docstring says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import alpa_lite as al

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


def _public(module: ModuleType) -> dict[str, Any]:
    """What a module gives, but for modules."""
    given = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module))}
    return {k: v for k, v in given.items() if not k.startswith("_") and not inspect.ismodule(v)}


def _exceptions() -> dict[str, Any]:
    return {k: v for k, v in vars(al.errors).items() if isinstance(v, type) and issubclass(v, al.AlpaLiteError)}


PUBLIC: dict[str, Any] = {
    **{f"alpa_lite.{name}": value for name, value in _public(al).items() if value is not al.AlpaLiteError},
    **{f"alpa_lite.planners.{name}": value for name, value in _public(al.planners).items()},
    **{f"alpa_lite.schedule.{name}": value for name, value in _public(al.schedule).items()},
    **{f"alpa_lite.serving.{name}": value for name, value in _public(al.serving).items()},
    **{f"alpa_lite.errors.{name}": value for name, value in _exceptions().items()},
}
VALUES = {  # that calls return
    al.plan: "Plan",
    al.check: "CheckReport",
    al.compare: "PlannerComparison",
    al.advise: "Advice",
    al.cluster: "Cluster",
    al.calibrate: "Calibration",
    al.serving.ServingSolver.plan: "ServingPlan",
    al.serving.compare_solvers: "ServingComparison",
    al.ParallelFunction.trace: "TracedFunction",
    al.TracedFunction.plan: "PlannedFunction",
    al.PlannedFunction.lower: "LoweredFunction",
    al.LoweredFunction.simulate: "SimulatedStep",
    al.LoweredFunction.compile: "CompiledFunction",
}


def test_public_names() -> None:
    """Whoever adds or removes one says so here."""
    assert set(_public(al)) == set(
        "Advice AlpaLiteError Calibration CheckReport Checkpoints CompiledFunction LoweredFunction ParallelFunction "
        "Plan PlannedFunction PlannerComparison TracedFunction advise batch_sharding calibrate check cluster compare "
        "init_sharded initialize local_cluster parallelize plan register_rule".split()
    )
    assert set(_public(al.planners)) == set(
        "Auto AxoNN Bounded ColocRL Compiled ConvolutionParallel Custom DataParallel DeepSpeed3D FSDP FlexFlow "
        "GShard GridSearch Hybrid Jitted Karma MANUAL_PLANNERS Megatron MeshTensorFlow OnMesh OneWeirdTrick "
        "ParameterServer PipeDream PipeDream2BW Pipeline PlanRequest Planner Replay TorchGPipe TrainerConfiguration "
        "Zero".split()
    )
    assert set(_public(al.serving)) == set(
        "AccuracySample Allocation BestAccuracy CloudOnly EdgeFirst EveryAssignment Exact JellyBean MessageSource "
        "ModelVariant SERVING_SOLVERS ServingComparison ServingOperator ServingPlan ServingProblem ServingSizes "
        "ServingSolver Strategy TieredWorker WorkflowEdge compare_solvers known_serving_problems "
        "random_serving_problem read_serving_problem variant_of_plans write_serving_problem".split()
    )
    assert set(_public(al.schedule)) == set(
        "AsynchronousSchedule DualPipeV EagerOneFOneB GPipe Inference Interleaved1F1B ListSchedule MessageDriven "
        "OneFOneB PipeDream PipeDream2BW SCHEDULES Schedule Sequential ServerSchedule "
        "Span Synthesised Task TaskKind TaskLists Timeline WarmupSchedule Wave ZeroBubbleH1 ZeroBubbleH2 ZeroBubbleV "
        "kinds_of linearize passes_of peak_held peak_in_flight processors_of schedule_named simulate splits_backward "
        "validate".split()
    )


@pytest.fixture(scope="module")
def site(built_site: Path) -> dict[str, str]:
    """The reference as it is built: page → HTML."""
    return {page.stem: (built_site / "reference" / f"{page.stem}.html").read_text() for page in PAGES}


def _words(html: str) -> str:
    text = re.sub(r"<[^>]+>", " ", html).replace("&#39;", "'").replace("&quot;", '"').replace("&amp;", "&")
    return " ".join(text.replace("&lt;", "<").replace("&gt;", ">").split())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_with_its_first_words(name: str, site: dict[str, str]) -> None:
    value, html = PUBLIC[name], "".join(site.values())
    headings = {_words(m[1]).split()[0]: m.end() for m in re.finditer(r"<h3[^>]*>(.*?)</h3>", html, re.DOTALL)}
    heading = headings.get(name)
    assert heading is not None, f"{name} has no heading in docs/reference"
    if isinstance(value, type) or inspect.isroutine(value):
        doc = inspect.getdoc(value) or ""
        first = " ".join(re.sub(r"`", "", doc.split("\n\n")[0]).split()[:4])
        shown = _words(html[heading : heading + 20_000])
        assert first and first.rstrip(".,:;") in re.sub(r"\s+([.,:;)])", r"\1", shown), f"{name}: {first}"


def test_every_value_that_a_call_returns_is_there(site: dict[str, str]) -> None:
    html = "".join(site.values())
    for call, returned in VALUES.items():
        assert str(inspect.signature(call, eval_str=False).return_annotation).endswith(returned)
        assert re.search(rf'id="[\w.]+\.{returned}"', html), returned


def _fields(value: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()


PLANNERS = [
    value for value in _public(al.planners).values() if isinstance(value, type) and value is not al.planners.Planner
]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.__name__)
def test_every_option_of_a_planner_is_explained(planner: type) -> None:
    explained = set(re.findall(r"^    (\w+): ", inspect.getdoc(planner) or "", re.MULTILINE))
    assert _fields(planner) == explained


@pytest.mark.parametrize("name", ["parallelize", "check", "calibrate", "init_sharded", "cluster", "local_cluster"])
def test_every_argument_is_explained(name: str) -> None:
    function = getattr(al, name)
    explained = set(re.findall(r"^    (\w+): ", inspect.getdoc(function) or "", re.MULTILINE))
    assert set(inspect.signature(function).parameters) <= explained


def test_public_methods_have_docstrings() -> None:
    classes = [
        value for value in PUBLIC.values() if isinstance(value, type) and value.__module__.startswith("alpa_lite")
    ]
    bare = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (property, staticmethod, classmethod)))
        and not inspect.getdoc(getattr(cls, name))
    ]
    assert not bare
