"""Run the segments of a program as results arrive, where their order is not fixed.

    parameter server   a worker starts its next micro-batch when the one before has ended and the schedule lets it, and
                       pulls the newest weights; an update starts when all gradients that it adds up have arrived
                                                                                                   `ServedRun`
    message-driven     a stage starts the next task of those whose inputs have arrived             `MessageRun`

What has arrived is seen at the tokens of launches, so that the order follows the devices, and differs between runs.

In a job of several processes the first one decides, and tells the others, which launch the same segments in the same
order (`_follow`): so no order of launches can deadlock, whatever arrives when. It has the tokens of its own launches;
of a segment that ends on another process, the first one of the stage reports the end (`_Reported`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from alpa_lite.errors import ExecutionError
from alpa_lite.plan.instructions import InstructionKind, Program, Segment
from alpa_lite.runtime.execute.bind import Bound, Slots
from alpa_lite.runtime.execute.survival import ALL_DIED, Survival
from alpa_lite.runtime.job.activity import Flight, Token
from alpa_lite.runtime.job.channel import IDLE_SECONDS, Channel
from alpa_lite.schedule import MessageDriven, Schedule
from alpa_lite.schedule.messages import Inboxes
from alpa_lite.schedule.servers import ServerEvent, ServerSchedule
from alpa_lite.schedule.tasks import Task

AHEAD = 2
"""The tasks of a stage that are launched and have not ended: while one runs, the inputs of the next one are sent."""

PAUSE = 2e-4
"""The most seconds between two looks at what has arrived, for which a worker may have to wait in vain."""

Event = ServerEvent | Task
"""What a segment is of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundSegments:
    """A program with segments, whose instructions are bound: launches it part by part.

    Attributes:
        program: the program.
        bound: its actions.
        flight: its launches.
        processes: the processes of each stage.
        channel: the connections to the other processes; None if there are none.
        survival: the workers without which the program goes on, if it can.
    """

    program: Program
    bound: Bound
    flight: Flight
    processes: Sequence[Sequence[int]]
    channel: Channel | None = None
    survival: Survival | None = None

    def parts(self) -> dict[Event, range]:
        """Return the actions of each segment."""
        at = self.bound.instructions
        return {s.event: range(bisect_left(at, s.first), bisect_left(at, s.end)) for s in self.program.segments}

    def ends_on(self, segment: Segment) -> int:
        """Return the process that sees the end of a segment: the first one of the stage that runs its last task."""
        instructions = self.program.instructions[segment.first : segment.end]
        stages = [i.stage for i in instructions if i.kind is InstructionKind.RUN]
        # Without a task, as of a pass that the other one of its stage includes, it ends at once.
        return self.processes[stages[-1]][0] if stages else 0

    def launch(self, slots: Slots, part: range) -> Token:
        """Launch some actions, and return the token of the last task among them."""
        tokens: list[Token] = [_ENDED]

        def seen(group: int, instruction: int, token: Token) -> None:
            del group
            if self.program.instructions[instruction].kind is InstructionKind.RUN:
                tokens.append(token)

        self.flight.observer = seen
        try:
            if self.survival is not None:
                self.survival.run(slots, part)
            else:
                self._run(slots, part)
        finally:
            self.flight.observer = None
        return tokens[-1]

    def _run(self, slots: Slots, part: range) -> None:
        for i in part:
            action, free = self.bound.actions[i]
            action(slots)
            for slot in free:
                slots[slot] = None

    def lost(self) -> set[int]:
        """Return the stages that are lost with their processes."""
        if self.survival is None or self.channel is None:
            return set()
        if self.channel.leads:
            self.survival.lose(self.channel.lost)
        return {*self.survival.lost}


