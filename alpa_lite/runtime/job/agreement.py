"""What the processes of a job agree upon, through the service that JAX coordinates them with: no device takes part.

    agreed_data       what the first process says
    same_everywhere   raise on every process unless all of them state the same facts
    everywhere        what each process says
    meet              wait for one another

With one process, that is what it said itself. The processes that take part must call these functions in the same order.
While one of them is awaited for long, the others say so. JAX ends all of them when one has died; one that has come to
its end (`ending`) is not waited for.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError, MismatchError
from alpa_lite.runtime.job.ending import Roll, came_to_end, say

FIRST_WORD_SECONDS = 30.0
"""After so long a wait for another process is told on stderr, and then again after twice as long, and so on."""

LOOK_SECONDS = 5.0
"""How often a process that waits for another looks whether that one has come to its end."""

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


def everywhere(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order; on all of them."""
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
def _service_of(job: _jax.Job) -> _Service:
    """One for each start of the coordination service, with which the counting begins again."""
    return _Service(job)


class _Service:
    """Numbers what is said, so that each key is used once."""

    def __init__(self, job: _jax.Job) -> None:
        self._client, self._roll = job.client, Roll(job)
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

    def everywhere(self, value: Any) -> list[Any]:
        key = f"any/{next(self._asked)}"
        self._set(f"{key}/{jax.process_index()}", value)
        return self._first(f"{key}/all", None if jax.process_index() else self._of_all(key))

    def meet(self, processes: tuple[int, ...]) -> None:
        key = f"meet/{'-'.join(map(str, processes))}/{next(self._met[processes])}"
        self._set(f"{key}/{jax.process_index()}", None)
        if jax.process_index() == processes[0]:
            self._of_all(key, processes)
        self._first(f"{key}/all", None, processes[0])

    def _of_all(self, key: str, processes: Sequence[int] | None = None) -> list[Any]:
        return [self._get(f"{key}/{i}", i) for i in processes or range(jax.process_count())]

    def _first(self, key: str, value: Any, first: int = 0) -> Any:
        """What the first process has under a key."""
        if jax.process_index() != first:
            return self._get(key, first)
        self._set(key, value)
        return value

    def _set(self, key: str, value: Any) -> None:
        self._client.key_value_set_bytes(f"alpa_lite/{key}", zlib.compress(json.dumps(value).encode()))

    def _get(self, key: str, process: int) -> Any:
        read: Callable[[str, int], bytes] = self._client.blocking_key_value_get_bytes
        began, word, ended = time.monotonic(), FIRST_WORD_SECONDS, dict[int, str]()
        while True:
            try:
                return json.loads(zlib.decompress(read(f"alpa_lite/{key}", int(1000 * LOOK_SECONDS))))
            except jax.errors.JaxRuntimeError as error:
                waited = time.monotonic() - began
                if "DEADLINE_EXCEEDED" not in str(error) or waited > PATIENCE_SECONDS or process in ended:
                    raise ExecutionError(_in_vain(process, waited, ended, error)) from error
            # It may have said it before its end: that is looked at once more.
            ended = self._roll.ended(self._roll.said())
            if waited > word:
                me = jax.process_index()
                say(f"process {me} has waited {waited:.0f} s for process {process}, which may be planning.")
                word += 2 * word


def _in_vain(process: int, waited: float, ended: Mapping[int, str], error: Exception) -> str:
    if process in ended:
        what = f"P{came_to_end([process], ended)[1:]}, but process {jax.process_index()} waits for its word"
    else:
        what = f"Process {process} did not say within {waited:.0f} s what the others wait for: {error}"
    return f"{what}. All processes of a job must call the same functions of alpa_lite in the same order."
