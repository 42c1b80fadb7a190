"""Stage costs: any layer range on any submesh in any logical mesh; equal stages are solved once.

`StageCosts` answers a `Question` for one step, cost model and restriction. Solutions are stored by the structure of the
stage (`solved_stages`), so that repeated layers cost one solve.

On a logical mesh of one axis every op may use it for anything. Of several, "replica" splits the batch and leaves state
whole, "data" splits the batch and may split state, as ZeRO does, and "model" splits everything else, as in Alpa: more
freedom multiplies the strategies and has bought nothing on the models tried.

`expect` passes questions to worker processes, which answer them before the search gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.solved_stages import MeshKey, Question, SolvedStage, SolvedStages, StagePlace
from alpa_lite.inter_op.workers import Likely, Workers
from alpa_lite.intra_op.formulate import UNWEIGHTED, Builders, CollectiveWeights
from alpa_lite.intra_op.memory_bound import least_peak_bytes
from alpa_lite.intra_op.shortage import Shortage, explain_shortage
from alpa_lite.intra_op.solve import RELATIVE_GAP, does_not_fit, in_two_parts, solve_stage
from alpa_lite.intra_op.solvers.integer_program import IntegerProgram
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.solvers.solver import ProgramTooLargeError
from alpa_lite.intra_op.stage import NO_LAYOUT, GivenLayout, StageSolution, StageView, remap
from alpa_lite.intra_op.strategies import FREE_CHOICE, AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.op_places import update_tasks
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.progress import Progress
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers
from alpa_lite.step.recomputation import Remat
from cost_models.cluster import Cluster
from cost_models.composed import CostModel
from cost_models.hardware import Device

WEIGHTS = (UNWEIGHTED, CollectiveWeights(0.6, 0.6), CollectiveWeights(0.3, 0.3), CollectiveWeights(1.0, 0.3))
WITHOUT_STACKS = (CollectiveWeights(0.6, 1.0, stacks=False), CollectiveWeights(0.3, 1.0, stacks=False))
"""The weights of collectives for which a stage of a plan is solved, and those for stages with loops in addition
(`StageCosts.fastest`).

