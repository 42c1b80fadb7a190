"""Let the processes of a job agree on values, through JAX's coordination service: no device takes part.

    agreed_data       the first process's value
    same_everywhere   raise on every process unless all of them state the same facts
    everywhere        the value of each process
    meet              a barrier
    shared_error      the cause of an error that some processes have, in the same words on all
    Stopping          the step after which all stop, when one of them was sent SIGTERM

In a job of one process each function returns the process's own value. The processes that take part must call these
functions in the same order. While one of them is awaited for long, the others report it. JAX ends all of them when one
has died. A process that has ended (`shutdown`) is not waited for, nor one that hangs: one that is silent for long and
not busy (`activity`).

Values are removed when all processes have read them: a process that writes to all has read everything written before,
so when the first process has heard from everybody it removes what is older. So the service holds the values of one
agreement, and the few that the first process alone has written since: every `TURN`-th time it hears the others as well.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import signal
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import CheckpointError, ExecutionError, MismatchError
from alpa_lite.runtime.job.activity import idle
from alpa_lite.runtime.job.shutdown import (
    RollCall,
    came_to_end,
    end_hung,
    hang_timeout,
    lost,
    name_processes,
    roll_call,
    say,
)
from cost_models.checks import excerpt

FIRST_WORD_SECONDS = 30.0
"""Seconds of waiting for another process after which it is reported on stderr; again after twice as long, and so on."""

LOOK_SECONDS = 5.0
"""Seconds between two checks whether an awaited process has ended."""

PATIENCE_SECONDS = 6 * 3600.0
"""Seconds that another process may take, as it may have to plan or to compile in the meantime."""


Json = Any
"""A value that JSON can represent."""

TURN = 16
"""The largest number of agreements by which the first process is ahead of the others."""


def agreed_number(value: float) -> float:
    """Return the first process's number."""
    return float(agreed_data(value))


def agreed_data(value: Json) -> Json:
    """Return the first process's JSON value; those of the others are ignored."""
    return value if jax.process_count() == 1 else _service().said_by_first(value)


def same_everywhere(facts: Mapping[str, str]) -> None:
    """Raise `MismatchError` on all processes, with one sentence, if facts of one differ from those of the first."""
    # All processes get the same answer, so that all of them raise.
    if jax.process_count() > 1 and (sentence := _service().compared(facts)):
        raise MismatchError(sentence)


def meet(processes: Sequence[int]) -> None:
    """Return when each of these processes, by number, has called this function."""
    if len(processes) > 1:
        _service().meet(tuple(sorted(processes)))


