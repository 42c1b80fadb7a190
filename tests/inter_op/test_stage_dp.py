import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.inter_op import stage_dp
from alpa_lite.inter_op.stage_dp import BOTTLENECK_GAP, PipelineTerms, StageAssignment, StageStatus, StageTable
from benchmarks.search import random_table


def solve(table, *, early_stop=True, **terms):
    return stage_dp.solve(table, PipelineTerms(**terms), early_stop=early_stop)


def evaluate(table, stages, **terms):
    return stage_dp.evaluate(table, stages, PipelineTerms(**terms))


def every_plan(table, devices):
    """Every list of (first layer, last layer, kind, configuration) of all layers on all devices of all groups."""
    num_layers, _, num_kinds, num_configurations = table.seconds.shape
    groups = table.submesh_groups or (0,) * num_kinds

    def after(first, free):
        if first == num_layers:
            if not any(free):
                yield []
            return
        for kind, (size, group) in enumerate(zip(table.submesh_devices, groups, strict=True)):
            if group is None:
                left = (0,) * len(free) if free == devices and size == sum(free) else (-1,)
            else:
                left = (*free[:group], free[group] - size, *free[group + 1 :])
            if min(left) < 0:
                continue
            for last in range(first, num_layers):
                for rest in after(last + 1, left):
                    for configuration in range(num_configurations):
                        yield [(first, last, kind, configuration), *rest]

    return after(0, devices)


def brute_force(
    table, *, num_devices, num_microbatches, min_stages=1, max_stages=None, serialized=False, waiting_share=1.0
):
    """The least seconds over all cuts, submeshes and configurations; infinite if there is no choice."""
    inflow, best, update = table.inflow_seconds, math.inf, table.update_seconds
    for plan in every_plan(table, (num_devices,) if isinstance(num_devices, int) else num_devices):
        if not min_stages <= len(plan) <= (max_stages or len(plan)):
            continue
        times = [float(table.seconds[stage]) for stage in plan]
        if inflow is not None:
            for number in range(1, len(plan)):
                times[number] += inflow[plan[number][0], plan[number - 1][2], plan[number][2]]
        fits = all(table.max_following_stages[stage] + number + 1 >= len(plan) for number, stage in enumerate(plan))
        if not fits or math.isinf(max(times)):
            continue
        updates = [0.0 if update is None else float(update[stage]) for stage in plan]
        # The stage that ends last works all the time; all others are waited for once, or for a part of the time.
        filling = 0.0 if table.filling_seconds is None else sum(float(table.filling_seconds[stage]) for stage in plan)
        ends = [
            num_microbatches * time + once + waiting_share * (sum(times) - time) + filling
            for time, once in zip(times, updates, strict=True)
        ]
        best = min(best, num_microbatches * sum(times) + sum(updates) if serialized else max(ends))
    return best


def random_costs(rng, shape, *, ties, missing):
    """Seconds of stages; few distinct ones or many, some of them impossible."""
    seconds = rng.integers(0, 6, shape).astype(float) if ties else rng.uniform(0.1, 3.0, shape)
    seconds[rng.random(shape) < missing] = np.inf
    return seconds


def random_updates(rng, seconds, how):
    """Seconds once per step: as long as some micro-batches, a few values only, or none."""
    if how == "none":
        return None
    found = rng.integers(0, 4, seconds.shape).astype(float) if how == "few" else rng.uniform(0.0, 20.0, seconds.shape)
    return np.where(np.isfinite(seconds), found, np.inf)


def random_filling(rng, seconds, how):
    """Seconds of the first micro-batch: more than of others, or a part of what these take less, or none."""
    if how == "none":
        return None
    least = np.where(np.isfinite(seconds), -seconds / 3 if how == "less" else 0.0, 0.0)
    return rng.uniform(least, least + 2.0)


def random_inflow(rng, num_layers, devices, how):
    """Seconds to receive: by both kinds, by the number of links, or a few values only."""
    shape = (num_layers, len(devices), len(devices))
    if how == "links":
        return rng.uniform(0.0, 2.0, (num_layers, 1, 1)) / np.minimum(*np.meshgrid(devices, devices))
    if how == "few":
        return rng.integers(0, 3, shape).astype(float)
    return rng.uniform(0.0, 1.0, shape) if how == "pairs" else None


