"""Run the workers of a parameter server as gradients arrive, where the order of a program's segments is not fixed.

    worker   starts its next micro-batch when the one before has ended and the schedule lets it; it then pulls the
             newest weights
    update   starts when all gradients that it adds up have arrived

What has arrived is seen at the tokens of launches, so that the order follows the devices, and differs between runs. In
a job of several processes, all of which would have to agree on it, segments run in the order of the program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from alpa_lite.plan.instructions import InstructionKind, Program
from alpa_lite.runtime.execute.bind import Bound, Slots
from alpa_lite.runtime.job.activity import Flight, Token
from alpa_lite.schedule.servers import ServerEvent, ServerSchedule


class _Running(NamedTuple):
    """A micro-batch on its worker, and the token of its last launch."""

    microbatch: int
    token: Token


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
            self.lacking[b] = self.updates - self._pulled[b]
        self.updates += 1


def planned_staleness(program: Program, schedule: ServerSchedule) -> Staleness:
    """Return the staleness of micro-batches in the order of the program."""
    found = Staleness(schedule=schedule, num_microbatches=program.num_microbatches)
    for segment in program.segments:
        found.note(segment.event)
    return found


class Servers:
    """Runs the segments of a program in the order in which gradients arrive."""

    def __init__(self, program: Program, bound: Bound, flight: Flight, schedule: ServerSchedule) -> None:
        """Prepare for a program with segments that was bound."""
        self.program, self.bound, self.flight, self.schedule = program, bound, flight, schedule
        ends = [
            (s.event, bisect_left(bound.instructions, s.first), bisect_left(bound.instructions, s.end))
            for s in program.segments
        ]
        self._parts = {event: range(first, end) for event, first, end in ends}
        self._before, self._after = range(ends[0][1]), range(ends[-1][2], len(bound.actions))
        self.staleness = planned_staleness(program, schedule)

    def run(self, slots: Slots) -> None:
        """Run a step."""
        m, workers = self.program.num_microbatches, self.schedule.workers
        self.staleness = Staleness(schedule=self.schedule, num_microbatches=m)
        left = [deque(range(w, m, workers)) for w in range(workers)]
        running: dict[int, _Running] = {}
        arrived, waiting = set[int](), self._updates(m)
        self._launch(slots, self._before)
        while waiting:
            for w in [w for w, each in running.items() if each.token.is_ready()]:
                arrived.add(running.pop(w).microbatch)
            # First the updates, so that the next pulls see them.
            for update in [u for u, needed in waiting.items() if needed <= arrived]:
                del waiting[update]
                self._begin(slots, ServerEvent(update, is_update=True))
            idle = [w for w in range(workers) if left[w] and w not in running]
            free = [w for w in idle if self.schedule.may_start(left[w][0], self.staleness.updates)]
            for w in free:
                b = left[w].popleft()
                running[w] = _Running(b, self._begin(slots, ServerEvent(b, is_update=False)))
            if waiting and not free:
                self.flight.wait(_Any([each.token for each in running.values()]))
        self._launch(slots, self._after)

    def _updates(self, num_microbatches: int) -> dict[int, set[int]]:
        """Return the micro-batches of each update, in the order in which updates of equal readiness run."""
        updates = sorted(event.number for event in self._parts if event.is_update)
        return {u: {*self.schedule.contributions(u, num_microbatches)} for u in updates}

    def _begin(self, slots: Slots, event: ServerEvent) -> Token:
        self.staleness.note(event)
        return self._launch(slots, self._parts[event])

    def _launch(self, slots: Slots, part: range) -> Token:
        """Launch a part of the program, and return the token of the last task in it."""
        tokens: list[Token] = [_ENDED]

        def seen(group: int, instruction: int, token: Token) -> None:
            del group
            if self.program.instructions[instruction].kind is InstructionKind.RUN:
                tokens.append(token)

        self.flight.observer = seen
        try:
            for i in part:
                action, free = self.bound.actions[i]
                action(slots)
                for slot in free:
                    slots[slot] = None
        finally:
            self.flight.observer = None
        return tokens[-1]


class _Any:
    """The token of what is ready as soon as one of several tokens is."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens

    def is_ready(self) -> bool:
        return not self._tokens or any(token.is_ready() for token in self._tokens)


_ENDED = _Any(())
