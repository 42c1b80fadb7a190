"""What the processes of a job are doing: activities, launches in flight, and processes that a signal has stopped.

busy         context in which the process plans or compiles: the others wait for it longer  `busy`, `doing`
idle         context in which it waits for others                                           `idle`
where        the line of the user's program that the main thread is at                      `where`
stacks       of all Python threads, written to the error stream                             `dump_stacks`
neighbours   other processes of this machine: a stopped one cannot report, but can be seen  `Neighbours`
launches     bounded in number, and watched for progress                                    `Flight`

Before the job ends because of a stopped process, that one is continued, so that it can write its stacks, and end.

Launches that are in flight:

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

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol
from weakref import ref

from alpa_lite.errors import HangError
from alpa_lite.trace.source_lines import is_in_a_library

_doing: list[str] = []
"""The activities of the process, the innermost last; empty texts stand for waiting."""


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Mark this process as busy with a long activity, for example "compiling"; the other processes are told."""
    _doing.append(what)
    try:
        yield
    finally:
        # By value, not the last: activities of several threads may end in another order than they began.
        _doing.remove(what)


def idle() -> AbstractContextManager[None]:
    """Mark this process as waiting for others."""
    return busy("")


def doing() -> str:
    """Return this process's activity, empty while it has none. JAX may be compiling a function of the user's own."""
    if _doing and _doing[-1]:
        return _doing[-1]
    # A function that the user compiles with JAX is not announced by `busy`, but is on the stack of some thread.
    return "compiling" if any(map(_is_compiling, sys._current_frames().values())) else ""


def where() -> str:
    """Return the innermost line of the user's program that the main thread is at, as `file:line (function)`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the end of the program"
    # Outwards, from the innermost frame to the first one that is in no library.
    user_frame: FrameType = frame
    while is_in_a_library(user_frame.f_code.co_filename) and user_frame.f_back is not None:
        user_frame = user_frame.f_back
    # If no frame is of the user's own, the innermost one says most.
    if user_frame.f_back is None and is_in_a_library(user_frame.f_code.co_filename):
        user_frame = frame
    return f"{user_frame.f_code.co_filename}:{user_frame.f_lineno} ({user_frame.f_code.co_name})"


def dump_stacks() -> None:
    """Write the stacks of all Python threads to the error stream, even if Python's own is closed or redirected."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(Exception):
            # This needs a file descriptor, which a replaced stream may lack: then the next one is tried.
            faulthandler.dump_traceback(file=stream or 2, all_threads=True)
            return


_STOPPED = frozenset("Tt")
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat after the name."""


def place() -> str:
    """Return a key of the process namespace and number of this process, for `Neighbours`; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    return ""


class Neighbours:
    """The processes of the job that see the same processes under the same numbers as this one."""

    def __init__(self, me: int, places: Callable[[], Mapping[int, str]], num_processes: int, limit: float) -> None:
        """Start without any neighbour.

        Args:
            me: number of this process in the job.
            places: returns the `place` of each process that has published it.
            num_processes: of the job; `places` is called until it returns that many.
            limit: seconds that a process may be stopped.
        """
        self._me, self._places, self._num_processes, self._limit = me, places, num_processes, limit
        self._known: Mapping[int, str] = {}
        self._since: dict[int, float] = {}

    def stopped(self, now: float) -> str:
        """Return the processes that have been stopped for too long, in words; empty if there are none."""
        still = self._still()
        # A process that was continued in between has no entry here, so its time starts again.
        self._since = {process: self._since.get(process, now) for process in still}
        for process, since in self._since.items():
            if now - since >= self._limit:
                number = still[process]
                return f"process {process} (its number is {number}) was stopped by a signal {self._limit:.0f} s ago."
        return ""

    def wake(self) -> None:
        """Continue all stopped processes, however briefly they were stopped."""
        for pid in self._still().values():
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _still(self) -> dict[int, int]:
        """Return the process ids of the stopped processes, by their numbers in the job."""
        if len(self._known) < self._num_processes:
            self._known = self._places()
        # Process ids mean the same only on one running kernel and in one process namespace, as of a container.
        machine = self._known.get(self._me, "").split()[:2]
        others = {process: text.split() for process, text in self._known.items() if process != self._me and machine}
        here = {process: (int(text[2]), int(text[3])) for process, text in others.items() if text[:2] == machine}
        return {process: pid for process, (pid, started) in here.items() if _is_stopped(pid, started)}


def _is_stopped(pid: int, started: int) -> bool:
    """Return True if the process that began then under this id is stopped; the id may have been reused."""
    with suppress(OSError, IndexError):
        fields = _stat(pid)
        return fields[_STATE] in _STOPPED and int(fields[_STARTED]) == started
    return False


def _stat(pid: int) -> list[str]:
    # The name of the program, in parentheses, may itself contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


_COMPILING = tuple(os.path.join("jax", "_src", *name) for name in (("compiler.py",), ("interpreters", "mlir.py")))
"""Files of JAX whose functions run while it lowers and compiles."""


