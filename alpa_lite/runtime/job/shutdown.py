"""Propagate the end of one process of a job to the others, so that none waits for it in vain.

    end        a process that ends says so, and one that fails says why                     `leaving`, `take_leave`
    hang       a process that waits for too long says so: all write their stacks and end    `end_hung`
    stopped    a process that a signal has stopped is seen by the others of its machine     `Neighbours`
    roll call  each live process answers; one that the first does not hear from is lost     `RollCall.silent`
    heartbeat  a thread reads the messages: it answers roll calls, and ends this process when another one failed or
               launches of this one wait for one that has ended                             `Heartbeat.look`
    exit       waits until all others have ended too, or one has failed                     `Heartbeat.wait_for_all`

All messages go through JAX's coordination service, which runs in the first process: it leaves last.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, NoReturn

import jax

from alpa_lite import _jax
from alpa_lite.runtime.job.activity import Neighbours, awaited, doing, dump_stacks, last_instructions, place, where
from alpa_lite.runtime.job.launch import COORDINATOR, ENDED, HUNG

LAST_WORDS_SECONDS, LAST_WORDS_SECONDS_EACH = 4.0, 0.02
"""Seconds that the first process waits for answers to a roll call, and the seconds added for each other process."""

LOOK_SECONDS = 1.0
"""Seconds between two looks at the messages."""

GRACE_SECONDS = 2.0
"""Seconds that a process gets to end by itself when it hears that another one failed."""

SHUTDOWN_SECONDS = 300
"""Seconds that a process that has ended waits for the others, as in JAX."""

STALE_SECONDS = 10.0
"""A busy process repeats its message each `LOOK_SECONDS`, unless Python is blocked there; older messages are ignored.
"""

STUCK_SECONDS = 10.0
"""Launches that wait for this many seconds for a process that has ended wait in vain."""

_FOLDER = "alpa_lite/end/"
_LISTENING = "alpa_lite/listening/"
_DOING, _PLACES = "alpa_lite/doing/", "alpa_lite/place/"
_FIRST, _CALL, _SILENT = "first", "call ", "silent "
_LEAVING, _HERE, _TOLD = "leaving ", "here ", "told "
_HANG, _HUNG, _OVER = "hang", "hung ", "hang is told"
_ANOTHER = "another process failed"

Awaited = Mapping[object, frozenset[int]]
"""Launches that are not done, by key, and the processes that take part in each."""


class RollCall:
    """The messages of the processes of a job about their ends."""

    def __init__(self, job: _jax.JobInfo) -> None:
        """Connect to the service, without writing."""
        self._client, self.me, self.num_processes = job.client, job.process, job.num_processes

    def said(self) -> dict[str, str]:
        """Return all messages by name; the message of a process's end has its number as name."""
        with suppress(jax.errors.JaxRuntimeError):
            return {key.rpartition("/")[2]: text for key, text in self._client.key_value_dir_get(_FOLDER)}
        return {}

    def say(self, name: str, text: str, *, once: bool = False) -> None:
        """Write a message. `once`: unless it was written before. If the service is gone, JAX ends this process."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(_FOLDER + name, text, not once)

    def take_back(self, name: str) -> None:
        """Remove a message that turned out not to be the end."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(_FOLDER + name)

    def last_words_seconds(self) -> float:
        """Return the seconds to wait for the others' last messages: all of them reach the service at the same time."""
        return LAST_WORDS_SECONDS + LAST_WORDS_SECONDS_EACH * self.num_processes

    def silent(self, seconds: float | None = None, *, last: bool = False) -> list[int]:
        """Return the processes that do not answer a roll call; all simultaneous callers get the same answer.

        `last`: whether this is the roll call of processes that leave.
        """
        if not self.listening():
            return []
        seconds = self.last_words_seconds() if seconds is None else seconds
        # Numbered, so that answers to an earlier call are not taken for answers to this one.
        call = "last" if last else f"{1 + max(_calls(self.said(), _SILENT).values(), default=-1)}"
        self.say(f"{_CALL}{call}", "")
        self._answer(call, seconds)
        with suppress(jax.errors.JaxRuntimeError):
            # The first process may see the call only at its next look, and then waits for the answers itself.
            wait = int(1000 * (seconds + 2 * LOOK_SECONDS))
            return json.loads(self._client.blocking_key_value_get(f"{_FOLDER}{_SILENT}{call}", wait))
        return []

    def answer(self, said: Mapping[str, str], seconds: float | None = None) -> None:
        """Answer open roll calls. The first process publishes who is missing."""
        seconds = self.last_words_seconds() if seconds is None else seconds
        for name in said:
            call = name.removeprefix(_CALL)
            if call != name and f"{_HERE}{call} {self.me}" not in said:
                self._answer(call, seconds)

    def _answer(self, call: str, seconds: float) -> None:
        self.say(f"{_HERE}{call} {self.me}", "")
        if self.me == 0 and f"{_SILENT}{call}" not in self.said():
            left = self.unheard(f"{_HERE}{call} ", self.listening(), seconds)
            # Once: another thread of this process may be answering too, and all must read one answer.
            self.say(f"{_SILENT}{call}", json.dumps(sorted(left)), once=True)
            self._forget_before(call)

    def _forget_before(self, call: str) -> None:
        """Remove earlier roll calls: a process that calls again has read the answer to those before."""
        said = self.said() if call.isdecimal() else {}
        for kind in (_CALL, _SILENT, _HERE):
            for name in (name for name, number in _calls(said, kind).items() if number < int(call)):
                self.take_back(name)

    def listen(self) -> None:
        """Declare that this process answers roll calls from now on."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_LISTENING}{self.me}", "", True)

    def listening(self) -> set[int]:
        """Return the processes that answer; those that joined the job without `alpa_lite.initialize` do not."""
        with suppress(jax.errors.JaxRuntimeError):
            return {int(key.rpartition("/")[2]) for key, _ in self._client.key_value_dir_get(_LISTENING)}
        return set()

    def say_doing(self, what: str, number: int) -> None:
        """Publish this process's activity, repeatedly with another number; empty: none."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_DOING}{self.me}", f"{number} {what}" if what else "", True)

    def doing(self, process: int) -> str:
        """Return the activity of a process; empty if it has published none, or not again for `STALE_SECONDS`."""
        published = ""
        with suppress(jax.errors.JaxRuntimeError):
            published = str(self._client.key_value_try_get(f"{_DOING}{process}"))
        now = time.monotonic()
        # The age counts from the last change seen here: the clocks of several machines are not compared.
        before, since = _watched.heard.get(process, ("", now))
        if published != before:
            since = now
        _watched.heard[process] = published, since
        return published.partition(" ")[2] if now - since < STALE_SECONDS else ""

    def say_place(self) -> None:
        """Publish where this process runs, for `Neighbours`."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_PLACES}{self.me}", place(), True)

    def places(self) -> dict[int, str]:
        """Return the places published so far."""
        with suppress(jax.errors.JaxRuntimeError):
            published = self._client.key_value_dir_get(_PLACES)
            return {int(key.rpartition("/")[2]): text for key, text in published}
        return {}

    def unheard(self, what: str, processes: set[int], seconds: float) -> set[int]:
        """Return the processes, of the given ones, that do not write a message within `seconds`."""
        until = time.monotonic() + seconds
        while True:
            said = self.said()
            left = {process for process in processes if f"{what}{process}" not in said}
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def ended(self, said: Mapping[str, str], *, or_leaving: bool = False) -> dict[int, str]:
        """Return the other processes that have ended, and the reason of each; empty for none."""
        # A process that leaves launches nothing more: for those that wait for its launches, it has ended.
        names = {(name.removeprefix(_LEAVING) if or_leaving else name): text for name, text in said.items()}
        return {int(name): text for name, text in names.items() if name.isdecimal() and int(name) != self.me}


def _calls(said: Iterable[str], kind: str) -> dict[str, int]:
    """Return the numbers of roll calls, by the names of their messages."""
    numbers = {name: name.removeprefix(kind).partition(" ")[0] for name in said if name.startswith(kind)}
    return {name: int(number) for name, number in numbers.items() if number.isdecimal()}


def roll_call() -> RollCall | None:
    """Return the roll call of the job; None if this process is the whole job."""
    job = _jax.job()
    return None if job is None or job.num_processes == 1 else RollCall(job)


_left = threading.Event()
"""Whether this process has told the others that it fails."""

_ends = threading.Lock()
"""Lock held by the thread that ends this process."""


class _Watched:
    """The state of the job of this process, set by `Heartbeat.begin`."""

    is_watched = False
    hang_timeout_seconds = float("inf")
    neighbours: ClassVar[Neighbours | None] = None
    heard: ClassVar[dict[int, tuple[str, float]]] = {}
    """The last published activity of each process, and the time of its last change."""
    is_recoverable = False
    lost: ClassVar[list[int]] = []
    """Processes that have died, and without which the job goes on; known to the first process."""
    last: ClassVar[Callable[[float], object]] = lambda seconds: None
    """Returns when all other processes are gone, or after some seconds."""
    before_leaving: ClassVar[Callable[[str], object]] = lambda reason: None
    """Called with the reason before this process tells the others that it fails."""


_watched = _Watched()


def is_recoverable() -> bool:
    """Return whether the job goes on when a process has died that all its steps can do without."""
    return _watched.is_recoverable


def lost() -> Sequence[int]:
    """Return the processes that have died, and without which the job goes on; only the first process knows them."""
    return _watched.lost


def go_on_without(process: int, reason: str) -> None:
    """Let the job go on without a process that has died: nobody waits for it any more."""
    _watched.lost.append(process)
    if (here := roll_call()) is not None:
        here.say(f"{process}", reason)


def has_left(process: int) -> bool:
    """Return whether a process has ended in good order, or another one's failure ends all."""
    here = roll_call()
    if here is None:
        return True
    said = here.said()
    return f"{process}" in said or _FIRST in said or _HANG in said


