"""The tasks of a step, each with what it receives, runs and returns, and the one way to run a task.

    parts      one per phase, run one after the other; each fetches what it reads
    loop       sums over micro-batches leave the loop as they are stored
    update     sums that are still as stored are resolved first, bucket by bucket                      `run_task`

The estimator (`task_prices`) and the emitter (`lower.emission`) run the same `TaskSpec` by the same function, so that
what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.walk import Walk
from alpa_lite.program.phases import Phase
from alpa_lite.sharding.specs import Spec

A = TypeVar("A")


_ORDER = {
    TaskRole.STEP: 0,
    TaskRole.FORWARD: 0,
    TaskRole.FORWARD_BACKWARD: 1,
    TaskRole.BACKWARD: 2,
    TaskRole.INPUT_GRADIENT: 2,
    TaskRole.WEIGHT_GRADIENT: 3,
    TaskRole.UPDATE: 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlace:
    """The place of an op of the step: its stage, the kind of its task and, for updates, the wave."""

    stage: int
    kind: TaskRole
    wave: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """A sort key that rises along every dependency within a micro-batch.

        Backward passes go from the last stage to the first, hence the negated stage.
        """
        number = _ORDER[self.kind]
        return number, self.wave, -self.stage if number == _ORDER[TaskRole.BACKWARD] else self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A value that enters or leaves a task, and its spec there."""

    value: int
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPart:
    """The ops of one phase of a task, in order; an invariant op belongs to the first part that reads it."""

    phase: Phase
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One executable of a stage.

    kind          the part of the step; "forward+backward" holds the input gradient only where the backward pass is
                  split in two
    parts         its ops by phase, repeated ones included
    inputs, outputs
    sums          values of the loop that are added up over micro-batches, in the specs in which they are stored
    resolved      sums that the update reads, of earlier tasks or its own: value, stored spec, resolved spec
    buckets       which of the resolved sums are reduced together, one bucket after the other
    kept          parameters that stay gathered from one part of the loop to the next
    """

    stage: int
    kind: TaskRole
    wave: int = 0
    parts: tuple[TaskPart, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sums: tuple[Port, ...] = ()
    resolved: tuple[tuple[int, Spec, Spec], ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()
    kept: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The name of the task, for example `stage 1 backward`."""
        return f"stage {self.stage} {self.kind}" + (f" {self.wave}" if self.wave else "")

    @property
    def ops(self) -> tuple[int, ...]:
        """The ops of all parts, in the order in which they run."""
        return tuple(op for part in self.parts for op in part.ops)


def run_task(walk: Walk[A], task: TaskSpec, arrays: Sequence[A], begin: Callable[[Phase], None]) -> list[A]:
    """Run a task on a walk without values and return its outputs and then its sums.

    `arrays` are those of the inputs; `begin` is called before each part, which runs on the machine that the walk then
    has.
    """
    for port, array in zip(task.inputs, arrays, strict=True):
        walk.put(port.value, port.spec, array)
    last = [part for part in task.parts if part.phase.in_loop][-1:]
    for part in task.parts:
        begin(part.phase)
        # What an earlier part gathered is gathered again, unless the task keeps it.
        walk.forget(but=task.kept if part.phase.in_loop else ())
        if part.phase is Phase.UPDATE:
            for value, stored, resolved in task.resolved:
                walk.arrays[value] = {stored: walk.get(value, stored)}
                # No other copy remains, so that every reader of the update gets the resolved sum.
                walk.arrays[value] = {resolved: walk.get(value, resolved)}
        walk.run(part.ops)
        if part in last:
            # Sums leave the loop as they are stored, where a task holds both.
            for value, stored, _ in task.resolved:
                walk.arrays[value] = {stored: walk.get(value, stored)}
    # Reading a value in the spec of its port reshards it, at the end of the task. Those that others wait for may change
    # their arrays until all are read.
    ports = (*task.outputs, *task.sums)
    for port in ports:
        walk.get(port.value, port.spec)
    return [walk.get(port.value, port.spec) for port in ports]
