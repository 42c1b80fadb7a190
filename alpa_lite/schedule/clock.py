"""Validation, linearization and simulation of task lists.

ready(i,b,forward)  = end(i-1,b,forward) + transfer(i-1,i)                              `_dependencies`
ready(i,b,backward) = max(end(i+1,b,backward) + transfer(i,i+1), end(i,b,forward))      `_dependencies`
ready(i,b,weight gradient) = end(i,b,input gradient), which is the backward in the line above
start = max(ready, end of the previous task in the list of the processor), end = start + duration       `_run`
Replicas (`Schedule.replicas`) share the number i: micro-batch b is run by the one whose turn it is     `_Route`
They wait for each other after each round, of which they exchange gradients                             `_needed`
bubble_fraction = idle / (idle + busy)   (GPipe's definition)                           `simulate`
bubble_over_ideal = idle / busy          (Megatron's definition)                        `simulate`
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alpa_lite.errors import PlanError
from alpa_lite.schedule.tasks import Task, TaskKind, in_groups, kinds_of, peak_in_flight, processors_of

_PASSES: tuple[frozenset[TaskKind], ...] = (
    frozenset((TaskKind.FORWARD, TaskKind.BACKWARD)),
    frozenset((TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT)),
    frozenset((TaskKind.FORWARD,)),
)
"""The sets of tasks that a stage may run per micro-batch: a backward pass in one task, in two tasks, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One executed task, with its start and end in seconds since the beginning of the step."""

    stage: int
    microbatch: int
    kind: TaskKind
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated pipeline step.

    makespan_seconds    end of the last task, in seconds since the beginning of the step
    spans               the executed tasks in order of execution
    bubble_fraction     idle / (idle + busy) processor time
    bubble_over_ideal   idle / busy processor time

    There is one processor per task list, or a single one if the simulation was serialized.
    """

    makespan_seconds: float
    spans: tuple[Span, ...]
    bubble_fraction: float
    bubble_over_ideal: float


def validate(
    schedule_tasks: Sequence[Sequence[Task]],
    num_stages: int,
    num_microbatches: int,
    *,
    processors: Sequence[int] = (),
    in_flight: Sequence[int] = (),
    replicas: Sequence[range] = (),
) -> tuple[Task, ...]:
    """Return all tasks in one order (`linearize`). Raises PlanError unless the task lists form a complete schedule that
    does not deadlock.

    Each task must occur exactly once, those of stage i in list `processors[i]` (empty: i mod the number of lists). A
    stage runs one backward task per micro-batch, or an input and a weight gradient, unless no stage runs a backward
    pass. No stage may have more micro-batches in flight than `in_flight[stage]` (empty: any number). `replicas`: groups
    of stages that take micro-batches in turn.
    """
    if not schedule_tasks or (num_stages % len(schedule_tasks) and not processors):
        raise PlanError(
            f"A schedule of {num_stages} stages needs as many task lists, or a number that divides them, but has"
            f" {len(schedule_tasks)}."
        )
    processors = processors or [stage % len(schedule_tasks) for stage in range(num_stages)]
    route = _Route(in_groups(replicas, num_stages))
    for number, tasks in enumerate(schedule_tasks):
        mine = [stage for stage, processor in enumerate(processors) if processor == number]
        kinds = {stage: _pass_of(in_list) for stage, in_list in kinds_of(tasks).items()}
        # Counts of both, so that one comparison finds tasks that are missing, repeated, or of another list.
        expected = {
            Task(stage=stage, microbatch=b, kind=kind): 1
            for stage in mine
            for b in route.turns(stage, num_microbatches)
            for kind in kinds.get(stage, _PASSES[0])
        }
        counts = Counter(tasks)
        for task in (*expected, *counts):
            if counts[task] != expected.get(task, 0):
                raise PlanError(
                    f"The list of stage {', '.join(map(str, mine))} holds the {task} {counts[task]} times, not"
                    f" {expected.get(task, 0)}: it needs the tasks of each of the {num_microbatches} micro-batches"
                    f"{' whose turn it is' if replicas else ''} once, and nothing else."
                )
    _check_passes(schedule_tasks)
    # Raises for lists that deadlock.
    order = linearize(schedule_tasks, replicas)
    for stage, most in enumerate(in_flight):
        held = peak_in_flight([t for t in schedule_tasks[processors[stage]] if t.stage == stage])
        if held > most:
            raise PlanError(
                f"Stage {stage} of the schedule holds {held} micro-batches at one time, but its in_flight says {most}:"
                " memory would be planned for too few. Make in_flight return the larger number."
            )
    return order


