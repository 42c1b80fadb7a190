"""Problems drawn at random: the optimum by two solvers, JellyBean above it, and files both ways."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.serving import (
    Allocation,
    EveryAssignment,
    Exact,
    JellyBean,
    ServingPlan,
    ServingProblem,
    ServingSizes,
    ServingSolver,
    Strategy,
    random_serving_problem,
    read_serving_problem,
    write_serving_problem,
)
from alpa_lite.serving.exact_assignment import largest_rate, tier_ranges
from alpa_lite.serving.model_selection import select_models

SIZES = st.builds(
    ServingSizes,
    operators=st.integers(1, 3),
    variants=st.integers(1, 2),
    workers=st.integers(3, 5),
    tiers=st.integers(1, 3),
)
PROBLEMS = st.builds(random_serving_problem, st.integers(0, 10**6), SIZES)


def _plan(solver: ServingSolver, problem: ServingProblem, least: float) -> ServingPlan | None:
    try:
        return solver.plan(problem, least)
    except InfeasibleError:
        return None


@settings(max_examples=30, deadline=None)
@given(PROBLEMS, st.sampled_from((0.0, 60.0, 70.0)))
def test_the_integer_program_finds_what_trying_all_finds(problem: ServingProblem, least: float) -> None:
    exact, tried = _plan(Exact(), problem, least), _plan(EveryAssignment(), problem, least)
    assert (exact is None) == (tried is None)
    if exact is not None and tried is not None:
        assert exact.dollars_per_hour == pytest.approx(tried.dollars_per_hour, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(PROBLEMS, st.sampled_from(Strategy), st.sampled_from(Allocation))
def test_jellybean_serves_at_no_less_than_the_optimum(
    problem: ServingProblem, strategy: Strategy, allocation: Allocation
) -> None:
    found = _plan(JellyBean(strategy=strategy, allocation=allocation), problem, 0.0)
    optimum = _plan(EveryAssignment(), problem, 0.0)
    if found is not None:
        assert optimum is not None and found.dollars_per_hour >= optimum.dollars_per_hour - 1e-9


@settings(max_examples=40, deadline=None)
@given(PROBLEMS, st.floats(50, 90))
def test_the_beam_finds_the_cheapest_models_where_it_is_wide(problem: ServingProblem, least: float) -> None:
    chosen = select_models(problem, least, beam=10**6)

    def cost(variants: dict[str, str]) -> float:
        return sum(each.weight * each.variant(variants[each.name]).cost for each in problem.operators)

    good = [cost(variants) for variants in problem.all_variants() if problem.accuracy(variants) >= least]
    assert bool(good) == bool(chosen)
    if good:
        assert chosen[0].cost == pytest.approx(min(good))


@settings(max_examples=30, deadline=None)
@given(PROBLEMS)
def test_the_largest_rate_can_be_served_and_a_larger_one_cannot(problem: ServingProblem) -> None:
    variants = next(problem.all_variants())
    multiple = largest_rate(problem, variants)

    def scaled(factor: float) -> ServingProblem:
        sources = [replace(each, messages_per_second=each.messages_per_second * factor) for each in problem.sources]
        return replace(problem.with_variants(variants), sources=tuple(sources))

    if multiple > 0:
        assert _plan(EveryAssignment(), scaled(0.999 * multiple), -1e9) is not None
    assert _plan(EveryAssignment(), scaled(1.001 * multiple + 1e-9), -1e9) is None


@settings(max_examples=30, deadline=None)
@given(problem=PROBLEMS)
def test_problems_are_written_and_read(problem: ServingProblem, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("problem") / "problem.json"
    write_serving_problem(problem, path)
    assert read_serving_problem(path) == problem
    write_serving_problem(read_serving_problem(path), path)
    assert json.loads(path.read_text())["name"] == problem.name


def test_ranges_of_two_tiers_never_lead_back() -> None:
    problem = read_serving_problem("vqa-medium")
    assert [{name: tiers for name, tiers in sorted(ranges.items())} for ranges in tier_ranges(problem)] == [
        {"ExtractImageFeature": (0, 0), "SpeechRecognition": (0, 0), "VQA": (0, 1)},
        {"ExtractImageFeature": (0, 1), "SpeechRecognition": (0, 1), "VQA": (1, 1)},
    ]


def test_prices_that_do_not_add_up_are_refused_by_the_integer_program_alone() -> None:
    problem = random_serving_problem(1, ServingSizes(operators=2, workers=6, tiers=3, variants=1))
    links = {
        pair: price * (3 if problem.worker(pair[1]).tier == 2 and not problem.is_source(pair[0]) else 1)
        for pair, price in problem.link_dollars_per_gib.items()
    }
    changed = replace(problem, link_dollars_per_gib=links)
    with pytest.raises(PlanError, match="are no sums of a price to leave a worker"):
        Exact().plan(changed, 0.0)
    assert EveryAssignment().plan(changed, 0.0).dollars_per_hour > 0
