"""Simulate the streams of one device, kernels and collectives, which run tasks as their inputs become ready.

Two further streams copy arrays to the memory of the host and back, at the same time: the link is full duplex.

    start(task)  = the first moment at which its stream is idle and all that it needs has ended         (simulate)
    order        = of the tasks that could start, the one with the longest path to the end              (_ways)
    rate         = 1 / (1 + contention) for both tasks while the two streams are busy                   (simulate)
    exposed      = seconds - hidden + contention * hidden, of collectives that run in buckets during other work
                   hidden = min(all buckets but the last, the work)                              (exposed_seconds)
    loop of n    = T(2) + (n - 2) * (T(3) - T(2)), T(k) = k trips one after the other                   (loop_seconds)

A kernel that can take a collective's result in parts, and a collective that can take a kernel's (`StreamTask.streams`:
decomposed products, Wang et al., ASPLOS 2023), starts once the first of `NUM_PARTS` parts is there, and not so early
that it would wait for the last.

Over the trips of a loop the second trip's collectives on what does not depend on the first (weights to be gathered) may
run during the first, but not earlier: that is prefetching one trip ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Stream = Literal["compute", "communication", "both", "to_host", "to_device"]

#: The streams beside kernels and collectives.
_COPIES: tuple[Stream, ...] = ("to_host", "to_device")

#: Number of buckets in which gradients are reduced, or weights gathered, during other work.
NUM_BUCKETS = 32
#: Number of parts in which a product consumes the result of a collective, or a collective that of a product.
NUM_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTask:
    """A task that occupies one stream, or those of kernels and collectives.

    Attributes:
        seconds: duration in seconds without contention.
        stream: "compute", "communication", or "both" (a loop that uses the two); "to_host" or "to_device" for copies.
        needs: indices of the tasks that must end before this one starts; all precede it in the list.
        streams: whether the task consumes in parts what tasks of the other stream produce.
    """

    seconds: float
    stream: Stream = "compute"
    needs: tuple[int, ...] = ()
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Result of a simulation: the end, start and end of each task, and the busy time of each stream, all in seconds.

    `exposed_seconds` is the time during which no kernel ran, due to communication and waiting.
    """

    seconds: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    compute_seconds: float
    communication_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """Seconds during which no kernel ran."""
        return max(0.0, self.seconds - self.compute_seconds)


