"""Detect a step that does not end while its caller waits for results, where no error can be raised.

One thread for all steps of the process looks at the launches from time to time as long as some are not done, and ends
when none are left; the next step starts another. When there was no progress for too long it writes to stderr which
instruction hangs and what it reads; then the process ends (`Flight.tell_hang`), or the next call raises the same error
(`Flight.raise_if_hung`). It holds the launches weakly: when the executor is dropped, the thread ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from alpa_lite.lower.instructions import SUM, Buffer, Instruction, Program
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.job.in_flight import Flight, Patience

MOST_INPUTS = 8
"""Number of inputs that a message names; the others are only counted."""


def explanation(program: Program, step: StepGraph, meshes: Sequence[Mesh], number: int) -> str:
    """Return the sentence for instruction `number`: task, micro-batch, stage, devices, inputs, and advice.

    The number after the last one stands for the delivery of results in a job of several processes.
    """
    if number == len(program.instructions):
        return (
            "the delivery of the step's small results to all processes. Either it is stuck, because one of them does "
            "not call the step, or takes longer than that; in the second case give a higher watchdog_seconds."
        )
    instruction = program.instructions[number]
    if instruction.kind == "SEND":
        return _of_transfer(program, step, meshes, number)
    task = program.tasks[instruction.task]
    devices = ", ".join(map(str, meshes[instruction.stage].devices.flat))
    inputs = list(zip(instruction.reads, (*task.inputs, *task.sums), strict=False))
    named = [f"{_name(step, b)} {_facts(step, b, str(p.spec))}{_origin(program, number, b)}" for b, p in inputs]
    more = f"; and {len(named) - MOST_INPUTS} more" if len(named) > MOST_INPUTS else ""
    sent = any(_writer(program, number, b).kind == "SEND" for b, _ in inputs)
    suspect = "it, or a transfer that brings its inputs," if sent else "it"
    return (
        f"{short_name(program, number)}, on stage {instruction.stage} ({devices}). "
        f"All that it reads was launched before: {'; '.join(named[:MOST_INPUTS]) or 'nothing'}{more}. "
        f"Either {suspect} is stuck, or takes longer than that; in the second case give a higher watchdog_seconds. On "
        "virtual CPU devices `alpa-lite doctor` says which settings they need."
    )


def short_name(program: Program, number: int) -> str:
    """Return an instruction in a few words; the number after the last one stands for the delivery in a job."""
    if number == len(program.instructions):
        return "the delivery of results"
    instruction = program.instructions[number]
    batch = "" if instruction.microbatch is None else f" of micro-batch {instruction.microbatch}"
    place = f"instruction {number} of {len(program.instructions)}"
    if instruction.kind != "RUN":
        return f"{instruction.kind} to stage {instruction.stage}{batch}, {place}"
    return f"{program.tasks[instruction.task].name!r}{batch}, {place}"


def _of_transfer(program: Program, step: StepGraph, meshes: Sequence[Mesh], number: int) -> str:
    instruction = program.instructions[number]
    source, buffer = instruction.source_stage, instruction.reads[0]
    ends = [f"stage {s} ({', '.join(map(str, meshes[s].devices.flat))})" for s in (source, instruction.stage)]
    return (
        f"the transfer of {_name(step, buffer)} {_facts(step, buffer, str(instruction.spec))}, instruction {number} of "
        f"{len(program.instructions)}, from {ends[0]} to {ends[1]}. Either it is stuck, or takes longer than that; in "
        "the second case give a higher watchdog_seconds."
    )


def _name(step: StepGraph, buffer: Buffer) -> str:
    """Return the user's name of an argument, or the user's source line of a result."""
    graph = step.graph
    producer = graph.producer[buffer.value]
    if producer is None:
        return graph.values[buffer.value].name or f"argument {graph.inputs.index(buffer.value)}"
    op = graph.ops[producer]
    kind = "the sum of what" if buffer.microbatch == SUM else "what"
    return f"{kind} {op.primitive} gives" + (f" at {op.source}" if op.source else "")


def _facts(step: StepGraph, buffer: Buffer, spec: str) -> str:
    value = step.graph.values[buffer.value]
    return f"{value.dtype}{list(value.shape)} as {spec}"


def _origin(program: Program, number: int, buffer: Buffer) -> str:
    writer = _writer(program, number, buffer)
    return f", sent by stage {writer.source_stage}" if writer.kind == "SEND" else ""


def _writer(program: Program, number: int, buffer: Buffer) -> Instruction:
    return next(i for i in reversed(program.instructions[:number]) if buffer in i.writes)


LONGEST_LOOK = 15.0
"""Largest number of seconds between two looks."""


def _to_stderr(text: str) -> None:
    # A stderr that is closed or full must not keep the next call from raising the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"alpa_lite: {text}", file=sys.stderr, flush=True)


class Watchdog:
    """Watches the launches of one `Flight`."""

    def __init__(self, flight: Flight, *, say: Callable[[str], None] = _to_stderr) -> None:
        """Start without watching."""
        self._flight = weakref.ref(flight)
        self._say, self._limit = say, flight.patience
        # So that the thread does not sleep on after the executor is gone.
        weakref.finalize(flight, _thread.wake)

    @property
    def is_watching(self) -> bool:
        """Whether the thread watches the launches."""
        return _thread.has(self)

    def watch(self) -> None:
        """Watch for the end of a step that was just launched."""
        if self._limit is not None:
            _thread.add(self, self._limit)

    def is_idle(self) -> bool:
        """Return True if nothing is left to watch for."""
        flight = self._flight()
        return flight is None or not flight.pending()

    def look(self, patience: Patience) -> None:
        """Report a hang, at most once."""
        flight = self._flight()
        pending = () if flight is None else flight.pending()
        if flight is not None and pending and not flight.hang and flight.is_hung(patience, pending):
            # Reported first: whoever sees the hang, and perhaps ends the process, has the sentence on stderr.
            if not flight.ends:
                self._say(flight.sentence(pending))
            flight.tell_hang(pending)


class _Thread:
    """One thread for all steps of the process, which runs while any of them has launches that are not done."""

    def __init__(self) -> None:
        # Reentrant: an executor may be collected, and wake the thread, while this thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._watched: dict[Watchdog, Patience] = {}
        self._pause = LONGEST_LOOK
        self._is_running = False

    def has(self, watchdog: Watchdog) -> bool:
        return watchdog in self._watched

    def add(self, watchdog: Watchdog, limit: float) -> None:
        with self._changed:  # so that a thread that is about to end sees the launches before this call
            if watchdog in self._watched:
                return
            self._watched[watchdog] = Patience(limit)
            # A part of the limit, so that a hang is noticed soon after it.
            pause = min(limit / 4, LONGEST_LOOK)
            if pause < self._pause:
                self._pause = pause
                self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, daemon=True, name="alpa_lite watchdog").start()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._pause)
                for idle in [each for each in self._watched if each.is_idle()]:
                    del self._watched[idle]
                if not self._watched:
                    self._is_running, self._pause = False, LONGEST_LOOK
                    return
                watched = [*self._watched.items()]
            # Without the lock: a look may end the process, or write to a stream that blocks.
            for each, patience in watched:
                each.look(patience)


_thread = _Thread()