def layouts():
    """Devices by group, and kinds as (size, group)."""
    one = st.tuples(
        st.integers(1, 8), st.lists(st.tuples(st.integers(1, 5), st.just(0)), min_size=1, max_size=3, unique=True)
    )
    pairs = st.sampled_from([(1, 1), (2, 2), (4, 1), (3, 2), (2, 4), (4, 4), (6, 2)])
    kinds_of_two = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=2, max_size=4, unique=True)
    two = st.tuples(pairs, kinds_of_two)
    spanning = two.map(lambda layout: (layout[0], [*layout[1], (sum(layout[0]), None)]))
    return st.one_of(one, two, spanning)


@st.composite
def problems(draw):
    """Small tables with ties (few distinct costs), impossible entries, memory limits and odd device counts."""
    num_layers = draw(st.integers(1, 4))
    num_configurations = draw(st.integers(1, 4))
    num_devices, kinds = draw(layouts())
    devices = tuple(size for size, _ in kinds)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_layers, num_layers, len(kinds), num_configurations)
    seconds = random_costs(rng, shape, ties=draw(st.booleans()), missing=draw(st.sampled_from([0.0, 0.1, 0.4])))
    return {
        "table": StageTable(
            seconds=seconds,
            update_seconds=random_updates(rng, seconds, draw(st.sampled_from(["none", "few", "long"]))),
            filling_seconds=random_filling(rng, seconds, draw(st.sampled_from(["none", "more", "less"]))),
            max_following_stages=rng.integers(draw(st.sampled_from([-1, 0, 3])), 4, shape),
            submesh_devices=devices,
            submesh_groups=() if isinstance(num_devices, int) else tuple(group for _, group in kinds),
            inflow_seconds=random_inflow(
                rng, num_layers, devices, draw(st.sampled_from(["none", "links", "few", "pairs"]))
            ),
        ),
        "num_devices": num_devices,
        "num_microbatches": draw(st.sampled_from([1, 2, 5, 64])),
        "min_stages": draw(st.integers(1, 2)),
        "max_stages": draw(st.sampled_from([None, 2, 3])),
        "serialized": draw(st.booleans()),
        "waiting_share": draw(st.sampled_from([1.0, 1 / 3])),
    }


def assert_matches(result, expected, problem):
    if math.isinf(expected):
        assert result.status is StageStatus.INFEASIBLE
        assert result.stages == () and math.isinf(result.seconds) and result.reason.endswith(".")
        return
    assert result.status is StageStatus.OPTIMAL and result.reason == ""
    assert result.seconds == pytest.approx(expected, rel=2 * BOTTLENECK_GAP)
    assert problem["min_stages"] <= len(result.stages) <= (problem["max_stages"] or math.inf)
    shared = {key: problem[key] for key in ("num_devices", "num_microbatches", "serialized", "waiting_share")}
    assert evaluate(problem["table"], result.stages, **shared) == result.seconds


@settings(max_examples=600, deadline=None)
@given(problems())
def test_equals_exhaustive_search(problem):
    assert_matches(solve(**problem), brute_force(**problem), problem)


@pytest.mark.parametrize("inflow", ["none", "pairs"])
@pytest.mark.parametrize("num_microbatches", [1, 8, 100])
@pytest.mark.parametrize(
    ("num_devices", "devices", "groups"),
    [
        (8, (1, 2, 4, 8), ()),
        (7, (1, 2, 3, 5), ()),
        (6, (1, 2, 3, 6), ()),
        ((4, 4), (1, 2, 4, 1, 2, 4), (0, 0, 0, 1, 1, 1)),
        ((6, 2), (2, 4, 1, 2, 8), (0, 0, 1, 1, None)),
        ((2, 2, 3), (1, 2, 1, 2, 1, 3, 7), (0, 0, 1, 1, 2, 2, None)),
    ],
)
def test_equals_exhaustive_search_at_six_layers(num_devices, devices, groups, num_microbatches, inflow):
    rng = np.random.default_rng([num_microbatches, *devices])
    shape = (6, 6, len(devices), 1 if len(devices) > 4 else 2)
    table = StageTable(
        # Costs that fall with the number of devices, so that several stages are worth it.
        seconds=random_costs(rng, shape, ties=False, missing=0.2)
        * (1 + np.abs(np.subtract.outer(range(6), range(6))))[:, :, None, None]
        / np.array(devices)[:, None] ** 0.9,
        max_following_stages=rng.integers(-1, 6, shape),
        submesh_devices=devices,
        submesh_groups=groups,
        inflow_seconds=random_inflow(rng, 6, devices, inflow),
    )
    problem = {"table": table, "num_devices": num_devices, "num_microbatches": num_microbatches}
    limits = {"min_stages": 1, "max_stages": None, "serialized": False, "waiting_share": 1.0}
    found = solve(**problem)
    assert_matches(found, brute_force(**problem), problem | limits)
    assert solve(**problem, early_stop=False).seconds == pytest.approx(found.seconds, rel=1e-14)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_early_stop_loses_nothing(problem):
    quick, full = solve(**problem), solve(**problem, early_stop=False)
    assert quick.status is full.status
    assert quick.seconds == full.seconds or quick.seconds == pytest.approx(full.seconds, rel=1e-14)
    assert quick.num_evaluated <= max(full.num_evaluated, 1)


