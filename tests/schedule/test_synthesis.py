"""Orders that are made for given times: against all orders of small steps, and against all other schedules."""

import json
import random
from dataclasses import replace
from functools import cache

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.schedule import (
    SCHEDULES,
    Inference,
    Interleaved1F1B,
    MessageDriven,
    Schedule,
    Synthesised,
    Wave,
    ZeroBubbleV,
    peak_in_flight,
    simulate,
    validate,
)


def there_and_back(p: int, n: int) -> tuple[int, ...]:
    return tuple(([*range(p), *reversed(range(p))] * n)[:n])


def drawn(number: int, *, small: bool) -> tuple[Synthesised, int, int]:
    """A schedule for uneven stages with its numbers of stages and of micro-batches."""
    draw = random.Random(number)
    p, v = draw.choice((2, 2, 3) if small else (2, 3, 4, 6)), draw.choice((1, 1, 2))
    n, m = p * v, draw.choice((1, 2, 3)) if small else draw.choice((1, 2, p, 2 * p, 3 * p))
    backward = tuple(float(draw.randint(2, 9)) for _ in range(n))
    split = draw.random() < 0.5
    schedule = Synthesised(
        forward=tuple(float(draw.randint(1, 5)) for _ in range(n)),
        backward=backward,
        weight=tuple(float(draw.randint(1, int(b) - 1)) if split else 0.0 for b in backward),
        transfer=() if small or draw.random() < 0.5 else tuple(float(draw.choice((0, 1, 3))) for _ in range(n - 1)),
        processors=draw.choice((there_and_back(p, n), (*range(p),) * v)),
        most_held=tuple(draw.randint(v, m * v) for _ in range(p)),
    )
    return schedule, n, m


def seconds_of(schedule: Synthesised, tasks) -> float:
    timeline = simulate(
        tasks,
        schedule.forward,
        schedule.backward,
        weight_seconds=schedule.weight,
        transfer_seconds=schedule.transfer,
    )
    return timeline.makespan_seconds


def shortest_of_all(schedule: Synthesised, n: int, m: int) -> float:
    """The makespan of the shortest order, by going through all: which stage of each processor runs what next."""
    split = any(schedule.weight)
    parts = ("F", "I", "W") if split else ("F", "B")
    lasts = {
        "F": schedule.forward,
        "B": schedule.backward,
        "I": tuple(b - w for b, w in zip(schedule.backward, schedule.weight, strict=True)),
        "W": schedule.weight,
    }
    p, back = 1 + max(schedule.processors), parts[1]

    @cache
    def best(done: tuple[tuple[tuple[str, int, int], float], ...], free: tuple[float, ...]) -> float:
        ends = dict(done)
        if len(ends) == len(parts) * n * m:
            return max(free)
        found = float("inf")
        for stage in range(n):
            for part in parts:
                b = sum((part, stage, other) in ends for other in range(m))
                if b == m:
                    continue
                needs = []
                if part == "F" and stage:
                    needs = [("F", stage - 1, b)]
                elif part == back:
                    needs = [("F", stage, b), *([(back, stage + 1, b)] if stage < n - 1 else [])]
                elif part == "W":
                    needs = [(back, stage, b)]
                home = schedule.processors[stage]
                held = sum(
                    (("F", s, o) in ends) - ((parts[-1], s, o) in ends)
                    for s in range(n)
                    if schedule.processors[s] == home
                    for o in range(m)
                )
                if all(need in ends for need in needs) and (part != "F" or held < schedule.most_held[home]):
                    end = max([free[home], *(ends[need] for need in needs)]) + lasts[part][stage]
                    then = tuple(sorted({**ends, (part, stage, b): end}.items()))
                    found = min(found, best(then, (*free[:home], end, *free[home + 1 :])))
        return found

    return best((), (0.0,) * p)


def test_small_steps_get_the_shortest_order_of_all():
    compared = 0
    for number in range(60):
        schedule, n, m = drawn(number, small=True)
        if (3 if any(schedule.weight) else 2) * n * m <= 12:
            best = shortest_of_all(schedule, n, m)
            assert seconds_of(schedule, schedule.tasks(n, m)) == pytest.approx(best), number
            assert schedule.bound(n, m) == pytest.approx(best), number
            compared += 1
    assert compared >= 25


def test_a_processor_may_have_to_leave_a_gap_in_which_a_forward_pass_would_fit():
    """Its memory is better kept for a later stage: 74 seconds by going through all orders, 75 without such gaps."""
    schedule = Synthesised(
        forward=(1.0, 4.0, 4.0, 5.0),
        backward=(5.0, 6.0, 6.0, 6.0),
        weight=(0.0, 0.0, 0.0, 0.0),
        processors=(0, 1, 0, 1),
        most_held=(4, 3),
    )
    assert seconds_of(schedule, schedule.tasks(4, 3)) == schedule.bound(4, 3) == 74


