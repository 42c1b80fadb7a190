"""What is asked about stages, what was solved, and which of that is an answer.

With M micro-batches in flight and L bytes per device, what was solved with M' <= M and L' >= L had as much room or
more. The best there is the best here, if it keeps to M and L (`_fits`). And a bound there is one here: whatever keeps
to M and L and is close to it is close to the best here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.intra_op.stage import StageView
from alpa_lite.sharding.meshes import LogicalMesh, Submesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshKey:
    """What a submesh is, the groups of hosts that it spans, by number, and the logical mesh over it."""

    num_hosts: int
    devices_per_host: int
    groups: tuple[int, ...]
    mesh: LogicalMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which layers are to be solved, on what, within how many bytes per device, and to which gap."""

    first: int
    last: int
    submesh: Submesh
    mesh: LogicalMesh
    in_flight: int
    limit_bytes: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedStage:
    """A stage as it was solved: within so many bytes per device, with so many micro-batches in flight, and to which
    gap; or, where that was not reached, to which it was to be solved."""

    view: StageView
    kind: MeshKey
    submesh: Submesh
    in_flight: int
    limit_bytes: float
    gap: float
    solution: StageSolution


def answer_among(solved: Sequence[SolvedStage], asked: Question) -> SolvedStage | None:
    """What answers a question about the same layers on the same kind of mesh, with a bound for what was asked; None if
    nothing does."""
    found = next((s for s in solved if s.gap <= asked.gap and _fits(s, asked)), None)
    if found is None:
        bound = max((s.solution.bound for s in solved if _is_roomier(s, asked)), default=-math.inf)
        close = (s for s in solved if _has_room(s, asked) and bound >= s.solution.objective * (1 - asked.gap))
        closest = min(close, key=lambda s: s.solution.objective, default=None)
        found = closest and replace(closest, solution=replace(closest.solution, bound=bound))
    return found


def _fits(solved: SolvedStage, asked: Question) -> bool:
    """True when the best with as much room or more keeps to less room: then nothing is better there."""
    if (solved.in_flight, solved.limit_bytes) == (asked.in_flight, asked.limit_bytes):
        return True
    return _is_roomier(solved, asked) and _has_room(solved, asked)


def _is_roomier(solved: SolvedStage, asked: Question) -> bool:
    """Whether it was solved with as much room as there is, or more."""
    return solved.in_flight <= asked.in_flight and solved.limit_bytes >= asked.limit_bytes


def _has_room(solved: SolvedStage, asked: Question) -> bool:
    """Whether there is a choice, and it keeps to the room that there is."""
    solution = solved.solution
    return solution.choice is not None and solution.bytes_in_flight(asked.in_flight) <= asked.limit_bytes
