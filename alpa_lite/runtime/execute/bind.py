"""Bind instructions to functions with all look-ups done, so that a step is one loop over a list (`Bound.run`).

Each buffer has a slot, an index into a list. The arguments of the step come first; the function of an instruction reads
and writes slots by index. A slot is cleared right after the last instruction that reads it.

    PLACE    `Binder._place`     an argument, or the rows of a micro-batch, onto the devices of a stage
    RUN      `Binder._run`       an executable, whose token goes to the `Flight`
    SEND     `Binder._send`      a transfer
    ZEROS    `Binder._zeros`
    CONCAT   `Binder._concat`, as ADD and MEAN
    RENEW    `Binder._renew`
    FREE     no function: the slots that the preceding instruction clears

In a job of several processes, an instruction without devices of this process has no function, and its slots stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite._jax import TreeLeaf
from alpa_lite.lower.emission import Executable
from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind, Program
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.execute.crossing import Transfer
from alpa_lite.runtime.execute.placing import Placing, Windows
from alpa_lite.runtime.job.activity import Flight, Token
from alpa_lite.runtime.job.processes import devices_of, in_turn
from alpa_lite.sharding.specs import Spec

Slots = list[Any]
"""The arguments of a step and what its instructions have made: a leaf of an argument, an array, or None while empty."""

Action = Callable[[Slots], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A program that is ready to run.

    actions      function and slots to clear after it, of each instruction but FREE
    instructions number in the program of each action
    slot         of each buffer; the inputs of the step have the first ones
    outputs      slots of the results
    """

    actions: tuple[tuple[Action, tuple[int, ...]], ...]
    instructions: tuple[int, ...]
    slot: Mapping[Buffer, int]
    num_slots: int
    outputs: tuple[int, ...]

    def slots(self, inputs: Sequence[TreeLeaf]) -> Slots:
        """Return the slots for one step on these inputs."""
        return [*inputs, *[None] * (self.num_slots - len(inputs))]

    def run(self, slots: Slots) -> None:
        """Launch all instructions."""
        # The loop of every step: everything that an instruction needs was looked up when it was bound.
        for action, free in self.actions:
            action(slots)
            # The list is the only reference to what the step makes: clearing an element frees its memory.
            for i in free:
                slots[i] = None


