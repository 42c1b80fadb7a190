import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.stage_dp import (
    BOTTLENECK_GAP,
    StageAssignment,
    StageStatus,
    StageTable,
    evaluate,
    solve,
)
from benchmarks.search import random_table


def brute_force(table, *, num_devices, num_microbatches, min_stages=1, max_stages=None, serialized=False):
    """The least seconds over all cuts, submeshes and configurations; infinite if there is no choice."""
    num_layers, _, num_kinds, num_configurations = table.seconds.shape
    best = math.inf
    for num_stages in range(min_stages, min(num_layers, max_stages or num_layers) + 1):
        options = [
            kinds
            for kinds in itertools.product(range(num_kinds), repeat=num_stages)
            if sum(table.submesh_devices[kind] for kind in kinds) == num_devices
        ]
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            bounds = (0, *cuts, num_layers)
            for kinds in options:
                for configurations in itertools.product(range(num_configurations), repeat=num_stages):
                    times = []
                    for index in range(num_stages):
                        entry = (bounds[index], bounds[index + 1] - 1, kinds[index], configurations[index])
                        fits = table.max_following_stages[entry] >= num_stages - 1 - index
                        times.append(float(table.seconds[entry]) if fits else math.inf)
                    total = sum(times) + (num_microbatches - 1) * max(times)
                    best = min(best, num_microbatches * sum(times) if serialized else total)
    return best


@st.composite
def problems(draw):
    """Small tables with ties (few distinct costs), impossible entries, memory limits and odd device counts."""
    num_layers = draw(st.integers(1, 4))
    num_configurations = draw(st.integers(1, 2))
    kinds = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_layers, num_layers, len(kinds), num_configurations)
    seconds = rng.integers(0, 6, shape).astype(float) if draw(st.booleans()) else rng.uniform(0.1, 3.0, shape)
    seconds[rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.4]))] = np.inf
    return {
        "table": StageTable(
            seconds=seconds,
            max_following_stages=rng.integers(draw(st.sampled_from([-1, 0, 3])), 4, shape),
            submesh_devices=kinds,
        ),
        "num_devices": draw(st.integers(1, 8)),
        "num_microbatches": draw(st.sampled_from([1, 2, 5, 64])),
        "min_stages": draw(st.integers(1, 2)),
        "max_stages": draw(st.sampled_from([None, 2, 3])),
        "serialized": draw(st.booleans()),
    }


def assert_matches(result, expected, problem):
    if math.isinf(expected):
        assert result.status is StageStatus.INFEASIBLE
        assert result.stages == () and math.isinf(result.seconds) and result.reason.endswith(".")
        return
    assert result.status is StageStatus.OPTIMAL and result.reason == ""
    assert result.seconds == pytest.approx(expected, rel=2 * BOTTLENECK_GAP)
    assert problem["min_stages"] <= len(result.stages) <= (problem["max_stages"] or math.inf)
    shared = {key: problem[key] for key in ("num_devices", "num_microbatches", "serialized")}
    assert evaluate(problem["table"], result.stages, **shared) == result.seconds


@settings(max_examples=300)
@given(problems())
def test_equals_exhaustive_search(problem):
    assert_matches(solve(**problem), brute_force(**problem), problem)


@pytest.mark.parametrize("seed", range(3))
def test_equals_exhaustive_search_at_five_layers_and_eight_devices(seed):
    rng = np.random.default_rng(seed)
    shape = (5, 5, 4, 2)
    seconds = rng.uniform(0.1, 3.0, shape)
    seconds[rng.random(shape) < 0.2] = np.inf
    table = StageTable(seconds=seconds, max_following_stages=rng.integers(-1, 5, shape), submesh_devices=(1, 2, 4, 8))
    problem = {"table": table, "num_devices": 8, "num_microbatches": 8}
    limits = {"min_stages": 1, "max_stages": None, "serialized": False}
    assert_matches(solve(**problem), brute_force(**problem), problem | limits)


@given(problems())
def test_early_stop_loses_nothing(problem):
    quick, full = solve(**problem), solve(**problem, early_stop=False)
    assert quick.status is full.status
    assert quick.seconds == full.seconds or quick.seconds == pytest.approx(full.seconds, rel=1e-14)
    assert quick.num_evaluated <= max(full.num_evaluated, 1)


@pytest.mark.parametrize("num_microbatches", [1, 8, 64])
def test_early_stop_tries_few_of_many_bottlenecks(num_microbatches):
    quick = solve(random_table(8, seed=0), num_devices=64, num_microbatches=num_microbatches)
    full = solve(random_table(8, seed=0), num_devices=64, num_microbatches=num_microbatches, early_stop=False)
    assert quick.seconds == full.seconds
    assert full.num_evaluated == full.num_bottlenecks > 500
    assert quick.num_evaluated < 50


