"""PipeDream: a pipeline whose stages have different layers and numbers of replicas, found by its planner.

Narayanan et al., PipeDream (SOSP 2019). The planner (`inter_op/replicated_stages.py`) gets the layers of the step with
compute seconds, activations and parameters from the cost model (`layer_profile`), and the devices of a host and the
hosts as levels. What it finds becomes a `Hybrid` with these stages, which is priced like every plan.

Its runtime keeps several versions of weights, and trains with old ones: `schedule=al.schedule.PipeDream()`. Replicas
then take whole micro-batches in turn, and their numbers divide that of micro-batches; where unequal ones would disagree
on a counter of the optimizer they share each micro-batch. By default stages run one step
after the other under a synchronous schedule, so that results stay those of one device. The unit of the profile is then
a step: what the planner takes as the exchange of gradients for every mini-batch happens once in it. Replicas share each
micro-batch: their numbers divide the batch. Replicas of a stage lie beside one another, where PipeDream's may lie in
the same place of several hosts.

Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021), plans without replicating stages
unequally: `PipeDream2BW` tries widths w, depths d with w d devices, micro-batches, and recomputation, and takes the
fastest that fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.loop_cuts import PipelineCut, natural_layers
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.replicated_stages import (
    LayerProfile,
    MachineLevel,
    PipeDreamCosts,
    PipeDreamFormula,
    ProfiledLayer,
    ReplicatedStages,
    replicated_stages,
)
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.plan.own_updates import UnequalUpdatesError
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.grid_search import GridSearch
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner, marked
from alpa_lite.program.phases import Phase
from alpa_lite.schedule import OneFOneB, Schedule
from alpa_lite.schedule.asynchronous import PipeDreamSchedule
from alpa_lite.sharding.meshes import LogicalMesh, Submesh


@dataclass(frozen=True, kw_only=True)
class PipeDream(Planner):
    """Stages of different layers and numbers of replicas, by PipeDream's planner.

    Attributes:
        formula: "repo", as the published code prices stages, or "paper".
        schedule: order in which stages run micro-batches. Under `schedule.PipeDream()` the replicas of a stage take
            them in turn (its option `replicated` is what the planner finds), else they share each of them.
    """

    formula: Literal["repo", "paper"] = "repo"
    schedule: Schedule = field(default_factory=OneFOneB)

    @property
    def name(self) -> str:
        """Name for tables."""
        return marked("PipeDream" + (" (paper)" if self.formula == "paper" else ""), self.schedule)

    def stages(self, request: PlanRequest, *, in_turn: bool = False) -> ReplicatedStages:
        """Return the stages of the planner, whose layers are natural layers of the step.

        `in_turn`: replicas divide the number of micro-batches, where one is given, and not the batch.
        """
        cluster, shared = request.cluster, request.batch_size
        if in_turn and isinstance(request.num_microbatches, int):
            shared = request.num_microbatches
        cut = natural_layers(request, (1,), range(1, cluster.num_devices + 1))
        levels = [
            MachineLevel(
                count=cluster.devices_per_host, bytes_per_second=cluster.intra_host.bandwidth_bytes_per_second
            ),
            MachineLevel(count=cluster.num_hosts, bytes_per_second=cluster.inter_host.bandwidth_bytes_per_second),
        ]
        costs = PipeDreamCosts(
            formula=PipeDreamFormula(self.formula),
            # All replicas of a stage get equal parts of each micro-batch, or equally many of them. Its submesh lies in
            # a host or has whole hosts.
            replicas=None if shared is None else [m for m in range(1, cluster.num_devices + 1) if shared % m == 0],
            whole_groups=True,
        )
        used = [level for level in levels if level.count > 1] or levels[:1]
        return replicated_stages(layer_profile(request, cut), used, costs)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the layers cannot be cut, or devices not be divided, so."""
        schedule = self.schedule
        if isinstance(schedule, PipeDreamSchedule) and schedule.replicated:
            raise PlanError(
                f"{self.name} finds numbers of replicas, but its schedule has replicated={schedule.replicated}. Leave "
                "it out, or ask for al.planners.Hybrid(pipeline=..., schedule=...) with this schedule."
            )
        if not isinstance(schedule, PipeDreamSchedule):
            return self._plan(request, in_turn=False)
        try:
            return self._plan(request, in_turn=True)
        except UnequalUpdatesError as error:
            plan = self._plan(request, in_turn=False)
            return replace(
                plan, notes=(*plan.notes, f"replicas share each micro-batch, as they cannot take turns: {error}")
            )

    def _plan(self, request: PlanRequest, *, in_turn: bool) -> Plan:
        found, schedule = self.stages(request, in_turn=in_turn).stages, self.schedule
        devices = tuple(stage.replicas for stage in found)
        if in_turn and isinstance(schedule, PipeDreamSchedule):
            schedule = replace(schedule, replicated=devices)
        hybrid = Hybrid(
            pipeline=len(found),
            devices=devices,
            blocks=tuple(len(stage.layers) for stage in found),
            schedule=schedule,
        )
        return replace(hybrid.plan(request), name=f"{self.name} ({'-'.join(map(str, devices))})")


