from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.schedule import AsynchronousSchedule, OneFOneB, PipeDream, PipeDream2BW, TaskKind, simulate

ASYNCHRONOUS = (PipeDream(), PipeDream(vertical_sync=True), PipeDream2BW(), PipeDream2BW(accumulated=8))
every_schedule = pytest.mark.parametrize("schedule", ASYNCHRONOUS, ids=str)


def versions_in_use(schedule: AsynchronousSchedule, stage: int, p: int, m: int) -> tuple[list[int], list[int], int]:
    """By going through a task list: the version of each micro-batch, the newest when it starts, and the most held."""
    group, newest, used, found = schedule.microbatches_per_update(p), 0, list[int](), list[int]()
    flying, most = list[int](), 0
    for task in schedule.tasks(p, m)[stage]:
        if task.kind is TaskKind.FORWARD:
            used.append(schedule.version(stage, p, task.microbatch))
            found.append(newest)
            flying.append(used[-1])
        else:
            most = max(most, len({*flying, newest}))
            flying.pop(0)
            newest += (task.microbatch + 1) % group == 0
        most = max(most, len({*flying, newest}))
    return used, found, most


def test_pipedream_runs_a_micro_batch_with_the_newest_weights_when_it_starts():
    """Version t - (p-1-s) on stage s, and p - s versions at a time (PipeDream, section 3.3)."""
    for p in range(1, 7):
        for stage in range(p):
            used, newest, most = versions_in_use(PipeDream(), stage, p, 20)
            assert used == newest == [max(0, t - (p - 1 - stage)) for t in range(20)]
            assert most == p - stage


def test_vertical_sync_takes_the_version_of_the_first_stage_everywhere():
    for stage in range(4):
        used, newest, _ = versions_in_use(PipeDream(vertical_sync=True), stage, 4, 20)
        assert used == versions_in_use(PipeDream(), 0, 4, 20)[0]
        assert all(mine <= there for mine, there in zip(used, newest, strict=True))


@given(p=st.integers(2, 6), more=st.integers(0, 4), groups=st.integers(3, 6))
def test_pipedream_2bw_lacks_one_update_and_holds_two_versions(p, more, groups):
    group = p + more
    schedule = PipeDream2BW(accumulated=group)
    for stage in range(p):
        used, newest, most = versions_in_use(schedule, stage, p, groups * group)
        assert used == [max(0, b // group - 1) for b in range(groups * group)]
        assert all(mine <= there for mine, there in zip(used, newest, strict=True)), "a version that is not there yet"
        assert most == 2


@every_schedule
def test_versions_never_fall_and_no_update_is_skipped(schedule):
    for stage in range(4):
        used, _, _ = versions_in_use(schedule, stage, 4, 24)
        assert all(b - a in (0, 1) for a, b in pairwise(used))


@every_schedule
def test_one_stage_is_never_late(schedule):
    used, newest, most = versions_in_use(schedule, 0, 1, 24)
    assert used == newest and most == 1


@every_schedule
def test_the_pipeline_fills_and_drains_once_however_many_updates_there_are(schedule):
    p = 4
    for m in (8, 32, 128):
        timeline = simulate(schedule.tasks(p, m), [1.0] * p, [2.0] * p)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    # Between the first and the last micro-batch no stage ever waits.
    spans = [span for span in timeline.spans if span.stage == 0]
    steady = [(a, b) for a, b in pairwise(spans) if p <= a.microbatch < m - p and p <= b.microbatch < m - p]
    assert steady and all(b.start_seconds == a.end_seconds for a, b in steady)
    # A synchronous step for each group drains as often as there are groups.
    group = schedule.microbatches_per_update(p)
    flushed = simulate(OneFOneB().tasks(p, group), [1.0] * p, [2.0] * p)
    assert flushed.bubble_fraction == pytest.approx((p - 1) / (group + p - 1))
    assert timeline.makespan_seconds < flushed.makespan_seconds * m / group


def test_groups_must_divide_the_micro_batches_and_be_as_many_as_stages():
    with pytest.raises(PlanError, match=r"every 4 micro-batches, of which 6 are no multiple. Use num_microbatches=4"):
        PipeDream2BW().tasks(4, 6)
    with pytest.raises(PlanError, match=r"update every 3 micro-batches, but 4 stages .* Use accumulated=4 or more"):
        PipeDream2BW(accumulated=3).tasks(4, 6)