def _pass_of(kinds: frozenset[TaskKind]) -> frozenset[TaskKind]:
    """Return the tasks that a stage must run per micro-batch, inferred from the kinds of task in its list.

    Incomplete sets of kinds map to the closest valid set, so that the error message names the missing tasks.
    """
    return next((wanted for wanted in _PASSES if kinds == wanted), _PASSES[0] if len(kinds) < 2 else _PASSES[1])


def _check_passes(schedule_tasks: Sequence[Sequence[Task]]) -> None:
    """Raise PlanError if some stages have a backward pass and others have none."""
    kinds_by_stage = {stage: kinds for tasks in schedule_tasks for stage, kinds in kinds_of(tasks).items()}
    without = [stage for stage, kinds in sorted(kinds_by_stage.items()) if kinds == _PASSES[2]]
    if 0 < len(without) < len(kinds_by_stage):
        raise PlanError(
            f"The schedule has no backward tasks of stage {', '.join(map(str, without))}, but of others. Give all of"
            " them, or none for inference."
        )


def linearize(tasks_per_processor: Sequence[Sequence[Task]], replicas: Sequence[range] = ()) -> tuple[Task, ...]:
    """Return all tasks in one order that respects every dependency, for a single controller that dispatches them.

    `replicas`: groups of stages that take micro-batches in turn.

    Tasks are ordered by the time at which they would end if a forward took 1 and a backward 2 units, so that a
    dispatched task seldom waits behind one that ends later. Raises PlanError if the lists deadlock.
    """
    num_stages = 1 + max((task.stage for tasks in tasks_per_processor for task in tasks), default=0)
    # A backward pass has about twice the FLOPs of the forward: two products for each one.
    unit = _seconds_by_kind([1.0] * num_stages, [2.0] * num_stages, [1.0] * num_stages)
    spans = _run(tasks_per_processor, unit, (), _Route(in_groups(replicas, num_stages)), serialized=False)
    return tuple(Task(stage=span.stage, microbatch=span.microbatch, kind=span.kind) for span in spans)


def simulate(
    tasks_per_processor: Sequence[Sequence[Task]],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    *,
    weight_seconds: Sequence[float] = (),
    transfer_seconds: Sequence[float] = (),
    dispatch_seconds: float = 0.0,
    serialized: bool = False,
    replicas: Sequence[range] = (),
) -> Timeline:
    """Simulate the task lists and return the timeline of the step.

    Args:
        tasks_per_processor: the ordered tasks of each processor; all tasks of a stage are in one list.
        forward_seconds: per stage, seconds of the forward pass of one micro-batch.
        backward_seconds: per stage, seconds of the whole backward pass of one micro-batch.
        weight_seconds: per stage, the part of `backward_seconds` spent on weight gradients, for schedules in which
            these are separate tasks (empty: half).
        transfer_seconds: element i is the time to send a micro-batch between stages i and i+1, in either direction
            (empty: none); replicas count as one stage here. A transfer delays the receiver and occupies neither stage,
            only the link between their processors, which carries one micro-batch at a time in each direction.
        dispatch_seconds: overhead added to each task of nonzero duration.
        serialized: all lists share one processor, which runs ready tasks first come, first served.
        replicas: groups of stages that take micro-batches in turn (`Schedule.replicas`).

    Raises:
        PlanError: the number of times does not match the number of stages, a time is negative, or the lists deadlock.
    """
    num_stages = 1 + max((task.stage for tasks in tasks_per_processor for task in tasks), default=-1)
    route = _Route(in_groups(replicas, num_stages))
    # By length, since a NumPy array of several numbers has no truth value.
    transfer_seconds = transfer_seconds if len(transfer_seconds) else [0.0] * (len(route.groups) - 1)
    # Both parts of a backward pass have about equally many FLOPs.
    weight_seconds = weight_seconds if len(weight_seconds) else [seconds / 2 for seconds in backward_seconds]
    borders = max(0, len(route.groups) - 1)
    all_times = (
        (forward_seconds, num_stages),
        (backward_seconds, num_stages),
        (weight_seconds, num_stages),
        (transfer_seconds, borders),
    )
    for times, needed in all_times:
        if len(times) != needed or min(times, default=0.0) < 0:
            raise PlanError(
                f"{num_stages} stages need {num_stages} forward and backward times and {borders} transfer"
                f" times, none of them negative, but one of these is {list(times)}."
            )
    seconds = {
        # A task without work is not launched, and so costs no dispatch either.
        kind: [t + dispatch_seconds if t > 0 else 0.0 for t in times]
        for kind, times in _seconds_by_kind(forward_seconds, backward_seconds, weight_seconds).items()
    }
    spans = _run(tasks_per_processor, seconds, transfer_seconds, route, serialized=serialized)
    # The last span in order of execution need not be the one that ends last.
    makespan = max((span.end_seconds for span in spans), default=0.0)
    busy = sum(span.end_seconds - span.start_seconds for span in spans)
    available = makespan * (1 if serialized else len(tasks_per_processor))
    # Rounding may make the sum of the tasks a little longer than the step.
    idle = max(available - busy, 0.0)
    return Timeline(
        makespan_seconds=makespan,
        spans=spans,
        bubble_fraction=idle / available if available > 0 else 0.0,
        bubble_over_ideal=idle / busy if busy > 0 else 0.0,
    )