def test_units_of_devices_and_alike_senders_change_nothing():
    """Eight times the devices in submeshes eight times as large, and inflow that is the same from all senders."""
    table = random_table(6, seed=3)
    large = replace(table, submesh_devices=tuple(8 * devices for devices in table.submesh_devices))
    alike = np.full((6, 10, 10), 0.25)
    added = replace(table, seconds=table.seconds + 0.25 * (np.arange(6) > 0)[:, None, None, None])
    for options in ({"num_microbatches": 16}, {"num_microbatches": 16, "serialized": True}):
        small = solve(table, num_devices=64, **options)
        assert solve(large, num_devices=512, **options).stages == small.stages
        with_inflow = solve(replace(table, inflow_seconds=alike), num_devices=64, **options)
        assert with_inflow.seconds == pytest.approx(solve(added, num_devices=64, **options).seconds)


def test_stages_go_to_the_kind_of_device_that_suits_them():
    """Layers 0 and 3 are fast on the first group, 1 and 2 on the second; the pipeline may go to and fro."""

    def seconds(i, j, m):
        return sum(1.0 if (layer in (0, 3)) == (m == 0) else 5.0 for layer in range(i, j + 1))

    table = replace(table_of(seconds, devices=(1, 2)), submesh_groups=(0, 1))
    found = solve(table, num_devices=(2, 2), num_microbatches=50)
    assert [(stage.first_layer, stage.last_layer, stage.submesh) for stage in found.stages] == [
        (0, 0, 0),
        (1, 2, 1),
        (3, 3, 0),
    ]
    assert found.seconds == 4 + 49 * 2
    # Where it takes long to get back to the first group, the pipeline stays on the second.
    inflow = np.zeros((4, 2, 2))
    inflow[:, 1, 0] = 10.0
    one_way = solve(replace(table, inflow_seconds=inflow), num_devices=(2, 2), num_microbatches=50)
    assert [stage.submesh for stage in one_way.stages] == [0, 0, 1]
    assert one_way.seconds == 1 + 5 + 6 + 49 * 6
    whole = replace(table_of(lambda i, j, m: 0.5 if m == 2 else 9.0, devices=(1, 2, 4)), submesh_groups=(0, 1, None))
    assert [stage.submesh for stage in solve(whole, num_devices=(2, 2), num_microbatches=50).stages] == [2]


@pytest.mark.parametrize("num_microbatches", [2, 8, 64])
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
    square = {"seconds": np.zeros((1, 1, 2, 1)), "max_following_stages": np.zeros((1, 1, 2, 1), int)}
    with pytest.raises(PlanError, match="the group of each"):
        StageTable(**square, submesh_devices=(1, 2), submesh_groups=(0,))
    for inflow in (np.zeros((1, 2)), np.full((1, 2, 2), np.inf), np.full((1, 2, 2), -1.0)):
        with pytest.raises(PlanError, match="inflow_seconds needs the shape"):
            StageTable(**square, submesh_devices=(1, 2), inflow_seconds=inflow)
    grouped = StageTable(**square, submesh_devices=(1, 2), submesh_groups=(0, 1))
    with pytest.raises(PlanError, match="belongs to group 1, but devices were given for 1 groups"):
        solve(grouped, num_devices=2, num_microbatches=1)
    with pytest.raises(PlanError, match="at least one device, micro-batch and stage"):
        solve(table_of(lambda i, j, m: 1.0), num_devices=1, num_microbatches=0)


def test_kernels_compile_ahead():
    """In a process of its own, where nothing else has compiled them; one run serves tables of any size."""
    program = """
from alpa_lite.inter_op import stage_dp, stage_kernels
from benchmarks.search import random_table
stage_dp.compile_kernels()
called = (stage_kernels.choices_of, stage_kernels.fill, stage_kernels.trace)
table = random_table(4, num_configurations=2)
stage_dp.solve(table, stage_dp.PipelineTerms(num_devices=8, num_microbatches=2, max_stages=2))
print([(each.__name__, len(each.signatures)) for each in called])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('choices_of', 1), ('fill', 1), ('trace', 1)]"