def end_job(reason: str) -> None:
    """End this process, and all others of its job, from any thread."""
    _end(reason, 0.0)


def make_recoverable(wait_until_alone: Callable[[float], object], before_leaving: Callable[[str], object]) -> None:
    """Let the job go on after losses.

    wait_until_alone: called at this process's exit, to be the last to end.
    before_leaving: called with the reason before this process ends the job for a failure, which may follow from a loss.
    """
    _watched.is_recoverable = True
    _Watched.last, _Watched.before_leaving = wait_until_alone, before_leaving


def is_watched() -> bool:
    """Return True if the processes of the job watch each other, as those that joined by `alpa_lite.initialize` do."""
    return _watched.is_watched and roll_call() is not None


def hang_timeout() -> float:
    """Return the seconds that this process waits for another one's message."""
    return _watched.hang_timeout_seconds


def at_work(processes: frozenset[int]) -> bool:
    """Return True if one of these processes, or this one, plans or compiles."""
    here = roll_call()
    if here is None or doing():
        return bool(doing())
    return any(here.doing(process) for process in processes - {here.me})


def take_leave(reason: str) -> None:
    """Tell the others, before this process ends in a failure, why it ends; report who is lost or who failed before."""
    here = roll_call()
    if here is None or (_left.is_set() and not _ends.locked()):
        return
    _Watched.before_leaving(reason)
    with _ends:  # another thread may be ending this process already: its reason counts
        if _left.is_set():
            return
        _left.set()
        _take_leave(here, reason)