How much of them kernels hide depends on the sharding itself. In 39 problems of one stage (23 cases of
`benchmarks.exhaustive`) the best of the first four took as long as the best of eleven pairs of weights, to 0.01 % in
the mean; the first three 0.14 % longer, the first alone 1.5 %. In three with loops at one micro-batch (of
`benchmarks.never_behind`) the best of all six took as long as the best of 24, the first four up to 3.5 % longer.
"""

LATER, SOONER = 1.02, 0.98
"""Weights at one micro-batch of collectives that the update may as well run as the backward pass: the objective is the
same, but they run beside other kernels.
"""

QUICK_GAP = 0.3
"""The relative gap of the first choices within a limit: their bound mostly tells if more is worth it."""

_ROLES = {
    "replica": AxisRole.REPLICA,
    "data": AxisRole.BATCH,
    "expert": AxisRole.EXPERT,
    "context": AxisRole.CONTEXT,
    "model": AxisRole.MODEL,
}


def free_restriction(mesh: LogicalMesh) -> Restriction:
    """Return the restriction of the search on a logical mesh; axes of other names than the search's are free."""
    if len(mesh.shape) == 1:
        return FREE_CHOICE
    roles = {axis: _ROLES[axis] for axis in mesh.axis_names if axis in _ROLES}
    return Restriction(roles=roles, optimizer=BatchSplit.MAY, parameters=BatchSplit.MAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConstraints:
    """The restrictions that the shardings of stages obey.

    Attributes:
        restriction: the use of each mesh axis; None: the search's own (`free_restriction`).
        pins: given specs of some inputs of the graph.
        outputs: given specs of some outputs of the graph.
        keeps_gathered, layout: see `StageView`.
    """

    restriction: Restriction | None = None
    pins: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    outputs: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    keeps_gathered: bool = False
    layout: GivenLayout = field(default=NO_LAYOUT, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveEffort:
    """The effort of solving stages: the gap to reach, and the time to spend.

    Attributes:
        relative_gap: relative gap to which a stage is solved.
        time_limit_seconds: time limit for a stage.
        peaks: how the memory of a stage that does not fit is found, its `peak_bytes`. "least": it is minimised, which
            takes longer than to see that the stage does not fit; "bounded": the same, unless a lower bound is too much
            (`memory_bound`); "none": it is infinite.
        solver: the solver of intra-op problems; None: the portfolio.
    """

    relative_gap: float = RELATIVE_GAP
    time_limit_seconds: float = 60.0
    peaks: Literal["least", "bounded", "none"] = "least"
    solver: IntegerProgram | None = None

    def solver_for(self, gap: float) -> Portfolio | IntegerProgram:
        """Return the solver that stops at a relative gap."""
        usual = Portfolio(peak_seconds=0.0) if self.peaks == "none" else Portfolio()
        return replace(usual if self.solver is None else self.solver, relative_gap=gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """The layers that recompute values in their backward pass; the fields of a `Plan` with the same names.

    Attributes:
        remat: policy of each layer; () if no layer recomputes anything.
        traced_layers: with `remat` or `host_optimizer`, the layer of each op of the step as it was traced.
        host_optimizer: whether the state of the optimizer waits in the memory of the host.
    """

    remat: tuple[Remat, ...] = ()
    traced_layers: tuple[int | None, ...] = ()
    host_optimizer: bool = False

    def recorded_in(self, plan: Plan) -> Plan:
        """Return a plan of the step with recomputation that says so."""
        if not self.remat and not self.host_optimizer:
            return plan
        return replace(plan, remat=self.remat, traced_layers=self.traced_layers, host_optimizer=self.host_optimizer)


class _Answer(NamedTuple):
    """A question, and its best sharding."""

    asked: Question
    solution: StageSolution


class _Given(NamedTuple):
    """The parts of stage costs that a worker needs in addition to the step: all that a solution depends on."""

    layers: Layers
    cost_model: CostModel
    cost_model_for: Callable[[Cluster], CostModel] | None
    constraints: StageConstraints
    effort: SolveEffort


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Stage costs of one step: stages are solved on demand, and each only once.

    Attributes:
        cost_model_for: `cost_model_for(cluster)` is the cost model of a part of a cluster whose devices differ.
        workers: worker processes that may solve stages before they are needed (`expect`).
        solved: the stages solved so far, here and by other costs of the same search.
        recomputed: the layers that recompute values.
        as_traced: the step as it was traced, if layers read there what others recompute; see `whole`.
    """

    step: StepGraph
    layers: Layers
    cost_model: CostModel
    cost_model_for: Callable[[Cluster], CostModel] | None = None
    constraints: StageConstraints = field(default_factory=StageConstraints)
    effort: SolveEffort = field(default_factory=SolveEffort)
    progress: Progress = field(default_factory=Progress, repr=False)
    workers: Workers = field(default_factory=Workers, repr=False)
    solved: SolvedStages = field(default_factory=SolvedStages, repr=False)
    recomputed: Recomputed = field(default_factory=Recomputed)
    as_traced: StepGraph | None = None

    @property
    def whole(self) -> StageCosts:
        """The costs of the stage of all layers as the only layer.

        A step that recomputes values as it is written is planned so that no layer reads what another one recomputes:
        it reads the values of the forward pass, which have to be saved. That is needed between stages alone. Less is
        recomputed then, but more is saved.
        """
        # Not cached here: costs that hold themselves would only be freed by the garbage collector.
        return self._in_one_layer or self

    @cached_property
    def _in_one_layer(self) -> StageCosts | None:
        if self.as_traced is None:
            return None
        return replace(self, step=self.as_traced, layers=make_layers(self.as_traced, 1), as_traced=None)

    @cached_property
    def most_update_tasks(self) -> int:
        """The most tasks that the update of a layer is, if each layer is a stage."""
        return max(update_tasks(self.step, self.layers.of_op).values(), default=0)

    def solution(
        self, place: StagePlace, *, in_flight: int = 1, limit_bytes: float | None = None, quick: bool = False
    ) -> StageSolution:
        """Return the best sharding of some layers on a logical mesh.

        `limit_bytes`: per device; None for the memory of a device, `math.inf` for no limit. `quick`: accept a larger
        gap (`QUICK_GAP`); the solution still has a bound for the best one.
        """
        return self.answer(self.question(place, in_flight=in_flight, limit_bytes=limit_bytes, quick=quick))

    def fastest(self, place: StagePlace, *, in_flight: int) -> StageSolution:
        """Return the sharding that takes the least time as its program runs, of those that are best by several sums.

        The objective of a stage adds up kernels and collectives, some of which run at the same time: what is best where
        the collectives between ops count for less may take less time.
        """
        asked = self.question(place, in_flight=in_flight)
        questions = [replace(asked, weights=each) for each in self._weights(place)]
        expect((self, question) for question in questions)
        best = min(questions, key=self._step_seconds)
        if best.weights.at_once != UNWEIGHTED.at_once:
            sooner = replace(best, weights=best.weights._replace(at_once=SOONER))
            best = min(best, sooner, key=self._step_seconds)
        return self.answer(best)

    def _step_seconds(self, asked: Question) -> float:
        """Return the seconds of a step that the sharding for a question keeps its stage busy; infinite without one."""
        found = self.answer(asked)
        return math.inf if found.choice is None else found.cost.step_seconds(self.step.num_microbatches)

    def _weights(self, place: StagePlace) -> Sequence[CollectiveWeights]:
        """Return the weights for which a stage of a plan is solved."""
        # Where nothing overlaps, the objective is the time.
        if self._builders(place).catalogue.pricer.runs_in_turn:
            return (UNWEIGHTED,)
        graph, phases = self.step.graph, self.step.phases
        ops = (op for layer in range(place.first, place.last + 1) for op in self.layers.ops_of(layer))
        loops = any(graph.ops[op].primitive == "scan" and phases[op] is Phase.BACKWARD for op in ops)
        found = WEIGHTS + (WITHOUT_STACKS if loops else ())
        return found if self.step.accumulates else [each._replace(at_once=LATER) for each in found]

    def answer(self, asked: Question) -> StageSolution:
        """Return the best sharding for a question, solved before or now; see `solution`."""
        structure, kind = self._structure(asked.first, asked.last), self._kind(asked)
        found = self.solved.answer(structure, kind, asked)
        if found is None:
            self.progress(f"layers {asked.first}..{asked.last} on {asked.mesh}")
            # A worker solves the first of equal questions, which may be about other layers of the same structure.
            taken = self.workers.take(self.key(asked))
            solved_as, solution = taken if isinstance(taken, _Answer) else _Answer(asked, self.solve(asked))
            view = self._view(solved_as.first, solved_as.last)
            # A solution that came closer than it had to also answers stricter questions.
            gap = min(asked.gap, solution.gap)
            found = SolvedStage(view=view, asked=solved_as, gap=gap, solution=solution)
            self.solved.add(structure, kind, found)
            self.progress.did()
        solution = found.solution
        if solution.choice is None:
            return solution
        # Equal stages have the same structure but other ids of ops and values, and the peak depends on how many
        # micro-batches are in flight here.
        same = found.asked.in_flight == asked.in_flight
        peak = solution.peak_bytes if same else solution.cost.bytes_in_flight(asked.in_flight)
        choice = remap(solution.choice, found.view, self._view(asked.first, asked.last))
        return replace(solution, choice=choice, peak_bytes=peak)

    def fitting(self, asked: Question) -> tuple[StageCosts, Question]:
        """Return the costs and the question that a question is answered by: for all layers those of `whole`, if they
        do not fit otherwise.
        """
        covers_all = asked.first == 0 and asked.last == self.layers.num_layers - 1
        if self.as_traced is None or not covers_all or self.answer(asked).choice is not None:
            return self, asked
        return self.whole, replace(asked, last=0)

    def solve(self, asked: Question) -> StageSolution:
        """Solve the stage of a question, whether or not it was solved before."""
        builders, view = self._builders(asked), self._view(asked.first, asked.last)
        if self.effort.peaks != "least" and math.isfinite(asked.limit_bytes):
            # Without its strategies, which take long to lay out.
            least = least_peak_bytes(view, builders.catalogue, asked.in_flight)
            if least > asked.limit_bytes:
                return does_not_fit(least if self.effort.peaks == "bounded" else math.inf)
        try:
            return solve_stage(
                builders.of(view),
                # Without a limit the integer program needs no rows for memory.
                limit_bytes=asked.limit_bytes if math.isfinite(asked.limit_bytes) else None,
                in_flight=asked.in_flight,
                solver=self.effort.solver_for(asked.gap),
                time_limit_seconds=asked.seconds,
                weights=asked.weights,
            )
        except ProgramTooLargeError as error:
            raise PlanError(
                f"A stage of layers {asked.first} to {asked.last} is too large for the solver asked for. {error}"
            ) from error

    def question(
        self, place: StagePlace, *, in_flight: int = 1, limit_bytes: float | None = None, quick: bool = False
    ) -> Question:
        """Return the question that `solution` answers with these arguments."""
        return Question(
            first=place.first,
            last=place.last,
            submesh=place.submesh,
            mesh=place.mesh,
            in_flight=in_flight,
            limit_bytes=self.room_bytes(place.submesh) if limit_bytes is None else limit_bytes,
            gap=QUICK_GAP if quick else self.effort.relative_gap,
            seconds=self.effort.time_limit_seconds,
        )

    def key(self, asked: Question) -> Hashable:
        """Return a key that is equal for questions whose answers differ at most in the ids of ops and values."""
        structure, kind = self._structure(asked.first, asked.last), self._kind(asked)
        # By id, since hashing a step takes long; both objects live as long as these costs.
        return (
            id(self.step),
            id(self.given),
            structure,
            kind,
            asked.in_flight,
            asked.limit_bytes,
            asked.gap,
            asked.weights,
        )

    @cached_property
    def given(self) -> _Given:
        """The parts that a worker needs in addition to the step; one object, which each worker is sent once."""
        return _Given(self.layers, self.cost_model, self.cost_model_for, self.constraints, self.effort)

    @property
    def has_rows(self) -> bool:
        """Whether arguments come in rows that loops read; a step returns each as one array, however stages differ."""
        return any(part.rows is not None for part in self.step.input_parts)

    def in_two_parts(self, place: StagePlace, solution: StageSolution, *, in_two: bool = True) -> StageSolution:
        """Return a solution with the cost of a backward pass of two tasks, or of one; see `solve.in_two_parts`."""
        if solution.choice is None:
            return solution
        view, pricer = self._view(place.first, place.last), self._builders(place).catalogue.pricer
        alike = self.solved.in_parts(self._structure(place.first, place.last), self._kind(place), in_two=in_two)
        for known, made in alike:
            if remap(solution.choice, view, known) == made.choice:
                # Of a pipeline of equal stages one is priced.
                return replace(
                    solution,
                    cost=made.cost,
                    compute_seconds=made.compute_seconds,
                    flops=made.flops,
                    collectives=made.collectives,
                )
        alike.append((view, in_two_parts(solution, view, pricer, in_two=in_two)))
        return alike[-1][1]

    def knows(self, asked: Question) -> bool:
        """Return True if `answer` need not solve anything."""
        return self.solved.answer(self._structure(asked.first, asked.last), self._kind(asked), asked) is not None

    def with_pins(self, pins: Mapping[int, Spec]) -> StageCosts:
        """Return the same costs with other pins."""
        # The views of the same pins stay.
        same = pins == self.constraints.pins
        return self if same else replace(self, constraints=replace(self.constraints, pins=pins))

    def solved_with(self, effort: SolveEffort) -> StageCosts:
        """Return the same costs, solved with another effort from now on."""
        return replace(self, effort=effort)

    def structure_of_layers(self) -> list[object]:
        """Return for each layer an object that stands for its structure, equal for equal layers."""
        return [self._structure(layer, layer) for layer in range(self.layers.num_layers)]

    @memoized
    def _view(self, first: int, last: int) -> StageView:
        constraints = self.constraints
        return StageView(
            step=self.step,
            layers=self.layers,
            first=first,
            last=last,
            pins=constraints.pins,
            outputs=constraints.outputs,
            keeps_gathered=constraints.keeps_gathered,
            layout=constraints.layout,
        )

    @memoized
    def _structure(self, first: int, last: int) -> object:
        """Return an object that stands for the structure of a stage."""
        return self.solved.structure(self._view(first, last))

    def device(self, submesh: Submesh) -> Device:
        """Return the kind of device of a submesh."""
        return self._model(submesh).cluster.device

    def room_bytes(self, submesh: Submesh) -> float:
        """Return the bytes that a plan may use of a device of a submesh."""
        return self.device(submesh).usable_bytes

    def _kind(self, place: StagePlace) -> MeshKey:
        submesh, per_host, ends = place.submesh, self.cost_model.cluster.devices_per_host, [0]
        # Hosts are numbered through all groups, whose borders are in `ends`.
        for group in self.cost_model.cluster.groups:
            ends.append(ends[-1] + group.num_hosts)
        first, last = submesh.first_device // per_host, submesh.devices[-1] // per_host
        spanned = (g for g, (a, b) in enumerate(pairwise(ends)) if first < b and a <= last)
        return MeshKey(
            num_hosts=submesh.num_hosts,
            devices_per_host=submesh.devices_per_host,
            groups=tuple(spanned),
            mesh=place.mesh,
        )

    def _model(self, submesh: Submesh) -> CostModel:
        """Return the cost model of the devices of a submesh, which differs from the cluster's in a mixed cluster."""
        cluster = self.cost_model.cluster
        if not cluster.groups or self.cost_model_for is None:
            return self.cost_model
        return self.cost_model_for(cluster.at(submesh.first_device, submesh.num_devices))

    def _builders(self, place: StagePlace) -> Builders:
        submesh, mesh, model = place.submesh, place.mesh, self._model(place.submesh)

        def make(alike: Pricer | None) -> Builders:
            pricer = alike.elsewhere(submesh, mesh) if alike else Pricer(cost_model=model, submesh=submesh, mesh=mesh)
            return Builders(Catalogue(pricer, self.constraints.restriction or free_restriction(mesh)))

        return self.solved.builders(self._kind(place), model, make)

    def least_peak(self, place: StagePlace, *, in_flight: int, limit_bytes: float) -> float:
        """Return the least peak bytes per device that the solver reaches for a stage that does not fit."""
        # Solutions so far may come from an effort that does not seek peaks.
        seeking = self.solved_with(replace(self.effort, peaks="least"))
        return seeking.solve(seeking.question(place, in_flight=in_flight, limit_bytes=limit_bytes)).peak_bytes

    def shortage(self, place: StagePlace, *, in_flight: int = 1) -> Shortage:
        """Explain why a stage does not fit, and how much memory it needs."""
        builder = self._builders(place).of(self._view(place.first, place.last))
        return explain_shortage(builder, limit_bytes=self.room_bytes(place.submesh), in_flight=in_flight)


def expect(likely: Iterable[tuple[StageCosts, Question]], *, later: bool = False) -> None:
    """Let workers answer questions that the search will likely have; see `Workers.expect`."""
    workers, questions = None, dict[Hashable, Likely]()
    for costs, asked in likely:
        # All costs of one search have the same workers.
        workers = costs.workers
        if workers.at_work and not costs.knows(asked):
            family = workers.number_of(costs.solved)
            # Questions about equal stages have one key: the first one is sent.
            questions.setdefault(costs.key(asked), Likely(_solve, (costs.step, costs.given), (family, asked)))
    if workers is not None:
        workers.expect(questions, later=later)


def _solve(memory: dict[object, object], step: StepGraph, given: _Given, likely: tuple[int, Question]) -> _Answer:
    """Answer a question in a worker, which stores stage costs, and the stages of each search, in its `memory`."""
    family, asked = likely
    # The worker keeps every part that it was sent, so that the id stays valid and stands for one set of costs.
    key = id(given)
    if key not in memory:
        # Costs that belong to one search in the main process do so in the worker.
        solved = memory.setdefault(("solved", family), SolvedStages())
        assert isinstance(solved, SolvedStages)
        memory[key] = StageCosts(step=step, **given._asdict(), solved=solved)
    costs = memory[key]
    assert isinstance(costs, StageCosts)
    return _Answer(asked, costs.solve(asked))
