"""Run the ops of a task phase by phase on any machine; emission and pricing share this order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from alpa_lite.lower.slices import TaskSpec
from alpa_lite.plan.walk import Walk
from alpa_lite.program.phases import Phase, StepGraph, parameters

A = TypeVar("A")


def run_parts(walk: Walk[A], task: TaskSpec, step: StepGraph) -> Iterator[Phase]:
    """Run a task whose inputs the walk holds, and yield each phase when it is about to begin.

    Each phase fetches what it reads, as it is priced: a parameter gathered for the forward pass is gathered again for
    the backward pass, unless the task keeps gathered parameters.
    """
    parts = _by_phase(task.ops, step)
    kept = parameters(step) if task.keeps_gathered else frozenset[int]()
    for phase, part in parts.items():
        yield phase
        walk.forget(but=kept if phase.in_loop else ())
        if phase is Phase.UPDATE:
            for value, stored, resolved in task.resolved:
                walk.arrays[value] = {stored: walk.get(value, stored)}
                walk.arrays[value] = {resolved: walk.get(value, resolved)}
        walk.run(part)
        if phase.in_loop and phase is [p for p in parts if p.in_loop][-1]:
            # Sums leave the loop as they are stored, where a task holds both.
            for value, stored, _ in task.resolved:
                walk.arrays[value] = {stored: walk.get(value, stored)}


def _by_phase(ops: Sequence[int], step: StepGraph) -> dict[Phase, list[int]]:
    """Return the ops of a task by phase, in order; invariant ops belong to the first phase that has any."""
    parts: dict[Phase, list[int]] = {Phase.FORWARD: [], Phase.BACKWARD: [], Phase.UPDATE: []}
    first = next((phase for phase in parts if any(step.phases[i] is phase for i in ops)), Phase.UPDATE)
    for i in ops:
        parts[first if step.phases[i] is Phase.INVARIANT else step.phases[i]].append(i)
    return {phase: part for phase, part in parts.items() if part}