def _is_compiling(frame: FrameType | None) -> bool:
    """Return whether a thread whose innermost frame is `frame` is lowering or compiling a function in JAX."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILING):
            return True
        frame = frame.f_back
    return False


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
        # A launch that has ended, or a new one, is progress: the time starts again.
        if pending != self._pending:
            self._pending, self._since = pending, self._clock()
        # Without launches there is nothing to wait for, however long that lasts.
        return self.limit is not None and bool(pending) and self._clock() - self._since >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionInfo:
    """Describes the instructions of a program, each given by its number.

    explain     returns sentences on a hang at an instruction
    name        returns an instruction in a few words
    processes   returns the processes that take part in an instruction
    """

    explain: Callable[[int], str]
    name: Callable[[int], str] = str
    processes: Callable[[int], frozenset[int]] = lambda instruction: frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """The definition of a hang, and the reaction to one.

    patience    seconds in which some launch must end; None waits for ever
    at_work     returns whether one of some processes plans or compiles, which is no hang
    end         ends the process with the sentence on a hang; None: `HangError` is raised
    """

    patience: float | None
    at_work: Callable[[frozenset[int]], bool] = lambda processes: False
    end: Callable[[str], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A clock, in seconds, and a function that sleeps for some seconds of it; tests simulate both."""

    clock: Clock = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Flight:
    """The launches of one executor; used from its thread, and read by the watchdog's."""

    def __init__(
        self,
        num_groups: int,
        *,
        limit: int,
        instructions: InstructionInfo,
        hang_policy: HangPolicy,
        timer: Timer | None = None,
    ) -> None:
        """Start without launches.

        Args:
            num_groups: number of groups of devices whose launches run in order.
            limit: credits of a group of devices.
            instructions: describes the instructions of the program.
            hang_policy: when launches count as hung.
            timer: measures and spends the time of waits.

        `waited_seconds` counts the waits for credits, and for what is to arrive, since the program was compiled.
        """
        # Deques, as one thread appends and takes from the other end while another reads.
        self.queues: tuple[deque[Launch], ...] = tuple(deque() for _ in range(num_groups))
        self.limit, self.patience = limit, hang_policy.patience
        self._instructions, self._at_work, self._end = instructions, hang_policy.at_work, hang_policy.end
        timer = timer or Timer()
        self._clock, self._sleep = timer.clock, timer.sleep
        self._last: Launch | None = None
        self._order = itertools.count()
        self.hang = ""
        self.waited_seconds = 0.0
        self.observer: Callable[[int, int, Token], None] | None = None
        # By weak references, as a dropped step must be freed; those that are gone are left out.
        _all_flights[:] = [*(each for each in _all_flights if each() is not None), ref(self)]

    def launched(self, group: int, instruction: int, token: Token) -> None:
        """Tell the `observer` of a launch on a group of devices; await the oldest one if there are too many."""
        if self.observer is not None:
            self.observer(group, instruction, token)
        # One queue for each group: launches on different devices do not wait for each other.
        queue = self.queues[group]
        self._last = Launch(next(self._order), instruction, token)
        queue.append(self._last)
        if len(queue) > self.limit:
            # It stays in the queue while it is awaited: the watchdog and the heartbeat must see it pending.
            oldest = queue[0].token
            if not oldest.is_ready():
                self.wait(oldest)
            queue.popleft()

    def pending(self) -> tuple[Launch, ...]:
        """Return the launches that are not done, in order."""
        # Copies, as the thread that launches changes the queues meanwhile.
        launches = (launch for queue in self.queues for launch in queue.copy())
        return tuple(sorted((x for x in launches if not x.token.is_ready()), key=lambda x: x.order))

    def awaited(self) -> dict[int, frozenset[int]]:
        """Return the processes that take part in the launches that are not done, by the order of the launches."""
        return {launch.order: self._instructions.processes(launch.instruction) for launch in self.pending()}

    def is_hung(self, patience: Patience, pending: Sequence[Launch]) -> bool:
        """Return True if the pending launches have run out of patience, and no process in them is busy otherwise."""
        if not patience.is_over(frozenset(launch.order for launch in pending)):
            return False
        taking_part = (self._instructions.processes(launch.instruction) for launch in pending)
        if self._at_work(frozenset[int]().union(*taking_part)):
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
            return f"waits for {self._instructions.name(pending[0].instruction)}"
        return f"has done {self._instructions.name(self._last.instruction)}"

    @property
    def ends(self) -> bool:
        """True if a hang ends the process, which then states the cause."""
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
            f"{self._instructions.explain(pending[0].instruction)}"
        )

    def wait(self, token: Token, *, longest_pause: float = LONGEST_PAUSE) -> None:
        """Wait until a token is ready, looking at it at least every `longest_pause` seconds.

        Raises `HangError` if nothing has ended for too long meanwhile.
        """
        began = self._clock()
        try:
            self._until_ready(token, longest_pause)
        finally:
            self.waited_seconds += self._clock() - began

    def _until_ready(self, token: Token, longest_pause: float) -> None:
        # Short pauses first, as most waits are short; then longer ones, which leave the core to others.
        patience, pause = Patience(self.patience, self._clock), FIRST_PAUSE
        look_at = self._clock() + LONGEST_PAUSE
        while not token.is_ready():
            self._sleep(pause)
            pause = min(1.5 * pause, longest_pause)
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
        for reference in tuple(_all_flights)
        if (flight := reference()) is not None
        for order, processes in flight.awaited().items()
    }


def last_instructions() -> str:
    """Return the last launch of each step of this process, in words; empty if there is none."""
    flights = (flight for reference in tuple(_all_flights) if (flight := reference()) is not None)
    return "; ".join(filter(None, (flight.last_instruction() for flight in flights)))
