"""Automatic search: Alpa's two levels, for every number of micro-batches that makes sense, and the manual plans too.

    for each number of micro-batches m                                   (candidate_steps)
        layers        cluster the forward ops                            (layers.make_layers)
        stage costs   integer program per layer range × submesh × shape  (inter_op.stage_costs)
        stage DP      min Σ t_i + (m - 1) max t_i, on the costs that
                      its answer depends on                              (inter_op.stage_search, stage_dp)
    the best of these and of the manual plans, priced alike

The result is never priced worse than any manual plan that the search knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.errors import AlpaLiteError, InfeasibleError, NonAdditiveError, PlanError, TraceError
from alpa_lite.graph.phases import StepGraph
from alpa_lite.graph.recomputation import read_originals_across
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.stage_dp import StageAssignment
from alpa_lite.inter_op.stage_search import StageSearch
from alpa_lite.layers import MAX_LAYERS, Layers, make_layers
from alpa_lite.mesh import place
from alpa_lite.plan import Plan
from alpa_lite.planners.data_parallel import DataParallel
from alpa_lite.planners.megatron import Megatron
from alpa_lite.planners.pipeline import Pipeline
from alpa_lite.planners.planner import PlacedStage, Planner, PlanRequest, assemble, boundary_values, inflow_seconds
from alpa_lite.planners.relax import cheapest_fit, more_hosts, more_microbatches, show_bytes, show_shortage
from alpa_lite.planners.zero import Zero
from alpa_lite.schedule import OneFOneB, Schedule

MANUAL_PLANNERS: tuple[Planner, ...] = (
    DataParallel(),
    Megatron(),
    Zero(stage=2),
    Pipeline(num_stages=2),
    Pipeline(num_stages=4),
)
"""The classic plans that are always priced beside the search."""

MICROBATCHES = (1, 16)
"""Numbers of micro-batches that are tried when the user leaves it open."""


@dataclass(frozen=True, kw_only=True)
class Auto(Planner):
    """`num_layers`: layers to cluster into (None: by the model); `manual`: plans that are priced as well."""

    num_layers: int | None = None
    schedule: Schedule = field(default_factory=OneFOneB)
    manual: tuple[Planner, ...] = field(default=MANUAL_PLANNERS)

    @property
    def name(self) -> str:
        """For tables."""
        return "auto"

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `InfeasibleError` when nothing fits into memory, with the sentence of the plan that came closest."""
        started = time.perf_counter()
        if self.schedule.stages_per_processor > 1:
            raise PlanError(
                f"The search gives each stage devices of its own, but {self.schedule} runs"
                f" {self.schedule.stages_per_processor} stages on each. Use it in al.planners.Hybrid."
            )
        problems: list[AlpaLiteError] = []
        plans = [*self._search(request, problems), *self._manual(request, problems)]
        if not plans:
            raise self._advised(request, _most_telling(problems))
        best = min(plans, key=lambda p: p.prediction.step_seconds)
        others = [(_with_microbatches(p), p.prediction.step_seconds) for p in plans if p is not best]
        report = replace(best.solver, seconds=time.perf_counter() - started)
        name = self.name if best.name == self.name else f"{self.name} ({best.name})"
        return replace(best, name=name, alternatives=tuple(sorted(others, key=lambda o: o[1])), solver=report)

    def _advised(self, request: PlanRequest, problem: AlpaLiteError) -> AlpaLiteError:
        """The problem with the cheapest change that would solve it, if memory is the problem."""
        if not request.advise or not isinstance(problem, InfeasibleError):
            return problem
        alone, tried = replace(self, manual=()), request.microbatch_choices(MICROBATCHES)[-1]
        changes = [*more_microbatches(alone, request, tried)]
        return InfeasibleError(f"{problem} {cheapest_fit(changes, more_hosts(alone, request))}")

    def _search(self, request: PlanRequest, problems: list[AlpaLiteError]) -> Iterator[Plan]:
        for step in candidate_steps(request, self.num_layers or MAX_LAYERS, problems):
            try:
                # One explanation is enough, and it takes time.
                explained = any(isinstance(problem, InfeasibleError) for problem in problems)
                yield self._search_step(replace(request, advise=request.advise and not explained), step)
            except PlanError as error:
                problems.append(error)

    def _search_step(self, request: PlanRequest, step: StepGraph) -> Plan:
        """The two-level search at one number of micro-batches."""
        started = time.perf_counter()
        pipelines = step.num_microbatches > 1 or request.cluster.shared_processor
        layers = make_layers(step, self.num_layers if pipelines else 1)
        step = read_originals_across(step, layers.of_op)
        costs = StageCosts(
            step=step,
            layers=layers,
            cost_model=request.cost_model,
            progress=request.progress,
        )
        search = StageSearch(costs, self.schedule, _inflow_seconds(request, step, layers))
        found = search.run()
        if not found.stages:
            raise InfeasibleError(_infeasible(request, costs))
        stages = _placed(request, search, found.stages)
        return assemble(self.name, request, step, layers, stages, self.schedule, started)

    def _manual(self, request: PlanRequest, problems: list[AlpaLiteError]) -> Iterator[Plan]:
        for planner in self.manual:
            request.progress(planner.name)
            try:
                yield planner.plan(replace(request, advise=False))
            except AlpaLiteError as error:
                problems.append(error)


