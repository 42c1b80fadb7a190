"""List scheduling: orders that follow from where stages run, how long tasks take, and how much processors may hold.

Each processor that is free runs, of the tasks that could start the earliest,

    1. gradients of inputs, of the latest stage first: they let the stage before go on, and free memory
    2. a forward pass, of the latest stage first, if the processor may hold one more micro-batch
    3. gradients of weights, in time in which it would wait, or where it may hold no more micro-batches

in ascending order of micro-batches for each stage; or forward passes before gradients, which is shorter where there is
memory for what they leave: both are tried. A forward pass leaves room for one micro-batch of each later stage
on its processor. So the orders end: of the micro-batches that have not come back, the first one finds that room free
on all processors, since those after it passed no stage before it did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from alpa_lite.program.memo import memoized
from alpa_lite.schedule.tasks import Task, TaskKind, TaskLists


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the tasks of each stage for one micro-batch.

    Attributes:
        forward: of the forward pass.
        backward: of the whole backward pass.
        weight: the part of it that are gradients of weights, where these are tasks of their own; () for whole passes.
        transfer: between stages i and i + 1, in either direction.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()

    def of(self, kind: TaskKind, stage: int) -> float:
        """Return the seconds of a task."""
        match kind:
            case TaskKind.FORWARD:
                return self.forward[stage]
            case TaskKind.BACKWARD:
                return self.backward[stage]
            case TaskKind.INPUT_GRADIENT:
                return max(0.0, self.backward[stage] - self.weight[stage])
            case TaskKind.WEIGHT_GRADIENT:
                return self.weight[stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The tasks to order.

    Attributes:
        processors: the processor of each stage.
        num_microbatches: number of micro-batches.
        times: seconds of tasks and transfers.
        most_held: how many micro-batches each processor may hold, counted once per stage; at least one of each of its
            stages.
    """

    processors: tuple[int, ...]
    num_microbatches: int
    times: StageTimes
    most_held: tuple[int, ...]


@memoized(entries=32)
def list_scheduled(work: Workload) -> TaskLists:
    """Return the ordered tasks of each processor; see the module."""
    ways = [_run(work, forward_first=forward_first) for forward_first in (False, True)]
    return min(ways, key=lambda way: max(way.free)).task_lists


def _run(work: Workload, *, forward_first: bool) -> PartialOrder:
    state = PartialOrder(work=work)
    # The next task of each processor with its start, if it can run any.
    candidates = [_next_on(state, processor, forward_first=forward_first) for processor in range(len(state.stages))]
    starts = [(found[0], processor) for processor, found in enumerate(candidates) if found is not None]
    heapify(starts)
    while starts:
        start, processor = heappop(starts)
        found = candidates[processor]
        # Starts of tasks that have run, or run at another time by now, remain in the heap.
        if found is None or found[0] != start:
            continue
        state.run(found[1], start)
        for near in {processor, *_receiver(work, found[1])}:
            candidates[near] = following = _next_on(state, near, forward_first=forward_first)
            if following is not None:
                heappush(starts, (following[0], near))
    return state


def _receiver(work: Workload, task: Task) -> Sequence[int]:
    """Return the processor that the result of a task is sent to, if it is sent to one."""
    if task.kind is TaskKind.WEIGHT_GRADIENT:
        return ()
    stage = task.stage + (1 if task.kind is TaskKind.FORWARD else -1)
    return (work.processors[stage],) if 0 <= stage < len(work.processors) else ()


def _next_on(state: PartialOrder, processor: int, *, forward_first: bool) -> tuple[float, Task] | None:
    """Return the task that a processor runs next, and its start; None if it has to wait for others."""
    options = state.options(processor)
    awaited = [option for option in options if option[1].kind is not TaskKind.WEIGHT_GRADIENT]

    def key(option: tuple[float, Task]) -> tuple[float, bool, int]:
        start, task = option
        return start, (task.kind is TaskKind.FORWARD) != forward_first, -task.stage

    found = min(awaited, key=key, default=None)
    late = [option for option in options if option[1].kind is TaskKind.WEIGHT_GRADIENT]
    if late and (found is None or found[0] > state.free[processor]):
        return min(late, key=lambda option: (option[1].microbatch, -option[1].stage))
    return found


