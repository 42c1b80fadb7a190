"""Schedules that go back and forth over the processors, and zero-bubble H2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.schedule import (
    DualPipeV,
    OneFOneB,
    Schedule,
    Wave,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
    peak_in_flight,
    simulate,
    validate,
)


def run(schedule: Schedule, p: int, m: int, tf: float = 1.0, ti: float = 1.0, tw: float = 1.0) -> tuple[float, float]:
    """The makespan less the work of a processor, and the most micro-batches on one; times are of all its stages."""
    v = schedule.stages_per_processor
    n = p * v
    tasks = schedule.tasks(n, m)
    validate(tasks, n, m, processors=[schedule.processor_of(stage, n) for stage in range(n)])
    timeline = simulate(tasks, [tf / v] * n, [(ti + tw) / v] * n, weight_seconds=[tw / v] * n)
    return timeline.makespan_seconds - m * (tf + ti + tw), max(map(peak_in_flight, tasks)) / v


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_waiting_and_memory_against_1f1b(p, rounds):
    m = rounds * p
    waits, held = run(OneFOneB(), p, m)
    assert (waits, held) == (3 * (p - 1), p)
    # Every processor but the first has to wait for the first micro-batch: no order is shorter.
    assert run(ZeroBubbleH2(), p, m) == (p - 1, 2 * p - 1)
    waits_v, held_v = run(ZeroBubbleV(), p, m)
    assert (p - 1) / 2 <= waits_v <= (p - 1) / 2 * (1.5 if p > 4 else 1.0) and held_v <= p
    waits_wave, held_wave = run(Wave(), p, m)
    assert waits_wave <= max(waits * 3 / 4, 0) and held_wave <= 1.5 * p
    waits_dual, held_dual = run(DualPipeV(), p, m)
    assert waits_dual <= p / 2 and held_dual == p + 1 / 2


@pytest.mark.parametrize("p", [4, 8])
def test_half_the_memory_leaves_half_of_the_waiting_and_a_bit(p):
    waits, held = run(ZeroBubbleV(memory=0.5), p, 8 * p)
    assert held <= (p + 1) / 2 and waits <= 0.8 * 3 * (p - 1)


def test_waves_for_as_many_micro_batches_as_processors_wait_less_the_more_waves():
    assert [run(wave, 4, 4)[0] for wave in (OneFOneB(), Wave(), Wave(num_waves=2))] == [9, 6, 4]


@given(p=st.integers(1, 6), m=st.integers(1, 12), tw=st.integers(1, 4), more=st.integers(0, 3))
def test_h2_never_waits_longer_than_h1(p, m, tw, more):
    tf = ti = tw + more
    assert run(ZeroBubbleH2(), p, m, tf, ti, tw)[0] <= run(ZeroBubbleH1(), p, m, tf, ti, tw)[0] + 1e-9


@given(p=st.integers(1, 6), w=st.integers(1, 3))
def test_neighbours_of_a_turn_share_a_processor(p, w):
    schedule = Wave(num_waves=w)
    homes = [schedule.processor_of(stage, 2 * w * p) for stage in range(2 * w * p)]
    assert homes == [*range(p), *reversed(range(p))] * w
    assert [ZeroBubbleV().processor_of(s, 2 * p) for s in range(2 * p)] == homes[: 2 * p]


def test_numbers_that_they_cannot_run_are_refused():
    with pytest.raises(PlanError, match=r"2 groups of devices needs at least 4 micro-batches, and 3 were asked for"):
        DualPipeV().tasks(4, 3)
    with pytest.raises(PlanError, match=r"not num_waves=0 times"):
        Wave(num_waves=0).tasks(4, 4)
    with pytest.raises(PlanError, match=r"not memory=0.0"):
        ZeroBubbleV(memory=0.0).tasks(4, 4)
    with pytest.raises(PlanError, match=r"Ask for a multiple of 2"):
        ZeroBubbleV().tasks(3, 4)
