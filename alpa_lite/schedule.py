"""Pipeline schedules: in which order each stage runs its forward and backward tasks.

A schedule is a frozen value. It only orders tasks; how long they take is an argument of `simulate`.
With p stages, m micro-batches and equal stages of tf and tb seconds:

    Sequential  makespan m*p*(tf+tb),     warm-up 0        `Sequential.num_warmup`
    GPipe       makespan (m+p-1)*(tf+tb), warm-up m        `GPipe.num_warmup`     (Huang et al., NeurIPS'19)
    1F1B        makespan (m+p-1)*(tf+tb), warm-up p-s-1    `OneFOneB.num_warmup`  (Narayanan et al., SC'21)
    micro-batches in flight on stage s = min(warm-up + 1, m)      `WarmupSchedule.in_flight`

    ready(s,b,forward)  = end(s-1,b,forward) + transfer(s-1,s)                              `_dependencies`
    ready(s,b,backward) = max(end(s+1,b,backward) + transfer(s,s+1), end(s,b,forward))      `_dependencies`
    start = max(ready, end of the task before it in the list of the stage), end = start + duration      `_run`
    bubble_fraction = idle / (idle + busy)   (GPipe's definition)                           `simulate`
    bubble_over_ideal = idle / busy          (Megatron's definition)                        `simulate`
"""

import enum
import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import final

from alpa_lite.errors import PlanError


class TaskKind(enum.Enum):
    """What a stage does with one micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One stage's forward or backward run of one micro-batch."""

    stage: int
    microbatch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.microbatch} on stage {self.stage}"


