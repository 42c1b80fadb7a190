"""The search over degrees: its plan is a local optimum, keeps to its family, and is near that of all degrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

import alpa_lite as al
from alpa_lite.api import advice
from alpa_lite.api.advice import ANYTHING, FAMILIES, SizedStep
from alpa_lite.cli.models.named_models import model_named
from alpa_lite.errors import InfeasibleError
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.degree_search import DegreePoint, DegreeSearch, Family, planner_at
from alpa_lite.planners.hybrid import Hybrid
from cost_models import Cluster
from cost_models.cluster import with_memory_limit

MODEL = "llama-8b:num_layers=4:hidden=1024:num_heads=8:inner=4096:vocab_size=8192"
SAMPLES, LENGTH = 32, 512


def search_of(model: str, samples: int, cluster: Cluster) -> DegreeSearch:
    step, args = model_named(model).training(samples, LENGTH)
    given = SizedStep(name="", step=step, args=args, cluster=cluster)
    return advice._search(given, advice._traced(given, None))


@pytest.fixture(scope="module")
def search() -> DegreeSearch:
    return search_of(MODEL, SAMPLES, al.cluster("dgx-1"))


def all_points(family: Family, devices: int) -> Iterator[DegreePoint]:
    """All degrees of a family without a context, chunks and recomputation, written out by hand."""
    for pipeline, tensor, replicas in product((1, 2, 4, 8), repeat=3):
        if any(n > 1 and name not in family.varied for n, name in
               ((pipeline, "pipeline"), (tensor, "tensor"), (replicas, "replicas"))):  # fmt: skip
            continue
        ways = devices // (pipeline * tensor)
        if ways == 0 or ways % replicas or SAMPLES % ways:
            continue
        for samples in divisors(SAMPLES // ways):
            yield DegreePoint(pipeline=pipeline, tensor=tensor, replicas=replicas, zero=family.zero, samples=samples)


def never() -> bool:
    return False


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_no_single_change_of_the_result_is_faster(search: DegreeSearch, family: Family) -> None:
    found = search.fastest(family, is_over=never)
    assert found.plan is not None and found.point is not None and not found.cut_short
    for change in search._changes(family):
        other = change(found.point)
        plan = None if other is None else search.plan_at(other)
        if isinstance(plan, Plan):
            assert plan.prediction.step_seconds >= 0.997 * found.plan.prediction.step_seconds


def test_the_result_keeps_to_its_family(search: DegreeSearch) -> None:
    for family in FAMILIES:
        point = search.fastest(family, is_over=never).point
        assert point is not None and point.zero == family.zero
        fixed = set(DegreePoint.__dataclass_fields__) - set(family.varied) - {"zero"}
        assert all(getattr(point, name) == getattr(DegreePoint(), name) for name in fixed)


@pytest.mark.slow
def test_all_degrees_are_no_faster_by_much(search: DegreeSearch) -> None:
    """The search is local: on this step it ends within a few per cent of the best of all degrees."""
    for family in FAMILIES:
        found = search.fastest(family, is_over=never).plan
        plans = map(search.plan_at, all_points(family, 8))
        best = min(plan.prediction.step_seconds for plan in plans if isinstance(plan, Plan))
        assert found is not None and found.prediction.step_seconds <= 1.05 * best


def test_changes_that_help_are_taken(search: DegreeSearch) -> None:
    # Recomputation that memory does not ask for, and the smallest micro-batches.
    start = DegreePoint(pipeline=2, tensor=4, zero=1, remat="full", samples=1)
    given = search.plan_at(start)
    found = search.fastest(ANYTHING, [start], is_over=never).plan
    assert isinstance(given, Plan) and found is not None
    assert found.prediction.step_seconds < 0.8 * given.prediction.step_seconds


def test_points_are_hybrids_with_their_microbatches(search: DegreeSearch) -> None:
    point = DegreePoint(pipeline=2, chunks=2, tensor=2, zero=1, remat="full", samples=4)
    planner, number = planner_at(point, search.request)
    assert (planner.pipeline, planner.num_stages, planner.tensor, planner.data, number) == (2, 4, 2, 2, 4)
    plan = search.plan_at(DegreePoint(tensor=2, zero=3, samples=4))
    alone = Hybrid(data=4, tensor=2, zero=3, projections=True).plan(replace(search.request, num_microbatches=2))
    assert isinstance(plan, Plan) and plan.prediction.step_seconds == alone.prediction.step_seconds


def test_without_time_the_first_plan_is_taken(search: DegreeSearch) -> None:
    found = search.fastest(FAMILIES[0], is_over=lambda: True)
    assert found.cut_short and found.plan is not None
    # Weights that fit are split by no more than their family says, and micro-batches are whole batches.
    assert found.point == DegreePoint(zero=3, samples=SAMPLES // 8)


def test_the_start_leaves_room_for_what_is_not_state() -> None:
    """Least splitting first: tensor parallelism, then a pipeline."""
    plain = al.cluster("dgx-1")
    for memory, tensor, pipeline in ((16e9, 1, 1), (6.6e8, 2, 1), (3.6e8, 8, 1)):
        tight = search_of(MODEL, SAMPLES, with_memory_limit(plain, memory))
        first = next(tight._starts(FAMILIES[2]))
        assert (first.tensor, first.pipeline) == (tensor, pipeline)
    tight = search_of(MODEL, SAMPLES, with_memory_limit(plain, 1e8))
    for family in FAMILIES:
        found = tight.fastest(family, is_over=never)
        assert found.plan is None and found.does_not_fit and "Use more hosts" in found.problem
    given = tight.fastest(ANYTHING, [DegreePoint(samples=4)], is_over=never)
    assert isinstance(tight.plan_at(DegreePoint(samples=4)), InfeasibleError) and given.does_not_fit


def test_batches_that_no_degrees_divide_are_told() -> None:
    odd = search_of(MODEL, 3, al.cluster("dgx-1"))
    found = odd.fastest(FAMILIES[0], is_over=never)
    assert not found.does_not_fit and "has no degrees for a batch of 3 on 8 devices" in found.problem
    # All devices in one replica: what is left of the others is 1.
    assert odd.fastest(FAMILIES[1], is_over=never).point is not None


def test_experts_are_split_where_there_are_experts(search: DegreeSearch) -> None:
    sizes = "num_layers=2:hidden=256:num_heads=8:inner=512:vocab_size=1024"
    mixture = search_of(f"mixtral-8x7b:{sizes}", SAMPLES, al.cluster("dgx-1"))
    assert mixture.has_experts and not search.has_experts
    point = DegreePoint(expert=2, zero=3, samples=4)
    assert point in [change(DegreePoint(zero=3, samples=4)) for change in mixture._changes(FAMILIES[1])]
    assert point not in [change(DegreePoint(zero=3, samples=4)) for change in search._changes(FAMILIES[1])]
