"""Time programs on a machine that others use too, and fit the constants of a cluster to the times.


trips      chosen for each program so that one run takes about run_seconds                     (_choose_trips)
rounds     in every round each program runs once, so that a slow minute affects all of them alike (time_programs)
seconds    median of the samples, without those further than 3 · 1.4826 · MAD from the median of all
           (MAD: median absolute deviation; Rousseeuw, Croux, JASA 88(424), 1993)               (typical_seconds)

The constants make the cost model predict the measurements:


    minimise over θ   Σ_i ρ(log(predicted_i(θ) / measured_i)),   ρ(r) = 2 (sqrt(1 + r²) - 1)            (fit_cluster)
    predicted_i       = price of the parts of i by a ComposedCostModel of the cluster θ, added up    (predicted_seconds)
    measured_i        is first made non-decreasing in the size within each series                (monotone)

θ are the logarithms of the rates, the launch time and the links, so that each stays above 0 and more bytes are never
predicted to be faster. The fit calls the cost model itself, whatever its formulas are. ρ is the soft L1 loss, which
grows only linearly with |r|: a few bad timings do not spoil the rest (Huber, Annals of Mathematical Statistics 35(1),
1964). Non-decreasing: isotonic least squares on the logarithms (scipy.optimize.isotonic_regression).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel
from cost_models.work import Collective, Work

_MAX_TRIPS = 1 << 14
_MIN_ROUNDS = 3
_OUTLIER = 3 * 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedProgram:
    """A program to time.

    Attributes:
        name: for display.
        run: `run(trips)` makes so many trips and returns when all is done.
        repeats: how often one trip repeats the program.
    """

    name: str
    run: Callable[[int], None]
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a program.

    Attributes:
        seconds: median of the accepted samples.
        num_samples: number of accepted samples; `num_rejected`: number of outliers.
        spread: largest relative difference of an accepted sample from the median.
    """

    seconds: float
    num_samples: int
    num_rejected: int = 0
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Settings of a measurement.

    Attributes:
        run_seconds: target duration of one run of a program.
        num_rounds: samples of each program.
        limit_seconds: after this no new round begins, once each program has 3 samples.
        clock: returns the current time in seconds.
        agree: combines the numbers of several processes that measure together into one, the same on all of them.
    """

    run_seconds: float = 0.01
    num_rounds: int = 15
    limit_seconds: float = 60.0
    clock: Callable[[], float] = time.perf_counter
    agree: Callable[[float], float] = float


def time_programs(
    programs: Sequence[TimedProgram], stopwatch: Stopwatch, progress: Callable[[str], None] = lambda _: None
) -> list[Timing]:
    """Return the timing of each program; `progress` is called with a program's name before each of its samples."""
    began = stopwatch.clock()
    trips: list[int] = []
    for program in programs:
        progress(program.name)
        trips.append(_choose_trips(program, stopwatch))
    samples: list[list[float]] = [[] for _ in programs]
    for number in range(stopwatch.num_rounds):
        # Agreed on, as processes that measure together must run equally many rounds.
        late = stopwatch.agree(float(stopwatch.clock() - began > stopwatch.limit_seconds))
        if late and number >= _MIN_ROUNDS:
            break
        # Every other round runs backwards, so that a program is not always timed with the same program's caches.
        for index in range(len(programs))[:: 1 if number % 2 == 0 else -1]:
            progress(programs[index].name)
            seconds = _run_seconds(programs[index], trips[index], stopwatch)
            samples[index].append(seconds / (trips[index] * programs[index].repeats))
    timings = [typical_seconds(times) for times in samples]
    return [replace(timing, seconds=stopwatch.agree(timing.seconds)) for timing in timings]


def num_samples(num_programs: int, stopwatch: Stopwatch) -> int:
    """Return how often `time_programs` calls `progress` if the time limit is not reached."""
    return num_programs * (stopwatch.num_rounds + 1)


def typical_seconds(samples: Sequence[float]) -> Timing:
    """Return the median without outliers."""
    times = np.asarray(samples)
    middle = float(np.median(times))
    # 1.4826 · MAD estimates the standard deviation of normally distributed samples.
    reach = _OUTLIER * float(np.median(np.abs(times - middle)))
    accepted = times[np.abs(times - middle) <= reach]
    seconds = float(np.median(accepted))
    return Timing(
        seconds=seconds,
        num_samples=accepted.size,
        num_rejected=times.size - accepted.size,
        spread=float(np.max(np.abs(accepted - seconds))) / seconds if seconds > 0 else 0.0,
    )


def _choose_trips(program: TimedProgram, stopwatch: Stopwatch) -> int:
    """Return the number of trips for one run; the first run also pays for page faults, so it does not count."""
    program.run(1)
    trips = 1
    while trips < _MAX_TRIPS:
        # Equally many trips on all processes, or a collective would wait for ever.
        seconds = stopwatch.agree(_run_seconds(program, trips, stopwatch))
        if seconds >= stopwatch.run_seconds / 2:
            break
        wanted = trips * stopwatch.run_seconds / max(seconds, 1e-9)
        # In bounded steps, since a run that is too short says little about the next one.
        trips = min(_MAX_TRIPS, max(2 * trips, min(16 * trips, round(wanted))))
    return trips


def _run_seconds(program: TimedProgram, trips: int, stopwatch: Stopwatch) -> float:
    start = stopwatch.clock()
    program.run(trips)
    return stopwatch.clock() - start


