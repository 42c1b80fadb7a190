import json
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.schedule import (
    SCHEDULES,
    EagerOneFOneB,
    GPipe,
    Inference,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    Sequential,
    Task,
    TaskKind,
    WarmupSchedule,
    ZeroBubbleH1,
    linearize,
    peak_held,
    peak_in_flight,
    schedule_named,
    simulate,
    splits_backward,
    validate,
)

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
whole_backward = pytest.mark.parametrize(
    "schedule",
    [s for s in SCHEDULES if s != Inference() and not splits_backward(s.tasks(2 * s.stages_per_processor, 4)[0])],
    ids=lambda schedule: schedule.name,
)
num_stages = st.integers(1, 6)
num_microbatches = st.integers(1, 9)
seconds = st.integers(0, 9).map(float)


def forward(stage: int, microbatch: int) -> Task:
    return Task(stage=stage, microbatch=microbatch, kind=TaskKind.FORWARD)


def sizes(schedule: Schedule, p: int, m: int) -> tuple[int, int]:
    """Numbers of stages and micro-batches that a schedule can run, for p processors."""
    chunks = schedule.stages_per_processor
    # Asynchronous schedules update after whole groups of micro-batches.
    groups = m * max(1, schedule.microbatches_per_update(p))
    return p * chunks, groups if chunks == 1 else (2 + m % 2) * p


def home_of(schedule: Schedule, n: int) -> list[int]:
    return [schedule.processor_of(stage, n) for stage in range(n)]


def backward(stage: int, microbatch: int) -> Task:
    return Task(stage=stage, microbatch=microbatch, kind=TaskKind.BACKWARD)


