"""Predict a plan with one decision changed: the rest of the stage is solved again, the schedule simulated.

restricted    some nodes of a stage's problem may take some strategies only                   `Repricing.solve_all`
predicted     like a plan, with the solutions of the stages that change                       `Repricing.predicted`

Submeshes, schedule and micro-batches stay. A schedule of many micro-batches repeats itself once its pipeline is full,
so that a step of them is predicted from two steps of few (`Repricing._steps`):

    seconds, bytes at m = those at n + (m - n) · their growth per micro-batch between n' and n        `_extrapolated`

Restrictions of a manual plan do not apply here, so the same decision with
the rest solved again may cost less than the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa_lite.inspection.why.stage_problem import SOLVE_SECONDS, Given, StageProblem
from alpa_lite.inter_op.assembly import StagedStep, simulated_step
from alpa_lite.inter_op.boundaries import stacks_at_rest
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.shared_devices import held_at_peak
from alpa_lite.inter_op.solved_stages import PlacedStage
from alpa_lite.intra_op.stage import StageSolution, StageView, remap
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import Pricer
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import Task, splits_backward
from alpa_lite.sharding.meshes import LogicalMesh
from alpa_lite.step.layers import Layers
from alpa_lite.step.planned_step import planned_step


@dataclass(frozen=True, kw_only=True, eq=False)
class _RepricedStage:
    """A stage problem and its solution."""

    stage: StageProblem
    solution: StageSolution

    def answers(self, other: StageProblem) -> bool:
        """Return True if the solution is valid for an equal stage: with the same memory limit, or one that it fits."""
        mine, theirs = ((s.in_flight, s.limit_bytes) for s in (self.stage, other))
        has_choice = self.solution.choice is not None
        return mine == theirs or (
            has_choice and self.solution.cost.bytes_in_flight(other.in_flight) <= other.limit_bytes
        )

    def solution_for(self, other: StageProblem) -> StageSolution:
        """Return the solution with the value numbers of an equal stage."""
        solution, view = self.solution, self.stage.view
        if solution.choice is None or view is other.view:
            return solution
        return replace(solution, choice=remap(solution.choice, view, other.view))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """The predicted seconds of a step, and the peak memory per device of each stage."""

    step_seconds: float
    peak_bytes: tuple[float, ...]


LEAST_SOLVE_SECONDS = 0.2
"""The least time limit of a solve, even if the time for pricing is nearly over."""

SOLVE_SHARE = 0.4
"""The largest share of the time left for pricing that one solve may take."""

FULL_AFTER = 2
"""The micro-batches per stage after which a pipeline is full."""


def _extrapolated(prices: Sequence[StepPrice], counts: Sequence[int], num_microbatches: int) -> StepPrice:
    """Return the price at a number of micro-batches from the prices at two smaller ones."""
    (before, after), (fewer, more) = prices, counts
    times = (num_microbatches - more) / (more - fewer)

    def grown(a: float, b: float) -> float:
        return b + times * (b - a)

    return StepPrice(
        step_seconds=grown(before.step_seconds, after.step_seconds),
        peak_bytes=tuple(map(grown, before.peak_bytes, after.peak_bytes)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Repricing:
    """A plan, the request that it answers, and its stages as problems; `ends` is the time of the monotonic clock until
    which values are priced.
    """

    plan: Plan
    request: PlanRequest
    step: StepGraph
    layers: Layers
    ends: float = math.inf
    _solved: dict[object, list[_RepricedStage]] = field(
        default_factory=dict[object, "list[_RepricedStage]"], repr=False
    )
    _prices: dict[object, tuple[StepPrice, Sequence[PlacedStage]]] = field(
        default_factory=dict[object, "tuple[StepPrice, Sequence[PlacedStage]]"], repr=False
    )

    @staticmethod
    def of(plan: Plan, request: PlanRequest, *, seconds: float = math.inf) -> Repricing:
        """Create the repricing of a plan made for the request's step. Prices hold for the plan's own cluster.

        seconds: the time that pricing may take, from now on.
        """
        ends = time.monotonic() + seconds
        layers = Layers(num_layers=plan.num_layers, of_op=plan.op_layers, of_input=plan.input_layers)
        own = replace(request, cluster=plan.cluster)
        traced = own.step_of(plan)
        step = planned_step(traced, plan.layers_as_traced, plan.remat, host_optimizer=plan.host_optimizer).step
        return Repricing(plan=plan, request=own, step=step, layers=layers, ends=ends)

    @property
    def left_seconds(self) -> float:
        """The time that is left for pricing; negative when it is over."""
        return self.ends - time.monotonic()

    @property
    def solve_seconds(self) -> float:
        """The time limit of the next solve."""
        return min(SOLVE_SECONDS, max(LEAST_SOLVE_SECONDS, SOLVE_SHARE * self.left_seconds))

    @cached_property
    def stages(self) -> tuple[StageProblem, ...]:
        """The stages of the plan as problems."""
        return tuple(
            self.problem(number, first=stage.layers[0], last=stage.layers[1], mesh=stage.mesh_shape)
            for number, stage in enumerate(self.plan.stages)
        )

    def problem(self, number: int, *, first: int, last: int, mesh: LogicalMesh) -> StageProblem:
        """Return the problem of stage `number` with other layers or another mesh, in the memory that is left for it."""
        stage, request = self.plan.stages[number], self.request
        tasks = self._tasks(number)
        cluster, submesh = request.cluster, stage.submesh
        # Clusters with several kinds of devices price each submesh as a cluster of its own.
        here = cluster.at(submesh.first_device, submesh.num_devices) if cluster.groups else cluster
        in_flight = held_at_peak(tasks).get(number, 1)
        mine = stage.cost.bytes_in_flight(in_flight)
        others = 0.0
        # What other stages hold on the same devices at the peak is not available to this one.
        if len({task.stage for task in tasks}) > 1:
            others = max(0.0, self.plan.prediction.peak_bytes[number] - mine)
        same = (first, last) == stage.layers and mesh == stage.mesh_shape
        return StageProblem(
            view=StageView(
                step=self.step,
                layers=self.layers,
                first=first,
                last=last,
                outputs=stage.outputs,
                keeps_gathered=stage.keeps_gathered,
            ),
            submesh=submesh,
            mesh=mesh,
            pricer=Pricer(cost_model=request.cost_model_for(here), submesh=submesh, mesh=mesh),
            in_flight=in_flight,
            limit_bytes=max(0.0, here.device.usable_bytes - others),
            in_two=splits_backward(tasks),
            placed=stage if same else None,
            # With another border the axes keep the uses that they have in the plan; another mesh has other axes.
            restriction=None if same or mesh != stage.mesh_shape else self.stages[number].builder.catalogue.restriction,
        )

    def _tasks(self, number: int) -> tuple[Task, ...]:
        # A submesh may run several stages, and its list has the tasks of all of them.
        lists = self.plan.schedule.tasks(len(self.plan.stages), self.plan.num_microbatches)
        return next(tasks for tasks in lists if any(task.stage == number for task in tasks))

    def solve(self, stage: StageProblem, given: Given | None = None) -> StageSolution:
        """Return `StageProblem.solve`, memoised."""
        return self._solve_each({0: (stage, given or {})})[0]

    def solve_all(self, stages: Mapping[int, tuple[StageProblem, Given]]) -> dict[int, StageSolution]:
        """Solve stages under restrictions; a solution without a choice means that the stage does not fit.

        If the stages then no longer agree on the spec of a stacked argument, the changed stages are solved once more
        with the specs of the last unchanged stage (or of the last stage, if all change); the better result counts.
        """
        found = self._solve_each(stages)
        after = self._as_placed(stages, found)
        if after is None or self.stacks_seconds(after) <= self.stacks_seconds({}):
            return found
        # The specs of an unchanged stage are part of the plan, while changed stages are still open.
        others = sorted(set(range(len(self.stages))) - set(stages))
        number = others[-1] if others else max(stages)
        choice = self.placed[number].solution.choice if others else found[number].choice
        assert choice is not None
        forms = {leaf: choice.inputs[v] for leaf, v in self.stages[number].rows if v in choice.inputs}
        agreed = self._solve_each({n: (stage, stage.with_forms(given, forms)) for n, (stage, given) in stages.items()})
        then = self._as_placed(stages, agreed)
        # To agree may cost a stage more than the resharding that it saves.
        if then is None or self.predicted(then).step_seconds > self.predicted(after).step_seconds:
            return found
        return agreed

    def _as_placed(
        self, stages: Mapping[int, tuple[StageProblem, Given]], found: Mapping[int, StageSolution]
    ) -> dict[int, PlacedStage] | None:
        """Return the stages with their solutions; None if one does not fit."""
        if any(solution.choice is None for solution in found.values()):
            return None
        return {number: placed_stage(stages[number][0], solution) for number, solution in found.items()}

    def _solve_each(self, stages: Mapping[int, tuple[StageProblem, Given]]) -> dict[int, StageSolution]:
        """Solve each stage under its restriction, equal stages once.

        Equal stages are solved with the most memory that one of them has, and once more with the least if that solution
        does not fit all of them. Memoised solutions are used where they apply.
        """
        alike: dict[object, list[int]] = {}
        for number, (stage, given) in stages.items():
            submesh = (stage.submesh.num_hosts, stage.submesh.devices_per_host)
            # Everything that decides a solution but its memory limit, which `answers` compares.
            key = (stage.view.signature, submesh, stage.mesh, stage.in_two, tuple(sorted(given.items())))
            alike.setdefault(key, []).append(number)
        found: dict[int, StageSolution] = {}
        for key, numbers in alike.items():
            known = self._solved.setdefault(key, [])
            # From the loosest limit to the tightest: a solution that fits the last fits all.
            ordered = sorted(numbers, key=lambda n: (stages[n][0].in_flight, -stages[n][0].limit_bytes))
            # Two solves are enough for equal stages: one for the loosest limit, one for the tightest, which fits all.
            for number in ordered:
                stage = stages[number][0]
                fitting = next((each for each in known if each.answers(stage)), None)
                if fitting is None:
                    tight = ordered[0] if number == ordered[0] else ordered[-1]
                    problem, given = stages[tight]
                    solution = problem.solve(given, seconds=self.solve_seconds)
                    fitting = _RepricedStage(stage=problem, solution=solution)
                    known.append(fitting)
                found[number] = fitting.solution_for(stage)
                # If one of several equal stages cannot be solved, the change is impossible for all of them.
                if fitting.solution.choice is None:
                    found |= dict.fromkeys(numbers, fitting.solution)
                    break
        return found

    def predicted(self, changed: Mapping[int, PlacedStage]) -> StepPrice:
        """Predict the step with some of its stages changed, memoised."""
        stages = self._with(changed)
        # Solutions are told apart by identity, and kept with the price, so that no other one gets their identity.
        key = tuple((stage.first, stage.last, id(stage.solution)) for stage in stages)
        if key not in self._prices:
            prices = [self._predicted_at(step, stages) for step in self._steps]
            counts = [step.num_microbatches for step in self._steps]
            price = prices[0] if len(prices) == 1 else _extrapolated(prices, counts, self.step.num_microbatches)
            self._prices[key] = price, stages
        return self._prices[key][0]

    def _predicted_at(self, step: StepGraph, stages: Sequence[PlacedStage]) -> StepPrice:
        staged = StagedStep(step=step, layers=self.layers, stages=stages, schedule=self.plan.schedule)
        # Not the whole prediction, which needs the step traced at this number of micro-batches.
        found = simulated_step(self.request, staged)
        peaks = tuple(found.use_of(number).peak_bytes for number in range(len(stages)))
        return StepPrice(step_seconds=found.step_seconds, peak_bytes=peaks)

    @cached_property
    def _steps(self) -> tuple[StepGraph, ...]:
        """The step, or two with so few micro-batches that predictions at them tell its own."""
        # Multiples of the number of stages, as interleaved schedules need them.
        counts = [number * len(self.plan.stages) for number in (FULL_AFTER, FULL_AFTER + 1)]
        if counts[-1] >= self.step.num_microbatches:
            return (self.step,)
        return tuple(replace(self.step, num_microbatches=count) for count in counts)

    def stacks_seconds(self, changed: Mapping[int, PlacedStage]) -> float:
        """Return the seconds that resharding takes for stacked arrays on whose spec the stages no longer agree."""
        return stacks_at_rest(self.request.cost_model, self.step, self.layers, self._with(changed)).seconds

    def _with(self, changed: Mapping[int, PlacedStage]) -> list[PlacedStage]:
        return [changed.get(number, placed) for number, placed in enumerate(self.placed)]

    @cached_property
    def placed(self) -> tuple[PlacedStage, ...]:
        """The stages as planned."""
        return tuple(placed_stage(stage, stage.as_planned) for stage in self.stages)

    @cached_property
    def as_planned(self) -> StepPrice:
        """The prediction of the step as planned, computed again."""
        return self.predicted({})


def placed_stage(stage: StageProblem, solution: StageSolution) -> PlacedStage:
    """Return a solved stage in the form that `predict` takes."""
    view = stage.view
    return PlacedStage(first=view.first, last=view.last, submesh=stage.submesh, mesh=stage.mesh, solution=solution)