def simulate(tasks: Sequence[StreamTask], *, contention: float = 0.0) -> Overlap:
    """Simulate tasks on two streams; `contention` is the relative slowdown while both streams are busy."""
    run = _OverlapState(tasks, contention)
    while run.advance():
        pass
    return Overlap(
        seconds=max(run.ends, default=0.0),
        starts=tuple(run.starts),
        ends=tuple(run.ends),
        compute_seconds=run.busy["compute"] + run.busy["both"],
        communication_seconds=run.busy["communication"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponed:
    """Tasks without their movable collectives, and the total seconds of the removed collectives."""

    tasks: tuple[StreamTask, ...]
    seconds: float


def without_last(tasks: Sequence[StreamTask]) -> Postponed:
    """Remove collectives whose result no task reads: they may overlap with work after these tasks."""
    read = {n for task in tasks for n in task.needs}
    return _without(tasks, {i for i in range(len(tasks)) if i not in read})


def without_first(tasks: Sequence[StreamTask]) -> Postponed:
    """Remove collectives that depend on no kernel: they may overlap with work before these tasks."""
    free = set[int]()
    for i, task in enumerate(tasks):
        # Tasks of 0 seconds stand for inputs, which are there before the first kernel.
        if set(task.needs) <= free and (task.stream == "communication" or not task.seconds):
            free.add(i)
    return _without(tasks, free)


def _without(tasks: Sequence[StreamTask], numbers: set[int]) -> Postponed:
    gone = {i for i in numbers if tasks[i].stream == "communication"}
    kept = tuple(replace(task, seconds=0.0) if i in gone else task for i, task in enumerate(tasks))
    return Postponed(tasks=kept, seconds=sum(tasks[i].seconds for i in gone))


def exposed_seconds(seconds: float, beside: float, *, contention: float = 0.0) -> float:
    """Return the seconds that collectives add when they run in buckets during kernels of `beside` seconds.

    The last of `NUM_BUCKETS` buckets starts after the kernels; the hidden ones slow the kernels down by contention.
    """
    hidden = min(seconds * (1 - 1 / NUM_BUCKETS), beside)
    return seconds - hidden + contention * hidden


def serial_seconds(tasks: Sequence[StreamTask]) -> float:
    """Return the total seconds of the tasks without any overlap."""
    return sum(task.seconds for task in tasks)


def loop_seconds(
    body: Sequence[StreamTask], carried: Sequence[tuple[int, int]], trips: float, *, contention: float = 0.0
) -> float:
    """Return the seconds of a loop, extrapolated from up to three simulated trips.

    Args:
        body: tasks of one trip; tasks of 0 seconds represent inputs.
        carried: pairs (index of the task that computes a carried value, index of its input task in the next trip).
        trips: number of trips; a fraction counts as a partial trip.
        contention: see `simulate`.
    """
    if trips <= 1:
        return trips * simulate(body, contention=contention).seconds
    tasks = _repeated(body, carried, min(3, int(trips)))

    def end(count: int) -> float:
        return simulate(tasks[: count * len(body)], contention=contention).seconds

    if trips < 2:
        return trips * end(1)
    # Prefetching reaches one trip ahead, so that trips repeat one another from the third on.
    second = end(2)
    third = end(3) if trips >= 3 else 2 * second - end(1)
    return second + (trips - 2) * (third - second)


def _repeated(body: Sequence[StreamTask], carried: Sequence[tuple[int, int]], count: int) -> list[StreamTask]:
    """Return the tasks of `count` consecutive trips."""
    tasks, size = list(body), len(body)
    handed = {into: out for out, into in carried}
    for trip in range(1, count):
        before, gate = (trip - 1) * size, (trip - 2) * size
        # Inputs from outside the loop become ready when the trip before the previous one ends: prefetch by one trip.
        gates = tuple(gate + out for out, _ in carried) if trip > 1 else ()
        for number, task in enumerate(body):
            needs = tuple(trip * size + n for n in task.needs)
            if number in handed:
                needs += (before + handed[number],)
            elif not task.needs:
                needs += gates
            tasks.append(StreamTask(seconds=task.seconds, stream=task.stream, needs=needs, streams=task.streams))
    return tasks


def _ways(tasks: Sequence[StreamTask]) -> list[float]:
    """Return for each task the longest path in seconds from its start to the end of all tasks."""
    ways = [0.0] * len(tasks)
    # Tasks follow what they need, so that one pass from the end suffices.
    for number in range(len(tasks) - 1, -1, -1):
        ways[number] += tasks[number].seconds
        for needed in tasks[number].needs:
            ways[needed] = max(ways[needed], ways[number])
    return ways


class _OverlapState:
    """State of a simulation: running tasks, waiting tasks and the current time."""

    def __init__(self, tasks: Sequence[StreamTask], contention: float) -> None:
        self.tasks, self.slow = tasks, 1 + contention
        self.ways = _ways(tasks)
        self.missing = [len(set(task.needs)) for task in tasks]
        self.readers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for needed in set(task.needs):
                self.readers[needed].append(number)
        self.starts, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.releases: list[tuple[float, int]] = []
        streams: tuple[Stream, ...] = ("compute", "communication", "both", *_COPIES)
        self.busy = dict.fromkeys(streams, 0.0)
        self.now = 0.0
        self.running: dict[Stream, tuple[int, float]] = {}
        self.waiting: dict[Stream, list[tuple[float, int]]] = {stream: [] for stream in self.busy}
        self.free: list[int] = []
        for number, missing in enumerate(self.missing):
            if not missing:
                self._enter(number)
        self._settle()

    def advance(self) -> bool:
        """Start all ready tasks and advance to the next end or release; return False when no task is left."""
        self._start()
        if not self.running:
            return False
        # A task that occupies both streams is a single entry: nothing contends with it.
        slow = self.slow if {"compute", "communication"} <= self.running.keys() else 1.0
        rates = {stream: 1.0 if stream in _COPIES else slow for stream in self.running}
        # In seconds without contention, which slows no copy down.
        left: dict[Stream, float] = {
            stream: seconds * (rates[stream] / slow) for stream, (_, seconds) in self.running.items()
        }
        first: Stream | None = min(left, key=left.__getitem__)
        step = left[first]
        release = self.releases[0][0] - self.now if self.releases else step * slow
        # A reader may start before any running task ends: advance only to its release, in seconds without contention.
        if release < step * slow:
            first, step = None, max(0.0, release) / slow
        self.now += step * slow
        for stream, (task, seconds) in self.running.items():
            # Rounding may leave a tiny negative rest.
            self.running[stream] = (task, max(0.0, seconds - step * (slow / rates[stream])))
            self.busy[stream] += step * slow
        while self.releases and self.releases[0][0] <= self.now:
            self._enter(heapq.heappop(self.releases)[1])
        if first is not None:
            self._end(self.running.pop(first)[0])
        self._settle()
        return True

    def _start(self) -> None:
        for stream in _COPIES:
            if stream not in self.running and self.waiting[stream]:
                self._take(stream)
        if "both" in self.running:
            return
        if self.waiting["both"] and not self.running.keys() - _COPIES:
            # Entries hold the negated length of the path to the end, so that the most urgent task is first in each
            # heap.
            heaps = (heap for stream, heap in self.waiting.items() if stream not in _COPIES)
            first = max((heap[0] for heap in heaps if heap), key=lambda entry: -entry[0])
            if first == self.waiting["both"][0]:
                self._take("both")
                return
        for stream in ("compute", "communication"):
            if stream not in self.running and self.waiting[stream] and not self._yields(stream):
                self._take(stream)

    def _yields(self, stream: Stream) -> bool:
        """Return whether the stream must stay idle for a more urgent waiting task that needs both streams."""
        both = self.waiting["both"]
        return bool(both) and both[0][0] < self.waiting[stream][0][0]

    def _take(self, stream: Stream) -> None:
        _, number = heapq.heappop(self.waiting[stream])
        seconds = self.tasks[number].seconds
        self.starts[number] = self.now
        self.running[stream] = (number, seconds)
        if stream in ("compute", "communication"):
            self._announce(number, seconds, "compute" if stream == "communication" else "communication")

    def _announce(self, number: int, seconds: float, other: Stream) -> None:
        """Schedule early starts of readers on the other stream that take the result in parts and need no other task."""
        for reader in self.readers[number]:
            task = self.tasks[reader]
            if task.streams and task.stream == other and self.missing[reader] == 1 and task.seconds > 0:
                # The mark keeps `_end` from entering the reader a second time when the collective ends.
                self.missing[reader] = -1
                beside = task.seconds * (1 - 1 / NUM_PARTS)
                heapq.heappush(self.releases, (self.now + max(seconds / NUM_PARTS, seconds - beside), reader))

    def _enter(self, number: int) -> None:
        task = self.tasks[number]
        # Tasks without duration (inputs, collectives that were removed) need no stream and end at once.
        if task.seconds == 0:
            self.free.append(number)
        else:
            heapq.heappush(self.waiting[task.stream], (-self.ways[number], number))

    def _end(self, number: int) -> None:
        self.ends[number] = self.now
        if not self.tasks[number].seconds:
            self.starts[number] = self.now
        for reader in self.readers[number]:
            if self.missing[reader] > 0:
                self.missing[reader] -= 1
                if not self.missing[reader]:
                    self._enter(reader)

    def _settle(self) -> None:
        """End all ready tasks of 0 seconds."""
        while self.free:
            self._end(self.free.pop())