def _take_leave(here: RollCall, reason: str) -> None:
    here.say(f"{here.me}", reason)
    # Only the first reason counts as the cause: what fails later fails because of it.
    here.say(_FIRST, json.dumps([here.me, reason]), once=True)
    # Everybody who leaves takes part in this roll call, whoever began it, so that all wait only once.
    silent = here.silent(last=True)
    first, why = json.loads(here.said().get(_FIRST, "[-1, null]"))
    if silent:
        say(f"no word from {name_processes(silent)}: lost, or hanging. The job ends.")
    elif first not in (-1, here.me) and why != reason:
        say(f"process {first} failed first: {why}. The job ends.")
    here.say(f"{_TOLD}{here.me}", "")
    if here.me == 0:
        here.unheard(_TOLD, set(range(here.num_processes)) - {*silent}, here.last_words_seconds())
        time.sleep(GRACE_SECONDS)  # the others end in this time; later, JAX ends them for the lost service


def end_hung(reason: str) -> NoReturn:
    """End this process, and all others of its job, because of a hang, with exit code `HUNG`.

    Each writes the stacks of its threads to its error stream, and the instruction that it launched last; the first one
    says for all of them where they are.
    """
    with _ends:
        _left.set()
        _end_hung(roll_call(), reason)


def _end_hung(here: RollCall | None, reason: str = "") -> NoReturn:
    """End this process because of a hang. `reason`: of this process, if it is the one that detected the hang."""
    if _watched.neighbours is not None:
        # Stopped processes must continue to write their stacks too, whatever the hang is. This precedes any message,
        # since the service is stopped together with the first process.
        _watched.neighbours.wake()
    if here is not None and reason:
        here.say(_HANG, json.dumps([here.me, reason]), once=True)
    # The first report counts, which may come from another process.
    first = json.loads(here.said().get(_HANG, "[-1, null]")) if here is not None else [-1, None]
    say(f"process {first[0]} found a hang: {first[1]} The job ends." if first[1] else "The program hangs: it ends.")
    mine = f"at {where()}; {last_instructions() or 'has launched no step'}{doing() and f'; {doing()}'}"
    say(f"process {0 if here is None else here.me} is {mine}. Its stacks:")
    dump_stacks()
    if here is not None:
        here.say(f"{_HUNG}{here.me}", mine, once=True)
        _tell_hang(here)
    flush()
    # The main thread may be in a call that never returns to Python, where no exception would reach it.
    os._exit(HUNG)