def listed(schedule: Synthesised, n: int, m: int):
    """The orders of all other schedules with the same places that hold no more."""
    chunks = n // (1 + max(schedule.processors))
    others: list[Schedule] = [*SCHEDULES, Interleaved1F1B(num_chunks=chunks), Wave(num_waves=max(1, chunks // 2))]
    others += [ZeroBubbleV(memory=part) for part in (0.25, 0.5, 0.75, 1.5)]
    others += [MessageDriven(limit=limit) for limit in range(1, 1 + max(schedule.most_held))]
    for other in others:
        try:
            tasks = other.tasks(n, m)
        except PlanError:
            continue
        if other != Inference() and tuple(other.processor_of(s, n) for s in range(n)) == schedule.processors:
            if all(peak_in_flight(each) <= most for each, most in zip(tasks, schedule.most_held, strict=True)):
                yield tasks


def test_an_order_for_less_memory_may_be_shorter():
    """One that holds two on each processor takes 400 seconds, and those with room for a third one 452."""
    schedule = Synthesised(
        forward=(7.0, 10.0, 9.0, 6.0),
        backward=(14.0, 16.0, 26.0, 26.0),
        weight=(5.0, 4.0, 15.0, 13.0),
        transfer=(5.0, 2.0, 2.0),
        processors=(0, 1, 1, 0),
        most_held=(2, 3),
    )
    less = ZeroBubbleV(memory=0.25).tasks(4, 4)
    assert [peak_in_flight(each) for each in less] == [2, 2]
    assert seconds_of(schedule, schedule.tasks(4, 4)) <= seconds_of(schedule, less) == 400


def test_a_bound_knows_that_memory_makes_processors_wait():
    """One micro-batch at a time takes m times the way of one, of which no processor's work says anything."""
    for stages, weight in ((4, 0.0), (4, 1.0), (3, 0.5)):
        schedule = Synthesised(
            forward=(1.0,) * stages,
            backward=(2.0,) * stages,
            weight=(weight,) * stages,
            transfer=(0.25,) * (stages - 1),
            most_held=(1,) * stages,
        )
        way = 3 * stages + 0.5 * (stages - 1)
        best = seconds_of(schedule, schedule.tasks(stages, 16))
        # What may wait behind the last micro-batch on a processor is left out.
        assert 16 * (way - weight * (stages - 1)) <= schedule.bound(stages, 16) <= best <= 16 * way


def test_a_bound_knows_that_few_gradients_of_weights_may_wait():
    """The last stage holds one micro-batch: earlier stages wait for its gradients of weights, all but the last one."""
    schedule = Synthesised(
        forward=(1.0, 2.0), backward=(3.0, 4.0), weight=(1.0, 2.0), transfer=(0.5,), most_held=(4, 1)
    )
    # 16 micro-batches on the last stage, but for the last gradient of weights, and what comes before and after.
    assert schedule.least_seconds(2, 16) == 1.5 + 16 * 6 - 2 + 2.5
    assert replace(schedule, most_held=(4, 16)).least_seconds(2, 16) == 1.5 + 16 * 6
    assert seconds_of(schedule, schedule.tasks(2, 16)) >= schedule.bound(2, 16) == schedule.least_seconds(2, 16)


@pytest.mark.slow
def test_no_other_schedule_is_shorter_in_200_draws():
    shorter = proven = 0
    for number in range(200):
        schedule, n, m = drawn(number, small=False)
        tasks = schedule.tasks(n, m)
        held = [schedule.in_flight(stage, n, m) for stage in range(n)]
        validate(tasks, n, m, processors=schedule.processors, in_flight=held)
        assert all(peak_in_flight(each) <= most for each, most in zip(tasks, schedule.most_held, strict=True))
        mine, others = seconds_of(schedule, tasks), [seconds_of(schedule, each) for each in listed(schedule, n, m)]
        assert schedule.bound(n, m) <= mine + 1e-9
        assert mine <= min(others, default=mine) + 1e-9, number
        shorter += mine < min(others, default=float("inf")) * 0.995
        proven += mine <= schedule.bound(n, m) + 1e-9
    assert shorter > 50 and proven > 50


def test_it_survives_json_and_refuses_other_numbers_of_stages():
    schedule = Synthesised(forward=(1.0, 2.0), backward=(2.0, 3.0), weight=(0.5, 1.0), most_held=(2, 1))
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    with pytest.raises(PlanError, match=r"made for 2 stages, and 3 are to be run"):
        schedule.tasks(3, 2)
    with pytest.raises(PlanError, match=r"numbered from 0 without gaps"):
        Synthesised(processors=(0, 2)).tasks(2, 2)
    with pytest.raises(PlanError, match=r"negative time"):
        Synthesised(forward=(-1.0, 1.0)).tasks(2, 2)
    with pytest.raises(PlanError, match=r"option forward of the schedule 'synthesised' is 3; give a list of numbers"):
        Schedule.from_json({"name": "synthesised", "forward": 3})
