"""Time programs on a machine that others use too.

trips      chosen for each program so that one run takes about run_seconds                     (_choose_trips)
rounds     in every round each program runs once, so that a slow minute affects all of them alike (time_programs)
seconds    median of the samples, without those further than 3 · 1.4826 · MAD from the median of all
           (MAD: median absolute deviation; Rousseeuw, Croux, JASA 88(424), 1993)               (typical_seconds)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

_MAX_TRIPS = 1 << 14
_MIN_ROUNDS = 3
_OUTLIER = 3 * 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedProgram:
    """A program to time: `run(trips)` repeats it `trips` times and returns when all is done."""

    name: str
    run: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one trip of a program.

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
            samples[index].append(_run_seconds(programs[index], trips[index], stopwatch) / trips[index])
    timings = [typical_seconds(times) for times in samples]
    return [replace(timing, seconds=stopwatch.agree(timing.seconds)) for timing in timings]


def num_samples(num_programs: int, stopwatch: Stopwatch) -> int:
    """Return how often `time_programs` calls `progress` if the time limit is not reached."""
    return num_programs * (stopwatch.num_rounds + 1)


def typical_seconds(samples: Sequence[float]) -> Timing:
    """Return the median without outliers."""
    times = np.asarray(samples)
    middle = float(np.median(times))
    reach = _OUTLIER * float(np.median(np.abs(times - middle)))
    kept = times[np.abs(times - middle) <= reach]
    seconds = float(np.median(kept))
    return Timing(
        seconds=seconds,
        num_samples=kept.size,
        num_rejected=times.size - kept.size,
        spread=float(np.max(np.abs(kept - seconds))) / seconds if seconds > 0 else 0.0,
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
