"""The comparison of searches: budgets, qualities, the statements, and the kept results."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.cli.bench.request import find_target
from alpa_lite.planners import AxoNN, DataParallel, OneWeirdTrick
from benchmarks import searchers
from benchmarks.searchers import SearchRow, Task, inception, quality, search, trick, within

TINY = Task(target=lambda: inception(num_samples=16, image_size=8, channels=8, num_blocks=1), cluster="g5.12xlarge")


def _row(model: str, searcher: str, budget: float, step_seconds: float | None, planning: float = 1.0) -> SearchRow:
    return SearchRow(
        model=model,
        searcher=searcher,
        budget_seconds=budget,
        planning_seconds=planning,
        step_seconds=step_seconds,
        plan="plan",
    )


def test_quality_is_relative_to_the_best_plan_of_all_and_zero_without_one() -> None:
    rows = [_row("a", "quick", budget, 4.0) for budget in (1, 2)] + [
        _row("b", "quick", budget, 3.0) for budget in (1, 2)
    ]
    for model, seconds in (("a", 2.0), ("b", 4.0)):
        rows += [_row(model, "slow", 1, None), _row(model, "slow", 2, seconds, planning=2.0)]
    assert quality(rows) == {"quick": {1: 0.75, 2: 0.75}, "slow": {1: 0.0, 2: 0.875}}
    # A search that ends after its budget has its plan in the next one.
    late = [_row("a", "late", 1, 2.0, planning=1.5), _row("a", "late", 2, None, planning=2.5)]
    of_a = [row for row in rows if row.model == "a"]
    assert quality([*of_a, *late])["late"] == {1: 0.0, 2: 1.0}
    # No search has a plan of this model: it counts for all.
    rows += [_row("c", name, budget, None) for name in ("quick", "slow") for budget in (1, 2)]
    assert quality(rows)["quick"] == {1: 0.5, 2: 0.5}


def test_a_search_gives_nothing_before_it_ends() -> None:
    row = _row("a", "slow", 30, 2.0, planning=7.0)
    assert within(row, 10) == replace(row, budget_seconds=10)
    early = within(row, 3)
    assert early.step_seconds is None and early.planning_seconds == early.budget_seconds == 3


@pytest.fixture
def tiny(monkeypatch: Any) -> None:
    monkeypatch.setattr(searchers, "TASKS", {"tiny": TINY})


@pytest.mark.usefixtures("default_interrupt")
def test_a_search_is_interrupted_when_its_budget_is_over(tiny: None, monkeypatch: Any) -> None:
    ended = list[bool]()

    class Endless:
        """A planner that would take a minute."""

        def plan(self, request: Any) -> Any:
            stop = time.perf_counter() + 60
            while time.perf_counter() < stop:
                pass
            ended.append(True)

    monkeypatch.setattr(searchers, "planner_by_name", lambda *_: Endless())
    # Python drops an exception that is raised while the garbage collector calls JAX.
    gc.disable()
    try:
        late = search("tiny", "grid search", 0.001)
    finally:
        gc.enable()
    assert late.step_seconds is None and late.plan == "not within the budget"
    assert late.planning_seconds == late.budget_seconds == 0.001
    assert not ended, "the search ran on after its budget"


def test_a_search_within_its_budget_gives_the_plan_of_the_planner(tiny: None) -> None:
    found = search("tiny", "AxoNN", 600.0)
    contest = TINY.contest()
    plan = contest.plan(AxoNN(), "auto")
    assert found.step_seconds == plan.prediction.step_seconds and found.plan == plan.name
    refused = search("tiny", "TorchGPipe", 600.0)
    assert (refused.step_seconds is None) == ("not within" not in refused.plan and "torchgpipe" not in refused.plan)


@pytest.mark.parametrize(("planner", "share", "holds"), [(OneWeirdTrick(), 1.0, True), (DataParallel(), 0.04, False)])
def test_one_weird_trick_is_recognised(planner: Any, share: float, holds: bool) -> None:
    """AlexNet has 4 % of its weights in kernels, which data parallelism leaves whole too."""
    target = find_target("alexnet")
    plan = al.plan(target.step, *target.arguments, cluster="p3.16xlarge", planner=planner, num_microbatches=1)
    found = trick(plan)
    assert found.holds == holds and found.seen == pytest.approx(share, abs=0.01)


def test_the_kept_results() -> None:
    """The searches end with what their rows say; the statements of the lecture hold."""
    kept = json.loads(searchers.RESULTS.read_text(encoding="utf-8"))
    rows = [SearchRow(**row) for row in kept["rows"]]
    assert {row.model for row in rows} <= set(searchers.TASKS) and {row.searcher for row in rows} <= set(
        searchers.SEARCHERS
    )
    for of in quality(rows).values():
        # A larger budget never gives less.
        assert [*of.values()] == sorted(of.values())
    at_the_end = {name: [*of.values()][-1] for name, of in quality(rows).items()}
    assert max(at_the_end, key=at_the_end.__getitem__) == "Auto"
    assert all(each["holds"] for each in kept["statements"])
    assert "Mesh-TensorFlow" in searchers.chart()
