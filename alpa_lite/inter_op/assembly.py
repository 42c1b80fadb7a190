"""Assemble a `Plan` and its prediction from stages that have been solved.

Dims of arguments that the devices do not divide stay whole. The plan says what padding them would save
(`_PricedStage.undivided`). A dim of local size s on an axis of n unused devices, padded to p = ⌈s / n⌉ · n, would save

    bytes    = local bytes · (1 - p / (s n))
    seconds  = Σ over the contractions that read the argument: seconds · runs per step · (1 - p / (s n))
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.boundaries import inflow_seconds, received_values, stacks_at_rest
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.sharding_demands import PlacedOps, sharding_uses
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.plan.host_use import host_bytes_of
from alpa_lite.plan.op_places import fused_stages, update_tasks
from alpa_lite.plan.parts import NOT_PREDICTED, NOT_SOLVED, Choice
from alpa_lite.plan.plan import (
    ArrayShape,
    OpaqueUse,
    Plan,
    Prediction,
    SolverReport,
    StagePlan,
    UndividedDim,
    UserShardingUse,
    fingerprint,
)
from alpa_lite.plan.pricing import Pricer, crosses_hosts, dispatch_seconds, local_bytes
from alpa_lite.plan.program_builder import build_program
from alpa_lite.plan.simulation import Prices, SimulatedStep, simulate_program
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import opaque_ops, rule_of_op
from alpa_lite.schedule import Inference, Schedule, ServerSchedule, simulate
from alpa_lite.sharding.meshes import sharing
from alpa_lite.step.layers import Layers
from alpa_lite.step.model_flops import needed_flops
from alpa_lite.text import show_bytes, show_usable
from cost_models.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class StagedStep:
    """A step in layers, with solved stages of these under a schedule: the decisions of a plan."""

    step: StepGraph
    layers: Layers
    stages: Sequence[PlacedStage]
    schedule: Schedule


def assemble(name: str, request: PlanRequest, staged: StagedStep, started: float) -> Plan:
    """Return a `Plan` with its prediction, from solved stages; ``started``: when planning began (`perf_counter`).

    Raises `InfeasibleError` if the program of the plan needs more memory than the devices of a stage have.
    """
    plan = assembled(name, request, staged, started)
    if bytes_over(plan):
        raise too_large(plan)
    return plan


def too_large(plan: Plan) -> InfeasibleError:
    """Return the error about the fullest stage of a plan that does not fit."""
    stage = plan.fullest_stage
    has = show_usable(plan.capacity_bytes(stage), plan.reserved_bytes(stage), decimals=2)
    return InfeasibleError(
        f"{plan.name} does not fit: stage {stage} of {len(plan.stages)} needs "
        f"{show_bytes(plan.prediction.peak_bytes[stage], decimals=2)} per device, with the arrays that are on the way "
        f"between stages, but there are {has}. Use smaller or more micro-batches, or more devices."
    )


ROUNDING = 1e-9
"""Relative tolerance for sums of bytes that are added up in another order."""


def bytes_over(plan: Plan) -> dict[int, float]:
    """Return the bytes per device by which stages exceed the memory of their devices; empty if all fit."""
    peaks = enumerate(plan.prediction.peak_bytes)
    over = {stage: peak - (1 + ROUNDING) * plan.capacity_bytes(stage) for stage, peak in peaks}
    return {stage: excess for stage, excess in over.items() if excess > 0}


def assembled(name: str, request: PlanRequest, staged: StagedStep, started: float) -> Plan:
    """Return the `Plan` of `assemble`, whether it fits or not."""
    step, stages = staged.step, staged.stages
    plan = _decisions(request, staged)
    # A plan is as proven as its stages; those that differ make it feasible at best.
    statuses = {stage.solution.status.value for stage in stages}
    prediction = _predicted(request, staged, plan)
    return replace(
        plan,
        name=name,
        prediction=prediction,
        solver=SolverReport(
            status=statuses.pop() if len(statuses) == 1 else "feasible",
            bound=request.floor_seconds,
            gap=relative_gap(prediction.step_seconds, request.floor_seconds),
            seconds=time.perf_counter() - started,
        ),
        opaque=opaque_uses(step),
        undivided=_undivided(request, staged),
        user_shardings=_user_shardings(request, staged),
        # Of the step as traced: recomputation is part of the plan, and not of the step that it is compared with.
        fingerprint=fingerprint(request.step_at(step.num_microbatches, step.loop_parts)),
    )


def _decisions(request: PlanRequest, staged: StagedStep) -> Plan:
    """Return the decisions of a plan alone: all that its program follows."""
    step, layers = staged.step, staged.layers
    return Plan(
        name="",
        function=request.signature.function,
        stages=tuple(_stage_plan(request, step, layers, stage) for stage in staged.stages),
        schedule=staged.schedule,
        num_microbatches=step.num_microbatches,
        num_layers=layers.num_layers,
        op_layers=layers.of_op,
        input_layers=layers.of_input,
        loop_parts=step.loop_parts,
        cluster=request.cluster,
        prediction=NOT_PREDICTED,
        solver=NOT_SOLVED,
        averaged=step.loop_results.averaged,
        fingerprint="",
    )


def schedule_for(step: StepGraph, schedule: Schedule) -> Schedule:
    """Return the schedule of a pipeline, or the one of inference if a step has no backward pass.

    Raises `PlanError` for the schedule of a parameter server.
    """
    if isinstance(schedule, ServerSchedule):
        raise PlanError(
            f"{schedule} has workers with all layers each, which the stages of a pipeline are not. Ask for "
            "al.planners.ParameterServer, which makes this schedule, or choose another one."
        )
    forward_alone = Phase.BACKWARD not in step.phases and schedule.stages_per_processor == 1
    return Inference() if forward_alone else schedule


def with_microbatches(plan: Plan) -> str:
    """Return the name of a plan with its number of micro-batches, if it has several."""
    count = plan.num_microbatches
    return plan.name if count == 1 else f"{plan.name}, {count} micro-batches"


def relative_gap(seconds: float, bound: float) -> float:
    """Return the largest possible saving over `seconds`, relative to it, given a lower bound."""
    return max(0.0, (seconds - bound) / seconds) if seconds > 0 else 0.0


def _undivided(request: PlanRequest, staged: StagedStep) -> tuple[UndividedDim, ...]:
    found: list[UndividedDim] = []
    step, layers = staged.step, staged.layers
    for number, stage in enumerate(staged.stages):
        if stage.solution.choice is None:
            continue
        homes = zip(step.graph.inputs, layers.of_input, strict=True)
        arguments = [v for v, home in homes if stage.first <= home <= stage.last]
        pricer = Pricer(cost_model=request.cost_model, submesh=stage.submesh, mesh=stage.mesh)
        found += _PricedStage(step, number, stage.solution.choice, pricer).undivided(arguments)
    return tuple(found)


def _user_shardings(request: PlanRequest, staged: StagedStep) -> tuple[UserShardingUse, ...]:
    placed = [
        PlacedOps(ops=stage.solution.choice.ops, inputs=stage.solution.choice.inputs, sizes=stage.mesh.axis_sizes)
        for stage in staged.stages
        if stage.solution.choice is not None
    ]
    return sharding_uses(staged.step, request.signature.user_shardings, placed)


def opaque_uses(step: StepGraph) -> tuple[OpaqueUse, ...]:
    """Return the ops of a step that have no rule, grouped by primitive, the largest group first."""
    # One line per primitive: a model may use an op without a rule in every layer.
    groups: dict[str, list[tuple[float, str]]] = {}
    for graph, op in opaque_ops(step.graph):
        size = float(sum(v.bytes for v in graph.results(op)))
        groups.setdefault(op.primitive, []).append((size, op.source))
    uses = (
        OpaqueUse(
            primitive=primitive,
            num_ops=len(members),
            bytes=sum(size for size, _ in members),
            sources=tuple(dict.fromkeys(source for _, source in members if source)),
        )
        for primitive, members in groups.items()
    )
    return tuple(sorted(uses, key=lambda use: -use.bytes))


def _stage_plan(request: PlanRequest, step: StepGraph, layers: Layers, stage: PlacedStage) -> StagePlan:
    solution, graph = stage.solution, step.graph
    if solution.choice is None:
        raise PlanError("A stage without a solution cannot become part of a plan.")
    choice = solution.choice
    # Inputs that are no arguments are arrays that the function captured.
    homes = {
        v: home
        for v, part, home in zip(graph.inputs, step.input_parts, layers.of_input, strict=True)
        if part.leaf < request.signature.num_arguments
    }
    mine = [v for v in choice.inputs if v in homes and stage.first <= homes[v] <= stage.last]
    specs = {graph.values[v].name: choice.inputs[v] for v in mine}
    shapes = {graph.values[v].name: ArrayShape(dims=step.full_shapes[v], dtype=graph.values[v].dtype) for v in mine}
    return StagePlan(
        layers=(stage.first, stage.last),
        submesh=stage.submesh,
        mesh_shape=stage.mesh,
        specs=specs,
        shapes=shapes,
        inputs=choice.inputs,
        ops=choice.ops,
        accumulators=choice.accumulators,
        cost=solution.cost,
        outputs=choice.outputs,
        keeps_gathered=choice.keeps_gathered,
    )


def simulated_step(request: PlanRequest, staged: StagedStep) -> SimulatedStep:
    """Return the simulated program of the plan that these decisions make."""
    return _simulated(request, staged, _decisions(request, staged))


def _simulated(request: PlanRequest, staged: StagedStep, plan: Plan) -> SimulatedStep:
    with request.progress.during("simulate"):
        program = build_program(plan, staged.step)
        return simulate_program(
            program, plan, staged.step, cost_model_for=request.cost_model_for, prices=Prices.OF_PLAN
        )


def _predicted(request: PlanRequest, staged: StagedStep, plan: Plan) -> Prediction:
    simulated = _simulated(request, staged, plan)
    solutions = [stage.solution for stage in staged.stages]
    traced = request.step_at(staged.step.num_microbatches, staged.step.loop_parts)
    needed = needed_flops(traced)
    # Solutions are those of all micro-batches, which equal stages take in turn.
    shares = [1 / len(plan.schedule.replicas_of(number, len(solutions))) for number in range(len(solutions))]
    flops = [share * solution.flops for share, solution in zip(shares, solutions, strict=True)]
    executed = sum(each * stage.submesh.num_devices for each, stage in zip(flops, staged.stages, strict=True))
    collectives = [
        replace(use, stage=number, count=shares[number] * use.count)
        for number, solution in enumerate(solutions)
        for use in solution.collectives
    ]
    # One rate for both, that of most of the work, as utilisations are stated everywhere.
    dtype = max(needed, key=needed.__getitem__, default="float32")
    available = simulated.step_seconds * peak_rate(request.cluster, dtype)
    return Prediction(
        step_seconds=simulated.step_seconds,
        compute_seconds=sum(share * s.compute_seconds for share, s in zip(shares, solutions, strict=True)),
        collective_seconds=sum(use.seconds * use.count for use in collectives),
        transfer_seconds=simulated.transfer_seconds,
        peak_bytes=tuple(simulated.use_of(stage).peak_bytes for stage in range(len(plan.stages))),
        flops_per_device=max(sum(flops[i] for i in use.stages) for use in simulated.submeshes),
        bubble_fraction=simulated.bubble_fraction,
        # Over one device there is nothing to send.
        collectives=tuple(use for use in collectives if use.num_devices > 1),
        tasks=simulated.tasks,
        transfers=simulated.transfers,
        mfu=sum(needed.values()) / available if available else 0.0,
        hfu=executed / available if available else 0.0,
        host_bytes=host_bytes_of(plan, staged.step),
    )


def peak_rate(cluster: Cluster, dtype: str) -> float:
    """Return the peak FLOP/s of all devices of a cluster for operands of a dtype."""
    groups = [(group.device, group.num_hosts) for group in cluster.groups] or [(cluster.device, cluster.num_hosts)]
    # Virtual devices share the rates of their host's processor.
    per_host = 1 if cluster.shared_processor else cluster.devices_per_host
    return sum(num_hosts * per_host * device.peak(dtype) for device, num_hosts in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """The seconds of a step, for a search.

    Attributes:
        step_seconds: seconds of the whole step.
        loop_seconds: seconds of the tasks of its micro-batches.
        bubble_fraction: the part of these that devices spend waiting for other stages.
    """

    step_seconds: float
    loop_seconds: float
    bubble_fraction: float


def estimate(request: PlanRequest, staged: StagedStep) -> StepEstimate:
    """Return the seconds of a step without its program: the tasks, transfers as one, and all updates at the end."""
    with request.progress.during("simulate"):
        return _estimated(request, staged)


def _estimated(request: PlanRequest, staged: StagedStep) -> StepEstimate:
    step, stages = staged.step, staged.stages
    model, m, count = request.cost_model, step.num_microbatches, len(stages)
    launch = dispatch_seconds(model.cluster)
    costs = [stage.solution.cost for stage in stages]
    together = sharing([stage.submesh for stage in stages])
    # One stage with one micro-batch is compiled as one program; else each task is dispatched.
    whole = count == 1 and m == 1
    tasks = staged.schedule.tasks(count, m)
    overhead = launch if not whole else launch / len(tasks[0])  # the whole step is one program
    timeline = simulate(
        tasks,
        [cost.forward_seconds for cost in costs],
        [cost.backward_seconds for cost in costs],
        weight_seconds=[cost.weight_seconds for cost in costs],
        transfer_seconds=inflows_between(request, step, staged.layers, stages),
        dispatch_seconds=overhead,
        serialized=request.cluster.shared_processor,
    )
    updates = [cost.update_seconds + (0.0 if whole else launch) for cost in costs]
    # Stages on the same devices update in turn, those on other devices at the same time; virtual devices never overlap.
    in_turn = [sum(updates[i] for i in numbers) for numbers in together]
    update = sum(in_turn) if request.cluster.shared_processor else max(in_turn)
    stacked = stacks_at_rest(model, step, staged.layers, stages).seconds
    # A host dispatches the programs of all its devices; they wait for it where their tasks are shorter than that.
    of_layer = [number for number, stage in enumerate(stages) for _ in range(stage.first, stage.last + 1)]
    of_op = tuple([None if layer is None else of_layer[layer] for layer in staged.layers.of_op])
    # A task without work is not launched, and the two passes of the last stage may be one program.
    programs = Counter(span.stage for span in timeline.spans if span.end_seconds > span.start_seconds)
    programs.subtract(dict.fromkeys(fused_stages(tasks, staged.schedule.loss_stage(count)), m))
    programs.update(update_tasks(step, of_op))
    of_hosts = Counter[int]()
    for number, stage in enumerate(stages):
        of_hosts[stage.submesh.first_device // request.cluster.devices_per_host] += programs[number]
    launched = 1 if whole else max(of_hosts.values())
    dispatched = model.launch_seconds() * launched
    seconds = max(dispatched, timeline.makespan_seconds + update + stacked) + request.cluster.skew_seconds
    loop, bubble = timeline.makespan_seconds, timeline.bubble_fraction
    return StepEstimate(step_seconds=seconds, loop_seconds=loop, bubble_fraction=bubble)


def inflows_between(request: PlanRequest, step: StepGraph, layers: Layers, stages: Sequence[StagePlace]) -> list[float]:
    """Return the seconds per micro-batch in which each stage but the first receives its inputs.

    Nothing is sent between stages on the same devices.
    """
    received = received_values(step, layers, [(stage.first, stage.last) for stage in stages[1:]])
    return [
        inflow_seconds(
            request.cost_model,
            values,
            crosses_hosts=crosses_hosts(request.cluster, a.submesh, b.submesh),
            num_links=min(a.submesh.num_devices, b.submesh.num_devices),
        )
        if a.submesh != b.submesh
        else 0.0
        for (a, b), values in zip(pairwise(stages), received, strict=True)
    ]


LEAST_SHARE = 0.01
"""Arguments below this share of the largest one are not reported."""


class _PricedStage(NamedTuple):
    """A stage of a step, by number, with its shardings and their prices."""

    step: StepGraph
    number: int
    choice: Choice
    pricer: Pricer

    def undivided(self, arguments: Sequence[int]) -> tuple[UndividedDim, ...]:
        """Return the dims of the stage's arguments that an axis would split if it divided them, the most bytes first.

        Only axes count that split some argument of this stage: the plan does not split state over the others.
        """
        step, inputs = self.step, self.choice.inputs
        values = [step.graph.values[v] for v in arguments if step.batch_dims[v] is None and v in inputs]
        used = {axis for v in values for axis in inputs[v.id].axes}
        largest = max((v.bytes for v in values), default=0)
        found = [
            dim
            for value in values
            if value.bytes >= LEAST_SHARE * largest and not value.dtype.startswith("key<")
            for dim in self._undivided(value, used)
        ]
        return tuple(sorted(found, key=lambda dim: -dim.bytes_saved))

    def _undivided(self, value: Value, used: set[str]) -> Iterator[UndividedDim]:
        spec, sizes = self.choice.inputs[value.id], self.pricer.sizes
        # The order of a set of strings differs between processes, whose plans must be equal.
        for axis in sorted(used - spec.axes):
            count = sizes[axis]
            blocks = [n // prod(sizes[a] for a in axes) for n, axes in zip(value.shape, spec.dims, strict=True)]
            if any(block % count == 0 for block in blocks):
                continue  # the axis could split another dim: the value stays whole by choice
            for dim, block in enumerate(blocks):
                # Padding would leave some devices with nothing but padding.
                if block < count:
                    continue
                padded = ceil(block / count) * count
                # A device would then hold padded / count of the block's positions instead of all.
                share = 1 - padded / (block * count)
                yield UndividedDim(
                    name=value.name,
                    dim=dim,
                    size=value.shape[dim],
                    axis=axis,
                    num_devices=count,
                    padded=padded * (value.shape[dim] // block),
                    bytes_saved=local_bytes(value, spec, sizes) * share,
                    seconds_saved=self._contraction_seconds(value, dim) * share,
                    stage=self.number,
                )

    def _contraction_seconds(self, value: Value, dim: int) -> float:
        """Return the seconds per step of the contractions that read this dim of a value as it is split now."""
        graph, axes, total = self.step.graph, self.choice.inputs[value.id].dims[dim], 0.0
        for op in (graph.ops[c] for c in graph.consumers[value.id]):
            rule, placement = rule_of_op(graph, op.id), self.choice.ops.get(op.id)
            if placement is not None and rule.work_kind != "elementwise":
                factors = rule.operands[op.operands.index(value.id)][dim]
                if any(f in rule.shardable and placement.factors[f] == axes for f in factors):
                    total += self.pricer.price(graph, op, placement).seconds * self.step.runs_of(op)
        return total