_CONVOLUTION = "device.convolution_efficiency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A timing and the work that it corresponds to in the cost model.

    Attributes:
        name: for display.
        series: measurements of one series differ in their size only.
        size: position within the series.
        parts: work and collectives that run one after the other, together `seconds`.
        num_active_devices: how many devices do this at the same time.
        seconds: measured.
        num_samples: number of samples of which `seconds` is the median.
    """

    name: str
    series: str
    size: float
    parts: tuple[Work | Collective, ...]
    num_active_devices: int
    seconds: float
    num_samples: int


def predicted_seconds(measurement: Measurement, cluster: Cluster) -> float:
    """Return the time of a measurement as the cost model of a cluster predicts it, in seconds."""
    model, active = ComposedCostModel(cluster), measurement.num_active_devices
    return sum(
        model.compute_seconds(part, num_active_devices=active)
        if isinstance(part, Work)
        else model.collective_seconds(part)
        for part in measurement.parts
    )


def monotone(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements with seconds that never fall while the size grows; sorted by series and size."""
    from scipy.optimize import isotonic_regression

    series: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        series.setdefault(measurement.series, []).append(measurement)
    result: list[Measurement] = []
    for members in series.values():
        members.sort(key=lambda m: m.size)
        logs = isotonic_regression(np.log([max(m.seconds, 1e-12) for m in members])).x
        result += [replace(m, seconds=float(np.exp(log))) for m, log in zip(members, logs, strict=True)]
    return result


def fit_cluster(guess: Cluster, measurements: Sequence[Measurement]) -> Cluster:
    """Return the cluster like `guess` whose constants best explain the measurements.

    Constants that no measurement depends on stay as in `guess`.
    """
    raised = monotone(measurements)
    of_devices = [m for m in raised if all(isinstance(part, Work) for part in m.parts)]
    cluster = _fit(guess, _device_constants(guess), of_devices)
    # After the devices, whose constants are fixed then.
    of_links = [m for m in raised if any(isinstance(part, Collective) for part in m.parts)]
    for link in ("intra_host", "inter_host"):
        # A group across hosts uses both links, so the link inside a host is fitted first.
        mine = [m for m in of_links if _crosses_hosts(m) == (link == "inter_host")]
        cluster = _fit(cluster, (f"{link}.bandwidth_bytes_per_second", f"{link}.latency_seconds"), mine)
    return cluster


def measured_constants(cluster: Cluster, measurements: Sequence[Measurement]) -> frozenset[str]:
    """Return the constants of a cluster that `fit_cluster` takes from measurements, as `part.field`."""
    links = {
        "inter_host" if _crosses_hosts(m) else "intra_host"
        for m in measurements
        if any(isinstance(part, Collective) for part in m.parts)
    }
    of_links = {f"{link}.{field}" for link in links for field in ("bandwidth_bytes_per_second", "latency_seconds")}
    return frozenset({".".join(name.split(".")[:2]) for name in _device_constants(cluster)} | of_links)


def _fit(guess: Cluster, names: Sequence[str], measurements: Sequence[Measurement]) -> Cluster:
    """Return the cluster with the best values of the constants `names`, the others fixed."""
    from scipy.optimize import least_squares

    if not measurements:
        return guess
    # In logarithms, so that relative errors count: programs take from microseconds to seconds.
    measured = np.log([m.seconds for m in measurements])

    def residuals(shifts: np.ndarray) -> np.ndarray:
        cluster = _shifted(guess, dict(zip(names, np.exp(shifts), strict=True)))
        # A price may be zero, whose logarithm would end the fit.
        predicted = np.log([max(predicted_seconds(m, cluster), 1e-15) for m in measurements])
        # The last terms pull very weakly towards the guess: they determine constants that no measurement depends on.
        return np.concatenate([predicted - measured, 1e-2 * shifts])

    best = min(
        (least_squares(residuals, start, loss="soft_l1", diff_step=1e-3) for start in _starts(len(names))),
        key=lambda result: result.cost,
    )
    return _shifted(guess, dict(zip(names, np.exp(best.x), strict=True)))


def _starts(num_constants: int) -> list[np.ndarray]:
    """Return several starting points: minima and maxima in the formulas have flat regions without a gradient."""
    if num_constants == 2:
        return [np.array(pair) for pair in product((-3.0, 0.0, 3.0), repeat=2)]
    return [np.full(num_constants, shift) for shift in (-1.5, 0.0, 1.5)]


def _crosses_hosts(measurement: Measurement) -> bool:
    return any(isinstance(part, Collective) and part.group.num_hosts > 1 for part in measurement.parts)


def _device_constants(cluster: Cluster) -> tuple[str, ...]:
    peaks = tuple(f"device.peak_flops.{dtype}" for dtype in cluster.device.peaks)
    return ("device.memory_bandwidth", "device.launch_seconds", "device.fill_depth", *peaks, _CONVOLUTION)


def _shifted(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return a cluster with some constants multiplied by factors."""

    def of(part: str) -> dict[str, float]:
        owner = getattr(cluster, part)
        prefix = f"{part}."
        keys = [name.removeprefix(prefix) for name in factors if name.startswith(prefix) and name.count(".") == 1]
        return {key: float(getattr(owner, key) * factors[prefix + key]) for key in keys}

    peaks = {
        dtype: float(rate * factors.get(f"device.peak_flops.{dtype}", 1.0))
        for dtype, rate in cluster.device.peaks.items()
    }
    device = of("device")
    if _CONVOLUTION in factors:
        # A share of the matrix rate, which the fit moves like a rate, without a bound.
        device["convolution_efficiency"] = min(1.0, device["convolution_efficiency"])
    return replace(
        cluster,
        device=replace(cluster.device, **device, peak_flops=peaks),
        intra_host=replace(cluster.intra_host, **of("intra_host")),
        inter_host=replace(cluster.inter_host, **of("inter_host")),
    )