def differences(facts: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence on the facts that differ from the first process's; empty if there are none."""
    first, numbers_of = facts[0], defaultdict[str, list[int]](list)
    for number, stated in enumerate(facts):
        for name in dict.fromkeys((*first, *stated)):
            mine, other = stated.get(name, "none"), first.get(name, "none")
            if mine != other:
                numbers_of[f"{name} {mine}, where process 0 has {other}"].append(number)
    if not numbers_of:
        return ""
    # Processes with the same difference share a part of the sentence, of which a large job would have hundreds.
    told = "; ".join(f"{_processes(numbers)} {what}" for what, numbers in numbers_of.items())
    return (
        f"The processes of this job do not do the same, and nothing was run: {told}. Start all processes with the same "
        "program, the same arguments, and the same versions of all packages."
    )


def _processes(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    return f"processes {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} have"


def everywhere(value: Json) -> list[Json]:
    """Return the JSON values of all processes, in their order; on all of them."""
    return [value] if jax.process_count() == 1 else _service().everywhere(value)


def _service() -> _Service:
    job = _jax.job()
    if job is None:
        raise ExecutionError(
            f"This is one of {jax.process_count()} processes, but JAX coordinates none: call alpa_lite.initialize() "
            "(or jax.distributed.initialize) before anything else that uses JAX."
        )
    return _service_of(job)


@lru_cache(maxsize=1)
def _service_of(job: _jax.JobInfo) -> _Service:
    """Return the service of one start of the coordination service, with which the numbering begins again."""
    return _Service(job)


class _Service:
    """The agreements of each set of processes."""

    def __init__(self, job: _jax.JobInfo) -> None:
        self._all = tuple(range(job.num_processes))
        self._words = KeyValues(job)
        self._groups: dict[tuple[int, ...], _GroupExchange] = {}

    def said_by_first(self, value: Json) -> Json:
        return self._of(self._all).said_by_first(value)

    def compared(self, facts: Mapping[str, str]) -> str:
        """Return the `differences` of the facts of all processes, computed by the first one."""
        return self._of(self._all).gathered(dict(facts), differences)

    def everywhere(self, value: Json) -> list[Json]:
        return self._of(self._all).gathered(value, list)

    def meet(self, processes: tuple[int, ...]) -> None:
        self._of(processes).gathered(None, lambda _: None)

    def _of(self, processes: tuple[int, ...]) -> _GroupExchange:
        if processes not in self._groups:
            # Hashed, so that keys stay short for groups of hundreds of processes.
            name = "all" if processes == self._all else hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
            self._groups[processes] = _GroupExchange(name, processes, self._words)
        return self._groups[processes]


class _GroupExchange:
    """Numbers the values that some processes exchange, so that keys occur once, and removes those all have read."""

    def __init__(self, name: str, processes: Sequence[int], words: KeyValues) -> None:
        self._name, self._processes, self._words = name, processes, words
        self._first = processes[0]
        self._numbers = itertools.count()
        self._read_by_all_that_come: list[str] = []

    def gathered(self, value: Json, combine: Callable[[list[Json]], Json]) -> Json:
        """Return the first process's combination of the values of all."""
        # All processes take part in the same agreements in the same order, so that they count to the same number.
        key = self._key()
        self._words.set(f"{key}/{self._words.me}", value)
        if self._words.me != self._first:
            return self._words.get(f"{key}/answer", self._first)
        values = self._words.get_all(key, self._processes)
        # All have written for this agreement, and so have read whatever was exchanged before it.
        self._words.remove(self._read_by_all_that_come)
        self._read_by_all_that_come = [key]
        answer = combine(values)
        self._words.set(f"{key}/answer", answer)
        return answer

    def said_by_first(self, value: Json) -> Json:
        """Return the first process's value."""
        number = next(self._numbers)
        # Now and then all of them answer: otherwise the first process would never learn that they have read its values,
        # and could remove none.
        if number % TURN == TURN - 1:
            return self.gathered(value if self._words.me == self._first else None, lambda values: values[0])
        key = f"agreed/{self._name}/{number}"
        if self._words.me != self._first:
            return self._words.get(key, self._first)
        self._words.set(key, value)
        self._read_by_all_that_come.append(key)
        return value

    def _key(self) -> str:
        return f"agreed/{self._name}/{next(self._numbers)}"


class KeyValues:
    """JSON values by name in the coordination service of a job."""

    def __init__(self, job: _jax.JobInfo) -> None:
        """Connect to the service, without writing."""
        self._client, self._roll_call, self.me = job.client, RollCall(job), job.process

    def set(self, name: str, value: Json) -> None:
        """Write a value under a name that was not used before."""
        # Compressed: whole plans are exchanged, whose JSON repeats itself.
        self._client.key_value_set_bytes(f"alpa_lite/{name}", zlib.compress(json.dumps(value).encode()))

    def remove(self, names: Sequence[str]) -> None:
        """Remove these names, and all names under them."""
        for name in names:
            with suppress(jax.errors.JaxRuntimeError):  # if the service is gone, JAX ends this process
                self._client.key_value_delete(f"alpa_lite/{name}")

    def get(self, name: str, process: int) -> Json:
        """Return the value of another process under a name, waiting until it is written."""
        key, read = f"alpa_lite/{name}", self._client.blocking_key_value_get_bytes
        began = at_work = time.monotonic()
        word, ended = FIRST_WORD_SECONDS, dict[int, str]()
        # Two processes that wait for each other must not take each other for busy, or their hang would never be
        # detected.
        with idle():
            while True:
                try:
                    # A short wait each time: in between it is checked whether the other process has ended or hangs.
                    return json.loads(zlib.decompress(read(key, int(1000 * min(LOOK_SECONDS, hang_timeout() / 2)))))
                except jax.errors.JaxRuntimeError as error:
                    waited = time.monotonic() - began
                    # The client raises one type for all errors; only running out of time is none.
                    if "DEADLINE_EXCEEDED" not in str(error) or waited > PATIENCE_SECONDS or process in ended:
                        raise ExecutionError(_in_vain(process, waited, ended, error)) from error
                # It may have written the value just before it ended: look once more.
                ended = self._roll_call.ended(self._roll_call.said())
                doing = self._roll_call.doing(process)
                # Planning and compiling may take hours, so a hang counts from the last sign of either.
                at_work = time.monotonic() if doing else at_work
                if process not in ended and time.monotonic() - at_work > hang_timeout():
                    end_hung(f"process {self.me} has waited {waited:.0f} s for a word of process {process} in vain.")
                if waited > word:
                    say(f"process {self.me} has waited {waited:.0f} s for process {process}{doing and f', {doing}'}.")
                    # Ever more rarely, so that a long wait does not fill the log.
                    word += 2 * word

    def get_all(self, name: str, processes: Sequence[int]) -> list[Json]:
        """Return the values of processes under a name, without those that have died where the job goes on."""
        values: list[Json] = []
        for process in processes:
            try:
                if process not in lost():
                    values.append(self.get(f"{name}/{process}", process))
            except ExecutionError:
                # It may have died while it was awaited.
                if process not in lost():
                    raise
        return values


def _in_vain(process: int, waited: float, ended: Mapping[int, str], error: Exception) -> str:
    if process in ended:
        what = f"P{came_to_end([process], ended)[1:]}, but process {jax.process_index()} waits for its word"
    else:
        what = f"Process {process} did not say within {waited:.0f} s what the others wait for: {error}"
    return f"{what}. All processes of a job must call the same functions of alpa_lite in the same order."


_MOST_LETTERS = 1000


class ConsequenceError(OSError):
    """An error that follows from another one, possibly on another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedError:
    """The reason of an error on some process, without a full stop; and a sentence of advice."""

    reason: str
    advice: str


def shared_error(problem: Exception | None) -> SharedError | None:
    """Return the error of any process, given the error of this one; None if no process has one. Collective.

    A lost process breaks the connections of the others, and the errors that they see then are not the cause.
    """
    # Before the exchange of errors, in which a lost process would be awaited in vain.
    if problem is not None and (here := roll_call()) is not None and (lost := here.silent()):
        return SharedError(
            reason=f"there is no word from {name_processes(lost)} ({reason_of(problem)})",
            advice="Start the job again to go on from there.",
        )
    said = everywhere(None if problem is None else [reason_of(problem), isinstance(problem, ConsequenceError)])
    if not any(said):
        return None
    causes = [None if each is None or each[1] else str(each[0]) for each in said]
    # Consequences are reported only where nobody knows a cause.
    reason = reasons_in_words(causes if any(causes) else [each and str(each[0]) for each in said])
    return SharedError(reason=reason, advice="Look for space and for the right to write there.")


def reason_of(error: BaseException) -> str:
    """Return the innermost cause, in one line, without the description of all files that TensorStore adds."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).partition("[tensorstore_spec")[0].split()) or type(error).__name__
    return excerpt(text, _MOST_LETTERS)


def reasons_in_words(reasons: Sequence[str | None]) -> str:
    """Return the reasons that processes report, with process numbers unless all report the same."""
    if len({*reasons}) == 1:
        return reasons[0] or ""
    by_reason: dict[str, list[int]] = {}
    for process, reason in enumerate(reasons):
        by_reason.setdefault(reason or "", []).append(process)
    return "; ".join(f"{reason} ({name_processes(which)})" for reason, which in by_reason.items() if reason)


SIGNAL_LOOK_SECONDS = 0.5
"""Seconds between two checks whether another process received the signal."""

_listener_numbers = itertools.count()
"""Numbers of listeners; all processes make their listeners in the same order."""


class Stopping:
    """Tell a job to end on SIGTERM, which schedulers send some time before they kill it.

    A job of one process listens for the signal from the first question on (`requested`). In a job of several, any of
    them may get the signal at any time, and all must stop after the same question:

        told(i)  = number of questions that process i had answered when it hears of the signal
        last     = 1 + max over i of told(i)                                                        `_agree`

    Each answers no until its question number `last`, and yes from then on. A process that has published its `told`
    delays its next answer until `last` is determined, so that none goes past it; a thread does this, since the program
    may be waiting for the others, one of which is behind.

    A program that never asks keeps the default: SIGTERM ends the process. JAX's preemption service would take the
    signal from all programs.
    """

    def __init__(self) -> None:
        """Start without listening."""
        self._told = threading.Event()
        self._over = threading.Event()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._listens = False
        self._answering = threading.Lock()
        self._asked = 0
        self._last: float = float("inf")
        self._problem = ""
        self._thread: threading.Thread | None = None

    def requested(self, step: int) -> bool:
        """Return True if the job is to end after `step`, the same on all processes; each must ask once per step."""
        if not self._listens:
            self._listen(step)
        if self._thread is None:
            return self._told.is_set()
        with self._answering:
            if self._problem:
                raise CheckpointError(f"The processes cannot agree on when to end: {self._problem}")
            self._asked += 1
            return self._asked >= self._last

    def close(self) -> None:
        """Restore the previous handling of SIGTERM."""
        if self._listens:
            # Another handler that was installed on top of this one stays; it may still call this one.
            if signal.getsignal(signal.SIGTERM) == self._tell:
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._listens = False
        self._end()

    def _end(self) -> None:
        self._over.set()
        # While it agrees with the others, the thread holds the lock, and may wait for processes that have ended.
        if self._thread is not None and not self._answering.locked():
            self._thread.join(2 * SIGNAL_LOOK_SECONDS)
            self._thread = None
            atexit.unregister(self._end)

    def _listen(self, step: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                f"stop_requested({step}) was called outside of the program's main thread, where SIGTERM cannot be "
                "listened for: call it in the main thread first."
            )
        self._before = signal.signal(signal.SIGTERM, self._tell)
        self._listens = True
        job = _jax.job()
        if job is not None and job.num_processes > 1:
            self._over.clear()
            work = (job, f"stop/{next(_listener_numbers)}")
            self._thread = threading.Thread(target=self._watch, args=work, daemon=True, name="alpa_lite stop")
            self._thread.start()
            # The thread must not use the coordination service any more when JAX shuts that down.
            atexit.register(self._end)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told.set()
        if callable(self._before):  # another listener, or the user's own
            self._before(number, frame)

    def _watch(self, job: _jax.JobInfo, name: str) -> None:
        """Wait until any process has received the signal; then agree."""
        while not self._over.is_set():
            # Both the pause between two looks at the others, and a wait that a signal here ends at once.
            if self._told.wait(SIGNAL_LOOK_SECONDS):
                self._set(job, f"alpa_lite/{name}/told")
            if self._told.is_set() or self._was_told(job, f"alpa_lite/{name}/told"):
                with self._answering:
                    try:
                        self._last = self._agree(job, KeyValues(job), name)
                    except Exception as error:
                        self._problem = str(error)
                return

    def _agree(self, job: _jax.JobInfo, words: KeyValues, name: str) -> int:
        """Return the number of the first question that all answer with yes."""
        words.set(f"{name}/asked/{job.process}", self._asked)
        if job.process:
            return words.get(f"{name}/last", 0)
        # No process has answered this question yet: each waits for the agreement before its next answer.
        last = 1 + max(words.get_all(f"{name}/asked", range(job.num_processes)))
        words.set(f"{name}/last", last)
        return last

    def _set(self, job: _jax.JobInfo, key: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            job.client.key_value_set(key, json.dumps(job.process), True)

    def _was_told(self, job: _jax.JobInfo, key: str) -> bool:
        with suppress(jax.errors.JaxRuntimeError):
            job.client.key_value_try_get(key)
            return True
        return False
