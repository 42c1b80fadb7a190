"""The benchmark of asynchronous pipelines: its kept figures, and the seconds of stages that work at the same time."""

from __future__ import annotations

import pytest

from alpa_lite.plan.instructions import InstructionKind, TaskTime
from alpa_lite.schedule import OneFOneB, PipeDream, PipeDream2BW
from benchmarks import asynchronous


def times():
    tasks = [(s, kind, n) for s in range(4) for kind, n in (("forward", 1.0), ("backward", 2.0), ("update", 0.5))]
    return [
        TaskTime(
            stage=s,
            kind=InstructionKind.RUN,
            name=f"stage {s} {kind}",
            microbatch=0,
            start_seconds=0.0,
            end_seconds=n,
        )
        for s, kind, n in tasks
    ]


def test_seconds_of_stages_that_work_at_the_same_time():
    flushed = asynchronous._overlapped(times(), OneFOneB(), 4, 1)
    assert flushed == pytest.approx((7 * 3 + 0.5, 4 * (4 * 3 + 0.5) / (4 * 21.5)))
    often = asynchronous._overlapped(times(), PipeDream(), 16, 16)
    assert often == pytest.approx((19 * 3.5 / 16, 16 / 19))
    twice = asynchronous._overlapped(times(), PipeDream2BW(), 16, 4)
    assert twice == pytest.approx((19 * 3.125 / 4, 16 / 19))


def test_the_kept_runs_are_those_that_the_page_speaks_of():
    flushed, often, twice = asynchronous.kept()
    assert [run.schedule.partition(" (")[2].rstrip(")") for run in (flushed, often, twice)] == [
        "synchronous",
        "asynchronous, staleness <= 3",
        "asynchronous, staleness <= 1",
    ]
    last = len(flushed.losses)
    for run in (often, twice):
        assert len(run.losses) == last
        assert run.relative_seconds < 1 and run.utilisation > flushed.utilisation
        # Old weights cost updates: the loss falls, but less far.
        assert asynchronous.smoothed(flushed, last) < asynchronous.smoothed(run, last)
        assert asynchronous.smoothed(run, last) < 0.9 * asynchronous.smoothed(run, last // 8)
