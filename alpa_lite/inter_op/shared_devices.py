"""Stages that share devices: the memory that they need together, and solutions that fit into it.

The chunks c of an interleaved pipeline lie on the same devices and run in turn, so that a device holds at most

    peak  = Σ_c (state_c + sums_c) + max over time of Σ_c held_c · activations_c + max_c temporaries_c     `device_peak`

where a backward pass in two parts holds other values for the second part than for the first.

Each stage is solved by itself first, with all of the memory. Where the best of each do not fit together, they get less:
limit_c = reserved_c · memory / peak, and a stage that cannot go so low gets what it needs (`solve_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.intra_op.stage import StageSolution
from alpa_lite.plan.parts import StageCost
from alpa_lite.schedule import Task, TaskKind, peak_held

#: How often the memory is divided anew while the stages of a device do not fit together.
MAX_ROUNDS = 4

Solve = Callable[[int, int, float], StageSolution]
"""Stage number, micro-batches in flight, limit in bytes per device -> the best solution."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """The solutions of stages that share devices, by stage, and the bytes per device that they need together."""

    solutions: Mapping[int, StageSolution]
    peak_bytes: float
    fits: bool


def device_peak(costs: Mapping[int, StageCost], tasks: Sequence[Task]) -> float:
    """Return the peak bytes per device of stages, given the cost of each by number and the tasks of all of them."""
    sizes, handed = ([0.0] * (1 + max(costs)) for _ in range(2))
    for stage, cost in costs.items():
        sizes[stage], handed[stage] = cost.activation_bytes, cost.handed_bytes
    resident = sum(cost.resident_bytes for cost in costs.values())
    return resident + peak_held(tasks, sizes, handed) + max(cost.temporary_bytes for cost in costs.values())


def held_at_peak(tasks: Sequence[Task]) -> dict[int, int]:
    """Return the micro-batches in flight of each stage when their sum first reaches its maximum; at least one each."""
    held = dict.fromkeys((task.stage for task in tasks), 0)
    most, total = dict(held), 0
    for task in tasks:
        held[task.stage] += 1 if task.kind is TaskKind.FORWARD else -1 if task.kind.is_last else 0
        if sum(held.values()) > total:
            most, total = dict(held), sum(held.values())
    return {stage: max(1, number) for stage, number in most.items()}


def solve_together(solve: Solve, tasks: Sequence[Task], memory_bytes: float) -> Together:
    """Solve the stages whose tasks are listed so that they fit into the memory of their devices together."""
    held = held_at_peak(tasks)
    limits = dict.fromkeys(sorted(held), memory_bytes)
    least = dict.fromkeys(limits, 0.0)
    found = Together(solutions={}, peak_bytes=float("inf"), fits=False)
    if memory_bytes < 0:
        # What is on its way between stages can take more than a device has; no choice within a stage changes that.
        return found
    # Solutions change by steps, and their peaks need not coincide, so that one division may not be enough.
    for _ in range(MAX_ROUNDS):
        solutions = {stage: solve(stage, held[stage], limit) for stage, limit in limits.items()}
        lacking = {s for s, solution in solutions.items() if solution.choice is None}
        least.update({s: solutions[s].peak_bytes for s in lacking})
        reserved = sum(solution.peak_bytes for solution in solutions.values())
        peak = reserved if lacking else device_peak({s: each.cost for s, each in solutions.items()}, tasks)
        if peak < found.peak_bytes or not found.solutions:
            # A stage that is alone was solved within this memory; only what it hands from the first part of a backward
            # pass to the second was not counted then. (Recomputed sums of bytes may differ by rounding.)
            alone = len(limits) == 1 and not any(each.cost.handed_bytes for each in solutions.values())
            fits = not lacking and (peak <= memory_bytes or alone)
            found = Together(solutions=solutions, peak_bytes=peak, fits=fits)
        if found.fits or any(limits[s] >= memory_bytes for s in lacking):
            break
        limits = _shared(solutions, least, memory_bytes * (reserved / peak))
    return found


def _shared(
    solutions: Mapping[int, StageSolution], least: Mapping[int, float], available_bytes: float
) -> dict[int, float]:
    """Divide `available_bytes` in proportion to what the solutions reserve; stages get at least what they need."""
    limits = dict(least)
    others = sum(solution.peak_bytes for s, solution in solutions.items() if not least[s])
    left = max(0.0, available_bytes - sum(least.values()))
    for stage, solution in solutions.items():
        if not least[stage]:
            limits[stage] = solution.peak_bytes * min(1.0, left / others) if others > 0 else left
    return limits
