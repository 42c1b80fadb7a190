"""Timing programs on a machine that is simulated: its clock advances by what the programs cost, and it is noisy."""

import numpy as np
import pytest

from alpa_lite.runtime.calibrate.timing import Stopwatch, TimedProgram, num_samples, time_programs, typical_seconds


class Machine:
    """Programs that take a known time per trip, a start-up time per run, and what `disturb(now)` multiplies."""

    def __init__(self, disturb=lambda now: 1.0, overhead=0.0):
        self.now = 0.0
        self.overhead = overhead
        self.disturb = disturb
        self.runs = []

    def program(self, name, seconds):
        def run(trips):
            self.runs.append((name, trips))
            self.now += (self.overhead + trips * seconds) * self.disturb(self.now)

        return TimedProgram(name=name, run=run)

    def stopwatch(self, **options):
        return Stopwatch(clock=lambda: self.now, **options)


def noise(seed, spike=0.0):
    """10 % of noise, and now and then something else that takes ten times as long."""
    rng = np.random.default_rng(seed)
    return lambda _: float(np.exp(rng.normal(0, 0.1)) * (10 if rng.random() < spike else 1))


@pytest.mark.parametrize("seconds", [1e-7, 1e-5, 3e-3, 0.5])
def test_any_duration_is_measured(seconds):
    machine = Machine()
    (timing,) = time_programs([machine.program("p", seconds)], machine.stopwatch())
    assert timing.seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_spikes_hardly_matter(seed):
    machine = Machine(noise(seed, spike=0.2))
    wanted = [2e-6, 5e-5, 4e-3]
    timings = time_programs([machine.program(str(s), s) for s in wanted], machine.stopwatch())
    assert [t.seconds for t in timings] == pytest.approx(wanted, rel=0.15)


def test_a_slow_minute_meets_all_programs():
    """The machine halves its speed while it is measured: the ratio of the programs stays."""
    machine = Machine(lambda now: 1.0 if now < 1.0 else 2.0)
    programs = [machine.program("a", 1e-3), machine.program("b", 3e-3)]
    a, b = time_programs(programs, machine.stopwatch(num_rounds=101))
    assert machine.now > 1.5
    assert b.seconds / a.seconds == pytest.approx(3.0, rel=1e-6)


def test_runs_are_long_against_their_start():
    machine = Machine(overhead=1e-4)
    (timing,) = time_programs([machine.program("p", 1e-6)], machine.stopwatch(run_seconds=0.02))
    assert timing.seconds == pytest.approx(1e-6, rel=0.02)


def test_the_limit_ends_it_after_three_rounds():
    machine = Machine()
    (timing,) = time_programs([machine.program("slow", 10.0)], machine.stopwatch(limit_seconds=1.0))
    assert timing.num_samples == 3
    assert [trips for _, trips in machine.runs] == [1] * 5


def test_rounds_run_forth_and_back():
    machine = Machine()
    programs = [machine.program(name, 1.0) for name in "abc"]
    seen = []
    stopwatch = machine.stopwatch(num_rounds=2)
    time_programs(programs, stopwatch, seen.append)
    assert "".join(name for name, _ in machine.runs[-6:]) == "abccba"
    assert len(seen) == num_samples(3, stopwatch)


def test_all_processes_take_what_they_agree_upon():
    machine = Machine()
    stopwatch = machine.stopwatch(agree=lambda value: 2 * value)
    (timing,) = time_programs([machine.program("p", 1.0)], stopwatch)
    assert timing.seconds == 2.0


def test_outliers_are_left_out():
    timing = typical_seconds([1.0, 1.01, 0.99, 1.02, 0.98, 9.0])
    assert timing.num_samples == 5 and timing.num_rejected == 1
    assert timing.seconds == 1.0
    assert timing.spread == pytest.approx(0.02)
    assert typical_seconds([2.0, 2.0, 2.0]).num_samples == 3