def _seconds_by_kind(
    forward: Sequence[float], backward: Sequence[float], weight: Sequence[float]
) -> dict[TaskKind, Sequence[float]]:
    return {
        TaskKind.FORWARD: forward,
        TaskKind.BACKWARD: backward,
        # Never negative, whatever part of the backward pass the caller assigns to the weights.
        TaskKind.INPUT_GRADIENT: [max(0.0, b - w) for b, w in zip(backward, weight, strict=True)],
        TaskKind.WEIGHT_GRADIENT: weight,
    }


_End = tuple[int, int, TaskKind]
"""The stage, micro-batch and kind of a task that has ended; tuples take a fraction of the time that tasks do as keys.

An input gradient counts as the backward task. The previous stage waits for the gradients it receives, whether the
sender runs its backward pass in one task or in two, so `_dependencies` need not know which.
"""


def _end_of(task: Task) -> _End:
    """Return the key under which the end of a task is recorded."""
    kind = TaskKind.BACKWARD if task.kind is TaskKind.INPUT_GRADIENT else task.kind
    return task.stage, task.microbatch, kind


@dataclass(slots=True)
class _Route:
    """The stages that run each micro-batch. `groups`: all stages in order, those that take them in turn together."""

    groups: Sequence[range]
    group_of: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = {stage: number for number, group in enumerate(self.groups) for stage in group}

    def replicas(self, stage: int) -> range:
        """Return the stages that take micro-batches in turn with this one, itself among them."""
        return self.groups[self.group_of[stage]]

    def turns(self, stage: int, num_microbatches: int) -> range:
        """Return the micro-batches that a stage runs."""
        group = self.replicas(stage)
        return range(stage - group.start, num_microbatches, len(group))

    def neighbour(self, task: Task, step: int) -> int | None:
        """Return the stage that runs the micro-batch of a task before (-1) or after (1) it; None at either end."""
        number = self.group_of[task.stage] + step
        if not 0 <= number < len(self.groups):
            return None
        group = self.groups[number]
        return group[task.microbatch % len(group)]

    def round(self, task: Task) -> tuple[_End, ...]:
        """Return the ends of the tasks of this kind of the other replicas in the same round."""
        others = [stage for stage in self.replicas(task.stage) if stage != task.stage]
        return tuple((n, task.microbatch + n - task.stage, task.kind) for n in others)


def _needed(task: Task, before: Task | None, route: _Route) -> tuple[_End, ...]:
    """Return the ends on which `task` depends; `before` is the task before it in its list."""
    # An update follows the last task of a round, for which the replicas wait for each other.
    of_round = route.round(before) if before is not None and before.kind.is_last else ()
    return (*_dependencies(task, route), *of_round)


def _dependencies(task: Task, route: _Route) -> tuple[_End, ...]:
    """Return the ends on which `task` depends: of the neighbouring stage, and for a backward its own forward."""
    if task.kind is TaskKind.WEIGHT_GRADIENT:
        return ((task.stage, task.microbatch, TaskKind.BACKWARD),)
    neighbour = route.neighbour(task, -1 if task.kind is TaskKind.FORWARD else 1)
    if task.kind is TaskKind.FORWARD:
        return () if neighbour is None else ((neighbour, task.microbatch, TaskKind.FORWARD),)
    # The backward pass reads what the forward of its stage has saved; that of the last stage starts from the loss.
    own = task.stage, task.microbatch, TaskKind.FORWARD
    return (own,) if neighbour is None else (own, (neighbour, task.microbatch, TaskKind.BACKWARD))


