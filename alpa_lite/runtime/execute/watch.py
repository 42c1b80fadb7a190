"""Measure when the instructions of a step ran, while they overlap as in any other step.

    end      a launch leaves a token; a thread per group of devices waits for its tokens in order    `Watch.launched`
             a copy has no program and no token: a thread waits for the array itself                 `Watch.copied`
    start    when it was launched, its inputs were ready, and its devices (for a transfer: the link) were done with the
             preceding instruction                                                                   `spans`

The thread that launches the step waits for nothing but the beginning of each wait for a copy: the task that reads an
array may reuse its memory, and then there would be nothing left to wait for. If the step fails, the threads are not
joined.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from alpa_lite.lower.instructions import Buffer, Program, TaskTime
from alpa_lite.runtime.job.in_flight import Token

Clock = Callable[[], float]


class Watch:
    """The end times of the instructions of one step, by their number in the program."""

    def __init__(self, num_groups: int, clock: Clock = time.perf_counter) -> None:
        """Start the measurement. `num_groups`: number of groups of devices whose launches run in order."""
        self.ends: dict[int, float] = {}
        self._clock = clock
        self._tokens: tuple[queue.SimpleQueue[tuple[int, Token] | None], ...] = tuple(
            queue.SimpleQueue() for _ in range(num_groups)
        )
        self._threads: list[threading.Thread] = []
        for tokens in self._tokens:
            self._begin(self._wait_in_turn, tokens)

    def launched(self, group: int, instruction: int, token: Token) -> None:
        """Record that a program of an instruction was launched on a group of devices."""
        self._tokens[group].put((instruction, token))

    def copied(self, instruction: int, array: jax.Array) -> None:
        """Record that an instruction copies an array; return once a thread waits for it."""
        begun = threading.Event()
        self._begin(self._wait_for_copy, instruction, array, begun)
        begun.wait()

    def finish(self) -> Mapping[int, float]:
        """Wait for all instructions and return their end times."""
        for tokens in self._tokens:
            tokens.put(None)
        for thread in self._threads:
            thread.join()
        return self.ends

    def _begin(self, wait: Callable[..., None], *what: Any) -> None:
        """Start a thread for one wait: with fewer threads, a copy's wait would begin only after another's end."""
        thread = threading.Thread(target=wait, args=what, name="alpa_lite watches a step", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait_in_turn(self, tokens: queue.SimpleQueue[tuple[int, Token] | None]) -> None:
        while (item := tokens.get()) is not None:
            instruction, token = item
            self._await(instruction, token)

    def _wait_for_copy(self, instruction: int, array: jax.Array, begun: threading.Event) -> None:
        begun.set()  # the waiting thread runs on into its wait: only there it releases Python's lock
        self._await(instruction, array)

    def _await(self, instruction: int, array: jax.Array | Token) -> None:
        try:
            jax.block_until_ready(array)
        except RuntimeError:
            # Donated before the wait began, or the launch failed, which the step reports. The end is unknown.
            return
        self.ends[instruction] = max(self._clock(), self.ends.get(instruction, 0.0))


def spans(
    program: Program,
    groups: Sequence[int],
    launches: Mapping[int, float],
    ends: Mapping[int, float],
) -> list[TaskTime]:
    """Return the span of each instruction of a program but FREE, in order.

    groups    of each stage, the number of the devices whose launches run in order
    launches  when the launch of an instruction was called, in seconds since the step began
    ends      when it was seen to have ended; those that are missing ended as soon as they could start
    """
    waits_for, latest = _waits_for(program, groups, launches), dict(ends)
    for number in reversed(waits_for):  # an end that was seen late lies before the ends that depend on it
        for before in waits_for[number] if number in latest else ():
            latest[before] = min(latest.get(before, latest[number]), latest[number])
    ended: dict[int, float] = {}
    found: list[TaskTime] = []
    for number, launched in launches.items():
        start = max([launched, *(ended[before] for before in waits_for[number])])
        ended[number] = max(start, latest[number]) if number in ends else start
        found.append(TaskTime.of(program, program.instructions[number], start, ended[number]))
    return found


def _waits_for(program: Program, groups: Sequence[int], numbers: Iterable[int]) -> dict[int, list[int]]:
    """Return for each instruction those that it waits for.

    These are the writers of its buffers, and the last instruction before it on its devices.
    """
    writer: dict[Buffer, int] = {}
    last: dict[object, int] = {}
    found: dict[int, list[int]] = {}
    for number in numbers:
        instruction = program.instructions[number]
        here = groups[instruction.stage]
        # Transfers between the same two groups share a link; they overlap with the tasks of both.
        where = {"RUN": here, "SEND": (groups[instruction.source_stage], here)}.get(instruction.kind)
        found[number] = [writer[b] for b in instruction.reads if b in writer]
        if where is not None:
            found[number] += [last[where]] if where in last else []
            last[where] = number
        writer.update(dict.fromkeys(instruction.writes, number))
    return found
