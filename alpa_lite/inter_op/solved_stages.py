"""Stages that were solved, and what further questions they answer.

With M micro-batches in flight and L bytes per device, what was solved with M' <= M and L' >= L had as much memory or
more. If the best solution there keeps to M and L, it is the best here (`_fits`), so that fewer micro-batches in flight
are to be solved first. A bound there is a bound here: what keeps to M and L and is close to it is close to the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from alpa_lite.intra_op.formulate import UNWEIGHTED, Builders, CollectiveWeights
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.stage import StageSolution, StageView
from alpa_lite.plan.pricing import Pricer
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from cost_models.composed import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshKey:
    """A kind of submesh with a logical mesh: on equal ones every stage takes the same time.

    groups   numbers of the groups of equal hosts that the submesh spans
    """

    num_hosts: int
    devices_per_host: int
    groups: tuple[int, ...]
    mesh: LogicalMesh


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The layers of a stage, `first` to `last`, on a logical mesh over a submesh."""

    first: int
    last: int
    submesh: Submesh
    mesh: LogicalMesh

    @staticmethod
    def nth(number: int, num_layers: int, submesh: Submesh, mesh: LogicalMesh) -> StagePlace:
        """Return the place of a stage, by its number among stages of `num_layers` layers each."""
        return StagePlace(number * num_layers, (number + 1) * num_layers - 1, submesh, mesh)

    def with_solution(self, solution: StageSolution) -> PlacedStage:
        """Return the stage with its solution."""
        return PlacedStage(first=self.first, last=self.last, submesh=self.submesh, mesh=self.mesh, solution=solution)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage(StagePlace):
    """A stage of a plan in the making, with its solution."""

    solution: StageSolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(StagePlace):
    """A stage to solve.

    in_flight     micro-batches held at the peak of memory
    limit_bytes   the limit per device
    gap           the relative gap at which the solver may stop
    seconds       its time limit
    weights       the weights of collectives between ops in the objective
    """

    in_flight: int
    limit_bytes: float
    gap: float
    seconds: float
    weights: CollectiveWeights = UNWEIGHTED


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedStage:
    """A solved stage, with the question that was asked.

    gap   the relative gap that was reached, or the requested one if that is smaller
    """

    view: StageView
    asked: Question
    gap: float
    solution: StageSolution


class SolvedStages:
    """The stages that the stage costs of one search have solved, and the strategies for each kind of mesh.

    All of these costs have one cost model and one restriction. Stages of equal structure (`StageView.signature`) on the
    same kind of mesh have the same solutions, whatever step they belong to.
    """

    def __init__(self) -> None:
        """Start without any stage."""
        self._solved: dict[tuple[object, MeshKey, CollectiveWeights], list[SolvedStage]] = {}
        self._structures: dict[Hashable, object] = {}
        self._of_views: dict[Hashable, object] = {}
        self._first_of_size: dict[Hashable, StageView] = {}
        self._builders: dict[MeshKey, Builders] = {}
        self._in_parts: dict[Hashable, list[tuple[StageView, StageSolution]]] = {}

    def structure(self, view: StageView) -> object:
        """Return an object that stands for the signature of a view, which takes long to make and to hash."""
        if view.key not in self._of_views:
            self._of_views[view.key] = self._structure(view)
        return self._of_views[view.key]

    def _structure(self, view: StageView) -> object:
        first = self._first_of_size.setdefault(view.size, view)
        if first is view:
            # No view so far can have its signature, as the whole step at each number of micro-batches.
            return object()
        # Once a second view of its size is there, the first one is compared too.
        self._structures.setdefault(first.signature, self._of_views[first.key])
        return self._structures.setdefault(view.signature, object())

    def answer(self, structure: object, kind: MeshKey, asked: Question) -> SolvedStage | None:
        """Return the solution that answers a question, or None; see the module docstring."""
        return answer_among(self._solved.get((structure, kind, asked.weights), ()), asked)

    def add(self, structure: object, kind: MeshKey, solved: SolvedStage) -> None:
        """Add a stage that was solved."""
        self._solved.setdefault((structure, kind, solved.asked.weights), []).append(solved)

    def in_parts(self, structure: object, kind: MeshKey, *, in_two: bool) -> list[tuple[StageView, StageSolution]]:
        """Return the list of the stages that were priced with a backward pass of two tasks, or of one."""
        return self._in_parts.setdefault((structure, kind, in_two), [])

    def within_memory(self, num_microbatches: int) -> list[SolvedStage]:
        """Return the stages of steps with so many micro-batches that were solved within a limit of memory."""
        return [
            solved
            for alike in self._solved.values()
            for solved in alike
            if solved.view.step.num_microbatches == num_microbatches and math.isfinite(solved.asked.limit_bytes)
        ]

    def builders(self, kind: MeshKey, model: CostModel, make: Callable[[Pricer | None], Builders]) -> Builders:
        """Return the builders of stages on a kind of mesh, from a cache.

        `make` gets a pricer with the same cost model for another kind, since prices of work do not depend on the
        submesh; None if there is none yet.
        """
        if kind not in self._builders:
            pricers = (known.catalogue.pricer for known in self._builders.values())
            self._builders[kind] = make(next((pricer for pricer in pricers if pricer.cost_model is model), None))
        return self._builders[kind]


def answer_among(solved: Sequence[SolvedStage], asked: Question) -> SolvedStage | None:
    """Return the solution that answers a question, with a bound for it, or None; see the module docstring.

    `solved` holds stages of the same structure on the same kind of mesh.
    """
    found = next((s for s in solved if s.gap <= asked.gap and _fits(s, asked)), None)
    if found is None:
        # None was proven close to the best with exactly this room. But a bound with more room is valid here, and one
        # solution may fit here and be close to another's bound.
        bound = max((s.solution.bound for s in solved if _is_roomier(s, asked)), default=-math.inf)
        close = (s for s in solved if _has_room(s, asked) and bound >= s.solution.objective * (1 - asked.gap))
        closest = min(close, key=lambda s: s.solution.objective, default=None)
        found = closest and replace(closest, solution=replace(closest.solution, bound=bound))
    return found


def _fits(solved: SolvedStage, asked: Question) -> bool:
    """Return True if a solution is also the best one within the limits of a question, and not only within its own."""
    if (solved.asked.in_flight, solved.asked.limit_bytes) == (asked.in_flight, asked.limit_bytes):
        # More time may find what less time did not.
        return solved.solution.choice is not None or _is_final(solved, asked)
    return _is_roomier(solved, asked) and _has_room(solved, asked)


def _is_final(solved: SolvedStage, asked: Question) -> bool:
    """Return True if a stage without a sharding has none, or none that is found in the time of a question."""
    return solved.solution.status is Status.INFEASIBLE or solved.asked.seconds >= asked.seconds


def _is_roomier(solved: SolvedStage, asked: Question) -> bool:
    """Return True if a stage was solved with as much memory as a question allows, or more."""
    return solved.asked.in_flight <= asked.in_flight and solved.asked.limit_bytes >= asked.limit_bytes


def _has_room(solved: SolvedStage, asked: Question) -> bool:
    """Return True if there is a solution and it respects the limits of a question."""
    solution = solved.solution
    return solution.choice is not None and solution.cost.bytes_in_flight(asked.in_flight) <= asked.limit_bytes