@dataclass(slots=True, kw_only=True)
class _TaskTimes:
    """The state of a simulation, in seconds.

    processors  the processor of each stage
    route       the stages that run each micro-batch
    transfer    between each group of stages and the next one
    ends        end of each finished task
    arrivals    time at which the result of a task has reached the stage that reads it
    taken       (sending, receiving) processor → time until which the link between them is occupied
    """

    processors: Mapping[int, int]
    route: _Route
    transfer: Sequence[float]
    ends: dict[_End, float] = field(default_factory=dict[_End, float])
    arrivals: dict[_End, float] = field(default_factory=dict[_End, float])
    taken: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def ready(self, task: Task, before: Task | None, free: float) -> float:
        """Return the earliest start of `task` on a processor free from `free` on; inf if a dependency has not run."""
        # A result is available on its own stage when its task ends, on another one when it has arrived.
        replicas = self.route.replicas(task.stage)
        for end in _needed(task, before, self.route):
            free = max(free, (self.ends if end[0] in replicas else self.arrivals).get(end, math.inf))
        return free

    def ended(self, task: Task, end: float) -> None:
        """Record the end of a task, and send its result to the stage that reads it."""
        key = _end_of(task)
        self.ends[key] = end
        # Activations go to the next stage, gradients to the previous one.
        reader = self.route.neighbour(task, 1 if task.kind is TaskKind.FORWARD else -1)
        if task.kind is not TaskKind.WEIGHT_GRADIENT and reader is not None:
            link = (self.processors[task.stage], self.processors[reader])
            border = min(self.route.group_of[task.stage], self.route.group_of[reader])
            # The link carries one micro-batch at a time: the transfer begins when the one before has ended.
            started = max(end, self.taken.get(link, 0.0))
            self.taken[link] = self.arrivals[key] = started + (self.transfer[border] if len(self.transfer) else 0.0)


def _run(
    tasks_per_processor: Sequence[Sequence[Task]],
    seconds: Mapping[TaskKind, Sequence[float]],
    transfer: Sequence[float],
    route: _Route,
    *,
    serialized: bool,
) -> tuple[Span, ...]:
    """Repeatedly run the task at the head of a list that ends first (`serialized`: that was ready first).

    A list whose head is ready has one entry in the heap; the others are in `waiting`. The result of a task is read only
    by its own and the neighbouring stages, so only the lists in `changed` need another look: O(tasks · log lists).
    """
    queues = [deque(tasks) for tasks in tasks_per_processor]
    processors = processors_of(tasks_per_processor)
    free, clock = [0.0] * len(queues), _TaskTimes(processors=processors, route=route, transfer=transfer)
    before: list[Task | None] = [None] * len(queues)
    spans: list[Span] = []
    choices: list[tuple[float, float, int]] = []
    changed = set(range(len(queues)))
    waiting = set(changed)
    while any(queues):
        for number in changed & waiting:
            ready = clock.ready(queues[number][0], before[number], free[number]) if queues[number] else math.inf
            if ready < math.inf:
                task = queues[number][0]
                key = ready if serialized else ready + seconds[task.kind][task.stage]
                # Ties are broken by the earlier start, then by the number of the list, so that the order is
                # deterministic.
                heapq.heappush(choices, (key, ready, number))
                waiting.remove(number)
        # No head of a list can run, and no other task may run before it.
        if not choices:
            raise PlanError(_deadlock(queues, before, clock))
        _, ready, number = heapq.heappop(choices)
        before[number] = task = queues[number].popleft()
        # A shared processor is free when the last task of any list has ended.
        start = max(ready, *free) if serialized else ready
        free[number] = end = start + seconds[task.kind][task.stage]
        clock.ended(task, end)
        spans.append(
            Span(stage=task.stage, microbatch=task.microbatch, kind=task.kind, start_seconds=start, end_seconds=end)
        )
        waiting.add(number)
        # The list itself, and those of replicas and of the neighbouring stages.
        stages = {*route.replicas(task.stage), *(route.neighbour(task, step) for step in (-1, 1))}
        changed = {processors.get(stage, number) for stage in stages if stage is not None}
    return tuple(spans)


def _deadlock(queues: Sequence[Sequence[Task]], before: Sequence[Task | None], clock: _TaskTimes) -> str:
    waits: list[str] = []
    for task, last in ((queue[0], last) for queue, last in zip(queues, before, strict=True) if queue):
        left = (end for end in _needed(task, last, clock.route) if end not in clock.ends)
        needed = [str(Task(stage=stage, microbatch=number, kind=kind)) for stage, number, kind in left]
        waits.append(f"the {task} waits for the {' and the '.join(needed)}")
    return f"The schedule cannot finish: {'; '.join(waits)}. Order the task lists so that none waits in a circle."
