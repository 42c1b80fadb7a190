"""What the ablations of pipelines say, and how they are searched."""

from __future__ import annotations

import pytest

from alpa_lite.cli.models.alpa_cases import CASES
from benchmarks.alpa.fixed_plans import num_layers
from benchmarks.alpa.orderings import STAGES, Way, claims_of_stages, restricted
from benchmarks.alpa.price import Desk, Price


def price(seconds: float | None) -> Price:
    problem = "" if seconds is not None else "too large"
    return Price(
        case="c",
        system="s",
        plan="p",
        global_batch=1,
        num_microbatches=1,
        planning_seconds=0.0,
        seconds=seconds,
        problem=problem,
    )


def said(measured: dict[Way, float], seconds: dict[Way, float | None]) -> dict[str, bool]:
    found: dict[Way, Price] = {way: price(each) for way, each in seconds.items()}
    return {claim.text: claim.holds for claim in claims_of_stages("c", measured, found)}


def test_a_restriction_gains_nothing_or_loses():
    measured: dict[Way, float] = {"the search": 60, "equal layers": 59, "equal operators": 40}
    assert said(measured, {"the search": 1.0, "equal layers": 1.01, "equal operators": 1.5}) == {
        "c: the search for stages gains nothing over equal layers": True,
        "c: the search for stages is faster than equal operators": True,
    }
    assert not any(said(measured, {"the search": 1.0, "equal layers": 1.2, "equal operators": 1.0}).values())


def test_without_a_search_that_was_measured_the_first_way_is_held_against_the_others():
    measured: dict[Way, float] = {"equal layers": 6.3, "equal operators": 3.3}
    assert said(measured, {"equal layers": 1.0, "equal operators": 2.0}) == {
        "c: a pipeline of equal layers is faster than equal operators": True
    }


def test_what_finds_no_plan_is_slower_than_what_does():
    measured: dict[Way, float] = {"the search": 2.0, "equal layers": 1.0}
    assert all(said(measured, {"the search": 1.0, "equal layers": None}).values())
    assert not any(said(measured, {"the search": None, "equal layers": 1.0}).values())
    assert not any(said({"the search": 1.0, "equal layers": 1.0}, {"the search": 1.0, "equal layers": None}).values())


@pytest.mark.parametrize("name", STAGES)
def test_ablations_are_of_published_cases(name: str):
    assert num_layers(name) >= 8
    assert CASES[name].num_devices in (8, 16, 32)
    assert set(STAGES[name]) > {"equal layers", "equal devices"}


def test_layers_of_equal_operators_are_searched_like_any_others():
    """One device, so that one stage is all there is: what layers are made of changes nothing."""
    case = CASES["gpt-350M"]
    plans = [Desk().price(restricted(case, way)) for way in ("the search", "equal operators")]
    seconds = [plan.seconds for plan in plans]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
