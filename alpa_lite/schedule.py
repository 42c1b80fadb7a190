"""Pipeline schedules: in which order each processor runs the forward and backward tasks of its stages.

A schedule is a frozen value. It only orders tasks; how long they take is an argument of `simulate`. A processor is the
group of devices that a stage runs on. There is one per stage, unless the schedule gives each processor v stages (the
chunks of an interleaved pipeline): then stage i of p*v runs on processor i mod p.
With p processors s = 0..p-1, m micro-batches and equal processors of tf and tb seconds per micro-batch:

    Sequential  makespan m*p*(tf+tb),     warm-up 0        `Sequential.num_warmup`
    GPipe       makespan (m+p-1)*(tf+tb), warm-up m        `GPipe.num_warmup`     (Huang et al., NeurIPS'19)
    1F1B        makespan (m+p-1)*(tf+tb), warm-up p-s-1    `OneFOneB.num_warmup`  (Narayanan et al., SC'21)
    micro-batches in flight on stage s = min(warm-up + 1, m)      `WarmupSchedule.in_flight`
    eager 1F1B  the makespan of 1F1B also where a transfer takes up to (tf+tb)/2, warm-up 2*(p-s-1)
    interleaved makespan (m+(p-1)/v)*(tf+tb), warm-up 2*(p-s-1)+(v-1)*p tasks, m a multiple of p, in flight on
                processor s over all its stages min(warm-up + 1, m*v)   `Interleaved1F1B`  (SC'21, section 2.2)

    ready(i,b,forward)  = end(i-1,b,forward) + transfer(i-1,i)                              `_dependencies`
    ready(i,b,backward) = max(end(i+1,b,backward) + transfer(i,i+1), end(i,b,forward))      `_dependencies`
    start = max(ready, end of the task before it in the list of the processor), end = start + duration      `_run`
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
"""The ordered tasks of each processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """An order of the tasks of a pipeline, for any number of stages and micro-batches."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in plans and on the command line."""

    @property
    def stages_per_processor(self) -> int:
        """How many stages share one processor."""
        return 1

    def num_processors(self, num_stages: int) -> int:
        """How many processors run so many stages; stage i is on processor i mod this number.

        Raises PlanError when the stages cannot be dealt out evenly.
        """
        if num_stages < 1 or num_stages % self.stages_per_processor:
            raise PlanError(
                f"{self.name} runs {self.stages_per_processor} stages per group of devices, which {num_stages} stages"
                f" are not. Ask for a multiple of {self.stages_per_processor}."
            )
        return num_stages // self.stages_per_processor

    @abstractmethod
    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        """The ordered tasks of each processor. Raises PlanError for numbers that the schedule cannot run."""

    @abstractmethod
    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """The largest number of micro-batches whose activations `stage` (from 0) holds at one time."""

    def __str__(self) -> str:
        """`interleaved-1f1b(num_chunks=2)`-like text."""
        options = ", ".join(f"{key}={value}" for key, value in asdict(self).items())
        return f"{self.name}({options})" if options else self.name

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
            lists.append(_warmed_up(forwards, backwards, warmup))
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOneFOneB(WarmupSchedule):
    """1F1B with twice the warm-up: while a micro-batch is on its way between stages, another one is at work.

    Under 1F1B the last two stages wait for a transfer in every turn. Zhuang et al., "On Optimizing the Communication of
    Model Parallelism" (MLSys'23), section 4.
    """

    @property
    def name(self) -> str:
        return "eager-1f1b"

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 2 * (num_stages - stage - 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved1F1B(Schedule):
    """1F1B on processors that own `num_chunks` stages each: a bubble `num_chunks` times smaller, more transfers.

    A processor runs its stages in turn, the first to the last, for p micro-batches at a time, and their backward
    passes in the opposite turn; so m must be a multiple of p. With one chunk this is 1F1B, for any m.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21).
    """

    num_chunks: int = 2

    @property
    def name(self) -> str:
        return "interleaved-1f1b"

    @property
    def stages_per_processor(self) -> int:
        if self.num_chunks < 1:
            raise PlanError(f"Each group of devices needs at least one chunk of the model, not {self.num_chunks}.")
        return self.num_chunks

    def num_warmup(self, processor: int, num_stages: int, num_microbatches: int) -> int:
        """How many forwards `processor` runs, over all of its stages, before it alternates."""
        p = self.num_processors(num_stages)
        warmup = 2 * (p - processor - 1) + (self.num_chunks - 1) * p if self.num_chunks > 1 else p - processor - 1
        return min(warmup, num_microbatches * self.num_chunks)

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        p = self.num_processors(num_stages)
        if num_microbatches < 1 or (self.num_chunks > 1 and num_microbatches % p):
            raise PlanError(
                f"{self.name} on {p} groups of devices runs {p} micro-batches at a time, so that it cannot run"
                f" {num_microbatches}. Use num_microbatches={max(1, num_microbatches // p) * p} or another multiple"
                f" of {p}."
            )
        return tuple(self._tasks_on(processor, num_stages, num_microbatches) for processor in range(p))

    def _tasks_on(self, processor: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
        p, v = self.num_processors(num_stages), self.num_chunks
        # Micro-batches in groups of p; with one chunk the size of the groups makes no difference.
        groups = [range(b, min(b + p, num_microbatches)) for b in range(0, num_microbatches, p)]
        turns = [(chunk, b) for group in groups for chunk in range(v) for b in group]
        forwards = [Task(stage=c * p + processor, microbatch=b, kind=TaskKind.FORWARD) for c, b in turns]
        backwards = [Task(stage=(v - c - 1) * p + processor, microbatch=b, kind=TaskKind.BACKWARD) for c, b in turns]
        return _warmed_up(forwards, backwards, self.num_warmup(processor, num_stages, num_microbatches))

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        tasks = self._tasks_on(stage % self.num_processors(num_stages), num_stages, num_microbatches)
        return peak_in_flight([task for task in tasks if task.stage == stage])


def _warmed_up(forwards: Sequence[Task], backwards: Sequence[Task], warmup: int) -> tuple[Task, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    steady = [task for pair in zip(forwards[warmup:], backwards, strict=False) for task in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


SCHEDULES: tuple[Schedule, ...] = (
    Sequential(),
    GPipe(),
    OneFOneB(),
    EagerOneFOneB(),
    Interleaved1F1B(),
)


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
    task list, or a single one when all share it.
    """

    makespan_seconds: float
    spans: tuple[Span, ...]
    bubble_fraction: float
    bubble_over_ideal: float


def peak_in_flight(tasks: Sequence[Task]) -> int:
    """The largest number of micro-batches between forward and backward, over one list; each counts once per stage."""
    return int(peak_held(tasks, [1.0] * (1 + max((task.stage for task in tasks), default=0))))


def peak_held(tasks: Sequence[Task], sizes: Sequence[float]) -> float:
    """The largest sum over what is between forward and backward at one time, over one list; `sizes` are per stage."""
    signs = ((1 if task.kind is TaskKind.FORWARD else -1, sizes[task.stage]) for task in tasks)
    return max(accumulate(sign * size for sign, size in signs), default=0.0)


def validate(schedule_tasks: Sequence[Sequence[Task]], num_stages: int, num_microbatches: int) -> None:
    """Raise PlanError unless the lists hold every task exactly once, stage i in list i mod their number, in an order
    that can finish."""
    if not schedule_tasks or num_stages % len(schedule_tasks):
        raise PlanError(
            f"A schedule of {num_stages} stages needs as many task lists, or a number that divides them, but has"
            f" {len(schedule_tasks)}."
        )
    for number, tasks in enumerate(schedule_tasks):
        mine = range(number, num_stages, len(schedule_tasks))
        pairs = [(stage, b) for stage in mine for b in range(num_microbatches)]
        expected = {Task(stage=stage, microbatch=b, kind=kind): 1 for stage, b in pairs for kind in TaskKind}
        counts = Counter(tasks)
        for task in (*expected, *counts):
            if counts[task] != expected.get(task, 0):
                raise PlanError(
                    f"The list of stage {', '.join(map(str, mine))} holds the {task} {counts[task]} times, not"
                    f" {expected.get(task, 0)}: it needs both tasks of each of the {num_microbatches} micro-batches"
                    " once, and nothing else."
                )
    linearize(schedule_tasks)


def linearize(tasks_per_processor: Sequence[Sequence[Task]]) -> tuple[Task, ...]:
    """One order of all tasks that respects every dependency, for a single controller that dispatches them.

    Tasks are merged by the time at which they would end if a forward took 1 and a backward 2, so that a dispatched
    task seldom waits behind one that ends later. Raises PlanError if the lists wait for each other.
    """
    num_stages = 1 + max((task.stage for tasks in tasks_per_processor for task in tasks), default=0)
    unit = {TaskKind.FORWARD: [1.0] * num_stages, TaskKind.BACKWARD: [2.0] * num_stages}
    spans = _run(tasks_per_processor, unit, [0.0] * (num_stages - 1), serialized=False)
    return tuple(Task(stage=span.stage, microbatch=span.microbatch, kind=span.kind) for span in spans)


def simulate(
    tasks_per_processor: Sequence[Sequence[Task]],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    *,
    transfer_seconds: Sequence[float] = (),
    serialized: bool = False,
) -> Timeline:
    """Run the task lists on a clock.

    `forward_seconds` and `backward_seconds` are those of each stage, per micro-batch. `transfer_seconds[i]` lies
    between stages i and i+1, in either direction (empty: none): it delays the receiver and keeps neither stage busy.
    Stage i belongs to list i mod their number. `serialized`: all of them share one processor, which runs the ready
    tasks first come, first served. Raises PlanError for a wrong number of times, or lists that wait for each other.
    """
    num_stages = 1 + max((task.stage for tasks in tasks_per_processor for task in tasks), default=-1)
    transfer_seconds = transfer_seconds if len(transfer_seconds) else [0.0] * (num_stages - 1)
    for times, needed in ((forward_seconds, 0), (backward_seconds, 0), (transfer_seconds, 1)):
        if len(times) != num_stages - needed or min(times, default=0.0) < 0:
            raise PlanError(
                f"{num_stages} stages need {num_stages} forward and backward times and {num_stages - 1} transfer"
                f" times, none of them negative, but one of these is {list(times)}."
            )
    seconds = {TaskKind.FORWARD: forward_seconds, TaskKind.BACKWARD: backward_seconds}
    spans = _run(tasks_per_processor, seconds, transfer_seconds, serialized=serialized)
    makespan = max((span.end_seconds for span in spans), default=0.0)
    busy = sum(span.end_seconds - span.start_seconds for span in spans)
    available = makespan * (1 if serialized else len(tasks_per_processor))
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


def _ready_seconds(task: Task, ends: Mapping[Task, float], free: float, transfer: Sequence[float]) -> float:
    """When `task` can start on its processor; infinite as long as something that it reads has not run."""
    ready = free
    for needed in _dependencies(task, len(transfer) + 1):
        delay = transfer[min(task.stage, needed.stage)] if needed.stage != task.stage else 0.0
        ready = max(ready, ends.get(needed, math.inf) + delay)
    return ready


def _run(
    tasks_per_processor: Sequence[Sequence[Task]],
    seconds: Mapping[TaskKind, Sequence[float]],
    transfer: Sequence[float],
    *,
    serialized: bool,
) -> tuple[Span, ...]:
    """Run, again and again, the one of the next tasks that ends first (`serialized`: that was ready first)."""
    queues = [deque(tasks) for tasks in tasks_per_processor]
    free = [0.0] * len(queues)
    ends: dict[Task, float] = {}
    spans: list[Span] = []
    choices: list[tuple[float, float, int]] = []
    changed = set(range(len(queues)))
    waiting = set(changed)
    while any(queues):
        for number in changed & waiting:
            ready = _ready_seconds(queues[number][0], ends, free[number], transfer) if queues[number] else math.inf
            if ready < math.inf:
                task = queues[number][0]
                key = ready if serialized else ready + seconds[task.kind][task.stage]
                heapq.heappush(choices, (key, ready, number))
                waiting.remove(number)
        if not choices:
            raise PlanError(_deadlock(queues, ends, len(transfer) + 1))
        _, ready, number = heapq.heappop(choices)
        task = queues[number].popleft()
        start = max(ready, *free) if serialized else ready
        ends[task] = free[number] = end = start + seconds[task.kind][task.stage]
        spans.append(
            Span(stage=task.stage, microbatch=task.microbatch, kind=task.kind, start_seconds=start, end_seconds=end)
        )
        waiting.add(number)
        changed = {(number + step) % len(queues) for step in (-1, 0, 1)}
    return tuple(spans)


def _deadlock(queues: Sequence[Sequence[Task]], ends: Mapping[Task, float], num_stages: int) -> str:
    waits: list[str] = []
    for task in (queue[0] for queue in queues if queue):
        needed = [str(need) for need in _dependencies(task, num_stages) if need not in ends]
        waits.append(f"the {task} waits for the {' and the '.join(needed)}")
    return f"The schedule cannot finish: {'; '.join(waits)}. Order the task lists so that none waits in a circle."
