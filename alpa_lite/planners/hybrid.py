"""Hybrid: pipeline × data × tensor parallelism with fixed degrees, as Megatron-LM and DeepSpeed combine them.

The cluster is cut into `pipeline` parts; every part is a logical mesh data × model. Axis "data" splits the batch and
nothing else, axis "model" never splits the batch. The integer program chooses which dims of which weights the "model"
axis splits; for a transformer this is Megatron's column/row pattern. Classic manual plans are special cases: see
`data_parallel`, `megatron`, `pipeline`, `zero`.

Each part runs one stage, or as many as its schedule gives it: under `Interleaved1F1B(num_chunks=v)` stage i of
pipeline · v runs on part i mod pipeline. Under `PipeDream(replicated=...)` a part is divided into equal stages with the
same layers, which take micro-batches in turn; data, tensor and the other degrees are those of each of these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import ceil, lcm, prod
from typing import Literal

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import StagedStep, assemble, schedule_for
from alpa_lite.inter_op.loop_cuts import (
    PipelineCut,
    StageBalance,
    cut_into_blocks,
    cut_into_stages,
    merged_layers,
    natural_layers,
)
from alpa_lite.inter_op.plan_request import PlanRequest, pins_on_mesh
from alpa_lite.inter_op.sharding_demands import argument_pins, user_layout, user_mesh, wanted_shardings
from alpa_lite.inter_op.shared_devices import Together, held_at_peak, solve_together
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.stage_costs import Recomputed, SolveEffort, StageConstraints, StageCosts
from alpa_lite.inter_op.what_would_fit import (
    Remedy,
    cheapest_fit,
    more_hosts,
    more_microbatches,
    show_bytes,
    show_shortage,
)
from alpa_lite.intra_op.stage import GivenLayout, StageSolution
from alpa_lite.intra_op.strategies import FREE_CHOICE, AxisRole, BatchSplit, Restriction
from alpa_lite.plan.host_use import fullest_host_bytes
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner, marked, renamed_options
from alpa_lite.planners.weights import positions_layout, projections, weights_layout
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import OneFOneB, Schedule, Task, peak_in_flight, splits_backward
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import subdivided
from alpa_lite.step.planned_step import planned_step, policies_of
from alpa_lite.step.recomputation import Remat
from alpa_lite.text import show_usable
from cost_models import Cluster


@renamed_options(model="tensor")
@dataclass(frozen=True, kw_only=True)
class Hybrid(Planner):
    """Fixed degrees; `data=None` takes the devices that `pipeline` and `tensor` leave.

    With `user_shardings="pin"` each stage is a mesh of the user's axes (`_stage_axes`), on which the
    user's shardings and the integer program decide what is split; degrees of data, tensor and others are not allowed.

    Attributes:
        pipeline: parts of the pipeline, each a group of devices; as many stages, or more under an interleaved schedule.
        data: data-parallel replicas.
        tensor: devices that share each layer (tensor parallelism).
        schedule: schedule of the pipeline.
        zero: 0 (replicated state), 1 (optimizer state split over "data"), 3 (parameters too).
        reshard_after_forward: whether parameters that are gathered for the forward pass (`zero=3`, one stage) are freed
            after it, and gathered again for the backward pass.
        replicas: number of groups of "data" devices that hold whole copies of the state that `zero` splits (hybrid
            sharding); they are outermost.
        context: devices that share the positions of each sequence (context parallelism), in addition to "data".
        expert: number of "data" devices that may hold different experts: they split the batch, or the dim of a
            contraction that its weights share with all its arrays.
        split: names of dims (`rules.dims.dim_names`; of kernels also "channel" and "filter"), each with the axis that
            must split the weights that have one along it.
        projections: whether "model" must split the projections of attention by heads, and those of feed-forward blocks
            by hidden units. A note of the plan says which it cannot, and why; their splits are then chosen by price.
        sequence_parallel: whether sums over "model" may stay scattered over it between products.
        equal: the quantity that stages share equally: "flops", or the "loops" over layers (`lax.scan`) as they are
            written; or "layer_flops" or "layer_bytes" of whole layers (`block_partition`).
        shares: relative forward FLOPs of each stage, if they should differ.
        blocks: number of natural layers of each stage (`natural_layers` for pipelines of at most as many stages as
            there are devices), if stages are to be exactly these; `equal` and `shares` then mean nothing.
        devices: number of devices of each part of the pipeline, if they should differ (`data` follows from them).
        remat: policy of recomputation in the backward pass: "none", "selective", "full" or "offload" (`Remat`), layer
            by layer of each stage. The last layer of all stores everything, as its backward pass follows at once,
            unless it is a loop.
        host_optimizer: whether the state of the optimizer waits in the memory of the host, and comes to the devices
            for the update alone, a few parameters at a time.
    """

    obeys_user_shardings = True

    pipeline: int = 1
    data: int | None = None
    tensor: int = 1
    zero: int = 0
    reshard_after_forward: bool = True
    replicas: int = 1
    context: int = 1
    expert: int = 1
    split: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    projections: bool = False
    sequence_parallel: bool = True
    schedule: Schedule = field(default_factory=OneFOneB)
    equal: Literal["flops", "loops", "layer_flops", "layer_bytes"] = "flops"
    shares: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    remat: Literal["none", "selective", "full", "offload"] = "none"
    host_optimizer: bool = False

    @property
    def name(self) -> str:
        """The degrees above 1, such as `pp4 × dp2`."""
        chunks = self.schedule.stages_per_processor
        copies = self.schedule.copies(self.num_stages)
        pipeline = f"pp{self.pipeline}" + (f"·{chunks}" if chunks > 1 else "")
        pipeline += f" ({'-'.join(map(str, copies))})" if max(copies, default=1) > 1 else ""
        parts = [pipeline if self.num_stages > 1 else "", f"tp{self.tensor}" if self.tensor > 1 else ""]
        parts += [f"cp{self.context}" if self.context > 1 else "", f"ep{self.expert}" if self.expert > 1 else ""]
        parts += [f"dp{self.data}" if self.data else "", f"zero{self.zero}" if self.zero else ""]
        parts += ["" if self.reshard_after_forward else "kept gathered"]
        parts += ["offload" if self.remat == "offload" else f"{self.remat} remat" if self.remat != "none" else ""]
        parts += ["host optimizer" if self.host_optimizer else ""]
        return marked(" × ".join(filter(None, parts)) or "hybrid", self.schedule)

    @property
    def num_stages(self) -> int:
        """Number of stages, of which replicas count as one."""
        return self.pipeline * self.schedule.stages_per_processor

    @property
    def _stage_numbers(self) -> list[int]:
        """The number of the stage that each stage of the plan is, or is a replica of."""
        return [number for number, count in enumerate(self.schedule.copies(self.num_stages)) for _ in range(count)]

    @property
    def _num_places(self) -> int:
        """Number of groups of devices: one for each part of the pipeline, or for each of its replicas."""
        return len(self._stage_numbers) // self.schedule.stages_per_processor

    def plan(self, request: PlanRequest) -> Plan:
        """Solve each stage under the fixed roles of its axes."""
        started = time.perf_counter()
        numbers = self._stage_numbers
        request = request.under(self.schedule, len(numbers))
        self._check_gathers()
        if self.host_optimizer or self.remat == "offload":
            check_host_memory(self.name, request.cluster)
        asked = user_mesh(request.step_at(1, 0), request.signature.user_shardings)
        user_axes = None if asked is None else self._user_axes(request, asked)
        places = self.places(request) if user_axes is None else self._user_places(request, user_axes)
        # Without advice many plans are tried, some of which are far too large: this check needs no step in layers.
        if not request.advise:
            self._check_state(request, [mesh for _, mesh in places])
        # Stages may have different numbers of devices: each micro-batch must be divided by all of them.
        ways = 1 if user_axes is not None else lcm(*(batch_ways(mesh) for _, mesh in places))
        microbatches = self.default_microbatches(request.batch_size, ways)
        if user_axes is not None and request.num_microbatches == "auto":
            microbatches = _microbatches_that_divide(request, microbatches)
        cut = self._cut(request, microbatches)
        schedule = schedule_for(cut.step, self.schedule)
        tasks = schedule.tasks(len(numbers), cut.step.num_microbatches)
        if any(map(splits_backward, tasks)) and self.equal == "flops" and not self.blocks:
            # In a loop over several layers no part of the backward pass can be postponed: the loop is one op.
            cut = self._cut(request, (cut.step.num_microbatches,), written_out=True)
        step, layers = cut.step, cut.layers
        for _, mesh in places if user_axes is None else ():
            check_batch(self.name, step, batch_ways(mesh))
        if self.remat != "none":
            # Stages are one layer each so far, but recomputation goes layer by layer.
            layers = subdivided(step, layers)
        traced_layers, per_stage = layers.of_op, layers.num_layers // self.num_stages
        remat = policies_of(step, layers, (Remat(self.remat),) * layers.num_layers)
        planned = planned_step(step, traced_layers, remat, host_optimizer=self.host_optimizer)
        step, layers = planned.step, replace(layers, of_op=planned.of_op)
        costs = StageCosts(
            step=step,
            layers=layers,
            cost_model=request.cost_model,
            cost_model_for=request.cost_model_for,
            constraints=self._constraints(request, step, places[0][1], user_axes),
            # A bound is enough where nothing is explained, and no stages share memory by what each needs at least.
            effort=SolveEffort(peaks="bounded" if len(numbers) == len(places) and not request.advise else "least"),
            recomputed=Recomputed(remat=remat, traced_layers=traced_layers, host_optimizer=self.host_optimizer),
            progress=request.progress,
        )
        parts = [schedule.processor_of(stage, len(numbers)) for stage in range(len(numbers))]
        # Chunks of one part share its memory, so that they are solved together.
        solved: dict[int, StageSolution] = {}
        # Fewer micro-batches in flight first: those solutions are the best for more, where they still fit.
        for part in reversed(range(self._num_places)):
            solved |= self._solve(costs, request, *places[part], tasks[part])
        stages = [
            StagePlace.nth(numbers[i], per_stage, submesh, mesh).with_solution(solved[i])
            for i, (submesh, mesh) in enumerate(places[part] for part in parts)
        ]
        staged = StagedStep(step=step, layers=layers, stages=stages, schedule=schedule)
        plan = assemble(self.name, request, staged, started)
        check_host_bytes(plan)
        return costs.recomputed.recorded_in(replace(plan, notes=self._notes(step)))

    def _constraints(
        self, request: PlanRequest, step: StepGraph, mesh: LogicalMesh, user_axes: Mapping[str, int] | None
    ) -> StageConstraints:
        if user_axes is not None:
            pins = pins_on_mesh(step, argument_pins(step, request.signature.user_shardings), user_axes)
            # The user's axes may have the names of those of the search, which split only what these mean.
            return StageConstraints(
                restriction=FREE_CHOICE,
                pins=pins,
                layout=user_layout(step, request.signature.user_shardings, user_axes),
            )
        return StageConstraints(
            restriction=self.restriction(),
            keeps_gathered=not self.reshard_after_forward,
            layout=self._layout(step, mesh.axis_sizes),
        )

    def _user_axes(self, request: PlanRequest, asked: Mapping[str, int]) -> dict[str, int]:
        """Return the axes of each stage on a mesh of the user. Raises `PlanError` for options that say otherwise."""
        free = Hybrid(
            pipeline=self.pipeline, schedule=self.schedule, equal=self.equal, shares=self.shares, remat=self.remat,
            blocks=self.blocks, host_optimizer=self.host_optimizer,
        )  # fmt: skip
        if self != free or self.split:
            raise PlanError(
                f'user_shardings="pin" lays out each stage on the axes of {dict(asked)}, but {self.name} has degrees '
                "of its own. Leave them out: give the pipeline, its schedule and the balance of its stages alone."
            )
        return _stage_axes(request, self._num_places, asked)

    def _user_places(self, request: PlanRequest, axes: Mapping[str, int]) -> list[tuple[Submesh, LogicalMesh]]:
        wide = {axis: size for axis, size in axes.items() if size > 1} or {"data": 1}
        mesh = LogicalMesh(axis_names=tuple(wide), shape=tuple(wide.values()))
        submeshes = submeshes_of(request.cluster, [mesh.num_devices] * self._num_places)
        return [(submesh, mesh) for submesh in submeshes]

    def _layout(self, step: StepGraph, sizes: Mapping[str, int]) -> GivenLayout:
        """Return the splits that the degrees mean. Raises `PlanError` if the step has no such dims."""
        # Parts may differ in their "data" axis alone, which splits no dims of weights by name.
        splits = projections(step, self.tensor).splits if self.projections and self.tensor > 1 else ()
        weights = weights_layout(step, self.split, sizes, more=splits)
        if splits:
            weights = replace(
                weights, reads_otherwise=True, advice="Megatron(relaxed=True) chooses the splits by price instead."
            )
        if self.context == 1:
            return weights
        positions = positions_layout(step, self.context).values[step.graph]
        # Weights have no samples, and what has positions is no weight.
        of_step = weights.values.get(step.graph, [()] * len(positions))
        both = [a or b for a, b in zip(of_step, positions, strict=True)]
        return replace(weights, values={**weights.values, step.graph: both})

    def _notes(self, step: StepGraph) -> tuple[str, ...]:
        unsplit = projections(step, self.tensor).unsplit if self.projections and self.tensor > 1 else ()
        return (f"weights that are not split as Megatron does: {'; '.join(unsplit)}",) if unsplit else ()

    def _cut(self, request: PlanRequest, microbatches: Sequence[int], *, written_out: bool = False) -> PipelineCut:
        """Return the step cut into stages of one layer each."""
        if self.blocks:
            if len(self.blocks) != self.num_stages:
                raise PlanError(
                    f"blocks = {self.blocks} was asked for, but there are {self.num_stages} stages. Give a number of "
                    "layers for each."
                )
            stages = range(1, request.cluster.num_devices + 1)
            return merged_layers(natural_layers(request, microbatches, stages), self.blocks)
        if self.equal in ("layer_flops", "layer_bytes") and self.num_stages > 1:
            return cut_into_blocks(request, microbatches, self.num_stages, self.equal)
        balance = StageBalance(count=self.num_stages, by_loops=self.equal == "loops", shares=self.shares)
        return cut_into_stages(request, microbatches, balance, written_out=written_out)

    def _check_state(self, request: PlanRequest, meshes: Sequence[LogicalMesh]) -> None:
        """Raise `InfeasibleError` if state alone is too large, before the step is cut into stages."""
        step, cluster = request.step_at(1, 0), request.cluster
        # In a mixed cluster the largest memory: what does not even fit there fits nowhere.
        device = max((group.device for group in cluster.groups), key=lambda d: d.usable_bytes, default=cluster.device)
        # A lower bound: as if all state were split evenly over all axes that may split it.
        total = sum(step.graph.values[v].bytes for v in step.graph.inputs if step.batch_dims[v] is None)
        # Without ZeRO state is whole along the axes that split nothing but samples or positions.
        whole_on = {"replica"} if self.zero else {"replica", "data", "context"}
        ways = sum(prod(n for axis, n in mesh.axis_sizes.items() if axis not in whole_on) for mesh in meshes)
        if total > ways * device.usable_bytes:
            raise InfeasibleError(
                f"{self.name} does not fit: state alone needs at least {show_bytes(total / ways)} per device, but "
                f"{device.name} has {show_usable(device.usable_bytes, device.reserved_bytes)}."
            )

    def default_microbatches(self, batch_size: int | None, data: int) -> Sequence[int]:
        """Return the numbers of micro-batches to try: 1 without a pipeline, otherwise enough to fill it.

        `data` devices must divide each micro-batch.
        """
        # Replicas take equally many micro-batches in turn.
        rounds = lcm(*self.schedule.copies(self.num_stages))
        if self._num_places == 1 or batch_size is None:
            return (rounds,)
        # With four micro-batches per stage the bubble is (p - 1) / (5p - 1), under a fifth of the time.
        wanted = [rounds * ceil(n / rounds) for n in (4 * self.pipeline, 2 * self.pipeline, self.pipeline, 2)]
        return (*(m for m in dict.fromkeys(wanted) if batch_size % (m * data) == 0), rounds)

    def restriction(self) -> Restriction:
        """Return the roles of the axes."""
        roles = {
            "replica": AxisRole.REPLICA,
            "data": AxisRole.BATCH,
            "expert": AxisRole.EXPERT,
            "context": AxisRole.CONTEXT,
            "model": AxisRole.TENSOR,
        }
        return Restriction(
            # Axes that a mesh does not have are ignored.
            roles=roles,
            optimizer=BatchSplit.MUST if self.zero >= 1 else BatchSplit.NEVER,
            parameters=BatchSplit.MUST if self.zero >= 3 else BatchSplit.NEVER,
            scatter_sums=self.sequence_parallel,
        )

    def places(self, request: PlanRequest) -> list[tuple[Submesh, LogicalMesh]]:
        """Return the submesh and logical mesh of each part of the pipeline, or of each of its replicas."""
        if not self.devices:
            mesh = self.mesh(request)
            sizes = [request.cluster.num_devices // self._num_places] * self._num_places
            return [(submesh, mesh) for submesh in submeshes_of(request.cluster, sizes)]
        total, rest = request.cluster.num_devices, self.context * self.tensor
        if len(self.devices) != self.pipeline or sum(self.devices) != total or self.data is not None:
            raise PlanError(
                f"devices = {self.devices} was asked for with pipeline = {self.pipeline} and data = {self.data} on "
                f"{request.cluster.name}, which has {total}. Give as many numbers as the pipeline has parts, whose sum "
                f"is {total}, and leave out data."
            )
        copies = self.schedule.copies(self.num_stages)[: self.pipeline]
        if any(number % (rest * count) for number, count in zip(self.devices, copies, strict=True)):
            replicas = f"{'-'.join(map(str, copies))} replicas of " if max(copies) > 1 else ""
            raise PlanError(
                f"devices = {self.devices} was asked for, but a part is split into {replicas}{self.context} context × "
                f"{self.tensor} tensor-parallel devices. Give multiples of "
                f"{', '.join(map(str, sorted({rest * count for count in copies})))}."
            )
        sizes = [n // count for n, count in zip(self.devices, copies, strict=True) for _ in range(count)]
        submeshes = submeshes_of(request.cluster, sizes)
        return [(submesh, self._mesh(submesh.num_devices // rest)) for submesh in submeshes]

    def mesh(self, request: PlanRequest) -> LogicalMesh:
        """Return the logical mesh of every stage, if all have equally many devices."""
        total = request.cluster.num_devices
        self._check_degrees()
        rest = self._num_places * self.context * self.tensor
        # At least 1, so that the message below names degrees that could be given.
        data = self.data if self.data is not None else max(1, total // rest)
        if data * rest != total:
            context = f" × {self.context} context" if self.context > 1 else ""
            raise PlanError(
                f"{self._num_places} stages × {data} data{context} × {self.tensor} tensor = {data * rest} "
                f"devices were asked for, but {request.cluster.name} has {total}. Choose degrees whose product is "
                f"{total}."
            )
        return self._mesh(data)

    def _check_gathers(self) -> None:
        if not self.reshard_after_forward and (self.zero < 3 or self.num_stages > 1):
            raise PlanError(
                f"reshard_after_forward=False keeps parameters gathered that zero=3 splits, on one stage, but "
                f"zero={self.zero} was asked for with {self.num_stages} stage(s). Leave it out."
            )

    def _check_degrees(self) -> None:
        for name in ("pipeline", "data", "tensor", "context", "replicas", "expert"):
            degree = getattr(self, name)
            if degree is not None and degree < 1:
                raise PlanError(f"{name} = {degree} was asked for; a degree is at least 1.")

    def _mesh(self, data: int) -> LogicalMesh:
        if data % (self.replicas * self.expert):
            raise PlanError(
                f"{self.replicas} replicas × {self.expert} expert devices lie within the {data} data-parallel devices, "
                "but their product does not divide that number. Choose degrees that do."
            )
        sizes = {
            "replica": self.replicas,
            "data": data // (self.replicas * self.expert),
            "expert": self.expert,
            "context": self.context,
            "model": self.tensor,
        }
        # The order is that of the devices: the last axis lies over neighbours, where the links are the fastest.
        # A logical mesh has at least one axis.
        axes = {name: size for name, size in sizes.items() if size > 1} or {"data": 1}
        return LogicalMesh(axis_names=tuple(axes), shape=tuple(axes.values()))

    def _solve(
        self,
        costs: StageCosts,
        request: PlanRequest,
        submesh: Submesh,
        mesh: LogicalMesh,
        tasks: Sequence[Task],
    ) -> Mapping[int, StageSolution]:
        """Solve the stages of one part of the cluster, which share its memory."""
        per_stage, in_two = costs.layers.num_layers // self.num_stages, splits_backward(tasks)
        numbers = self._stage_numbers

        def solve(stage: int, in_flight: int, limit_bytes: float) -> StageSolution:
            place = StagePlace.nth(numbers[stage], per_stage, submesh, mesh)
            found = costs.solution(place, in_flight=in_flight, limit_bytes=limit_bytes)
            return costs.in_two_parts(place, found) if in_two else found

        found = solve_together(solve, tasks, costs.room_bytes(submesh))
        if found.fits:
            return found.solutions
        problem = self._too_large(request.cluster, submesh, found, tasks)
        if request.advise:
            lacking = [stage for stage, solution in found.solutions.items() if solution.choice is None]
            why = None
            if lacking:
                place = StagePlace.nth(numbers[lacking[0]], per_stage, submesh, mesh)
                why = costs.shortage(place, in_flight=held_at_peak(tasks)[lacking[0]])
            problem = f"{problem} {show_shortage(why)}{self._advice(request, costs.step.num_microbatches)}"
        raise InfeasibleError(problem)

    def _too_large(self, cluster: Cluster, submesh: Submesh, found: Together, tasks: Sequence[Task]) -> str:
        """Return a sentence that says which stages need how much memory."""
        device = cluster.at(submesh.first_device, submesh.num_devices).device
        numbers, held = sorted(found.solutions), peak_in_flight(tasks)
        where, need = f"on {submesh.num_devices} devices", f"{show_bytes(found.peak_bytes)} per device"
        if len(numbers) == 1:
            lacking = f"stage {numbers[0]} {where} needs at least {need}"
        else:
            listed = ", ".join(map(str, numbers))
            lacking = f"stages {listed} {where} together need {need} at the leanest that was found"
        return (
            f"{self.name} does not fit: {lacking} with {held} micro-batch{'es' if held > 1 else ''} in flight, but "
            f"{device.name} has {show_usable(device.usable_bytes, device.reserved_bytes)}."
        )

    def _advice(self, request: PlanRequest, microbatches: int) -> str:
        """Return a sentence about the cheapest change that would fit."""
        changes = [*more_microbatches(self, request, microbatches)]
        if self.zero < 3:
            text = "splitting parameters and optimizer state over the data axis (al.planners.FSDP)"
            changes.append(Remedy(text=text, planner=replace(self, zero=3), request=request))
        # Parts of different sizes have no common degree that could be halved.
        data = 1 if self.devices else batch_ways(self.mesh(request))
        if data % 2 == 0:
            wider = replace(self, tensor=self.tensor * 2, data=data // 2)
            text = f"tensor parallelism over {wider.tensor} devices (al.planners.Hybrid)"
            changes.append(Remedy(text=text, planner=wider, request=request))
        # Fixed numbers of devices would not cover further hosts.
        return cheapest_fit(changes, more_hosts(replace(self, data=None, devices=()), request))


def check_host_memory(name: str, cluster: Cluster) -> None:
    """Raise `PlanError` if a plan of this name would use memory of hosts that the cluster does not describe."""
    if cluster.host_memory is None:
        raise PlanError(
            f"{name} lets arrays wait in the memory of the host, but {cluster.name} states none. Describe it in the "
            'cluster file, as "host_memory": {"memory_bytes": 1e12, "link": "pcie4"}, or set it with '
            "dataclasses.replace(cluster, host_memory=cost_models.HostMemory(...))."
        )


def check_host_bytes(plan: Plan) -> None:
    """Raise `InfeasibleError` if a plan needs more memory of a host than there is."""
    used, host = fullest_host_bytes(plan), plan.cluster.host_memory
    if host is not None and used > host.usable_bytes:
        raise InfeasibleError(
            f"{plan.name} does not fit: {show_bytes(used)} would wait in the memory of a host of {plan.cluster.name}, "
            f"which has {show_usable(host.usable_bytes, host.memory_bytes - host.usable_bytes)}. Let less wait there, "
            "or use more hosts."
        )


def _stage_axes(request: PlanRequest, num_stages: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of the user's mesh that each of equal stages has, those of one device among them.

    Raises:
        PlanError: neither the mesh nor a part of it has as many devices as a stage.
    """
    devices = request.cluster.num_devices // num_stages
    if prod(mesh.values()) == devices:
        return dict(mesh)
    named = {
        axis
        for _, sharding in wanted_shardings(request.step_at(1, 0), request.signature.user_shardings)
        for dim in sharding.dims
        for axis in dim or ()
    }
    unnamed = [axis for axis in mesh if axis not in named]
    for count in range(1, len(unnamed) + 1):
        for over_stages in combinations(unnamed, count):
            rest = {axis: size for axis, size in mesh.items() if axis not in over_stages}
            if prod(mesh[axis] for axis in over_stages) == num_stages and prod(rest.values()) == devices:
                return rest
    raise PlanError(
        f'user_shardings="pin": {num_stages} stages on {request.cluster.name} have {devices} devices each, but the '
        f"shardings of {request.signature.function} are on the mesh {dict(mesh)}, of which they name "
        f"{', '.join(axis for axis in mesh if axis in named) or 'no axis'}. Use a mesh of {devices} devices, which "
        f"every stage then has, or one with a further axis of {num_stages} devices that no sharding names."
    )