@dataclass(frozen=True, kw_only=True)
class PipeDream2BW(Planner):
    """Equal stages with equally many replicas: the width, depth, micro-batches and recomputation that are the fastest.

    The published runtime holds two versions of the weights (`schedule.PipeDream2BW`); here the pipeline is flushed in
    every step (PipeDream-Flush), so that gradients are those of one device.

    Attributes:
        max_depth: the largest number of stages to try; None: the number of devices.
        largest_microbatch: the largest number of samples per replica and micro-batch to try.
    """

    max_depth: int | None = None
    largest_microbatch: int = 64

    @property
    def name(self) -> str:
        """Name for tables."""
        return "PipeDream-2BW's planner"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the fastest plan that fits. Raises `InfeasibleError` of the first that does not, else `PlanError`."""
        grid = GridSearch(
            max_pipeline=self.max_depth,
            max_tensor=1,
            largest_microbatch=self.largest_microbatch,
            remat=("none", "full"),
        )
        plan = grid.plan(request)
        return replace(plan, name=plan.name.replace(grid.name, self.name, 1))


def layer_profile(request: PlanRequest, cut: PipelineCut) -> LayerProfile:
    """Return the layers of a step as a chain, of a whole batch on one device, by the cost model.

    What skips layers counts at each border that it crosses. Parameters count where they are first read.
    """
    graph, layers = cut.step.graph, cut.layers
    handed_on, parameters = [0.0] * layers.num_layers, [0.0] * layers.num_layers
    weights = {v for v in graph.inputs if cut.step.batch_dims[v] is None}
    for number, value in enumerate(graph.values):
        forward = [op for op in graph.consumers[number] if cut.step.phases[op] is Phase.FORWARD]
        homes = [home for op in forward if (home := layers.of_op[op]) is not None]
        maker = graph.producer[number]
        made = None if maker is None else layers.of_op[maker]
        if homes and number in weights:
            parameters[min(homes)] += value.bytes
        # What is no layer's is made again where it is read.
        for layer in range(made, max(homes)) if homes and made is not None else ():
            handed_on[layer] += value.bytes
    seconds = _layer_seconds(request, cut)
    return LayerProfile.chain(
        [
            ProfiledLayer(seconds=seconds[i], activation_bytes=handed_on[i], parameter_bytes=parameters[i])
            for i in range(layers.num_layers)
        ]
    )


def _layer_seconds(request: PlanRequest, cut: PipelineCut) -> list[float]:
    """Return the seconds of the forward and backward pass of each layer on one device."""
    costs = StageCosts(
        step=cut.step, layers=cut.layers, cost_model=request.cost_model, cost_model_for=request.cost_model_for
    )
    one = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
    mesh = LogicalMesh(axis_names=("data",), shape=(1,))
    # Without a limit of memory: what does not fit on one device may fit on several.
    solved = [
        costs.solution(StagePlace(i, i, one, mesh), limit_bytes=math.inf).cost for i in range(cut.layers.num_layers)
    ]
    return [cost.forward_seconds + cost.backward_seconds for cost in solved]
