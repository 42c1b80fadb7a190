import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.schedule import (
    SCHEDULES,
    GPipe,
    OneFOneB,
    Schedule,
    Sequential,
    Task,
    TaskKind,
    linearize,
    peak_in_flight,
    schedule_named,
    simulate,
    validate,
)

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
num_stages = st.integers(1, 6)
num_microbatches = st.integers(1, 9)
seconds = st.integers(0, 9).map(float)


def forward(stage: int, microbatch: int) -> Task:
    return Task(stage=stage, microbatch=microbatch, kind=TaskKind.FORWARD)


def backward(stage: int, microbatch: int) -> Task:
    return Task(stage=stage, microbatch=microbatch, kind=TaskKind.BACKWARD)


@pytest.mark.parametrize(
    ("schedule", "makespan", "peaks", "over_ideal", "of_total"),
    [
        (GPipe(), 33, [8, 8, 8, 8], 3 / 8, 3 / 11),
        (OneFOneB(), 33, [4, 3, 2, 1], 3 / 8, 3 / 11),
        (Sequential(), 96, [1, 1, 1, 1], 3, 3 / 4),
    ],
)
def test_reference_values_for_four_stages_and_eight_microbatches(schedule, makespan, peaks, over_ideal, of_total):
    tasks = schedule.tasks(4, 8)
    timeline = simulate(tasks, [1.0] * 4, [2.0] * 4)
    assert timeline.makespan_seconds == makespan
    assert [peak_in_flight(tasks_of_stage) for tasks_of_stage in tasks] == peaks
    assert timeline.bubble_over_ideal == pytest.approx(over_ideal)
    assert timeline.bubble_fraction == pytest.approx(of_total)


def test_the_order_of_1f1b_is_warmup_then_alternating_then_drain():
    first, last = OneFOneB().tasks(2, 3)
    assert first == (forward(0, 0), forward(0, 1), backward(0, 0), forward(0, 2), backward(0, 1), backward(0, 2))
    assert last == (forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1), forward(1, 2), backward(1, 2))


@given(p=num_stages, m=num_microbatches, tf=st.integers(1, 9), tb=st.integers(1, 9))
def test_makespan_formulas(p, m, tf, tb):
    def makespan(schedule: Schedule) -> float:
        return simulate(schedule.tasks(p, m), [tf] * p, [tb] * p).makespan_seconds

    assert makespan(Sequential()) == m * p * (tf + tb)
    assert makespan(GPipe()) == (m + p - 1) * (tf + tb)
    assert makespan(OneFOneB()) == (m + p - 1) * (tf + tb)


@given(p=num_stages, m=num_microbatches)
def test_bubble_formulas(p, m):
    for schedule in (GPipe(), OneFOneB()):
        timeline = simulate(schedule.tasks(p, m), [1.0] * p, [2.0] * p)
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@every_schedule
@given(p=num_stages, m=num_microbatches)
def test_in_flight_is_what_the_task_lists_hold(schedule, p, m):
    tasks = schedule.tasks(p, m)
    assert [schedule.in_flight(stage, p, m) for stage in range(p)] == [peak_in_flight(stage) for stage in tasks]


@every_schedule
@given(p=num_stages, m=num_microbatches)
def test_every_schedule_is_valid_and_its_linear_order_respects_dependencies(schedule, p, m):
    tasks = schedule.tasks(p, m)
    validate(tasks, p, m)
    order = linearize(tasks)
    assert sorted(order, key=str) == sorted((task for stage in tasks for task in stage), key=str)
    position = {task: index for index, task in enumerate(order)}
    for stage_tasks in tasks:
        assert all(position[first] < position[second] for first, second in pairwise(stage_tasks))
    for b in range(m):
        path = [forward(stage, b) for stage in range(p)] + [backward(stage, b) for stage in reversed(range(p))]
        assert all(position[first] < position[second] for first, second in pairwise(path))


@every_schedule
def test_micro_batches_go_backward_in_ascending_order(schedule):
    for tasks in schedule.tasks(3, 5):
        assert [task.microbatch for task in tasks if task.kind is TaskKind.BACKWARD] == [0, 1, 2, 3, 4]


def test_linear_order_follows_the_earliest_end():
    order = linearize(GPipe().tasks(2, 2))
    assert order == (
        *(forward(0, 0), forward(0, 1), forward(1, 0), forward(1, 1)),
        *(backward(1, 0), backward(0, 0), backward(1, 1), backward(0, 1)),
    )


