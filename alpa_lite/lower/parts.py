"""Walking the ops of a task phase by phase, on whatever machine: emission and pricing do the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from alpa_lite.graph.phases import Phase, StepGraph
from alpa_lite.lower.slice import TaskSpec
from alpa_lite.spmd import Walk

A = TypeVar("A")


def run_parts(walk: Walk[A], task: TaskSpec, step: StepGraph) -> Iterator[Phase]:
    """Run a task whose inputs the walk knows, and yield each phase of it when it is done.

    Each phase fetches what it needs, as it is priced; a parameter is not held gathered from forward to backward.
    """
    for part in _by_phase(task.ops, step):
        walk.forget()
        phase = step.phases[part[-1]]
        if phase is Phase.UPDATE:
            for value, stored, resolved in task.resolved:
                walk.get(value, stored)
                walk.arrays[value] = {stored: walk.arrays[value][stored]}
                walk.arrays[value] = {resolved: walk.get(value, resolved)}
        walk.run(part)
        yield phase


def _by_phase(ops: Sequence[int], step: StepGraph) -> list[list[int]]:
    """The ops of a task phase by phase; invariant ones go with the first."""
    parts: dict[Phase, list[int]] = {Phase.FORWARD: [], Phase.BACKWARD: [], Phase.UPDATE: []}
    first = next((phase for phase in parts if any(step.phases[i] is phase for i in ops)), Phase.UPDATE)
    for i in ops:
        parts[first if step.phases[i] is Phase.INVARIANT else step.phases[i]].append(i)
    return [part for part in parts.values() if part]
