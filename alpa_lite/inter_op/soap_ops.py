"""The operators of a step for a search over SOAP dims: dims, seconds at any degrees, weights and arrays between them.

An operator is a group of ops around one contraction or loop. Its dims are those of the result of this op: one that the
batch is along is a sample dim; one that its weights have too, a parameter dim; the others are attribute dims. Dims of
other ops belong to these by the ops' rules (`rules.dims.DimClasses`). With degrees d, a part takes

    seconds of the group on one device · Σ price of each op split so / Σ price of each op whole           `_Seconds`

and 1/Π d of them where the group has a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, prod

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.soap import OpSeconds, SoapDim, SoapEdge, SoapKind, SoapOp, SoapProblem
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.plan.parts import StageCost
from alpa_lite.plan.pricing import Pricer
from alpa_lite.program.ir import Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import DimClasses, dim_classes
from alpa_lite.rules.op_info import free_values, rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.colocation import ColocatedGroups, colocated_groups
from alpa_lite.step.layers import contractions, op_flops, readers_of
from cost_models.work import Collective, Group


@dataclass(frozen=True, kw_only=True, eq=False)
class SoapStep:
    """The operators of a step.

    Attributes:
        step: the step, with one micro-batch and whole loops.
        problem: the operators; the keys of their dims are numbers of classes.
        leads: for each operator the op whose result has its dims; None without forward ops.
        weights: for each of these ops the arguments among its weights.
        classes: the classes of dims.
    """

    step: StepGraph
    problem: SoapProblem
    leads: tuple[Op | None, ...]
    weights: Mapping[int, tuple[int, ...]]
    classes: DimClasses


def soap_step(request: PlanRequest, most: int) -> SoapStep:
    """Return the operators of a step, at most so many."""
    step = request.best_step((1,), loop_parts=0)
    groups, classes = colocated_groups(step, most), dim_classes(step)
    submesh = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
    mesh = LogicalMesh(axis_names=("data",), shape=(1,))
    costs = StageCosts(
        step=step,
        layers=groups.layers,
        cost_model=request.cost_model,
        cost_model_for=request.cost_model_for,
        progress=request.progress,
    )
    pricer = Pricer(cost_model=request.cost_model, submesh=submesh, mesh=mesh)
    count = groups.layers.num_layers
    leads = [_lead(step, groups, group) for group in range(count)]
    ops = list[SoapOp]()
    read = dict[int, tuple[int, ...]]()
    for group, lead in enumerate(leads):
        cost = costs.solution(StagePlace(group, group, submesh, mesh), limit_bytes=inf).cost
        weights = [
            v
            for v, home in zip(step.graph.inputs, groups.layers.of_input, strict=True)
            if home == group and step.batch_dims[v] is None and _is_read(step, v)
        ]
        if lead is not None:
            read[lead.id] = tuple(weights)
        ops.append(_operator(step, classes, groups, group, _About(lead, cost, weights, pricer)))
    return SoapStep(
        step=step,
        problem=SoapProblem(
            ops=tuple(ops),
            edges=tuple(_edges(step, classes, groups)),
            num_devices=request.cluster.num_devices,
            transfer_seconds=_Transfers(request).seconds,
            sync_seconds=_Transfers(request).sync_seconds,
            usable_bytes=request.cluster.device.usable_bytes,
        ),
        leads=tuple(leads),
        weights=read,
        classes=classes,
    )


@dataclass(frozen=True, slots=True)
class _About:
    """What is known of an operator: its op, its cost on one device, its weights."""

    lead: Op | None
    cost: StageCost
    weights: list[int]
    pricer: Pricer


def _is_read(step: StepGraph, value: int) -> bool:
    """Return whether the forward pass reads an argument; optimizer state is read by the update alone."""
    return any(step.phases[op] is Phase.FORWARD for op in readers_of(step, value))


def _lead(step: StepGraph, groups: ColocatedGroups, group: int) -> Op | None:
    """Return the op of a group whose result has its dims: the largest contraction, else the largest result."""
    graph, flops = step.graph, op_flops(step)
    forward = [graph.ops[o] for o in groups.layers.ops_of(group) if step.phases[o] is Phase.FORWARD]
    able = [op for op in forward if op.results]
    return max(
        able,
        key=lambda op: (contractions(graph, op) > 0, flops[op.id], graph.values[op.results[0]].bytes, -op.id),
        default=None,
    )


def _operator(step: StepGraph, classes: DimClasses, groups: ColocatedGroups, group: int, about: _About) -> SoapOp:
    graph, lead = step.graph, about.lead
    dims = list[SoapDim]()
    if lead is not None:
        result = lead.results[0]
        held = {n for v in lead.operands if step.batch_dims[v] is None for n in classes.of_value(graph, v)}
        for dim, key in enumerate(classes.of_value(graph, result)):
            size, is_batch = graph.values[result].shape[dim], step.batch_dims[result] == dim
            kind = SoapKind.SAMPLE if is_batch else SoapKind.PARAMETER if key in held else SoapKind.ATTRIBUTE
            # A loop splits samples alone; one key stands for one dim.
            if size > 1 and key not in {each.key for each in dims} and (is_batch or not lead.bodies):
                dims.append(SoapDim(kind, size, key))
    keys = {each.key for each in dims}
    sizes = tuple(
        (float(graph.values[v].bytes), tuple(k for k in classes.of_value(graph, v) if k in keys)) for v in about.weights
    )
    total = sum(size for size, _ in sizes)
    seconds = _Seconds(
        step=step,
        classes=classes,
        ops=[graph.ops[o] for o in groups.layers.ops_of(group)],
        keys=tuple(each.key for each in dims),
        cost=about.cost,
        pricer=about.pricer,
    )
    return SoapOp(
        name=lead.primitive if lead is not None else "nothing",
        dims=tuple(dims),
        seconds=seconds.of,
        weights=sizes,
        state_bytes=about.cost.resident_bytes / total if total else 1.0,
        activation_bytes=about.cost.activation_bytes,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seconds:
    """Seconds of an operator by the degrees of its dims."""

    step: StepGraph
    classes: DimClasses
    ops: list[Op]
    keys: tuple[int, ...]
    cost: StageCost
    pricer: Pricer
    known: dict[tuple[int, ...], OpSeconds] = field(default_factory=dict[tuple[int, ...], OpSeconds])

    def of(self, degrees: tuple[int, ...]) -> OpSeconds:
        """Return the seconds of one part."""
        if degrees not in self.known:
            whole, split = self._prices((1,) * len(degrees)), self._prices(degrees)
            loops = any(op.bodies for op in self.ops)

            def share(*phases: Phase) -> float:
                total = sum(whole[phase] for phase in phases)
                return 1 / prod(degrees) if loops or not total else sum(split[phase] for phase in phases) / total

            self.known[degrees] = OpSeconds(
                self.cost.forward_seconds * share(Phase.FORWARD),
                self.cost.backward_seconds * share(Phase.BACKWARD),
                self.cost.update_seconds * share(Phase.UPDATE),
            )
        return self.known[degrees]

    def _prices(self, degrees: tuple[int, ...]) -> dict[Phase, float]:
        """Return the seconds of all ops of each phase."""
        graph, found = self.step.graph, dict.fromkeys(Phase, 0.0)
        ways = dict(zip(self.keys, degrees, strict=True))
        for op in self.ops:
            if op.bodies:
                continue
            rule = rule_of_op(graph, op.id)
            cuts = list[int]()
            for factor in range(len(rule.sizes)):
                key = self.classes.of_factor(graph, op, factor)
                n = ways.get(key, 1) if key is not None else 1
                cuts.append(n if rule.splits_into(factor, n) else 1)
            found[self.step.phases[op.id]] += self.pricer.local_price(
                self.pricer.price_class(graph, op.id), tuple(cuts)
            ).seconds
        return found


def _edges(step: StepGraph, classes: DimClasses, groups: ColocatedGroups) -> list[SoapEdge]:
    """Return the forward arrays between operators."""
    graph, of_op, free = step.graph, groups.layers.of_op, free_values(step.graph)
    found = list[SoapEdge]()
    for value, maker in zip(graph.values, graph.producer, strict=True):
        source = of_op[maker] if maker is not None else None
        if maker is None or source is None or value.id in free or step.phases[maker] is not Phase.FORWARD:
            continue
        readers = {of_op[c] for c in graph.consumers[value.id] if step.phases[c] is Phase.FORWARD}
        dims = tuple(zip(classes.of_value(graph, value.id), value.shape, strict=True))
        found += [
            SoapEdge(source, target, float(value.bytes), dims)
            for target in sorted(reader for reader in readers if reader is not None and reader != source)
        ]
    return found


@dataclass(frozen=True, kw_only=False)
class _Transfers:
    """Seconds of communication between devices of a cluster."""

    request: PlanRequest

    def seconds(self, size: float, source: int, target: int) -> float:
        """Return the seconds of sending bytes from one device to another."""
        per_host = self.request.cluster.devices_per_host
        return self.request.cost_model.transfer_seconds(size, crosses_hosts=source // per_host != target // per_host)

    def sync_seconds(self, size: float, devices: tuple[int, ...]) -> float:
        """Return the seconds of an all_reduce over devices."""
        hosts = Counter(device // self.request.cluster.devices_per_host for device in devices)
        group = Group(num_devices=len(devices), devices_per_host=max(hosts.values()))
        return self.request.cost_model.collective_seconds(Collective(kind="all_reduce", bytes=size, group=group))