@every_schedule
@given(data=st.data(), p=num_stages, m=num_microbatches)
def test_spans_of_uneven_stages_respect_dependencies_and_transfers(schedule, data, p, m):
    forwards = data.draw(st.lists(seconds, min_size=p, max_size=p))
    backwards = data.draw(st.lists(seconds, min_size=p, max_size=p))
    transfers = data.draw(st.lists(seconds, min_size=p - 1, max_size=p - 1))
    serialized = data.draw(st.booleans())
    timeline = simulate(schedule.tasks(p, m), forwards, backwards, transfer_seconds=transfers, serialized=serialized)
    spans = {(span.stage, span.microbatch, span.kind): span for span in timeline.spans}
    assert len(spans) == len(timeline.spans) == 2 * p * m
    for b in range(m):
        for stage in range(p):
            ahead, back = spans[stage, b, TaskKind.FORWARD], spans[stage, b, TaskKind.BACKWARD]
            assert ahead.end_seconds == ahead.start_seconds + forwards[stage]
            assert back.end_seconds == back.start_seconds + backwards[stage]
            assert back.start_seconds >= ahead.end_seconds
            if stage > 0:
                previous = spans[stage - 1, b, TaskKind.FORWARD]
                assert ahead.start_seconds >= previous.end_seconds + transfers[stage - 1]
                assert spans[stage - 1, b, TaskKind.BACKWARD].start_seconds >= back.end_seconds + transfers[stage - 1]
    busy = m * (sum(forwards) + sum(backwards))
    available = timeline.makespan_seconds * (1 if serialized else p)
    assert timeline.makespan_seconds == max(span.end_seconds for span in timeline.spans)
    assert timeline.bubble_fraction * available == pytest.approx(available - busy)


def test_a_slow_transfer_delays_the_receiver_only():
    timeline = simulate(GPipe().tasks(2, 2), [1.0, 1.0], [1.0, 1.0], transfer_seconds=[10.0])
    starts = {(span.stage, span.microbatch, span.kind): span.start_seconds for span in timeline.spans}
    assert starts[0, 1, TaskKind.FORWARD] == 1.0
    assert starts[1, 0, TaskKind.FORWARD] == 11.0
    assert timeline.makespan_seconds == 26.0


@every_schedule
@given(data=st.data(), p=num_stages, m=num_microbatches)
def test_stages_that_share_a_processor_never_overlap(schedule, data, p, m):
    forwards = data.draw(st.lists(seconds, min_size=p, max_size=p))
    backwards = data.draw(st.lists(seconds, min_size=p, max_size=p))
    timeline = simulate(schedule.tasks(p, m), forwards, backwards, serialized=True)
    assert timeline.makespan_seconds == m * (sum(forwards) + sum(backwards))
    assert timeline.bubble_fraction == timeline.bubble_over_ideal == 0.0
    assert all(first.end_seconds <= second.start_seconds for first, second in pairwise(timeline.spans))


def test_sequential_keeps_one_stage_busy_at_every_instant():
    spans = sorted(simulate(Sequential().tasks(4, 3), [1.0] * 4, [2.0] * 4).spans, key=lambda span: span.start_seconds)
    assert all(first.end_seconds == second.start_seconds for first, second in pairwise(spans))


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=lambda schedule: schedule.name)
def test_validator_catches_broken_lists(schedule):
    tasks = schedule.tasks(3, 4)
    first, *others = tasks
    with pytest.raises(PlanError, match=r"holds the forward of micro-batch 0 on stage 0 0 times"):
        validate((first[1:], *others), 3, 4)
    with pytest.raises(PlanError, match=r"holds the backward of micro-batch 3 on stage 0 2 times"):
        validate(((*first, first[-1]), *others), 3, 4)
    with pytest.raises(PlanError, match=r"stage 1"):
        validate(((*first, forward(1, 0)), *others), 3, 4)
    with pytest.raises(PlanError, match=r"micro-batch 9"):
        validate(((*first, forward(0, 9)), *others), 3, 4)
    with pytest.raises(PlanError, match=r"3 stages needs as many task lists"):
        validate(others, 3, 4)


def test_validator_catches_lists_that_wait_for_each_other():
    first, second = OneFOneB().tasks(2, 2)
    with pytest.raises(PlanError, match=r"backward of micro-batch 0 on stage 1 waits for the forward of"):
        validate((first, (second[1], second[0], *second[2:])), 2, 2)
    # Each list is in a possible order, but stage 0 wants micro-batch 0 back before it sends 1, and stage 1 needs 1.
    with pytest.raises(PlanError, match=r"cannot finish"):
        validate(
            (
                (forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)),
                (forward(1, 0), forward(1, 1), backward(1, 0), backward(1, 1)),
            ),
            2,
            2,
        )


@every_schedule
def test_json_round_trip_by_name(schedule):
    text = json.dumps(schedule.to_json())
    assert Schedule.from_json(json.loads(text)) == schedule
    assert schedule_named(schedule.name) == schedule


def test_unknown_names_and_impossible_sizes_are_refused():
    with pytest.raises(PlanError, match=r"no schedule named 'zigzag'. Choose one of: sequential, gpipe, 1f1b"):
        schedule_named("zigzag")
    with pytest.raises(PlanError, match=r"option"):
        Schedule.from_json({"name": "gpipe", "chunks": 2})
    with pytest.raises(PlanError, match=r"not 0 and 4"):
        GPipe().tasks(0, 4)
    with pytest.raises(PlanError, match=r"2 stages need 2 forward"):
        simulate(GPipe().tasks(2, 2), [1.0], [1.0, 1.0])
    with pytest.raises(PlanError, match=r"none of them negative"):
        simulate(GPipe().tasks(2, 2), [1.0, -1.0], [1.0, 1.0])