def candidate_steps(request: PlanRequest, num_layers: int, problems: list[AlpaLiteError]) -> Iterator[StepGraph]:
    """The step at each number of micro-batches worth trying; what cannot be split is left out, with its reason."""
    # Virtual devices of one processor gain nothing from overlap, so that one micro-batch is best when it fits.
    for m in request.microbatch_choices((1,) if request.cluster.shared_processor else MICROBATCHES):
        try:
            # Loops over layers are cut where a pipeline may cut them.
            yield request.step_at(m, num_layers if m > 1 else 0)
        except (NonAdditiveError, TraceError) as error:
            if request.num_microbatches != "auto":
                raise
            problems.append(error)


def _inflow_seconds(request: PlanRequest, step: StepGraph, layers: Layers) -> np.ndarray:
    """Time to receive what each layer reads from earlier ones, over one pair of devices inside a host."""
    seconds = [0.0]
    for first in range(1, layers.num_layers):
        values = boundary_values(step, layers, first)
        seconds.append(inflow_seconds(request.cost_model, values, crosses_hosts=False, num_links=1))
    return np.array(seconds)


def _placed(request: PlanRequest, search: StageSearch, assignments: Sequence[StageAssignment]) -> list[PlacedStage]:
    cluster = request.cluster
    kinds = [search.kinds[a.submesh] for a in assignments]
    submeshes = place(kinds, cluster.num_hosts, cluster.devices_per_host)
    stages: list[PlacedStage] = []
    for assignment, submesh in zip(assignments, submeshes, strict=True):
        first, last, kind, number = (
            assignment.first_layer,
            assignment.last_layer,
            assignment.submesh,
            assignment.configuration,
        )
        mesh, solution = search.configuration(kind, number).mesh, search.solution(first, last, kind, number)
        stages.append(PlacedStage(first=first, last=last, submesh=submesh, mesh=mesh, solution=solution))
    return stages


def _infeasible(request: PlanRequest, costs: StageCosts) -> str:
    """The layer that needs the most memory even at its best, as a sentence."""
    device, needs = request.cluster.device, costs.least_peaks()
    worst = max(needs, key=lambda layers: needs[layers], default=(0, 0))
    where = f"layer {worst[0]}" if worst[0] == worst[1] else f"layers {worst[0]}..{worst[1]}"
    why = show_shortage(costs.leanest_shortage(*worst)) if request.advise else ""
    sentence = (
        f"No plan fits into memory. The tightest stage is {where} of {costs.layers.num_layers} layers, which "
        f"needs at least {show_bytes(needs.get(worst, 0.0))} per device of {request.cluster.name} at "
        f"num_microbatches={costs.step.num_microbatches}; {device.name} has {show_bytes(device.memory_bytes)}. {why}"
    )
    return sentence.rstrip()


def _with_microbatches(plan: Plan) -> str:
    count = plan.num_microbatches
    return plan.name if count == 1 else f"{plan.name}, {count} micro-batches"


def _most_telling(problems: Sequence[AlpaLiteError]) -> AlpaLiteError:
    infeasible = [p for p in problems if isinstance(p, InfeasibleError)]
    if infeasible:
        return infeasible[0]
    return problems[0] if problems else PlanError("No plan was found and no reason was given.")