def _microbatches_that_divide(request: PlanRequest, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of micro-batches at which as many arrays have their sharding of the user as at one."""

    def obeyed(number: int) -> int:
        found = wanted_shardings(request.step_at(number, 0), request.signature.user_shardings)
        return sum(sharding.divides(value.shape) for value, sharding in found)

    return [number for number in numbers if number == 1 or obeyed(number) >= obeyed(1)]


def submeshes_of(cluster: Cluster, sizes: Sequence[int]) -> list[Submesh]:
    """Return consecutive submeshes of these sizes; each lies within a host, or consists of whole hosts."""
    found, first, per_host = list[Submesh](), 0, cluster.devices_per_host
    for size in sizes:
        if first % per_host + size <= per_host:
            found.append(Submesh(first_device=first, num_hosts=1, devices_per_host=size))
        elif first % per_host == 0 and size % per_host == 0:
            found.append(Submesh(first_device=first, num_hosts=size // per_host, devices_per_host=per_host))
        else:
            raise PlanError(
                f"Stages of {', '.join(map(str, sizes))} devices do not tile {cluster.num_hosts} hosts of {per_host} "
                "devices. Choose stages that lie within a host or have whole hosts."
            )
        first += size
    return found


def batch_ways(mesh: LogicalMesh) -> int:
    """Return the number of parts into which the axes split the batch."""
    # The context axis splits positions, not samples.
    return prod(mesh.axis_sizes.get(name, 1) for name in ("replica", "data", "expert"))


def check_batch(name: str, step: StepGraph, data: int) -> None:
    """Raise `PlanError` unless the number of devices that split the batch in a plan of this name divides it."""
    if step.batch.size is None:
        if data > 1:
            raise PlanError(f"{name} splits the batch over {data} devices, but there is no batch. {step.batch.problem}")
        return
    micro = step.batch.size // step.num_microbatches
    if micro % data:
        raise PlanError(
            f"{name} splits each micro-batch over {data} devices, but it has {micro} samples "
            f"(batch {step.batch.size} in {step.num_microbatches} micro-batches). Use a multiple of {data} samples per "
            "micro-batch, or a smaller data degree."
        )
