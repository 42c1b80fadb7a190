"""Timing programs on a simulated machine, whose clock advances by their costs; and fitting a cluster to timings."""

from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.runtime.calibrate.measurements import (
    Measurement,
    Stopwatch,
    TimedProgram,
    fit_cluster,
    monotone,
    num_samples,
    predicted_seconds,
    time_programs,
    typical_seconds,
)
from cost_models import Cluster, Collective, ComposedCostModel, Device, Group, Link, Product, Work


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


def test_a_trip_may_repeat_the_program():
    machine = Machine()
    program = replace(machine.program("p", 32 * 5e-6), repeats=32)
    (timing,) = time_programs([program], machine.stopwatch())
    assert timing.seconds == pytest.approx(5e-6, rel=1e-9)


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


GUESS = Cluster(
    name="guess",
    device=Device(
        name="some device",
        memory_bytes=1e10,
        memory_bandwidth=1e11,
        peak_flops={"float32": 1e11, "tensorfloat32": 1e11},
        launch_seconds=1e-6,
        dispatch_seconds=1e-4,
        tiles=((8, 8),),
        fill_depth=8.0,
        matrix_efficiency=1.0,
        convolution_efficiency=0.5,
        memory_efficiency=1.0,
    ),
    num_hosts=2,
    devices_per_host=4,
    intra_host=Link(bandwidth_bytes_per_second=1e10, latency_seconds=1e-5),
    inter_host=Link(bandwidth_bytes_per_second=1e10, latency_seconds=1e-5),
)
#: Constants far from the guess, in both directions.
TRUTH = replace(
    GUESS,
    device=replace(
        GUESS.device,
        memory_bandwidth=2e12,
        peak_flops={"float32": 2e13, "tensorfloat32": 1.5e14},
        launch_seconds=5e-6,
    ),
    intra_host=Link(bandwidth_bytes_per_second=2e11, latency_seconds=4e-6),
    inter_host=Link(bandwidth_bytes_per_second=1e9, latency_seconds=5e-5),
)
GROUPS = (
    Group(num_devices=2, devices_per_host=2, num_concurrent=2),
    Group(num_devices=4, devices_per_host=4),
    Group(num_devices=2, devices_per_host=1, num_concurrent=4),
    Group(num_devices=8, devices_per_host=4),
)


def measure(series, size, parts, truth):
    measured = Measurement(
        name=f"{series} {size}",
        series=series,
        size=size,
        parts=parts,
        num_active_devices=8,
        seconds=1.0,
        num_samples=9,
    )
    return replace(measured, seconds=predicted_seconds(measured, truth))


def product(n):
    shape = Product(rows=n, columns=n, depth=n)
    return Work(flops=shape.flops, bytes=12.0 * n**2, kind="matmul", product=shape)


def measurements(truth=TRUTH):
    found = [measure("product", n, (product(n),), truth) for n in (8, 256, 1024, 4096)]
    found += [measure("pass", n, (Work(flops=3.0 * n, bytes=12.0 * n),), truth) for n in (1e4, 1e6, 1e8)]
    found.append(measure("arithmetic", 1e8, (Work(flops=1e11, bytes=8e8),), truth))
    for group in GROUPS:
        for kind in ("all_reduce", "all_to_all", "permute"):
            for size in (1e3, 1e6, 1e9):
                parts = (Collective(kind=kind, bytes=size, group=group),)
                found.append(measure(f"{kind} {group}", size, parts, truth))
    return found


def errors(cluster, truth=TRUTH):
    return [abs(np.log(predicted_seconds(m, cluster) / m.seconds)) for m in measurements(truth)]


def test_true_timings_give_the_truth_back():
    fitted = fit_cluster(GUESS, measurements())
    assert max(errors(fitted)) < 0.1
    assert fitted.device.memory_bandwidth == pytest.approx(2e12, rel=0.05)
    assert fitted.device.peaks["tensorfloat32"] == pytest.approx(1.5e14, rel=0.1)
    assert fitted.intra_host.bandwidth_bytes_per_second == pytest.approx(2e11, rel=0.1)
    assert fitted.inter_host.bandwidth_bytes_per_second == pytest.approx(1e9, rel=0.1)
    assert fitted.inter_host.latency_seconds == pytest.approx(5e-5, rel=0.2)


def test_what_is_counted_by_hand():
    """A pass over b bytes takes b / bandwidth, and a permute latency + b / bandwidth."""
    passes = [
        Measurement(
            name="",
            series="pass",
            size=n,
            parts=(Work(bytes=n, num_kernels=0),),
            num_active_devices=1,
            seconds=n / 3e9,
            num_samples=1,
        )
        for n in (1e6, 1e8)
    ]
    permutes = [
        replace(
            passes[0],
            series="permute",
            size=n,
            parts=(Collective(kind="permute", bytes=n, group=GROUPS[1]),),
            seconds=2e-4 + n / 5e8,
        )
        for n in (1e3, 1e5, 1e7)
    ]
    fitted = fit_cluster(GUESS, [*passes, *permutes])
    assert fitted.device.memory_bandwidth == pytest.approx(3e9, rel=0.02)
    assert fitted.intra_host.latency_seconds == pytest.approx(2e-4, rel=0.05)
    assert fitted.intra_host.bandwidth_bytes_per_second == pytest.approx(5e8, rel=0.05)
    assert fitted.inter_host == GUESS.inter_host


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_outliers_are_survived(seed):
    """10 % of noise on all, and one collective in ten five times too slow."""
    rng = np.random.default_rng(seed)
    noisy = [
        replace(
            m,
            seconds=m.seconds
            * float(np.exp(rng.normal(0, 0.1)))
            * (5 if isinstance(m.parts[0], Collective) and rng.random() < 0.1 else 1),
        )
        for m in measurements()
    ]
    assert max(m.seconds / t.seconds for m, t in zip(noisy, measurements(), strict=True)) > 4
    found = errors(fit_cluster(GUESS, noisy))
    assert np.median(found) < 0.15 and max(found) < 0.6


@pytest.mark.parametrize("seed", range(5))
def test_more_bytes_are_never_faster_whatever_was_measured(seed):
    rng = np.random.default_rng(seed)
    nonsense = [replace(m, seconds=float(10 ** rng.uniform(-7, 0))) for m in measurements()]
    model = ComposedCostModel(fit_cluster(GUESS, nonsense))
    for group in GROUPS:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"):
            times = [
                model.collective_seconds(Collective(kind=kind, bytes=size, group=group))
                for size in np.geomspace(1, 1e10, 40)
            ]
            assert all(np.isfinite(times)) and (np.diff(times) >= 0).all()
    passes = [model.compute_seconds(Work(bytes=size)) for size in np.geomspace(1, 1e10, 40)]
    assert (np.diff(passes) >= 0).all()


def test_series_are_made_monotone():
    base = measurements()[0]
    given = [replace(base, size=n, seconds=s) for n, s in ((3, 4.0), (1, 2.0), (2, 8.0), (4, 16.0))]
    other = replace(base, series="other", size=0.5, seconds=100.0)
    raised = monotone([*given, other])
    assert [m.size for m in raised] == [1, 2, 3, 4, 0.5]
    # 8 and 4 are out of order: both become their geometric mean.
    assert [m.seconds for m in raised] == pytest.approx([2.0, 32**0.5, 32**0.5, 16.0, 100.0])
