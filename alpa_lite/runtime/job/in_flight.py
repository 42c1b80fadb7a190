"""Bound the launches that are in flight, and detect when none of them makes progress.

    credits    un-awaited launches <= limit, for each group of devices              `Flight.launched`
    hang       no launch has ended for `patience` seconds while some have not       `Patience.is_over`
    work       a process that takes part in them compiles: that is no hang          `Flight.is_hung`
    end        of a hang: the process, and its job with it, or a `HangError`        `Flight.tell_hang`

Each launch leaves a token, a scalar that is ready when the launch is done. Without a bound, a dispatching thread that
is faster than the devices would allocate memory far ahead, and on virtual CPU devices, whose launches wait in threads
of one pool, it would fill that pool until nothing progresses. Waiting for a credit is waiting for an event; nothing is
fetched from a device.

A wait polls its token, with pauses that grow from `FIRST_PAUSE` to `LONGEST_PAUSE`, so that it can end in an error. The
queue holds other launches meanwhile, so devices do not idle in a pause.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import ref

from alpa_lite.errors import HangError

CPU_CREDITS = 16
"""Launches in flight per virtual CPU device: XLA admits 32, then blocks threads."""

CREDITS = 64
"""Launches in flight on other platforms, where queues are the driver's: enough to hide any wait, few enough to bound
memory.
"""

FIRST_PAUSE, LONGEST_PAUSE = 50e-6, 2e-3
"""Seconds between two looks at a token."""

Clock = Callable[[], float]


class Token(Protocol):
    """The scalar that a launch leaves, as a `jax.Array` is."""

    def is_ready(self) -> bool:
        """Return True if the launch is done."""
        ...


class Launch(NamedTuple):
    """One launch: its number since the program was compiled, its instruction, and its token."""

    order: int
    instruction: int
    token: Token


class Patience:
    """Detects that nothing has changed for `limit` seconds."""

    def __init__(self, limit: float | None, clock: Clock = time.monotonic) -> None:
        """Set the limit; None waits for ever."""
        self.limit, self._clock = limit, clock
        self._since, self._pending = clock(), frozenset[int]()

    def restart(self) -> None:
        """Restart the time."""
        self._since = self._clock()

    def is_over(self, pending: frozenset[int]) -> bool:
        """Return True if the same launches, by their order, have been pending for too long."""
        if pending != self._pending:
            self._pending, self._since = pending, self._clock()
        return self.limit is not None and bool(pending) and self._clock() - self._since >= self.limit


class Flight:
    """The launches of one executor; used from its thread, and read by the watchdog's."""

    def __init__(
        self,
        num_groups: int,
        *,
        limit: int,
        patience: float | None,
        explain: Callable[[int], str],
        name: Callable[[int], str] = str,
        processes: Callable[[int], frozenset[int]] = lambda instruction: frozenset(),
        at_work: Callable[[frozenset[int]], bool] = lambda processes: False,
        end: Callable[[str], object] | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start without launches.

        Args:
            num_groups: number of groups of devices whose launches run in order.
            limit: credits of a group of devices.
            patience: seconds in which something must end; None waits for ever.
            explain: returns sentences on what hangs at an instruction.
            name: returns an instruction in a few words.
            processes: returns the processes that take part in an instruction.
            at_work: returns whether one of these processes plans or compiles.
            end: ends the process with the sentence on a hang; None: `HangError` is raised.
            clock: returns the current time in seconds.
            sleep: sleeps for a number of seconds.

        `waited_seconds` counts the waits for credits since the program was compiled.
        """
        self.queues: tuple[deque[Launch], ...] = tuple(deque() for _ in range(num_groups))
        self.limit, self.patience, self.explain = limit, patience, explain
        self._name, self._processes, self._at_work, self._end = name, processes, at_work, end
        self._clock, self._sleep = clock, sleep
        self._last: Launch | None = None
        self._order = itertools.count()
        self.hang = ""
        self.waited_seconds = 0.0
        self.observer: Callable[[int, int, Token], None] | None = None
        # By weak references, as a dropped step must be freed; those that are gone are left out.
        _all_flights[:] = [*(each for each in _all_flights if each() is not None), ref(self)]

    def launched(self, group: int, instruction: int, token: Token) -> None:
        """Record a launch on a group of devices; wait for its oldest one if there are too many.

        `observer`, if set, is called first.
        """
        if self.observer is not None:
            self.observer(group, instruction, token)
        queue = self.queues[group]
        self._last = Launch(next(self._order), instruction, token)
        queue.append(self._last)
        if len(queue) > self.limit:
            # It stays in the queue while it is awaited: the watchdog and the heartbeat must see it pending.
            oldest = queue[0].token
            if not oldest.is_ready():
                self._wait(oldest)
            queue.popleft()

    def pending(self) -> tuple[Launch, ...]:
        """Return the launches that are not done, in order."""
        # Copies, as the thread that launches changes the queues meanwhile.
        launches = (launch for queue in self.queues for launch in queue.copy())
        return tuple(sorted((x for x in launches if not x.token.is_ready()), key=lambda x: x.order))

    def awaited(self) -> dict[int, frozenset[int]]:
        """Return the processes that take part in the launches that are not done, by the order of the launches."""
        return {launch.order: self._processes(launch.instruction) for launch in self.pending()}

    def is_hung(self, patience: Patience, pending: Sequence[Launch]) -> bool:
        """Return True if the pending launches have run out of patience, and no process that takes part is busy
        otherwise.
        """
        if not patience.is_over(frozenset(launch.order for launch in pending)):
            return False
        if self._at_work(frozenset[int]().union(*(self._processes(launch.instruction) for launch in pending))):
            patience.restart()
            return False
        return True

    def tell_hang(self, pending: Sequence[Launch]) -> str:
        """Return the sentence on a hang, which the next call raises; end the process instead if it is configured to."""
        self.hang = self.sentence(pending)
        if self._end is not None:
            self._end(self.hang)
        return self.hang

    def last_instruction(self) -> str:
        """Return the last launch of this process, or the first that is not done; empty before the first launch."""
        if self._last is None:
            return ""
        if pending := self.pending():
            return f"waits for {self._name(pending[0].instruction)}"
        return f"has done {self._name(self._last.instruction)}"

    @property
    def ends(self) -> bool:
        """Whether a hang ends the process, which then states the cause."""
        return self._end is not None

    def raise_if_hung(self) -> None:
        """Raise the hang that the watchdog detected between two steps, unless it has ended since."""
        if self.hang and self.pending():
            raise HangError(self.hang)
        self.hang = ""

    def sentence(self, pending: Sequence[Launch]) -> str:
        """Return the explanation of a hang: the first launch that is not done, as its inputs come from earlier ones."""
        return (
            f"No instruction has ended for {self.patience:g} s, and {len(pending)} are not done. The first of them: "
            f"{self.explain(pending[0].instruction)}"
        )

    def _wait(self, token: Token) -> None:
        began = self._clock()
        try:
            self._until_ready(token)
        finally:
            self.waited_seconds += self._clock() - began

    def _until_ready(self, token: Token) -> None:
        patience, pause = Patience(self.patience, self._clock), FIRST_PAUSE
        look_at = self._clock() + LONGEST_PAUSE
        while not token.is_ready():
            self._sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
            if self.patience is None or self._clock() < look_at:
                continue
            # Looking at all launches costs more than polling one token, and a hang need not be seen at once.
            look_at = self._clock() + min(1.0, self.patience / 8)
            pending = self.pending()
            if self.is_hung(patience, pending):
                raise HangError(self.tell_hang(pending))


_all_flights: list[ref[Flight]] = []
"""The steps of this process; another thread reads them."""


def awaited() -> dict[object, frozenset[int]]:
    """Return the processes that take part in unfinished launches of this process, of all its steps."""
    return {
        (id(flight), order): processes
        for found in tuple(_all_flights)
        if (flight := found()) is not None
        for order, processes in flight.awaited().items()
    }


def last_instructions() -> str:
    """Return the last launch of each step of this process, in words; empty if there is none."""
    flights = (flight for found in tuple(_all_flights) if (flight := found()) is not None)
    return "; ".join(filter(None, (flight.last_instruction() for flight in flights)))