def _tell_hang(here: RollCall) -> None:
    """Report on the first process where all are, once the others had time to end."""
    if here.me:
        # The first process waits as long for all others, and may begin later than this one.
        until = time.monotonic() + 2 * here.last_words_seconds()
        while _OVER not in here.said() and time.monotonic() < until:
            time.sleep(0.1)
        return
    silent = here.unheard(_HUNG, here.listening(), here.last_words_seconds())
    said = here.said()
    for process in range(here.num_processes):
        say(f"process {process} was {said.get(f'{_HUNG}{process}', 'nowhere to be heard of')}.")
    if silent:
        say(f"no word from {name_processes(sorted(silent))}: lost, or Python does not run there.")
    here.say(_OVER, "")
    time.sleep(GRACE_SECONDS)


def flush() -> None:
    """Flush the output streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def name_processes(numbers: Sequence[int]) -> str:
    """Return process numbers in words."""
    return f"process {numbers[0]}" if len(numbers) == 1 else f"processes {', '.join(map(str, numbers))}"


def say(text: str) -> None:
    """Write a text to the error stream."""
    print(f"alpa_lite: {text}", file=sys.stderr, flush=True)


def came_to_end(which: Sequence[int], ended: Mapping[int, str]) -> str:
    """Return in words which processes ended, with their reasons."""
    reasons = "; ".join(dict.fromkeys(ended[process] for process in which if ended[process]))
    end = "its end" if len(which) == 1 else "their ends"
    return f"{name_processes(which)} came to {end}{reasons and f' ({reasons})'}"


@contextmanager
def leaving(reason: str) -> Iterator[None]:
    """Mark this process as leaving: it launches nothing more, but still agrees with others that end too."""
    here = roll_call()
    if here is not None:
        _finish(here, awaited, time.monotonic() + SHUTDOWN_SECONDS)
        here.say(f"{_LEAVING}{here.me}", reason)
    try:
        yield
    finally:
        if here is not None:
            here.take_back(f"{_LEAVING}{here.me}")


def _finish(here: RollCall, awaited: Callable[[], Awaited], until: float) -> None:
    """Wait for the launches of this process: others may wait for its part."""
    while awaited() and _FIRST not in here.said() and time.monotonic() < until:
        time.sleep(0.05)


class Heartbeat:
    """A thread that reads the others' messages. When this process exits, it waits for the others."""

    def __init__(
        self, here: RollCall, awaited: Callable[[], Awaited] = awaited, seconds: float = SHUTDOWN_SECONDS
    ) -> None:
        """Prepare the thread. `awaited`: launches of this process. `seconds`: how long its exit waits for others."""
        self._here, self._awaited, self._seconds = here, awaited, seconds
        self._over = threading.Event()
        self._was_busy, self._looks = False, 0
        # The launches that wait for processes that have ended, and the time since which these are the same.
        self._stuck, self._since = frozenset[object](), time.monotonic()
        # A daemon, which does not keep Python running after the main thread has ended.
        self._thread = threading.Thread(target=self._run, daemon=True, name="alpa_lite heartbeat")

    def begin(self, hang_timeout_seconds: float | None = None, stopped_seconds: float = float("inf")) -> None:
        """Start the thread.

        Args:
            hang_timeout_seconds: see `hang_timeout`; None: for ever.
            stopped_seconds: seconds after which another process of this machine that a signal has stopped is hung.
        """
        _watched.hang_timeout_seconds = hang_timeout_seconds or float("inf")
        here = self._here
        _watched.is_watched = True
        here.say_place()
        neighbours = Neighbours(here.me, here.places, here.num_processes, stopped_seconds)
        _Watched.neighbours = neighbours
        threading.Thread(target=self._see, args=(neighbours,), daemon=True, name="alpa_lite neighbours").start()
        here.listen()
        self._thread.start()
        # Exit functions run in reverse order: this one before JAX's, which shuts the coordination service down.
        atexit.register(self._at_exit)

    def look(self, now: float) -> str:
        """Return why to end this process, empty while there is no reason."""
        said = self._here.said()
        # Before all else: other processes may already fail because of those that end for the hang.
        if _HANG in said:
            with _ends:
                _left.set()
                _end_hung(self._here)
        self._here.answer(said)
        if _FIRST in said:
            return _ANOTHER
        # Only while it is busy, and once more at the end: an idle job does not load the service.
        if (what := doing()) or self._was_busy:
            self._looks += 1
            self._here.say_doing(what, self._looks)
            self._was_busy = bool(what)
        ended = self._here.ended(said, or_leaving=True)
        return self._in_vain(ended, now) if ended else ""

    def _in_vain(self, ended: Mapping[int, str], now: float) -> str:
        """Return a sentence on launches that have long waited for processes that have ended; empty for none."""
        stuck = {launch: needed & ended.keys() for launch, needed in self._awaited().items() if needed & ended.keys()}
        # Whenever the launches that wait change, there was progress, and the time starts again.
        if frozenset(stuck) != self._stuck:
            self._stuck, self._since = frozenset(stuck), now
        if not stuck or now - self._since < STUCK_SECONDS:
            return ""
        which = sorted(frozenset[int]().union(*stuck.values()))
        return f"{came_to_end(which, ended)}, but process {self._here.me} has launched steps that need its devices"

    def wait_for_all(self) -> str:
        """Wait until the others have ended too. Return why the job failed instead, if so."""
        # The first pauses are short: mostly all processes come to their end at about the same time.
        me, until, pause = self._here.me, time.monotonic() + self._seconds, 0.01
        self._here.say(f"{me}", "")
        while True:
            said = self._here.said()
            if _FIRST in said:
                return _ANOTHER
            if len(self._here.ended(said)) == self._here.num_processes - 1:
                return ""
            if time.monotonic() > until:
                left = [p for p in range(self._here.num_processes) if p != me and f"{p}" not in said]
                return (
                    f"{name_processes(left)} went on for {self._seconds:.0f} s after process {me} had come to its end"
                )
            self._here.answer(said)
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS) and not _left.is_set():
            if problem := self.look(time.monotonic()):
                _end(problem, GRACE_SECONDS)

    def _see(self, neighbours: Neighbours) -> None:
        """Look for stopped processes, in another thread: where the first one is stopped, reading messages blocks.

        The first looks come soon, as long as the service still knows where the others are.
        """
        pause = LOOK_SECONDS / 20
        while not self._over.wait(pause) and not _left.is_set():
            pause = min(2 * pause, LOOK_SECONDS)
            if stopped := neighbours.stopped(time.monotonic()):
                end_hung(stopped)

    def _at_exit(self) -> None:
        if _left.is_set() or roll_call() is None:  # already left, or the user has called jax.distributed.shutdown()
            return
        _finish(self._here, self._awaited, time.monotonic() + self._seconds)
        self._over.set()
        self._thread.join(2 * LOOK_SECONDS)
        if problem := self.wait_for_all():
            _end(problem, 0.0)
        _Watched.last(self._seconds)


def _end(reason: str, grace: float) -> None:
    """End this process because of others; `grace`: seconds that it gets to end by itself."""
    if reason != _ANOTHER:
        say(f"{reason}. The job ends.")
    take_leave(reason)
    time.sleep(grace)
    flush()
    # Only the launcher knows `ENDED`: it then looks for the cause elsewhere.
    os._exit(ENDED if reason == _ANOTHER and COORDINATOR in os.environ else 1)