@dataclass(slots=True, kw_only=True)
class PartialOrder:
    """The tasks that have run so far, with their times."""

    work: Workload
    stages: list[list[int]] = field(init=False)
    lists: list[list[Task]] = field(init=False)
    free: list[float] = field(init=False)
    held: list[int] = field(init=False)
    # Seconds at which each pass of each micro-batch ended, in order of micro-batches; of stages.
    forwards: list[list[float]] = field(init=False)
    backwards: list[list[float]] = field(init=False)
    weights: list[int] = field(init=False)

    def __post_init__(self) -> None:
        processors = self.work.processors
        count = 1 + max(processors)
        self.stages = [[s for s, p in enumerate(processors) if p == processor] for processor in range(count)]
        self.lists, self.free, self.held = [[] for _ in range(count)], [0.0] * count, [0] * count
        self.forwards, self.backwards = [[] for _ in processors], [[] for _ in processors]
        self.weights = [0] * len(processors)

    @property
    def task_lists(self) -> TaskLists:
        """The tasks that ran on each processor."""
        return tuple(map(tuple, self.lists))

    def options(self, processor: int) -> list[tuple[float, Task]]:
        """Return the tasks that a processor may run next, each with its earliest start."""
        split = bool(self.work.times.weight)
        back = TaskKind.INPUT_GRADIENT if split else TaskKind.BACKWARD
        free, found = self.free[processor], list[tuple[float, Task]]()
        for stage in self.stages[processor]:
            ready = self._backward_ready(stage)
            if ready < math.inf:
                found.append((max(ready, free), Task(stage=stage, microbatch=len(self.backwards[stage]), kind=back)))
            ready = self._forward_ready(stage) if self._has_room(processor, stage) else math.inf
            if ready < math.inf:
                forward = Task(stage=stage, microbatch=len(self.forwards[stage]), kind=TaskKind.FORWARD)
                found.append((max(ready, free), forward))
            if split and self.weights[stage] < len(self.backwards[stage]):
                late = Task(stage=stage, microbatch=self.weights[stage], kind=TaskKind.WEIGHT_GRADIENT)
                found.append((free, late))
        return found

    def run(self, task: Task, start: float) -> None:
        """Record that a task runs."""
        processor = self.work.processors[task.stage]
        self.lists[processor].append(task)
        self.free[processor] = end = start + self.work.times.of(task.kind, task.stage)
        if task.kind is TaskKind.FORWARD:
            self.forwards[task.stage].append(end)
            self.held[processor] += 1
        elif task.kind is TaskKind.WEIGHT_GRADIENT:
            self.weights[task.stage] += 1
        else:
            self.backwards[task.stage].append(end)
        if task.kind.is_last:
            self.held[processor] -= 1

    def take_back(self, task: Task, free: float) -> None:
        """Undo the last task of its processor, which was free from `free` on before it ran."""
        processor = self.work.processors[task.stage]
        self.lists[processor].pop()
        self.free[processor] = free
        if task.kind is TaskKind.FORWARD:
            self.forwards[task.stage].pop()
            self.held[processor] -= 1
        elif task.kind is TaskKind.WEIGHT_GRADIENT:
            self.weights[task.stage] -= 1
        else:
            self.backwards[task.stage].pop()
        if task.kind.is_last:
            self.held[processor] += 1

    def _has_room(self, processor: int, stage: int) -> bool:
        later = sum(other > stage for other in self.stages[processor])
        # At least one micro-batch of each stage, without which none could pass.
        return self.held[processor] + 1 + later <= max(self.work.most_held[processor], len(self.stages[processor]))

    def _forward_ready(self, stage: int) -> float:
        microbatch = len(self.forwards[stage])
        if microbatch == self.work.num_microbatches:
            return math.inf
        return 0.0 if stage == 0 else self._arrival(self.forwards[stage - 1], microbatch, stage - 1)

    def _backward_ready(self, stage: int) -> float:
        microbatch = len(self.backwards[stage])
        if microbatch >= len(self.forwards[stage]):
            return math.inf
        own = self.forwards[stage][microbatch]
        last = stage == len(self.work.processors) - 1
        return own if last else max(own, self._arrival(self.backwards[stage + 1], microbatch, stage))

    def _arrival(self, ends: Sequence[float], microbatch: int, boundary: int) -> float:
        """Return when the result of a neighbouring stage has arrived; infinite before it has run."""
        transfer = self.work.times.transfer
        return ends[microbatch] + (transfer[boundary] if transfer else 0.0) if microbatch < len(ends) else math.inf
