"""Task lists on a clock: when each task starts and ends, whether all can finish, and an order for one dispatcher.

ready(i,b,forward)  = end(i-1,b,forward) + transfer(i-1,i)                              `_dependencies`
ready(i,b,backward) = max(end(i+1,b,backward) + transfer(i,i+1), end(i,b,forward))      `_dependencies`
start = max(ready, end of the task before it in the list of the processor), end = start + duration      `_run`
bubble_fraction = idle / (idle + busy)   (GPipe's definition)                           `simulate`
bubble_over_ideal = idle / busy          (Megatron's definition)                        `simulate`
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.errors import PlanError
from alpa_lite.schedule.tasks import Task, TaskKind


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
    between stages i and i+1, in either direction (empty: none): it delays the receiver and keeps neither stage busy,
    but the way between two processors, which carries one micro-batch after the other in each direction.
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


@dataclass(slots=True, kw_only=True)
class _Clock:
    """When tasks ended, when their results arrived at the stage that reads them, and until when ways are taken."""

    num_processors: int
    transfer: Sequence[float]
    ends: dict[Task, float] = field(default_factory=dict[Task, float])
    arrivals: dict[Task, float] = field(default_factory=dict[Task, float])
    taken: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def ready(self, task: Task, free: float) -> float:
        """When `task` can start on its processor; infinite as long as something that it reads has not run."""
        needed = _dependencies(task, len(self.transfer) + 1)
        return max([free, *((self.ends if n.stage == task.stage else self.arrivals).get(n, math.inf) for n in needed)])

    def ended(self, task: Task, end: float) -> None:
        """Note the end of a task, and send on its result."""
        self.ends[task] = end
        reader = task.stage + (1 if task.kind is TaskKind.FORWARD else -1)
        if 0 <= reader <= len(self.transfer):
            way = (task.stage % self.num_processors, reader % self.num_processors)
            started = max(end, self.taken.get(way, 0.0))
            self.taken[way] = self.arrivals[task] = started + self.transfer[min(task.stage, reader)]


def _run(
    tasks_per_processor: Sequence[Sequence[Task]],
    seconds: Mapping[TaskKind, Sequence[float]],
    transfer: Sequence[float],
    *,
    serialized: bool,
) -> tuple[Span, ...]:
    """Run, again and again, the one of the next tasks that ends first (`serialized`: that was ready first)."""
    queues = [deque(tasks) for tasks in tasks_per_processor]
    free, clock = [0.0] * len(queues), _Clock(num_processors=len(queues), transfer=transfer)
    spans: list[Span] = []
    choices: list[tuple[float, float, int]] = []
    changed = set(range(len(queues)))
    waiting = set(changed)
    while any(queues):
        for number in changed & waiting:
            ready = clock.ready(queues[number][0], free[number]) if queues[number] else math.inf
            if ready < math.inf:
                task = queues[number][0]
                key = ready if serialized else ready + seconds[task.kind][task.stage]
                heapq.heappush(choices, (key, ready, number))
                waiting.remove(number)
        if not choices:
            raise PlanError(_deadlock(queues, clock.ends, len(transfer) + 1))
        _, ready, number = heapq.heappop(choices)
        task = queues[number].popleft()
        start = max(ready, *free) if serialized else ready
        free[number] = end = start + seconds[task.kind][task.stage]
        clock.ended(task, end)
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
