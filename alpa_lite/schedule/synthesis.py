"""Schedules that are made for the times of given stages: the shortest order that is found, with a bound.

    candidates     every schedule with the same places that the memory allows, both list schedules for the given
                   times, and those for equal stages at every limit of memory, since less memory may make
                   an order shorter                                                           `_listed`, `_at_limits`
    small steps    the shortest order of all, by branch and bound                                      `shortest`
    bound          no order is shorter: of each processor its work, after what must precede and before
                   what must follow it; and the way of one micro-batch                                 `least_seconds`
    memory         a micro-batch is held on stage s from its forward pass to the end of its backward pass, at least
                   for the R_s seconds of its way to the last stage and back. A processor that holds up to h of
                   them at a time takes m ΣR_s / h seconds or more                                  `_least_by_memory`

Branch and bound goes through the orders of each processor's tasks. Among all tasks that can run next, one ends the
earliest. On its processor either this task comes next, or another one that starts before that end: whatever starts
later would leave a gap in which this task fits. Only forward passes, which take memory, may have to leave it open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from alpa_lite.errors import PlanError
from alpa_lite.program.memo import memoized
from alpa_lite.schedule.clock import simulate
from alpa_lite.schedule.known_schedules import SCHEDULES
from alpa_lite.schedule.list_scheduling import PartialOrder, StageTimes, Workload, list_scheduled
from alpa_lite.schedule.ordering import Schedule, check_numbers, num_places
from alpa_lite.schedule.orders import Interleaved1F1B
from alpa_lite.schedule.tasks import Task, TaskKind, TaskLists, peak_in_flight
from alpa_lite.schedule.waves import Wave

MOST_TASKS, MOST_NODES = 36, 20_000
"""The most tasks of a step of which the shortest order is looked for, and the partial orders that are looked at."""

LISTED_TASKS = 8_000
"""The tasks in all list schedules for equal stages together: of a large step only some limits are tried."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesised(Schedule):
    """The shortest order that is found for the times of given stages, within a limit of micro-batches in flight.

    It is never longer than that of any other schedule with the same places and no more micro-batches in flight, with
    its default options, nor, unless the step is large (`LISTED_TASKS`), with any other options.

    Attributes:
        forward, backward, weight: seconds of each stage for one micro-batch; `weight` is the part of the backward pass
            that may be postponed. () for stages that take 1, 2 and 1. With weights of 0 backward passes stay whole.
        transfer: seconds between each stage and the next; () for none.
        processors: the processor of each stage; () for one of its own.
        most_held: how many micro-batches each processor may hold, counted once per stage; () for any number.
    """

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    processors: tuple[int, ...] = ()
    most_held: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "synthesised"

    def __str__(self) -> str:
        return self.name  # its times would fill a page

    @property
    def stages_per_processor(self) -> int:
        return max(map(self.processors.count, self.processors), default=1)

    def num_processors(self, num_stages: int) -> int:
        given = (self.forward, self.backward, self.weight)
        wrong = next((len(each) for each in given if each and len(each) != num_stages), None)
        if wrong is not None or len(self.transfer) not in (0, num_stages - 1) or num_stages < 1:
            raise PlanError(
                f"{self.name} was made for {wrong or len(self.transfer) + 1} stages, and {num_stages} are to be run. "
                "Give as many times and processors as there are stages, and one transfer fewer."
            )
        used = num_places(self.name, self.processors or range(num_stages), num_stages)
        if len(self.most_held) not in (0, used):
            raise PlanError(
                f"{self.name} has {used} processors, and most_held={self.most_held}. Give a number for each of them."
            )
        return used

    def processor_of(self, stage: int, num_stages: int) -> int:
        self.num_processors(num_stages)
        return int(self.processors[stage]) if self.processors else stage

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        return _synthesised(self._work(num_stages, num_microbatches)).lists

    def bound(self, num_stages: int, num_microbatches: int) -> float:
        """Return seconds that no order of these tasks can go below."""
        return _synthesised(self._work(num_stages, num_microbatches)).bound

    def least_seconds(self, num_stages: int, num_microbatches: int) -> float:
        """Return the part of `bound` that needs no order: no stage works less, or begins earlier."""
        return min(map(least_seconds, _works(self._work(num_stages, num_microbatches))))

    def _work(self, num_stages: int, num_microbatches: int) -> Workload:
        count = self.num_processors(num_stages)
        weight = self.weight or ((1.0,) * num_stages if not self.backward else ())
        times = StageTimes(
            forward=self.forward or (1.0,) * num_stages,
            backward=self.backward or (2.0,) * num_stages,
            weight=weight if any(weight) else (),
            transfer=self.transfer,
        )
        if min((*times.forward, *times.backward, *times.weight, *times.transfer)) < 0:
            raise PlanError(f"{self.name} has a negative time: {times}. Give seconds.")
        return Workload(
            processors=tuple(self.processor_of(stage, num_stages) for stage in range(num_stages)),
            num_microbatches=num_microbatches,
            times=times,
            most_held=tuple(map(int, self.most_held)) or (num_microbatches * num_stages,) * count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """An order, its seconds, and seconds that no order goes below."""

    lists: TaskLists
    seconds: float
    bound: float


@memoized(entries=32)
def _synthesised(work: Workload) -> _Order:
    """Return the shortest order that is found; of equally short ones the first, with whole backward passes if any."""
    works = _works(work)
    found = [list_scheduled(each) for each in works]
    found += [lists for lists in _listed(work) if _fits(lists, work)]
    ranked = [(_seconds(lists, work), number) for number, lists in enumerate(found)]
    seconds, number = min(ranked)
    best, bound = found[number], min(least_seconds(each) for each in works)
    for lists in _at_limits(work) if seconds > bound else ():
        if _fits(lists, work) and (taken := _seconds(lists, work)) < seconds:
            best, seconds = lists, taken
    if seconds > bound and 3 * len(work.processors) * work.num_microbatches <= MOST_TASKS:
        exact = [shortest(each, seconds) for each in works]
        for lists in (each.lists for each in exact if each.lists):
            # Judged with links that carry one micro-batch at a time, which may take longer.
            if (taken := _seconds(lists, work)) < seconds:
                best, seconds = lists, taken
        bound = max(bound, min(each.bound for each in exact))
    return _Order(lists=best, seconds=seconds, bound=min(bound, seconds))


def _works(work: Workload) -> Sequence[Workload]:
    """Return the work with whole backward passes, and as it is."""
    return [*dict.fromkeys((replace(work, times=replace(work.times, weight=())), work))]


def _listed(work: Workload) -> Iterator[TaskLists]:
    """Yield the orders of other schedules that have the places of these stages."""
    stages = len(work.processors)
    chunks = stages // (1 + max(work.processors))
    others: list[Schedule] = [*SCHEDULES, Interleaved1F1B(num_chunks=max(1, chunks))]
    # Those of other options are among `_at_limits`, which may not try all.
    others += [Wave(num_waves=chunks // 2)] if chunks >= 2 else []
    for other in others:
        with suppress(PlanError):
            if tuple(other.processor_of(stage, stages) for stage in range(stages)) == work.processors:
                lists = other.tasks(stages, work.num_microbatches)
                # Not the schedule for inference, which has no backward pass.
                if any(task.kind.is_last for tasks in lists for task in tasks):
                    yield lists


def _at_limits(work: Workload) -> Iterator[TaskLists]:
    """Yield the orders of list schedules for equal stages at every limit that processors may have in common.

    The schedules that go back and forth, at any memory, are among these, as is `MessageDriven` with any limit.
    """
    stages, m = len(work.processors), work.num_microbatches
    per_processor = max(map(work.processors.count, work.processors))
    # Forward passes leave room for the later stages of their processor, so that a limit may be above what it holds.
    # Backward passes take twice as long: with three micro-batches per stage, no forward pass waits for memory.
    most = min(max(work.most_held) + per_processor - 1, 3 * stages, m * per_processor + per_processor - 1)
    limits = sorted(range(per_processor, most + 1), key=lambda limit: abs(limit - min(work.most_held)))
    unit = (1.0,) * stages
    splits = ((), unit) if any(work.times.weight) else ((),)
    count = max(2, LISTED_TASKS // (sum(2 + bool(weight) for weight in splits) * stages * m))
    for limit in limits[:count]:
        for weight in splits:
            times = StageTimes(forward=unit, backward=(2.0,) * stages, weight=weight)
            held = (limit,) * len(work.most_held)
            yield list_scheduled(replace(work, times=times, most_held=held))


def _fits(lists: TaskLists, work: Workload) -> bool:
    return all(peak_in_flight(tasks) <= most for tasks, most in zip(lists, work.most_held, strict=True))


def _seconds(lists: TaskLists, work: Workload) -> float:
    times = work.times
    # A schedule that splits backward passes may be tried for stages that do not.
    weight = times.weight or [0.0] * len(times.forward)
    return simulate(
        lists, times.forward, times.backward, weight_seconds=weight, transfer_seconds=times.transfer
    ).makespan_seconds


def least_seconds(work: Workload) -> float:
    """Return seconds that no order goes below: see the module."""
    return max(_least(PartialOrder(work=work)), *_least_by_memory(work))


def _least_by_memory(work: Workload) -> Iterator[float]:
    """Yield, for each processor, seconds that no order goes below which holds as much there as it may."""
    times, stages = work.times, len(work.processors)
    weight, transfer = times.weight or (0.0,) * stages, times.transfer or (0.0,) * (stages - 1)
    # To the last stage and back to a stage: gradients of weights of the later stages may wait.
    ways = [times.forward[-1] + times.backward[-1]]
    for s in reversed(range(stages - 1)):
        ways.append(ways[-1] - weight[s + 1] + times.forward[s] + times.backward[s] + 2 * transfer[s])
    for processor, most in enumerate(work.most_held):
        mine = [s for s, p in enumerate(work.processors) if p == processor]
        before = sum(times.forward[: mine[0]]) + sum(transfer[: mine[0]])
        after = 0.0 if times.weight else sum(times.backward[: mine[0]]) + sum(transfer[: mine[0]])
        held = sum(ways[stages - 1 - s] for s in mine) * work.num_microbatches
        yield before + held / max(most, len(mine)) + after


def _least(state: PartialOrder) -> float:
    """Return seconds that no order with this beginning goes below."""
    work, times, m = state.work, state.work.times, state.work.num_microbatches
    weight, found = times.weight or (0.0,) * len(times.forward), [_way(work)]
    for processor, stages in enumerate(state.stages):
        passes = sum(
            times.forward[s] * (m - len(state.forwards[s]))
            + (times.backward[s] - weight[s]) * (m - len(state.backwards[s]))
            for s in stages
        )
        late = sum(weight[s] * (m - state.weights[s]) for s in stages)
        before = sum(times.forward[: stages[0]]) + sum(times.transfer[: stages[0]])
        begin = max(state.free[processor], before)
        # Earlier stages wait for the last gradient of inputs, but not for gradients of weights. These may follow it of
        # as many micro-batches as the processor may hold.
        after = sum(times.backward[: stages[0]]) - sum(weight[: stages[0]]) + sum(times.transfer[: stages[0]])
        held = max(work.most_held[processor], len(stages)) * max(weight[s] for s in stages)
        found += [begin + passes + late, begin + passes + max(0.0, late - held) + (after if passes else 0.0)]
    return max(found)


def _way(work: Workload) -> float:
    """Return the seconds of one micro-batch through all stages and back."""
    return (
        sum(work.times.forward) + sum(work.times.backward) - sum(work.times.weight[1:]) + 2 * sum(work.times.transfer)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortest:
    """An order that is shorter than asked for, or () if there is none or the search ended early, and a bound."""

    lists: TaskLists
    bound: float


def shortest(work: Workload, at_most: float) -> Shortest:
    """Return the shortest order of less than `at_most` seconds, where links carry any number of micro-batches."""
    search = _BranchAndBound(state=PartialOrder(work=work), best=at_most)
    search.branch({})
    done = search.nodes < MOST_NODES
    return Shortest(lists=search.lists, bound=search.best if done else least_seconds(work))


@dataclass(slots=True, kw_only=True)
class _BranchAndBound:
    state: PartialOrder
    best: float
    lists: TaskLists = ()
    nodes: int = 0

    def branch(self, passed: dict[int, frozenset[Task]]) -> None:
        """Look at all orders with the beginning in `state`.

        passed: by processor, tasks that it could run, but does not until it has run another one.
        """
        self.nodes += 1
        state, work = self.state, self.state.work
        options = [
            [option for option in state.options(p) if option[1] not in passed.get(p, ())]
            for p in range(len(state.stages))
        ]
        ends = [
            (start + work.times.of(task.kind, task.stage), p) for p, each in enumerate(options) for start, task in each
        ]
        if not ends:
            seconds = max(state.free)
            done = all(len(each) == work.num_microbatches for each in state.backwards)
            done = done and (not work.times.weight or min(state.weights) == work.num_microbatches)
            if done and seconds < self.best:
                self.best, self.lists = seconds, state.task_lists
            return
        end, processor = min(ends)
        first = min(options[processor], key=lambda option: option[0] + work.times.of(option[1].kind, option[1].stage))[
            1
        ]
        takes_memory = first.kind is TaskKind.FORWARD
        for start, task in sorted(
            options[processor], key=lambda option: (option[0], option[1].kind is TaskKind.FORWARD)
        ):
            if start >= end and task != first and not takes_memory:
                continue
            free = state.free[processor]
            state.run(task, start)
            if _least(state) < self.best and self.nodes < MOST_NODES:
                self.branch({p: tasks for p, tasks in passed.items() if p != processor})
            state.take_back(task, free)
        if takes_memory and self.nodes < MOST_NODES:
            # The processor waits for a task that it cannot run yet.
            here = frozenset(task for _, task in state.options(processor))
            if here != passed.get(processor):
                self.branch({**passed, processor: here})
