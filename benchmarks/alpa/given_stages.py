"""Plans as Alpa publishes them: the number of layers of each stage, its devices, and their logical mesh.

A stage is (layers, hosts × devices per host, dp × mp). The integer program makes the other decisions within it. Where a
batch dim is forced on the first axis, it is restricted to approximately the choices of Alpa's program (`FORCED_BATCH`):
the first axis splits the batch, and may split state; the second splits weights by their own dims. Alpa's program had no
all_to_all over two axes, and its objective was communication only: it gained nothing from computing norms and the like
on the parts of a scattered sum. Without a forced batch, the use of a mesh is free
(`inter_op.stage_costs.free_restriction`).

As Alpa ran them, plans differ in three aspects (sources of alpa-projects/alpa). Its runtime executed instructions in
order, so both ends of a message waited for it. Its integer program had only all_reduce for sums. Afterwards optimizer
state was split wherever possible, and the reduce_scatter of gradients that this allows became an all_reduce with
micro-batches, before updated weights were gathered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import StagedStep, assemble, inflows_between
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.stage_costs import StageConstraints, StageCosts
from alpa_lite.inter_op.what_would_fit import show_bytes
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import OneFOneB, Schedule, peak_in_flight, simulate
from alpa_lite.sharding.meshes import LogicalMesh, Submesh, place
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers
from alpa_lite.step.planned_step import planned_step

FORCED_BATCH = Restriction(
    roles={"data": AxisRole.BATCH, "model": AxisRole.TENSOR},
    optimizer=BatchSplit.MAY,
    parameters=BatchSplit.MAY,
    scatter_sums=False,
)
"""The choices of Alpa's integer program where the batch dim is forced on the first axis."""

FORCED_BATCH_AS_RUN = replace(FORCED_BATCH, optimizer=BatchSplit.MUST)
"""The same with sharded optimizer state, as Alpa ran it."""