@dataclass(kw_only=True, eq=False)
class Binder:
    """Performs all look-ups that a program needs.

    zeros     per task, the function that makes its accumulators
    concats   per buffer, the function that concatenates the micro-batches of an output
    transfers per buffer, the transfer from another stage, where this process takes part
    is_here   per stage, whether this process has a device of it
    indices   per stage, the indices of the micro-batches on its devices
    groups    per stage, the group of devices whose launches `flight` counts together
    sharding  maps a stage, a spec, and whether the array lies on the host, to a sharding
    placing   moves arguments to their shardings
    """

    program: Program
    step: StepGraph
    executables: Sequence[Executable]
    zeros: Mapping[int, Callable[[], Sequence[jax.Array]]]
    concats: Mapping[Buffer, Callable[..., jax.Array]]
    transfers: Mapping[Buffer, Transfer]
    is_here: Sequence[bool]
    indices: Sequence[Sequence[jax.Array]]
    groups: Sequence[int]
    flight: Flight
    sharding: Callable[[int, Spec | None, bool], NamedSharding]
    placing: Placing

    def __post_init__(self) -> None:
        self.input_slot = {v: i for i, v in enumerate(self.step.graph.inputs)}
        self.slot: dict[Buffer, int] = {}
        self.num_slots = len(self.step.graph.inputs)
        self.staged: dict[object, int] = {}

    def bound(self) -> Bound:
        """Return the program with all look-ups done."""
        kinds: dict[str, Callable[[int, Instruction], Action]] = {
            InstructionKind.PLACE: self._place,
            InstructionKind.RUN: self._run,
            InstructionKind.SEND: self._send,
            InstructionKind.ZEROS: self._zeros,
            InstructionKind.CONCAT: self._concat,
            InstructionKind.ADD: self._concat,
            InstructionKind.MEAN: self._concat,
            InstructionKind.RENEW: self._renew,
        }
        actions: list[tuple[Action, list[int]]] = []
        numbers: list[int] = []
        last_place: dict[int, list[int]] = {}
        for number, instruction in enumerate(self.program.instructions):
            if instruction.kind == InstructionKind.FREE:
                if actions:
                    actions[-1][1].extend(self.slot[b] for b in instruction.reads)
                continue
            for buffer in instruction.writes:
                if buffer not in self.slot:
                    self.slot[buffer] = self.num_slots
                    self.num_slots += 1
            # Buffers of other processes have slots too, which stay empty: outputs of the program may be among them.
            if not self._runs_here(instruction):
                continue
            actions.append((kinds[instruction.kind](number, instruction), []))
            numbers.append(number)
            if instruction.kind == InstructionKind.PLACE:
                last_place[self.input_slot[instruction.writes[0].value]] = actions[-1][1]
                last_place.update({slot: actions[-1][1] for slot in self._staged_by(instruction)})
        # An argument has no FREE: its slot is cleared after the last PLACE that reads it, if their order is fixed.
        for slot, free in last_place.items() if not self.program.segments else ():
            free.append(slot)
        return Bound(
            actions=tuple((action, tuple(dict.fromkeys(free))) for action, free in actions),
            instructions=tuple(numbers),
            slot=self.slot,
            num_slots=self.num_slots,
            outputs=tuple(self.slot[b] for b in self.program.outputs),
        )

    def _runs_here(self, instruction: Instruction) -> bool:
        """Return True if this process takes part in an instruction; any may hold a part of an argument to place."""
        if instruction.kind == InstructionKind.SEND:
            return instruction.writes[0] in self.transfers
        return instruction.kind == InstructionKind.PLACE or self.is_here[instruction.stage]

    def _staged_by(self, instruction: Instruction) -> list[int]:
        key = instruction.writes[0].value, instruction.stage, instruction.spec
        return [self.staged[key]] if key in self.staged else []

    def _run(self, number: int, instruction: Instruction) -> Action:
        executable = self.executables[instruction.task]
        assert executable.compiled is not None, "this process has a device of the mesh"
        compiled, launched = in_turn(executable.compiled, devices_of(executable.mesh)), self.flight.launched
        group = self.groups[instruction.stage]
        writes = [self.slot[instruction.writes[i]] for i in executable.order]
        take = _taker([self.slot[b] for b in instruction.reads])
        more = (self.indices[instruction.stage][instruction.microbatch or 0],) if executable.takes_microbatch else ()

        # All that the function needs is a local of its closure: look-ups of attributes add up over thousands of
        # launches.
        def run(slots: Slots) -> None:
            *results, token = compiled(*take(slots), *more)
            for i, result in zip(writes, results, strict=True):
                slots[i] = result
            launched(group, number, token)

        return run

    def _send(self, number: int, instruction: Instruction) -> Action:
        """Return the action of a transfer; the programs that it launches count as launches on their devices."""
        transfer, launched = self.transfers[instruction.writes[0]], self.flight.launched
        source, target = self.slot[instruction.reads[0]], self.slot[instruction.writes[0]]
        group, other = self.groups[instruction.stage], self.groups[instruction.source_stage]
        if not transfer.num_programs:
            # No program is launched, so there is nothing to count or to wait for.
            def copy(slots: Slots) -> None:
                slots[target] = transfer(slots[source])

            return copy

        def note(token: Token, *, at_source: bool) -> None:
            # Each program counts for the devices that it runs on: their credits are apart.
            launched(other if at_source else group, number, token)

        def send(slots: Slots) -> None:
            slots[target] = transfer(slots[source], launched=note)

        return send

    def _place(self, number: int, instruction: Instruction) -> Action:
        del number
        buffer = instruction.writes[0]
        on_host = self.step.graph.values[buffer.value].on_host
        sharding = self.sharding(instruction.stage, instruction.spec, on_host)
        source, target = self.input_slot[buffer.value], self.slot[buffer]
        placing = self.placing
        if buffer.microbatch is None:

            def place(slots: Slots) -> None:
                slots[target] = placing.put(slots[source], sharding)

            return place
        dim, microbatch = self.step.batch_dims[buffer.value] or 0, buffer.microbatch
        size = self.step.graph.values[buffer.value].shape[dim]
        rows = Windows(dim=dim, start=0, size=size, count=self.step.num_microbatches)
        key = buffer.value, instruction.stage, instruction.spec
        # The first micro-batch that is placed stages the whole array, from which all of them take their rows.
        first = key not in self.staged
        if first:
            self.staged[key] = self.num_slots
            self.num_slots += 1
        staged, here = self.staged[key], self.is_here[instruction.stage]

        def place_rows(slots: Slots) -> None:
            if first:
                slots[staged] = placing.staged(slots[source], rows, sharding)
            if here:
                slots[target] = placing.rows(slots[staged], rows, microbatch, sharding)

        return place_rows

    def _zeros(self, number: int, instruction: Instruction) -> Action:
        del number
        make, writes = self.zeros[instruction.task], [self.slot[b] for b in instruction.writes]

        def zeros(slots: Slots) -> None:
            for i, array in zip(writes, make(), strict=True):
                slots[i] = array

        return zeros

    def _concat(self, number: int, instruction: Instruction) -> Action:
        del number
        take, join = _taker([self.slot[b] for b in instruction.reads]), self.concats[instruction.writes[0]]
        target = self.slot[instruction.writes[0]]

        def concat(slots: Slots) -> None:
            slots[target] = join(*take(slots))

        return concat

    def _renew(self, number: int, instruction: Instruction) -> Action:
        del number
        pairs = [(self.slot[a], self.slot[b]) for a, b in zip(instruction.reads, instruction.writes, strict=True)]

        def renew(slots: Slots) -> None:
            made = [slots[source] for source, _ in pairs]
            for (_, target), array in zip(pairs, made, strict=True):
                slots[target] = array

        return renew


def _taker(slots: Sequence[int]) -> Callable[[Slots], Sequence[jax.Array]]:
    """Return a function that reads these slots at once."""
    if len(slots) > 1:
        # With one index `itemgetter` returns the item itself, and without any it fails.
        return itemgetter(*slots)
    return (lambda values: (values[slots[0]],)) if slots else (lambda values: ())
