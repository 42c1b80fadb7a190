"""What the processes of a job agree upon, through the service that JAX coordinates them with: no device takes part.

    agreed_data       what the first process says
    same_everywhere   raise on every process unless all of them state the same facts
    anywhere          whether something is true on any process
    meet              wait for one another
    take_leave        tell which processes are gone, before this one ends

With one process, that is what it said itself. The processes that take part must call these functions in the same order.
While one of them is awaited for long, the others say so; JAX ends all of them when one has died.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError, MismatchError

FIRST_WORD_SECONDS = 30.0
"""After so long a wait for another process is told on stderr, and then again after twice as long, and so on."""

PATIENCE_SECONDS = 6 * 3600.0
"""So long another process may take, as it may have to plan or to compile in the meantime."""


def agreed_number(value: float) -> float:
    """The first process's number."""
    return float(agreed_data(value))


def agreed_data(value: Any) -> Any:
    """The first process's JSON value; those of the others are passed over."""
    return value if jax.process_count() == 1 else _service().said_by_first(value)


def same_everywhere(facts: Mapping[str, str]) -> None:
    """Raise `MismatchError` on all processes, with one sentence, where facts of one differ from those of the first."""
    if jax.process_count() > 1 and (found := _service().compared(facts)):
        raise MismatchError(found)


def meet(processes: Sequence[int]) -> None:
    """Return when each of these processes, by number, has called this."""
    if len(processes) > 1:
        _service().meet(tuple(sorted(processes)))


def differences(facts: Sequence[Mapping[str, str]]) -> str:
    """The sentence on what processes have otherwise than the first one; empty where all is the same."""
    first, found = facts[0], defaultdict[str, list[int]](list)
    for number, stated in enumerate(facts):
        for name in dict.fromkeys((*first, *stated)):
            mine, other = stated.get(name, "none"), first.get(name, "none")
            if mine != other:
                found[f"{name} {mine}, where process 0 has {other}"].append(number)
    if not found:
        return ""
    told = "; ".join(f"{_processes(numbers)} {what}" for what, numbers in found.items())
    return (
        f"The processes of this job do not do the same, and nothing was run: {told}. Start all processes with the same "
        "program, the same arguments, and the same versions of all packages."
    )


def _processes(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    return f"processes {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} have"


def anywhere(value: bool) -> bool:
    """Whether it is true on any process; on all of them."""
    return value if jax.process_count() == 1 else _service().anywhere(value)


def take_leave(seconds: float) -> None:
    """Before a process that failed ends: tell who is gone, as far as the processes that fail with it know.

    What fails on all at once is mostly that one of them was lost. So each says that it leaves; of whom the first one,
    without which JAX ends the others, does not hear within so many seconds, it tells the others.
    """
    job = _jax.job()
    if job is None or job.num_processes == 1:
        return
    with suppress(jax.errors.JaxRuntimeError):  # the first one is gone: JAX ends this process
        job.client.key_value_set(f"alpa_lite/left/{job.process}", "")
        if job.process == 0:
            _tell_who_is_gone(job, seconds)
        elif told := job.client.blocking_key_value_get("alpa_lite/gone", int(1000 * seconds) + 500):
            _say(told)


def _tell_who_is_gone(job: _jax.Job, seconds: float) -> None:
    until, silent = time.monotonic() + seconds, list[int]()
    for process in range(1, job.num_processes):
        try:
            left = max(0.0, until - time.monotonic())
            job.client.blocking_key_value_get(f"alpa_lite/left/{process}", int(1000 * left) + 1)
        except jax.errors.JaxRuntimeError:
            silent.append(process)
    told = ""
    if silent:
        which = f"process {silent[0]}" if len(silent) == 1 else f"processes {', '.join(map(str, silent))}"
        told = f"no word from {which}: lost, or waiting for the others. The job ends."
        _say(told)
    job.client.key_value_set("alpa_lite/gone", told)
    if len(silent) < job.num_processes - 1:
        time.sleep(0.5)  # in which the others read it


def _service() -> _Service:
    job = _jax.job()
    if job is None:
        raise ExecutionError(
            f"This is one of {jax.process_count()} processes, but JAX coordinates none: call alpa_lite.initialize() "
            "(or jax.distributed.initialize) before anything else that uses JAX."
        )
    return _service_of(job.client)


@lru_cache(maxsize=1)
def _service_of(client: Any) -> _Service:
    """One for each start of the coordination service, with which the counting begins again."""
    return _Service(client)


class _Service:
    """Numbers what is said, so that each key is used once."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._said, self._compared, self._asked = itertools.count(), itertools.count(), itertools.count()
        self._met: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)

    def said_by_first(self, value: Any) -> Any:
        return self._first(f"said/{next(self._said)}", value)

    def compared(self, facts: Mapping[str, str]) -> str:
        """`differences` of the facts of all processes; the first one compares."""
        key = f"facts/{next(self._compared)}"
        self._set(f"{key}/{jax.process_index()}", dict(facts))
        if jax.process_index() > 0:
            return self._first(f"{key}/differ", None)
        return self._first(f"{key}/differ", differences(self._of_all(key)))

    def anywhere(self, value: bool) -> bool:
        key = f"any/{next(self._asked)}"
        self._set(f"{key}/{jax.process_index()}", value)
        return bool(self._first(f"{key}/all", None if jax.process_index() else any(self._of_all(key))))

    def meet(self, processes: tuple[int, ...]) -> None:
        number = next(self._met[processes])
        key = f"alpa_lite/meet/{'-'.join(map(str, processes))}/{number}"
        milliseconds = int(1000 * PATIENCE_SECONDS)
        self._client.wait_at_barrier(key, milliseconds, list(processes))

    def _of_all(self, key: str) -> list[Any]:
        return [self._get(f"{key}/{i}", i) for i in range(jax.process_count())]

    def _first(self, key: str, value: Any) -> Any:
        """What the first process has under a key."""
        if jax.process_index() > 0:
            return self._get(key, 0)
        self._set(key, value)
        return value

    def _set(self, key: str, value: Any) -> None:
        self._client.key_value_set_bytes(f"alpa_lite/{key}", zlib.compress(json.dumps(value).encode()))

    def _get(self, key: str, process: int) -> Any:
        read: Callable[[str, int], bytes] = self._client.blocking_key_value_get_bytes
        began, wait = time.monotonic(), FIRST_WORD_SECONDS
        while True:
            try:
                return json.loads(zlib.decompress(read(f"alpa_lite/{key}", int(1000 * wait))))
            except jax.errors.JaxRuntimeError as error:
                waited = time.monotonic() - began
                if "DEADLINE_EXCEEDED" not in str(error) or waited > PATIENCE_SECONDS:
                    raise ExecutionError(
                        f"Process {process} did not say within {waited:.0f} s what the others wait for: {error}. All "
                        "processes of a job must call the same functions of alpa_lite in the same order."
                    ) from error
            _say(
                f"process {jax.process_index()} has waited {waited:.0f} s for process {process}, which may be planning."
            )
            wait *= 2


def _say(text: str) -> None:
    print(f"alpa_lite: {text}", file=sys.stderr, flush=True)