TaskLists = tuple[tuple[Task, ...], ...]
"""The ordered tasks of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """An order of the tasks of a pipeline, for any number of stages and micro-batches."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in plans and on the command line."""

    @abstractmethod
    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        """The ordered tasks of each stage."""

    @abstractmethod
    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """The largest number of micro-batches whose activations `stage` (from 0) holds at one time."""

    def to_json(self) -> dict[str, object]:
        """A JSON-serialisable description, read back by `Schedule.from_json`."""
        return {"name": self.name, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "Schedule":
        """The schedule that `to_json` described. Raises PlanError for an unknown name or option."""
        default = schedule_named(str(data.get("name")))
        if unknown := data.keys() - default.to_json().keys():
            raise PlanError(f"The schedule {default.name!r} has no option named {', '.join(sorted(unknown))}.")
        return replace(default, **{key: value for key, value in data.items() if key != "name"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSchedule(Schedule):
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    Micro-batches pass in ascending order in both directions (GPipe's figure has descending backwards): makespan and
    memory are the same, and gradients are summed in the same order under every schedule.
    """

    @abstractmethod
    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """How many forwards `stage` runs before it alternates."""

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        if num_stages < 1 or num_microbatches < 1:
            raise PlanError(f"A pipeline needs stages and micro-batches, not {num_stages} and {num_microbatches}.")
        lists: list[tuple[Task, ...]] = []
        for stage in range(num_stages):
            warmup = min(self.num_warmup(stage, num_stages, num_microbatches), num_microbatches)
            forwards = [Task(stage=stage, microbatch=b, kind=TaskKind.FORWARD) for b in range(num_microbatches)]
            backwards = [Task(stage=stage, microbatch=b, kind=TaskKind.BACKWARD) for b in range(num_microbatches)]
            steady = [task for pair in zip(forwards[warmup:], backwards, strict=False) for task in pair]
            lists.append((*forwards[:warmup], *steady, *backwards[num_microbatches - warmup :]))
        return tuple(lists)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(self.num_warmup(stage, num_stages, num_microbatches) + 1, num_microbatches)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential(WarmupSchedule):
    """Naive model parallelism: a micro-batch passes all stages, forth and back, before the next one starts."""

    @property
    def name(self) -> str:
        return "sequential"

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(WarmupSchedule):
    """All forwards, then all backwards."""

    @property
    def name(self) -> str:
        return "gpipe"

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return num_microbatches


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(WarmupSchedule):
    """As many warm-up forwards as stages follow: backwards start as early, and memory is freed as early, as can be."""

    @property
    def name(self) -> str:
        return "1f1b"

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return num_stages - stage - 1


SCHEDULES: tuple[Schedule, ...] = (Sequential(), GPipe(), OneFOneB())


def schedule_named(name: str) -> Schedule:
    """The schedule of that name, with default options. Raises PlanError if there is none."""
    known = {schedule.name: schedule for schedule in SCHEDULES}
    if name not in known:
        raise PlanError(f"There is no schedule named {name!r}. Choose one of: {', '.join(known)}.")
    return known[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One executed task, in seconds from the start of the step."""

    stage: int
    microbatch: int
    kind: TaskKind
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated pipeline step, its spans in the order of execution.

    The bubble is idle processor time, as a fraction of all and of the busy processor time. There is one processor per
    stage, or a single one when the stages share it.
    """

    makespan_seconds: float
    spans: tuple[Span, ...]
    bubble_fraction: float
    bubble_over_ideal: float


def peak_in_flight(tasks: Sequence[Task]) -> int:
    """The largest number of micro-batches between their forward and their backward, over one stage's task list."""
    held = accumulate(1 if task.kind is TaskKind.FORWARD else -1 for task in tasks)
    return max(held, default=0)


def validate(schedule_tasks: Sequence[Sequence[Task]], num_stages: int, num_microbatches: int) -> None:
    """Raise PlanError unless the lists hold every task exactly once, on its stage, in an order that can finish."""
    if len(schedule_tasks) != num_stages:
        raise PlanError(f"A schedule of {num_stages} stages needs as many task lists, but has {len(schedule_tasks)}.")
    for stage, tasks in enumerate(schedule_tasks):
        expected = {Task(stage=stage, microbatch=b, kind=kind): 1 for b in range(num_microbatches) for kind in TaskKind}
        counts = Counter(tasks)
        for task in (*expected, *counts):
            if counts[task] != expected.get(task, 0):
                raise PlanError(
                    f"The list of stage {stage} holds the {task} {counts[task]} times, not {expected.get(task, 0)}:"
                    f" it needs both tasks of each of the {num_microbatches} micro-batches once, and nothing else."
                )
    linearize(schedule_tasks)


def linearize(tasks_per_stage: Sequence[Sequence[Task]]) -> tuple[Task, ...]:
    """One order of all tasks that respects every dependency, for a single controller that dispatches them.

    Tasks are merged by the time at which they would end if a forward took 1 and a backward 2, so that a dispatched
    task seldom waits behind one that ends later. Raises PlanError if the lists wait for each other.
    """
    num_stages = len(tasks_per_stage)
    unit = {TaskKind.FORWARD: [1.0] * num_stages, TaskKind.BACKWARD: [2.0] * num_stages}
    spans = _run(tasks_per_stage, unit, [0.0] * (num_stages - 1), serialized=False)
    return tuple(Task(stage=span.stage, microbatch=span.microbatch, kind=span.kind) for span in spans)


def simulate(
    tasks_per_stage: Sequence[Sequence[Task]],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    *,
    transfer_seconds: Sequence[float] = (),
    serialized: bool = False,
) -> Timeline:
    """Run the task lists on a clock.

    `forward_seconds` and `backward_seconds` are those of each stage, per micro-batch. `transfer_seconds[i]` lies
    between stages i and i+1, in either direction (empty: none): it delays the receiver and keeps neither stage busy.
    `serialized`: all stages share one processor, which runs the ready tasks first come, first served. Raises PlanError
    for a wrong number of times, or lists that wait for each other.
    """
    num_stages = len(tasks_per_stage)
    transfer_seconds = transfer_seconds if len(transfer_seconds) else [0.0] * (num_stages - 1)
    for times, needed in ((forward_seconds, 0), (backward_seconds, 0), (transfer_seconds, 1)):
        if len(times) != num_stages - needed or min(times, default=0.0) < 0:
            raise PlanError(
                f"{num_stages} stages need {num_stages} forward and backward times and {num_stages - 1} transfer"
                f" times, none of them negative, but one of these is {list(times)}."
            )
    seconds = {TaskKind.FORWARD: forward_seconds, TaskKind.BACKWARD: backward_seconds}
    spans = _run(tasks_per_stage, seconds, transfer_seconds, serialized=serialized)
    makespan = max((span.end_seconds for span in spans), default=0.0)
    busy = sum(span.end_seconds - span.start_seconds for span in spans)
    available = makespan * (1 if serialized else num_stages)
    idle = max(available - busy, 0.0)
    return Timeline(
        makespan_seconds=makespan,
        spans=spans,
        bubble_fraction=idle / available if available > 0 else 0.0,
        bubble_over_ideal=idle / busy if busy > 0 else 0.0,
    )


def _dependencies(task: Task, num_stages: int) -> tuple[Task, ...]:
    """The tasks whose results `task` reads: its neighbour's, and for a backward its own stage's activations."""
    if task.kind is TaskKind.FORWARD:
        return (Task(stage=task.stage - 1, microbatch=task.microbatch, kind=task.kind),) if task.stage > 0 else ()
    own = replace(task, kind=TaskKind.FORWARD)
    return (own, replace(task, stage=task.stage + 1)) if task.stage < num_stages - 1 else (own,)


def _ready_seconds(task: Task, ends: Mapping[Task, float], free: Sequence[float], transfer: Sequence[float]) -> float:
    """When `task` can start on its stage; infinite as long as something that it reads has not run."""
    ready = free[task.stage]
    for needed in _dependencies(task, len(free)):
        delay = transfer[min(task.stage, needed.stage)] if needed.stage != task.stage else 0.0
        ready = max(ready, ends.get(needed, math.inf) + delay)
    return ready


def _run(
    tasks_per_stage: Sequence[Sequence[Task]],
    seconds: Mapping[TaskKind, Sequence[float]],
    transfer: Sequence[float],
    *,
    serialized: bool,
) -> tuple[Span, ...]:
    """Run, again and again, the one of the stages' next tasks that ends first (`serialized`: that was ready first)."""
    queues = [deque(tasks) for tasks in tasks_per_stage]
    free = [0.0] * len(queues)
    ends: dict[Task, float] = {}
    spans: list[Span] = []
    choices: list[tuple[float, float, int]] = []
    changed = set(range(len(queues)))
    waiting = set(changed)
    while any(queues):
        for stage in changed & waiting:
            ready = _ready_seconds(queues[stage][0], ends, free, transfer) if queues[stage] else math.inf
            if ready < math.inf:
                key = ready if serialized else ready + seconds[queues[stage][0].kind][stage]
                heapq.heappush(choices, (key, ready, stage))
                waiting.remove(stage)
        if not choices:
            raise PlanError(_deadlock(queues, ends))
        _, ready, stage = heapq.heappop(choices)
        task = queues[stage].popleft()
        start = max(ready, *free) if serialized else ready
        ends[task] = free[stage] = end = start + seconds[task.kind][stage]
        span = Span(stage=stage, microbatch=task.microbatch, kind=task.kind, start_seconds=start, end_seconds=end)
        spans.append(span)
        waiting.add(stage)
        changed = {stage - 1, stage, stage + 1}
    return tuple(spans)


def _deadlock(queues: Sequence[Sequence[Task]], ends: Mapping[Task, float]) -> str:
    waits: list[str] = []
    for task in (queue[0] for queue in queues if queue):
        needed = [str(need) for need in _dependencies(task, len(queues)) if need not in ends]
        waits.append(f"the {task} waits for the {' and the '.join(needed)}")
    return f"The schedule cannot finish: {'; '.join(waits)}. Order the task lists so that none waits in a circle."
