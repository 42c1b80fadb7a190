"""Go on without workers of a parameter server whose processes have died.

    who          processes that have workers alone; those that share a worker end together       `losses_of`
    when         with several updates per step: a synchronous update needs all workers
    loss         the first process sees it (`job.channel`), and begins nothing more of these workers
    push         is awaited before its update begins: a worker may die in the middle of one       `Survival.run`
    update       a lost worker contributes nothing: to a sum zeros, of MAX, MIN and SAME one of the others,
                 to a mean of updates nothing                                                     `Survival._fill`
    results      small ones go from the servers to the others through the host                    `HostDelivery`

As in the original (Li et al., OSDI 2014, "Worker Management"): a worker that has departed need not be replaced, since
to lose a small part of the data changes a model little. Servers are not replicated here: when one dies, the job ends.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite._jax import Device
from alpa_lite.errors import ExecutionError
from alpa_lite.plan.instructions import Instruction, InstructionKind, Program
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.execute.bind import Bound, Slots
from alpa_lite.runtime.execute.crossing import joined
from alpa_lite.runtime.execute.run_transfers import Result, over_processes
from alpa_lite.runtime.job.activity import Token
from alpa_lite.runtime.job.channel import IDLE_SECONDS, Channel, joined_groups
from alpa_lite.runtime.job.processes import devices_of
from alpa_lite.runtime.job.shutdown import name_processes
from alpa_lite.schedule import Schedule
from alpa_lite.schedule.servers import ServerSchedule

CONFIRM_SECONDS = 10.0
"""Seconds in which the connection to a process breaks too, when a transfer to or from it has failed."""

ALL_DIED = (
    "All workers of the parameter server have died: there are no gradients for an update. Start the job again; it goes "
    "on from its newest checkpoint."
)


class Losses(NamedTuple):
    """The processes without which a step goes on.

    may_be_lost: sets of processes that share workers, which all end when one of them has died.
    why_not: a sentence on why it needs others than the first; "" if it does not.
    """

    may_be_lost: tuple[frozenset[int], ...]
    why_not: str


def losses_of(schedule: Schedule, processes: Sequence[Sequence[int]]) -> Losses:
    """Return the processes without which a step goes on. `processes`: of each stage."""
    groups = joined_groups(processes)
    if not isinstance(schedule, ServerSchedule) or not schedule.is_asynchronous:
        why = f"under {schedule} it needs all of them; use a parameter server with Bounded(delay) or async consistency."
        return Losses((), why if groups != [{0}] else "")
    if tuple(processes[0]) != (0,):
        why = (
            f"its servers lie in {name_processes(processes[0])}, and nobody else has their ranges of keys. Ask for at "
            "most as many servers as the first process has devices."
        )
        return Losses((), why)
    needed = sorted(next(group for group in groups if 0 in group))
    why = (
        f"{name_processes(needed)} share workers, and the first of them has the servers. Ask for a number of servers "
        "that leaves no worker on devices of the first process and of others."
    )
    return Losses(tuple(group for group in groups if 0 not in group), why if len(needed) > 1 else "")


@dataclass(kw_only=True, eq=False)
class Survival:
    """The workers that a program goes on without, and what it does in their place.

    Attributes:
        program: the program.
        step: its step.
        bound: its actions.
        processes: the processes of each stage.
        channel: the connections to the other processes.
        lost: the stages of the workers that are lost.
    """

    program: Program
    step: StepGraph
    bound: Bound
    processes: Sequence[Sequence[int]]
    channel: Channel
    lost: set[int] = field(default_factory=set[int])
    # Arrays that other updates than the last one have made in the place of results, by the slots of these.
    _latest: dict[int, Any] = field(default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        place = {(b.value, b.stage): slot for b, slot in zip(self.program.outputs, self.bound.outputs, strict=True)}
        self._in_place_of = {
            slot: place[b.value, b.stage]
            for b, slot in self.bound.slot.items()
            if (b.value, b.stage) in place and b.microbatch is not None
        }

    def lose(self, processes: Iterable[int]) -> None:
        """Take note of lost processes."""
        gone = {*processes}
        self.lost.update(stage for stage, of in enumerate(self.processes) if gone & {*of})

    def run(self, slots: Slots, part: range) -> None:
        """Run some actions as the living do it, pushes first; an update for which nothing has come is left out."""
        pushes = [i for i in part if self._is_push(self._instruction(i))]
        for i in pushes:
            self._act(i, slots)
        for i in pushes:
            self._check(self._instruction(i), slots)
        sources = {self._instruction(i).source_stage for i in pushes}
        if pushes and sources <= self.lost:
            return
        for i in part:
            if i not in pushes:
                self._act(i, slots)

    def _act(self, i: int, slots: Slots) -> None:
        instruction = self._instruction(i)
        action, free = self.bound.actions[i]
        if not self._is_of_lost(instruction):
            if instruction.kind in (InstructionKind.ADD, InstructionKind.CONCAT):
                self._fill(instruction, slots)
            with self._alive(instruction):
                action(slots)
        for slot in free:
            if slot in self._in_place_of and slots[slot] is not None:
                self._latest[self._in_place_of[slot]] = slots[slot]
            slots[slot] = None

    def complete(self, slots: Slots) -> None:
        """Let the last update that was made stand for the last one of the program."""
        for slot, array in self._latest.items():
            if slots[slot] is None:
                slots[slot] = array
        self._latest.clear()

    def _instruction(self, i: int) -> Instruction:
        return self.program.instructions[self.bound.instructions[i]]

    def _is_push(self, instruction: Instruction) -> bool:
        """Return whether an instruction sends from a worker to the servers, which are stage 0."""
        return instruction.kind is InstructionKind.SEND and instruction.stage == 0

    def _is_of_lost(self, instruction: Instruction) -> bool:
        source = instruction.source_stage if instruction.kind is InstructionKind.SEND else instruction.stage
        return instruction.stage in self.lost or source in self.lost

    def _check(self, push: Instruction, slots: Slots) -> None:
        """Wait for a push; if its worker has died meanwhile, leave out all that it sends."""
        slot = self.bound.slot[push.writes[0]]
        if push.source_stage not in self.lost:
            with self._alive(push):
                jax.block_until_ready(slots[slot])
        if push.source_stage in self.lost:
            slots[slot] = None

    @contextmanager
    def _alive(self, instruction: Instruction) -> Iterator[None]:
        """Context in which a transfer may fail because the worker at its other end has died."""
        try:
            yield
        except (ValueError, jax.errors.JaxRuntimeError):  # the collectives of the CPU raise the first one
            worker = instruction.stage or instruction.source_stage
            if instruction.kind is not InstructionKind.SEND or not self.channel.leads or worker == 0:
                raise
            # Any other error ends the job as ever.
            if not any(self.channel.is_lost(process, CONFIRM_SECONDS) for process in self.processes[worker]):
                raise
            self.lost.add(worker)

    def _fill(self, instruction: Instruction, slots: Slots) -> None:
        """Give what comes from lost workers, or from updates that were not made, a value that changes nothing."""
        places = [self.bound.slot[b] for b in instruction.reads]
        there = [slots[slot] for slot in places if slots[slot] is not None]
        if len(there) == len(places):
            return
        if not there:
            raise ExecutionError(ALL_DIED)
        value = instruction.writes[0].value
        is_mean = instruction.kind is InstructionKind.CONCAT and self.step.batch_dims[value] is None
        filled = there[0]
        if is_mean and jnp.issubdtype(filled.dtype, jnp.inexact):
            filled = sum(there[1:], there[0]) / len(there)
        elif self.step.loop_results.combined.get(value) is None and not jnp.issubdtype(
            filled.dtype, jax.dtypes.extended
        ):
            filled = jnp.zeros(filled.shape, filled.dtype, device=filled.sharding)
        for slot in places:
            if slots[slot] is None:
                slots[slot] = filled


class HostDelivery:
    """The delivery of the results of the servers through the hosts, in which no worker has to take part."""

    def __init__(self, results: Sequence[Result], devices: Sequence[Device], channel: Channel) -> None:
        """Prepare. `results`: the results to deliver, of which those of the servers are."""
        self.results = tuple(r for r in results if devices_of(r.sharding.mesh)[0].process_index == 0)
        mesh, self._mine = over_processes(devices)
        self._whole, self._channel = NamedSharding(mesh, PartitionSpec()), channel

    def __call__(self, leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], Token | None]:
        """Return all results of a step, the small ones delivered. Waits for the end of the step."""
        results = list(leaves)
        values = [np.asarray(leaves[r.number]) for r in self.results] if self._channel.leads else []
        if self._channel.leads:
            self._channel.tell([base64.b64encode(value.tobytes()).decode() for value in values])
        else:
            values = [self._unpacked(r, text) for r, text in zip(self.results, self._heard(), strict=True)]
        for result, value in zip(self.results, values, strict=True):
            like = jax.ShapeDtypeStruct(result.array.shape, result.array.dtype, sharding=self._whole)
            results[result.number] = joined(like, [jax.device_put(value, self._mine)])
        return results, None

    def _heard(self) -> Sequence[str]:
        while (told := self._channel.heard(IDLE_SECONDS)) is None:
            pass
        return told

    @staticmethod
    def _unpacked(result: Result, text: str) -> Any:
        return np.frombuffer(base64.b64decode(text), result.array.dtype).reshape(result.array.shape)