def table_of(seconds, following=None, devices=(1,)) -> StageTable:
    """One configuration; `seconds` and `following` are functions of (first layer, last layer, submesh)."""
    num_layers = 4
    index = np.indices((num_layers, num_layers, len(devices)))
    grid = [np.vectorize(function, otypes=[float])(*index)[..., None] for function in (seconds, following) if function]
    return StageTable(
        seconds=grid[0],
        max_following_stages=grid[1].astype(int) if following else np.full(grid[0].shape, 99),
        submesh_devices=devices,
    )


def test_equal_layers_on_equal_submeshes_are_cut_evenly():
    choice = solve(table_of(lambda i, j, m: max(j - i + 1, 0)), num_devices=2, num_microbatches=10)
    assert [(stage.first_layer, stage.last_layer) for stage in choice.stages] == [(0, 1), (2, 3)]
    assert choice.seconds == 4 + 9 * 2


def test_memory_bounds_the_number_of_stages_that_follow():
    def even(i, j, m):
        return max(j - i + 1, 0)

    kinds = (1, 2, 4)
    free = solve(table_of(even, devices=kinds), num_devices=4, num_microbatches=100)
    assert len(free.stages) == 4
    one_follows = solve(table_of(even, lambda i, j, m: 1, kinds), num_devices=4, num_microbatches=100)
    assert len(one_follows.stages) == 2


def test_stages_on_a_shared_processor_add_up():
    table = table_of(lambda i, j, m: 4.0 if (i, j) == (0, 3) else 1.5 * max(j - i + 1, 0), devices=(1, 2))
    assert len(solve(table, num_devices=2, num_microbatches=8).stages) == 2
    shared = solve(table, num_devices=2, num_microbatches=8, serialized=True)
    assert len(shared.stages) == 1
    assert shared.seconds == 8 * 4.0


def test_close_bottlenecks_count_as_one_and_stay_feasible():
    table = table_of(lambda i, j, m: (1.0 + 1e-9 * i) * max(j - i + 1, 0))
    choice = solve(table, num_devices=4, num_microbatches=4)
    assert choice.num_bottlenecks <= 8
    assert choice.seconds == pytest.approx(7.0, rel=2 * BOTTLENECK_GAP)


def test_infeasible_results_say_why():
    def seconds(i, j, m):
        return 1.0

    def reason(table, **options):
        choice = solve(table, num_microbatches=4, **options)
        assert choice.status is StageStatus.INFEASIBLE
        return choice.reason

    assert "submeshes of 2, 4 devices do not add up to 7" in reason(table_of(seconds, devices=(4, 2)), num_devices=7)
    assert "memory" in reason(table_of(seconds, lambda i, j, m: -1), num_devices=1)
    assert "no possible configuration" in reason(table_of(lambda i, j, m: np.inf), num_devices=1)
    assert "At least 5 stages" in reason(table_of(seconds), num_devices=8, min_stages=5)
    assert "at most 1 stages allow 1" in reason(table_of(seconds), num_devices=8, min_stages=2, max_stages=1)


def test_the_evaluator_rejects_stages_that_do_not_fit():
    table = table_of(lambda i, j, m: 1.0, lambda i, j, m: 1)
    half, rest = (
        StageAssignment(first_layer=first, last_layer=first + 1, submesh=0, configuration=0) for first in (0, 2)
    )

    def price(*stages, num_devices=2, serialized=False):
        return evaluate(table, stages, num_devices=num_devices, num_microbatches=3, serialized=serialized)

    assert price(half, rest) == 2 + 2 * 1
    assert price(half, rest, serialized=True) == 3 * 2
    assert price(half) == price(rest, half) == price(half, half) == price() == math.inf
    assert price(half, rest, num_devices=3) == math.inf
    ones = [StageAssignment(first_layer=i, last_layer=i, submesh=0, configuration=0) for i in range(4)]
    assert price(*ones, num_devices=4) == math.inf


def test_malformed_tables_and_sizes_are_refused():
    with pytest.raises(PlanError, match="2 submesh kinds needs two arrays"):
        StageTable(
            seconds=np.zeros((2, 2, 1, 1)), max_following_stages=np.zeros((2, 2, 1, 1), int), submesh_devices=(1, 2)
        )
    with pytest.raises(PlanError, match="seconds of at least 0"):
        StageTable(
            seconds=np.full((1, 1, 1, 1), np.nan), max_following_stages=np.zeros((1, 1, 1, 1)), submesh_devices=(1,)
        )
    with pytest.raises(PlanError, match="at least one device, micro-batch and stage"):
        solve(table_of(lambda i, j, m: 1.0), num_devices=1, num_microbatches=0)