@pytest.mark.parametrize(
    ("schedule", "makespan", "peaks", "over_ideal", "of_total"),
    [
        (GPipe(), 33, [8, 8, 8, 8], 3 / 8, 3 / 11),
        (OneFOneB(), 33, [4, 3, 2, 1], 3 / 8, 3 / 11),
        (Sequential(), 96, [1, 1, 1, 1], 3, 3 / 4),
        (ZeroBubbleH1(), 27, [4, 4, 4, 4], 3 / 24, 3 / 27),
        (Inference(), 11, [1, 1, 1, 1], 3 / 8, 3 / 11),
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
    n, m = sizes(schedule, p, m)
    lists, homes = schedule.tasks(n, m), home_of(schedule, n)
    tasks = [[task for task in lists[homes[stage]] if task.stage == stage] for stage in range(n)]
    assert [schedule.in_flight(stage, n, m) for stage in range(n)] == [peak_in_flight(stage) for stage in tasks]


@every_schedule
@given(p=num_stages, m=num_microbatches)
def test_every_schedule_is_valid_and_its_linear_order_respects_dependencies(schedule, p, m):
    n, m = sizes(schedule, p, m)
    tasks = schedule.tasks(n, m)
    validate(tasks, n, m, processors=home_of(schedule, n))
    order = linearize(tasks)
    assert sorted(order, key=str) == sorted((task for stage in tasks for task in stage), key=str)
    position = {task: index for index, task in enumerate(order)}
    for stage_tasks in tasks:
        assert all(position[first] < position[second] for first, second in pairwise(stage_tasks))
    for b in range(m):
        back = [task for task in order if task.microbatch == b and task.kind.sends_back]
        assert [task.stage for task in back] in ([], list(reversed(range(n))))
        path = [*(forward(stage, b) for stage in range(n)), *back]
        assert all(position[first] < position[second] for first, second in pairwise(path))
        for first in back if splits_backward(tasks[0]) else ():
            assert position[first] < position[replace(first, kind=TaskKind.WEIGHT_GRADIENT)]


@every_schedule
def test_micro_batches_go_backward_in_ascending_order(schedule):
    n, m = sizes(schedule, 3, 2)
    backwards = [task for tasks in schedule.tasks(n, m) for task in tasks if task.kind.is_last]
    for stage in range(n) if schedule != Inference() else ():
        assert [task.microbatch for task in backwards if task.stage == stage] == list(range(m))


def test_linear_order_follows_the_earliest_end():
    order = linearize(GPipe().tasks(2, 2))
    assert order == (
        *(forward(0, 0), forward(0, 1), forward(1, 0), forward(1, 1)),
        *(backward(1, 0), backward(0, 0), backward(1, 1), backward(0, 1)),
    )


@whole_backward
@given(data=st.data(), p=num_stages, m=num_microbatches)
def test_spans_of_uneven_stages_respect_dependencies_and_transfers(schedule, data, p, m):
    n, m = sizes(schedule, p, m)
    forwards = data.draw(st.lists(seconds, min_size=n, max_size=n))
    backwards = data.draw(st.lists(seconds, min_size=n, max_size=n))
    transfers = data.draw(st.lists(seconds, min_size=n - 1, max_size=n - 1))
    serialized = data.draw(st.booleans())
    timeline = simulate(schedule.tasks(n, m), forwards, backwards, transfer_seconds=transfers, serialized=serialized)
    spans = {(span.stage, span.microbatch, span.kind): span for span in timeline.spans}
    homes = home_of(schedule, n)
    assert len(spans) == len(timeline.spans) == 2 * n * m
    for processor in range(p):
        mine = [span for span in timeline.spans if homes[span.stage] == processor]
        assert all(first.end_seconds <= second.start_seconds for first, second in pairwise(mine))
    for b in range(m):
        for stage in range(n):
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


def test_a_slow_transfer_delays_the_receiver_and_the_next_transfer():
    timeline = simulate(GPipe().tasks(2, 2), [1.0, 1.0], [1.0, 1.0], transfer_seconds=[10.0])
    starts = {(span.stage, span.microbatch, span.kind): span.start_seconds for span in timeline.spans}
    assert starts[0, 1, TaskKind.FORWARD] == 1.0
    assert starts[1, 0, TaskKind.FORWARD] == 11.0
    assert starts[1, 1, TaskKind.FORWARD] == 21.0
    # Both backward passes start after all forwards; the second is sent when the first has arrived.
    assert timeline.makespan_seconds == 22.0 + 1.0 + 10.0 + 10.0 + 1.0


@pytest.mark.parametrize("transfer", [0.1, 1.0, 1.4, 3.0, 9.0])
@pytest.mark.parametrize("n", [2, 4])
def test_in_the_long_run_a_pipeline_is_as_fast_as_its_slowest_part(transfer, n):
    """Of stages with forwards of 1 and backwards of 2 seconds: the first one waits for the way of a micro-batch through
    all stages and back, with as many in flight as it may have, or for a transfer; GPipe for one in each pass."""

    def per_microbatch(schedule):
        few, many = (
            simulate(schedule.tasks(n, m), [1.0] * n, [2.0] * n, transfer_seconds=[transfer] * (n - 1)).makespan_seconds
            for m in (20 * n * (2 * n - 1), 40 * n * (2 * n - 1))
        )
        return (many - few) / (20 * n * (2 * n - 1))

    around = 3 * n + 2 * transfer * (n - 1)
    assert per_microbatch(OneFOneB()) == pytest.approx(around / n)
    assert per_microbatch(EagerOneFOneB()) == pytest.approx(max(3, transfer, around / (2 * n - 1)))
    assert per_microbatch(GPipe()) == pytest.approx(max(1, transfer) + max(2, transfer))


@whole_backward
@given(data=st.data(), p=num_stages, m=num_microbatches)
def test_stages_that_share_a_processor_never_overlap(schedule, data, p, m):
    n, m = sizes(schedule, p, m)
    forwards = data.draw(st.lists(seconds, min_size=n, max_size=n))
    backwards = data.draw(st.lists(seconds, min_size=n, max_size=n))
    timeline = simulate(schedule.tasks(n, m), forwards, backwards, serialized=True)
    assert timeline.makespan_seconds == m * (sum(forwards) + sum(backwards))
    assert timeline.bubble_fraction == timeline.bubble_over_ideal == 0.0
    assert all(first.end_seconds <= second.start_seconds for first, second in pairwise(timeline.spans))


# --- backward passes in two parts, and none ---------------------------------------------------------------------------


@given(p=num_stages, m=num_microbatches, tw=st.integers(1, 5), ti=st.integers(0, 4), tf=st.integers(0, 4))
def test_the_bubble_of_h1_lacks_the_weights_of_each_stage(p, m, tw, ti, tf):
    tf, ti = tw + tf, tw + ti
    timeline = simulate(ZeroBubbleH1().tasks(p, m), [tf] * p, [ti + tw] * p, weight_seconds=[tw] * p)
    # With fewer micro-batches than stages there is less that can be put off.
    assert timeline.makespan_seconds == m * (tf + ti + tw) + (p - 1) * (tf + ti) - min(p - 1, m - 1) * tw
    share = ZeroBubbleH1().waiting_share(tw / (tf + ti + tw), p, m)
    assert timeline.makespan_seconds == pytest.approx((m + share * (p - 1)) * (tf + ti + tw))
    assert timeline.makespan_seconds <= simulate(OneFOneB().tasks(p, m), [tf] * p, [ti + tw] * p).makespan_seconds


@given(data=st.data(), p=num_stages, m=num_microbatches)
def test_spans_of_two_parts_respect_dependencies_and_transfers(data, p, m):
    forwards = data.draw(st.lists(seconds, min_size=p, max_size=p))
    backwards = data.draw(st.lists(st.integers(9, 12).map(float), min_size=p, max_size=p))
    weights = data.draw(st.lists(seconds, min_size=p, max_size=p))
    transfers = data.draw(st.lists(seconds, min_size=p - 1, max_size=p - 1))
    tasks = ZeroBubbleH1().tasks(p, m)
    timeline = simulate(tasks, forwards, backwards, weight_seconds=weights, transfer_seconds=transfers)
    spans = {(span.stage, span.microbatch, span.kind.value): span for span in timeline.spans}
    assert len(spans) == 3 * p * m
    for b in range(m):
        for stage in range(p):
            ahead, back = spans[stage, b, "forward"], spans[stage, b, "input gradient"]
            last = spans[stage, b, "weight gradient"]
            assert back.end_seconds - back.start_seconds == backwards[stage] - weights[stage]
            assert last.end_seconds - last.start_seconds == weights[stage]
            assert back.start_seconds >= ahead.end_seconds and last.start_seconds >= back.end_seconds
            if stage > 0:
                before = spans[stage - 1, b, "input gradient"]
                assert before.start_seconds >= back.end_seconds + transfers[stage - 1]


def test_the_order_of_h1_delays_weights_by_the_number_of_the_stage():
    def text(stage: int) -> str:
        short = {"forward": "F", "input gradient": "I", "weight gradient": "W"}
        return " ".join(f"{short[t.kind.value]}{t.microbatch}" for t in ZeroBubbleH1().tasks(2, 3)[stage])

    assert text(0) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert text(1) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"


def test_validator_knows_the_parts_of_a_backward_pass():
    first, second = ZeroBubbleH1().tasks(2, 2)
    with pytest.raises(PlanError, match=r"weight gradient of micro-batch 1 on stage 1 0 times, not 1"):
        validate((first, second[:-1]), 2, 2)
    with pytest.raises(PlanError, match=r"backward of micro-batch 0 on stage 1 1 times, not 0"):
        validate((first, (*second, backward(1, 0))), 2, 2)
    weights_first = sorted(first, key=lambda task: task.kind is not TaskKind.WEIGHT_GRADIENT)
    with pytest.raises(PlanError, match=r"weight gradient of micro-batch 0 on stage 0 waits for the backward of"):
        validate((weights_first, second), 2, 2)
    with pytest.raises(PlanError, match=r"no backward tasks of stage 1, but of others"):
        validate((first, Inference().tasks(2, 2)[1]), 2, 2)


@every_schedule
def test_validator_bounds_what_is_in_flight(schedule):
    n, m = sizes(schedule, 3, 2)
    bounds = [schedule.in_flight(stage, n, m) for stage in range(n)]
    homes = home_of(schedule, n)
    validate(schedule.tasks(n, m), n, m, processors=homes, in_flight=bounds)
    bounds[1] -= 1
    with pytest.raises(
        PlanError, match=rf"Stage 1 of the schedule holds {bounds[1] + 1} .* in_flight says {bounds[1]}"
    ):
        validate(schedule.tasks(n, m), n, m, processors=homes, in_flight=bounds)


def test_a_schedule_of_the_users_own_is_found_by_its_name():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Lazy(WarmupSchedule):
        extra: int = 0

        @property
        def name(self) -> str:
            return "lazy"

        def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
            return num_stages - stage - 1 + self.extra

    assert Schedule.from_json(json.loads(json.dumps(Lazy(extra=2).to_json()))) == Lazy(extra=2)


# --- several stages per processor -------------------------------------------------------------------------------------

processors = st.integers(1, 8)
chunks = st.integers(1, 4)
groups = st.integers(1, 4)


@pytest.mark.parametrize(
    ("v", "makespan", "peaks", "over_ideal", "of_total"),
    [
        (1, 33, [4, 3, 2, 1], 3 / 8, 3 / 11),
        (2, 28.5, [11, 9, 7, 5], 3 / 16, 3 / 19),
        (4, 26.25, [19, 17, 15, 13], 3 / 32, 3 / 35),
    ],
)
def test_reference_values_of_chunks_on_four_processors_with_eight_microbatches(
    v, makespan, peaks, over_ideal, of_total
):
    tasks = Interleaved1F1B(num_chunks=v).tasks(4 * v, 8)
    timeline = simulate(tasks, [1 / v] * 4 * v, [2 / v] * 4 * v)
    assert timeline.makespan_seconds == makespan
    assert [peak_in_flight(tasks_of_processor) for tasks_of_processor in tasks] == peaks
    assert timeline.bubble_over_ideal == pytest.approx(over_ideal)
    assert timeline.bubble_fraction == pytest.approx(of_total)


def test_the_order_of_two_chunks_on_two_processors():
    first, last = Interleaved1F1B(num_chunks=2).tasks(4, 2)
    # Processor 0 owns stages 0 and 2, processor 1 stages 1 and 3.
    assert first[:4] == (forward(0, 0), forward(0, 1), forward(2, 0), forward(2, 1))
    assert first[4:] == (backward(2, 0), backward(2, 1), backward(0, 0), backward(0, 1))
    assert last == (
        *(forward(1, 0), forward(1, 1), forward(3, 0), backward(3, 0)),
        *(forward(3, 1), backward(3, 1), backward(1, 0), backward(1, 1)),
    )


@given(p=processors, v=chunks, n=groups)
def test_chunks_can_finish_and_hold_what_the_formula_says(p, v, n):
    m, schedule = min(n * p, 32 // p * p), Interleaved1F1B(num_chunks=v)
    tasks = schedule.tasks(p * v, m)
    validate(tasks, p * v, m)
    held = [peak_in_flight(tasks_of_processor) for tasks_of_processor in tasks]
    warmups = [2 * (p - s - 1) + (v - 1) * p if v > 1 else p - s - 1 for s in range(p)]
    assert held == [min(m * v, warmup + 1) for warmup in warmups]
    assert [schedule.in_flight(stage, p * v, m) for stage in range(p * v)] == [_counted(tasks, i) for i in range(p * v)]


def _counted(tasks, stage: int) -> int:
    """The micro-batches that a stage holds at most, by looking after every task at which ones those are."""
    (of_processor,) = [tasks_of for tasks_of in tasks if any(task.stage == stage for task in tasks_of)]
    held, most = set[int](), 0
    for task in of_processor:
        if task.stage == stage:
            held ^= {task.microbatch}
            most = max(most, len(held))
    return most


@given(p=processors, v=chunks, n=groups, tf=st.integers(1, 9), tb=st.integers(1, 9))
def test_the_bubble_of_equal_chunks_is_v_times_smaller(p, v, n, tf, tb):
    tasks = Interleaved1F1B(num_chunks=v).tasks(p * v, n * p)
    timeline = simulate(tasks, [tf] * p * v, [tb] * p * v)
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * n * p))
    assert timeline.makespan_seconds == pytest.approx((n * p + (p - 1) / v) * v * (tf + tb))


@given(p=num_stages, m=num_microbatches)
def test_one_chunk_per_processor_is_1f1b(p, m):
    single = Interleaved1F1B(num_chunks=1)
    assert single.tasks(p, m) == OneFOneB().tasks(p, m)
    assert [single.in_flight(s, p, m) for s in range(p)] == [OneFOneB().in_flight(s, p, m) for s in range(p)]


def test_what_a_processor_holds_is_the_sum_over_its_stages():
    tasks = [forward(0, 0), forward(2, 0), backward(2, 0), forward(0, 1), backward(0, 0), backward(0, 1)]
    assert peak_held(tasks, [1.0, 0.0, 10.0]) == 11.0
    assert peak_held(tasks, [5.0, 0.0, 1.0]) == 10.0
    assert peak_in_flight(tasks) == 2 and peak_held([], []) == 0.0


def test_chunks_refuse_what_they_cannot_run():
    schedule = Interleaved1F1B(num_chunks=2)
    with pytest.raises(
        PlanError, match=r"4 micro-batches at a time, so that it cannot run 6. Use num_microbatches=4 or"
    ):
        schedule.tasks(8, 6)
    with pytest.raises(PlanError, match=r"num_microbatches=4"):
        schedule.tasks(8, 2)
    with pytest.raises(PlanError, match=r"which 7 stages are not. Ask for a multiple of 2"):
        schedule.tasks(7, 8)
    with pytest.raises(PlanError, match=r"at least one chunk of the model, not 0"):
        Interleaved1F1B(num_chunks=0).tasks(4, 4)


def test_chunks_survive_json():
    schedule = Interleaved1F1B(num_chunks=3)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


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
    with pytest.raises(PlanError, match=r"3 stages needs as many task lists, or a number that divides them, but has 2"):
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
    with pytest.raises(
        PlanError,
        match=r"no schedule named 'zigzag'. Choose one of: 1f1b, dualpipe-v, eager-1f1b, gpipe, inference,",
    ):
        schedule_named("zigzag")
    with pytest.raises(PlanError, match=r"option"):
        Schedule.from_json({"name": "gpipe", "chunks": 2})
    with pytest.raises(PlanError, match=r"not 0 and 4"):
        GPipe().tasks(0, 4)
    with pytest.raises(PlanError, match=r"2 stages need 2 forward"):
        simulate(GPipe().tasks(2, 2), [1.0], [1.0, 1.0])
    with pytest.raises(PlanError, match=r"none of them negative"):
        simulate(GPipe().tasks(2, 2), [1.0, -1.0], [1.0, 1.0])
