"""Watch a step that runs: measure when its instructions ran, and detect that it does not end.

Measurement, while instructions overlap as in any other step:

    end      a launch leaves a token; a thread per group of devices waits for its tokens in order    `Watch.launched`
             a copy has no program and no token: a thread waits for the array itself                 `Watch.copied`
    start    when it was launched, its inputs were ready, and its devices (for a transfer: the link) were done with the
             preceding instruction                                                                   `spans`

The thread that launches the step waits for nothing but the beginning of each wait for a copy: the task that reads an
array may reuse its memory, and then there would be nothing left to wait for. If the step fails, the threads are not
joined.

Detection of a hang while the caller waits for results, where no error can be raised (`Watchdog`): one thread for all
steps of the process looks at the launches from time to time as long as some are not done, and ends when none are left;
the next step starts another. When there was no progress for too long it writes to stderr which instruction hangs and
what it reads; then the process ends (`Flight.tell_hang`), or the next call raises the same error
(`Flight.raise_if_hung`). It holds the launches weakly: when the executor is dropped, the thread ends.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jax.sharding import Mesh

from alpa_lite.plan.instructions import SUM, Buffer, Instruction, InstructionKind, Program, TaskTime
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.job.activity import Clock, Flight, Patience, Token


class Watch:
    """The end times of the instructions of one step, by their number in the program."""

    def __init__(self, num_groups: int, clock: Clock = time.perf_counter) -> None:
        """Start the measurement. `num_groups`: number of groups of devices whose launches run in order."""
        self.ends: dict[int, float] = {}
        self._clock = clock
        # Tokens of one group are ready in order, so that one thread can wait for all of them.
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

    def _begin(self, wait: Callable[..., None], *what: object) -> None:
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
        # An instruction may have launched several programs: the last one counts.
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
    times: list[TaskTime] = []
    for number, launched in launches.items():
        # The earliest possible start: devices are not asked when they really began.
        start = max([launched, *(ended[before] for before in waits_for[number])])
        ended[number] = max(start, latest[number]) if number in ends else start
        times.append(TaskTime.of(program, program.instructions[number], start, ended[number]))
    return times


def _waits_for(program: Program, groups: Sequence[int], numbers: Iterable[int]) -> dict[int, list[int]]:
    """Return for each instruction those that it waits for.

    These are the writers of its buffers, and the last instruction before it on its devices.
    """
    writer: dict[Buffer, int] = {}
    last: dict[object, int] = {}
    needed: dict[int, list[int]] = {}
    for number in numbers:
        instruction = program.instructions[number]
        here = groups[instruction.stage]
        # Transfers between the same two groups share a link; they overlap with the tasks of both.
        link = (groups[instruction.source_stage], here)
        where = {InstructionKind.RUN: here, InstructionKind.SEND: link}.get(instruction.kind)
        needed[number] = [writer[b] for b in instruction.reads if b in writer]
        if where is not None:
            needed[number] += [last[where]] if where in last else []
            last[where] = number
        writer.update(dict.fromkeys(instruction.writes, number))
    return needed


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
    if instruction.kind == InstructionKind.SEND:
        return _of_transfer(program, step, meshes, number)
    task = program.tasks[instruction.task]
    devices = ", ".join(map(str, meshes[instruction.stage].devices.flat))
    inputs = list(zip(instruction.reads, (*task.inputs, *task.sums), strict=False))
    named = [f"{_name(step, b)} {_facts(step, b, str(p.spec))}{_origin(program, number, b)}" for b, p in inputs]
    more = f"; and {len(named) - MOST_INPUTS} more" if len(named) > MOST_INPUTS else ""
    sent = any(_writer(program, number, b).kind == InstructionKind.SEND for b, _ in inputs)
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
    if instruction.kind != InstructionKind.RUN:
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
    kind = "the sum of what" if buffer.microbatch is not None and buffer.microbatch <= SUM else "what"
    return f"{kind} {op.primitive} gives" + (f" at {op.source}" if op.source else "")


def _facts(step: StepGraph, buffer: Buffer, spec: str) -> str:
    value = step.graph.values[buffer.value]
    return f"{value.dtype}{list(value.shape)} as {spec}"


def _origin(program: Program, number: int, buffer: Buffer) -> str:
    writer = _writer(program, number, buffer)
    return f", sent by stage {writer.source_stage}" if writer.kind == InstructionKind.SEND else ""


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
        """True while the thread watches the launches."""
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