class ArrivalRun(ABC):
    """Runs the steps of a program whose segments have no fixed order."""

    def __init__(self, segments: BoundSegments) -> None:
        """Prepare for a program that was bound."""
        self.segments, self.parts = segments, segments.parts()
        listed = segments.program.segments
        self._events = [segment.event for segment in listed]
        self._number = {event: number for number, event in enumerate(self._events)}
        self._ends_on = [segments.ends_on(segment) for segment in listed]
        ranges = list(self.parts.values())
        # What is not part of a segment runs before all of them, or after.
        self._before = range(min(part.start for part in ranges))
        self._after = range(max(part.stop for part in ranges), len(segments.bound.actions))

    def run(self, slots: Slots) -> None:
        """Run a step."""
        channel, survival = self.segments.channel, self.segments.survival
        self.segments.launch(slots, self._before)
        self.restart()
        if channel is not None:
            channel.begin()
        if channel is None or channel.leads:
            self.run_segments(slots)
        else:
            self._follow(slots, channel)
        if channel is not None and channel.leads:
            # All segments were told. What follows is launched without the same workers everywhere.
            channel.tell(sorted(self.segments.lost()))
        if survival is not None:
            survival.complete(slots)
        self.segments.launch(slots, self._after)

    @abstractmethod
    def restart(self) -> None:
        """Take note that a step begins."""

    @abstractmethod
    def note(self, event: Event) -> None:
        """Take note that a segment begins."""

    @abstractmethod
    def run_segments(self, slots: Slots) -> None:
        """Launch all segments as what they read arrives."""

    def begin(self, slots: Slots, event: Event) -> Token:
        """Launch a segment, on all processes, and return the token of its last task."""
        channel, number = self.segments.channel, self._number[event]
        self.note(event)
        if channel is not None:
            channel.tell(number)
        token = self.segments.launch(slots, self.parts[event])
        return token if channel is None or self._ends_on[number] == channel.me else _Reported(channel, number)

    def _follow(self, slots: Slots, channel: Channel) -> None:
        """Launch the segments that the first process tells, and report the ends of those that end here."""
        running: dict[int, Token] = {}
        while True:
            # Waiting for a message wakes at once; the ends of launches are to be looked for.
            number = channel.heard(PAUSE if running else IDLE_SECONDS)
            if isinstance(number, list):
                if self.segments.survival is not None:
                    self.segments.survival.lost.update(number)
                return
            if number is not None:
                event = self._events[number]
                self.note(event)
                token = self.segments.launch(slots, self.parts[event])
                if self._ends_on[number] == channel.me:
                    running[number] = token
            for ended in [n for n, token in running.items() if token.is_ready()]:
                del running[ended]
                channel.report(ended)

    def wait(self, tokens: Sequence[Token]) -> None:
        """Wait until one of some tokens is ready."""
        self.segments.flight.wait(_Any(tokens), longest_pause=PAUSE)


def arrival_run(segments: BoundSegments, schedule: Schedule, num_stages: int) -> ArrivalRun | None:
    """Return what runs the program of a schedule without a fixed order; None for any other program."""
    if segments.program.segments and isinstance(schedule, ServerSchedule):
        return ServedRun(segments, schedule)
    if segments.program.segments and isinstance(schedule, MessageDriven):
        return MessageRun(segments, schedule, num_stages)
    return None


@dataclass(kw_only=True)
class Staleness:
    """Counts, in the order of events, how many updates the weights of each micro-batch lack.

    `updates`: number of updates so far. `lacking`: staleness by micro-batch, of those that were applied.
    """

    schedule: ServerSchedule
    num_microbatches: int
    updates: int = 0
    lacking: dict[int, int] = field(default_factory=dict[int, int])
    _pulled: dict[int, int] = field(default_factory=dict[int, int])

    def note(self, event: ServerEvent) -> None:
        """Take note of the start of an event."""
        if not event.is_update:
            self._pulled[event.number] = self.updates
            return
        for b in self.schedule.contributions(event.number, self.num_microbatches):
            if b in self._pulled:  # else its worker is lost
                self.lacking[b] = self.updates - self._pulled[b]
        self.updates += 1

    def lose(self, microbatches: range) -> None:
        """Take note that the worker of some micro-batches is lost: those not applied yet never will be."""
        for b in microbatches:
            self._pulled.pop(b, None)


class _Running(NamedTuple):
    """A micro-batch on its worker, and the token of its last launch."""

    microbatch: int
    token: Token


