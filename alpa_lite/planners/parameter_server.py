"""A parameter server: workers pull weights, compute gradients of their samples, and push them to servers.

The devices are `servers` servers and `workers` equal groups. Each server holds a contiguous range of the rows of every
weight and of its optimizer state, and updates it; a worker has a copy of the weights while it runs a micro-batch. With
N workers, S servers and M bytes of weights, in a step of one micro-batch per worker

    a worker receives M (pull) and sends M (push); a server sends and receives N M / S; all send 2 N M

so that the links of the servers are the bottleneck: they carry one transfer at a time in each direction.
`schedule.servers` has the order of pulls, pushes and updates under each consistency.

Arrays without a dim that the servers divide are held and updated by all of them.

Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import StagedStep, assemble
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.stage_costs import StageConstraints, StageCosts
from alpa_lite.intra_op.strategies import AxisRole, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import check_batch, submeshes_of
from alpa_lite.planners.planner import Planner, marked
from alpa_lite.program.ir import Value, wiring_of
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import major_factor
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.schedule import ServerSchedule
from alpa_lite.sharding.meshes import LogicalMesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.layers import Layers
from alpa_lite.text import did_you_mean, show_bytes, show_count, show_usable

ROUNDS = (4, 2, 1)
"""The numbers of micro-batches of each worker to try where there is an update for each of them."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """The consistency under which weights may lack up to `delay` updates; with 0 every round waits for the one before.

    Attributes:
        delay: the largest number of updates that the weights of a micro-batch lack.
    """

    delay: int

    def __post_init__(self) -> None:
        """Check the delay."""
        if self.delay < 0:
            raise PlanError(f"Bounded({self.delay}) was asked for. A delay is 0 or more updates.")


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Planner):
    """Workers that pull weights from servers and push gradients to them.

    Attributes:
        servers: number of devices that hold and update the weights.
        workers: number of equal groups of the other devices; 0: one device each.
        consistency: "bsp": one update per step, of the whole batch, as with data parallelism; `Bounded(delay)`: an
            update for one micro-batch of each worker, of which weights lack up to `delay` (also as "bounded:DELAY");
            "async": an update for each micro-batch, when its gradient arrives. The last two are other optimisers than
            the step on one device.
    """

    servers: int = 1
    workers: int = 0
    consistency: str | Bounded = "bsp"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.servers < 1:
            raise PlanError(f"servers={self.servers} was given. Ask for at least 1.")
        given = self.consistency
        if isinstance(given, str) and given not in ("bsp", "async") and _delay_of(given) is None:
            close = did_you_mean(given, ("bsp", "async"))
            raise PlanError(
                f"consistency={given!r} was given.{close} Give "
                '"bsp", "async", or al.planners.Bounded(delay), which on the command line is bounded:DELAY.'
            )

    @property
    def name(self) -> str:
        """Name for tables."""
        schedule = self._schedule(1)
        rule = f"delay {schedule.delay}" if schedule.consistency == "bounded" else schedule.consistency
        return marked(f"parameter server ({show_count(self.servers, 'server')}, {rule})", schedule)

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated several times per step."""
        return self._schedule(1).is_asynchronous

    def _schedule(self, workers: int) -> ServerSchedule:
        given = self.consistency
        delay = given.delay if isinstance(given, Bounded) else _delay_of(given)
        if delay is not None:
            return ServerSchedule(workers=workers, consistency="bounded", delay=delay)
        return ServerSchedule(workers=workers, consistency=str(given))

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan.

        Raises:
            PlanError: the devices cannot be divided, or the step has no batch or no gradients.
            InfeasibleError: a server or a worker has too little memory.
        """
        started = time.perf_counter()
        places = self._places(request)
        workers = len(places) - 1
        schedule = self._schedule(workers)
        request = request.under(schedule, len(places))
        step = request.best_step(self._microbatches(request, workers, places[1].submesh.num_devices), loop_parts=0)
        if Phase.BACKWARD not in step.phases or step.num_microbatches % workers:
            # For its sentence about the number of micro-batches.
            schedule.tasks(len(places), step.num_microbatches)
            raise PlanError(f"{self.name} divides gradients among workers, but {request.signature.function} has none.")
        check_batch(self.name, step, places[1].submesh.num_devices)
        layers = served_layers(step)
        axis = places[0].mesh.axis_names[0]
        pins = key_ranges(step, axis, self.servers)
        costs = StageCosts(
            step=step,
            layers=layers,
            cost_model=request.cost_model,
            cost_model_for=request.cost_model_for,
            constraints=StageConstraints(restriction=Restriction(roles={"data": AxisRole.BATCH}), pins=pins),
            progress=request.progress,
        )
        of_workers = costs.with_pins({})
        stages = [
            _solved(self.name, costs if number == 0 else of_workers, place) for number, place in enumerate(places)
        ]
        staged = StagedStep(step=step, layers=layers, stages=stages, schedule=schedule)
        plan = assemble(self.name, request, staged, started)
        # A scalar, such as a counter of steps, has no rows to divide.
        state = ((step.graph.values[v], pins[v]) for v in step.graph.inputs if v in pins)
        whole = [value.name for value, spec in state if value.rank and spec.is_replicated]
        note = f"held by all servers, which do not divide their dims: {', '.join(whole)}"
        return replace(plan, notes=(*plan.notes, note)) if whole and self.servers > 1 else plan

    def _microbatches(self, request: PlanRequest, workers: int, size: int) -> tuple[int, ...]:
        """Return the numbers of micro-batches to try, each with samples for all `size` devices of a worker.

        Raises:
            PlanError: the workers, which get equally many samples, do not divide the batch.
        """
        batch = request.batch_size
        if batch is not None and batch % workers and request.num_microbatches == "auto":
            raise PlanError(
                f"{self.name} gives each of {show_count(workers, 'worker')} as many samples, but the batch has {batch}"
                f". Use a multiple of {workers} samples, or a number of workers that divides {batch}."
            )
        numbers = [workers * each for each in (ROUNDS if self.is_asynchronous else (1,))]
        return tuple(m for m in numbers if batch is None or batch % (m * size) == 0) or tuple(numbers[-1:])

    def _places(self, request: PlanRequest) -> list[StagePlace]:
        """Return the places of the servers, which have the first devices, and of the workers.

        The process that has the first devices is the one without which a job cannot go on in any case.
        """
        total = request.cluster.num_devices
        left = total - self.servers
        workers = self.workers or left
        size = left // workers if workers > 0 else 0
        if left < 1 or workers < 1 or size * workers != left:
            raise PlanError(
                f"{self.name} on {request.cluster.name}, which has {show_count(total, 'device')}, leaves {left} for "
                f"{show_count(workers, 'worker')}. Choose a number of servers, and of workers that divide the rest."
            )
        try:
            of_servers, *of_workers = submeshes_of(request.cluster, [self.servers] + [size] * workers)
        except PlanError:
            raise PlanError(
                f"{self.name}: {show_count(self.servers, 'server')} on the first devices and then "
                f"{show_count(workers, 'worker')} of {show_count(size, 'device')} do not tile hosts of "
                f"{request.cluster.devices_per_host}. The servers, and each worker, must lie within a host or have "
                "whole hosts: choose other numbers of servers and workers."
            ) from None
        data = LogicalMesh(axis_names=("data",), shape=(size,))
        server = LogicalMesh(axis_names=("server",), shape=(self.servers,))
        return [StagePlace(0, 0, of_servers, server), *(StagePlace(1, 1, submesh, data) for submesh in of_workers)]


def _delay_of(text: str) -> int | None:
    """Return the delay of a text such as `bounded:2`; None for any other text."""
    name, _, delay = text.partition(":")
    return int(delay) if name == "bounded" and delay.isdecimal() else None


def served_layers(step: StepGraph) -> Layers:
    """Return two layers: the update with all state, which servers have, and the loop with the batch, of the workers."""
    of_phase = {Phase.FORWARD: 1, Phase.BACKWARD: 1, Phase.UPDATE: 0, Phase.INVARIANT: None}
    return Layers(
        num_layers=2,
        of_op=tuple(of_phase[phase] for phase in step.phases),
        of_input=tuple(0 if step.batch_dims[v] is None else 1 for v in step.graph.inputs),
    )


def key_ranges(step: StepGraph, axis: str, servers: int) -> Mapping[int, Spec]:
    """Return the spec of each array of state, and of each gradient, on the servers.

    State is split along its first dim that they divide, and gradients as the state that the update makes of them.
    """
    graph, found = step.graph, dict[int, Spec]()
    dims = _split_dims(step, servers)
    for value in graph.values:
        v, producer = value.id, graph.producer[value.id]
        # A gradient, or another sum over the samples, is what the loop makes and the update reads.
        is_pushed = (
            producer is not None
            and step.phases[producer].in_loop
            and any(step.phases[op] is Phase.UPDATE for op in graph.consumers[v])
        )
        if step.batch_dims[v] is None and (is_pushed or v in graph.inputs):
            dim = dims[v] if v in dims else _first_dim(value, servers)
            found[v] = Spec(tuple((axis,) if d == dim else () for d in range(value.rank)))
    return found


def _first_dim(value: Value, servers: int) -> int | None:
    return next((d for d, n in enumerate(value.shape) if servers > 1 and n and n % servers == 0), None)


def _split_dims(step: StepGraph, servers: int) -> dict[int, int]:
    """Return the dims along which servers split state, and what the update makes new state of, followed backwards.

    A gradient may be pushed transposed, where only the sum of all micro-batches is brought into the form of its weight:
    split along its first dim, the servers would have to exchange all of it.
    """
    graph, found = step.graph, dict[int, int]()
    for new, old in step.aliases.items():
        if step.batch_dims[old] is None and (dim := _first_dim(graph.values[old], servers)) is not None:
            found[old] = found[new] = dim
    for op in reversed(graph.ops):
        if step.phases[op.id] is not Phase.UPDATE or wiring_of(op) is not None:
            continue
        rule = rule_of_op(graph, op.id)
        split = {
            major_factor(rule, dims[found[v]]) for v, dims in zip(op.results, rule.results, strict=True) if v in found
        }
        for v, dims in zip(op.operands, rule.operands, strict=True):
            same = (d for d, factors in enumerate(dims) if major_factor(rule, factors) in split - {None})
            if v not in found and (dim := next(same, None)) is not None and graph.values[v].shape[dim] % servers == 0:
                found[v] = dim
    return found


def _solved(name: str, costs: StageCosts, place: StagePlace) -> PlacedStage:
    solution = costs.solution(place)
    if solution.choice is None:
        device = costs.device(place.submesh)
        raise InfeasibleError(
            f"{name} does not fit: {'a server' if place.first == 0 else 'a worker'} needs at least "
            f"{show_bytes(solution.peak_bytes)} per device, but {device.name} has "
            f"{show_usable(device.usable_bytes, device.reserved_bytes)}. Use more servers, smaller micro-batches, or "
            "more devices for each worker."
        )
    return place.with_solution(solution)