FREE_AS_RUN = Restriction(
    roles={"data": AxisRole.BATCH, "model": AxisRole.MODEL},
    optimizer=BatchSplit.MUST,
    parameters=BatchSplit.MAY,
    scatter_sums=False,
)
"""Any sharding on the meshes of a `GivenStage`, as Alpa ran it: only gradient sums may be left scattered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStage:
    """A stage as it is published.

    Attributes:
        layers: number of the model's layer clusters in it.
        hosts, devices_per_host: size of its submesh.
        data, model: sizes of the logical mesh.
    """

    layers: int
    hosts: int
    devices_per_host: int
    data: int
    model: int

    def mesh(self, *, force_batch: bool) -> LogicalMesh:
        """Return its logical mesh; without a forced batch dim, an axis of one device is left out."""
        if force_batch or min(self.data, self.model) > 1:
            return LogicalMesh(axis_names=("data", "model"), shape=(self.data, self.model))
        return LogicalMesh(axis_names=("x",), shape=(self.data * self.model,))

    def __str__(self) -> str:
        return f"{self.layers} on {self.data}×{self.model}"


@dataclass(frozen=True, kw_only=True)
class GivenStages(Planner):
    """Plan with the given stages, in order.

    by_loops: whether the layers are the loops of the model as it is written; else clusters of about equal FLOPs.
    force_batch: whether the first axis of each mesh splits the batch and the second never does.
    as_alpa_ran: whether execution has the limits that the module describes; else messages overlap with kernels, and
        gradients and, without a forced batch, other sums may be left scattered.
    """

    stages: tuple[GivenStage, ...]
    by_loops: bool
    force_batch: bool
    as_alpa_ran: bool = False
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """A name such as `4 + 4 on 2×4`."""
        if len(set(self.stages)) == 1 and len(self.stages) > 1:
            return f"{len(self.stages)} stages: {self.stages[0]}"
        return ", ".join(map(str, self.stages))

    @property
    def num_layers(self) -> int:
        """The number of layer clusters of all stages."""
        return sum(stage.layers for stage in self.stages)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `InfeasibleError` if a stage does not fit into memory."""
        started = time.perf_counter()
        step = request.best_step((), loop_parts=0)
        layers = self._layers(step)
        step = planned_step(step, layers.of_op).step
        costs = StageCosts(
            step=step,
            layers=layers,
            cost_model=request.cost_model,
            constraints=StageConstraints(restriction=self._restriction()),
            progress=request.progress,
        )
        cluster, kinds = request.cluster, [(stage.hosts, stage.devices_per_host) for stage in self.stages]
        submeshes = place(kinds, cluster.num_hosts, cluster.devices_per_host)
        placed = self._solved(costs, submeshes, step.num_microbatches)
        staged = StagedStep(step=step, layers=layers, stages=placed, schedule=self.schedule)
        plan = assemble(self.name, request, staged, started)
        if not self.as_alpa_ran:
            return plan
        waiting = self._waiting_seconds(request, step, layers, placed)
        seconds = plan.prediction.step_seconds + waiting + summing_seconds(plan)
        return replace(plan, prediction=replace(plan.prediction, step_seconds=seconds))

    def _restriction(self) -> Restriction | None:
        if self.force_batch:
            return FORCED_BATCH_AS_RUN if self.as_alpa_ran else FORCED_BATCH
        return FREE_AS_RUN if self.as_alpa_ran else None

    def _waiting_seconds(
        self, request: PlanRequest, step: StepGraph, layers: Layers, placed: Sequence[PlacedStage]
    ) -> float:
        """Return the additional seconds of a step in which both ends of a message wait for it."""
        messages = inflows_between(request, step, layers, placed)
        tasks = self.schedule.tasks(len(placed), step.num_microbatches)
        forward = [stage.solution.cost.forward_seconds for stage in placed]
        backward = [stage.solution.cost.backward_seconds for stage in placed]
        beside = simulate(tasks, forward, backward, transfer_seconds=messages)
        # A stage receives from one side and sends to the other, forwards and backwards.
        waits = [before + after for before, after in zip([0.0, *messages], [*messages, 0.0], strict=True)]
        in_turn = simulate(
            tasks,
            [seconds + wait for seconds, wait in zip(forward, waits, strict=True)],
            [seconds + wait for seconds, wait in zip(backward, waits, strict=True)],
        )
        return in_turn.makespan_seconds - beside.makespan_seconds

    def _layers(self, step: StepGraph) -> Layers:
        if self.num_layers == 1:
            return make_layers(step, 1)
        return make_layers(step, self.num_layers, equal="loops" if self.by_loops else "flops")

    def _solved(self, costs: StageCosts, submeshes: Sequence[Submesh], microbatches: int) -> list[PlacedStage]:
        found: list[PlacedStage] = []
        tasks, last = self.schedule.tasks(len(self.stages), microbatches), self.num_layers - 1
        if self.schedule.stages_per_processor > 1:
            raise PlanError(f"Each stage has devices of its own; {self.schedule} shares them. Use OneFOneB.")
        for number in reversed(range(len(self.stages))):  # fewer micro-batches in flight first
            stage, submesh = self.stages[number], submeshes[number]
            mesh, first = stage.mesh(force_batch=self.force_batch), last - stage.layers + 1
            held = peak_in_flight(tasks[number])
            where = StagePlace(first, last, submesh, mesh)
            solution = costs.solution(where, in_flight=held)
            if solution.choice is None:
                raise InfeasibleError(
                    f"{self.name} does not fit: stage {number} with {held} micro-batch"
                    f"{'es' if held > 1 else ''} in flight needs "
                    f"{show_bytes(solution.peak_bytes)} per device. Use more micro-batches."
                )
            found.append(where.with_solution(solution))
            last = first - 1
        return found[::-1]


def summing_seconds(plan: Plan) -> float:
    """Return the additional seconds of a step that all-reduces gradients, on the stage where they are greatest.

    An all-reduce takes twice a reduce_scatter. Gradients that are scattered in each micro-batch to save memory are not
    counted.
    """
    longer = [0.0] * len(plan.stages)
    for use in plan.prediction.collectives:
        if use.kind == "reduce_scatter" and use.phase == "update":
            longer[use.stage] += use.count * use.seconds
    return max(longer)