@final
class ServedRun(ArrivalRun):
    """Runs the workers and the servers of a parameter server."""

    def __init__(self, segments: BoundSegments, schedule: ServerSchedule) -> None:
        """Prepare for a program that was bound."""
        super().__init__(segments)
        self.schedule, self.num_microbatches = schedule, segments.program.num_microbatches
        self.restart()
        # Until a step has run, the staleness is that of the program's order.
        for event in schedule.events(self.num_microbatches):
            self.staleness.note(event)

    def restart(self) -> None:
        self.staleness = Staleness(schedule=self.schedule, num_microbatches=self.num_microbatches)

    def note(self, event: Event) -> None:
        assert isinstance(event, ServerEvent)
        self.staleness.note(event)

    def run_segments(self, slots: Slots) -> None:
        """Launch micro-batches as workers become free, and updates as gradients arrive."""
        m, workers = self.num_microbatches, self.schedule.workers
        left = [deque(range(w, m, workers)) for w in range(workers)]
        running: dict[int, _Running] = {}
        arrived, waiting, lost = set[int](), self._updates(), set[int]()
        while waiting:
            for stage in (stages := self.segments.lost()) - lost:
                # Also what has arrived: the gradients are on the devices of the worker until an update pulls them.
                mine = range(stage - 1, m, workers)
                running.pop(stage - 1, None)
                left[stage - 1].clear()
                self.staleness.lose(mine)
                waiting = {u: still for u, needed in waiting.items() if (still := needed.difference(mine))}
            lost = stages
            if len(lost) == workers:
                raise ExecutionError(ALL_DIED)
            for w in [w for w, each in running.items() if each.token.is_ready()]:
                arrived.add(running.pop(w).microbatch)
            # First the updates, so that the next pulls see them.
            for update in [u for u, needed in waiting.items() if needed <= arrived]:
                del waiting[update]
                self.begin(slots, ServerEvent(update, is_update=True))
            idle = [w for w in range(workers) if left[w] and w not in running]
            free = [w for w in idle if self.schedule.may_start(left[w][0], self.staleness.updates)]
            for w in free:
                b = left[w].popleft()
                running[w] = _Running(b, self.begin(slots, ServerEvent(b, is_update=False)))
            if waiting and not free:
                self.wait([*(each.token for each in running.values()), _Loss(self.segments, lost)])

    def _updates(self) -> dict[int, set[int]]:
        """Return the micro-batches of each update, in the order in which updates of equal readiness run."""
        updates = [e.number for e in self.schedule.events(self.num_microbatches) if e.is_update]
        return {u: {*self.schedule.contributions(u, self.num_microbatches)} for u in sorted(updates)}


@final
class MessageRun(ArrivalRun):
    """Runs the stages of a message-driven pipeline."""

    def __init__(self, segments: BoundSegments, schedule: MessageDriven, num_stages: int) -> None:
        """Prepare for a program that was bound."""
        super().__init__(segments)
        self.num_stages, self.limit = num_stages, schedule.most_under_way(num_stages)
        self.restart()

    def restart(self) -> None:
        self.begun, self.most_under_way = list[Task](), 0

    def note(self, event: Event) -> None:
        assert isinstance(event, Task)
        self.begun.append(event)

    def run_segments(self, slots: Slots) -> None:
        """Launch, on each stage that is free, what has arrived there."""
        m = self.segments.program.num_microbatches
        inboxes = Inboxes(num_stages=self.num_stages, num_microbatches=m, limit=self.limit)
        launched = [deque[tuple[Task, Token]]() for _ in range(self.num_stages)]
        while not inboxes.is_done:
            for queue in launched:
                while queue and queue[0][1].is_ready():
                    inboxes.end(queue.popleft()[0])
            moved = False
            # The latest stages first: what they send back lets the others go on.
            for stage in reversed(range(self.num_stages)):
                while len(launched[stage]) < AHEAD and (task := inboxes.next_on(stage)) is not None:
                    inboxes.begin(task)
                    launched[stage].append((task, self.begin(slots, task)))
                    moved = True
            self.most_under_way = max(self.most_under_way, inboxes.under_way)
            if not moved and not inboxes.is_done:
                self.wait([queue[0][1] for queue in launched if queue])


class _Any:
    """The token of what is ready as soon as one of several tokens is."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens

    def is_ready(self) -> bool:
        return not self._tokens or any(token.is_ready() for token in self._tokens)


class _Reported:
    """The token of a segment that ends on another process, which reports it."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._segment = channel, number

    def is_ready(self) -> bool:
        return self._channel.is_reported(self._segment)


class _Loss:
    """A token that is ready as soon as other stages are lost than before."""

    def __init__(self, segments: BoundSegments, lost: set[int]) -> None:
        self._segments, self._lost = segments, lost

    def is_ready(self) -> bool:
        return self._segments.lost() != self._lost


_ENDED = _Any(())
