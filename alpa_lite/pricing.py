"""What an op, a resharding or a whole task costs on one logical mesh, by a cost model.

    seconds(op)    = cost_model.compute(flops / Π split axes, local bytes)     (Pricer.op_seconds)
    seconds(move)  = cost_model.collective(kind, local buffer, group of axis)  (Pricer.step_seconds)

`Estimator` is the machine that drives a walk (`spmd.Walk`) to price a task exactly as it will be emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from alpa_lite.graph.ir import Graph, Op, Value, item_bytes
from alpa_lite.graph.wiring import Wiring
from alpa_lite.mesh import LogicalMesh, Submesh, axis_group
from alpa_lite.plan import CollectiveUse, OpPlacement
from alpa_lite.rules import Rule
from alpa_lite.rules.graph_facts import fused_values, price_class, rule_of_op
from alpa_lite.sharding import Spec, Step, num_shards
from alpa_lite.spmd import Application, Walk, body_walk, combination, reduced_axes, sharing_axes
from cost_models.collective import Collective, Group
from cost_models.interface import CostModel
from cost_models.work import Work

#: Ops that XLA always folds into their readers: they neither compute nor write anything of their own.
FOLDED = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims iota optimization_barrier copy stop_gradient empty "
    "sharding_constraint random_wrap random_unwrap bitcast_convert_type".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrice:
    """One device's part of an op: seconds and FLOPs of its work; kind, axes and buffer bytes of `own_collectives`."""

    seconds: float
    flops: float
    collectives: tuple[tuple[str, tuple[str, ...], float], ...]


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """Prices on one logical mesh over one submesh; every answer in seconds. Ops that are alike are priced once."""

    cost_model: CostModel
    submesh: Submesh
    mesh: LogicalMesh
    _memo: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float], repr=False)
    _prices: dict[tuple[object, ...], OpPrice] = field(default_factory=dict[tuple[object, ...], OpPrice], repr=False)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Devices per mesh axis."""
        return self.mesh.axis_sizes

    def group(self, axes: tuple[str, ...]) -> Group:
        """The devices that communicate along axes."""
        g = axis_group(self.submesh, self.mesh, *axes)
        return Group(num_devices=g.num_devices, devices_per_host=g.devices_per_host, num_concurrent=g.num_concurrent)

    def step_seconds(self, step: Step, array_bytes: float) -> float:
        """One elementary move of an array of this size (whole array, in bytes)."""
        if step.is_local:
            return 0.0
        return self.collective_seconds(step.kind, step.bytes_factor * array_bytes, step.axes)

    def collective_seconds(self, kind: str, buffer_bytes: float, axes: tuple[str, ...]) -> float:
        """One collective over axes with this buffer per device."""
        key = (kind, buffer_bytes, axes)
        if key not in self._memo:
            collective = Collective(kind=kind, bytes=buffer_bytes, group=self.group(axes))  # type: ignore[arg-type]
            self._memo[key] = self.cost_model.collective_seconds(collective)
        return self._memo[key]

    def op_work(self, graph: Graph, op: Op, placement: OpPlacement) -> Work:
        """Work of one device for one op. Chains of element-wise ops are fused: only what leaves a chain is written."""
        if op.primitive in FOLDED:
            return Work()
        rule, operands, results = rule_of_op(graph, op.id), graph.operands(op), graph.results(op)
        split = prod(self.sizes[a] for axes in placement.factors for a in axes)
        moved = sum(
            v.bytes / _shards(rule.results[i], placement, self.sizes)
            for i, v in enumerate(results)
            if v.id not in fused_values(graph)
        )
        largest = max((v.num_elements for v in results), default=0)
        if rule.work_kind != "elementwise" or rule.opaque or all(v.num_elements < largest for v in operands):
            moved += sum(v.bytes / _shards(rule.operands[i], placement, self.sizes) for i, v in enumerate(operands))
        return Work(
            flops=rule.flops / split,
            bytes=moved,
            kind=rule.work_kind,
            dtype=next((v.dtype for v in (*results, *operands) if v.is_float), "float32"),
        )

    def price(self, graph: Graph, op: Op, placement: OpPlacement) -> OpPrice:
        """What one op without bodies takes on one device."""
        key = (price_class(graph, op.id), placement.factors)
        if key not in self._prices:
            work, seconds = self.op_work(graph, op, placement), 0.0
            if work.flops or work.bytes:
                seconds = self.cost_model.compute_seconds(work, num_active_devices=self.mesh.num_devices)
            collectives = tuple(own_collectives(graph, op, placement, self.sizes))
            self._prices[key] = OpPrice(seconds=seconds, flops=work.flops, collectives=collectives)
        return self._prices[key]

    def op_seconds(self, graph: Graph, op: Op, placement: OpPlacement) -> float:
        """Compute of one op plus the collectives that are part of it (own_collectives)."""
        price = self.price(graph, op, placement)
        return price.seconds + sum(
            self.collective_seconds(kind, buffer, axes) for kind, axes, buffer in price.collectives
        )


def _shards(dims: tuple[tuple[int, ...], ...], placement: OpPlacement, sizes: Mapping[str, int]) -> int:
    return prod(sizes[a] for factors in dims for f in factors for a in placement.factors[f])


def own_collectives(
    graph: Graph, op: Op, placement: OpPlacement, sizes: Mapping[str, int]
) -> list[tuple[str, tuple[str, ...], float]]:
    """(kind, axes, buffer bytes) of the collectives inside an op under a placement.

    The halos that its operands need, what an effect on one device gives to the others, and the combination of a max,
    min, and, or, product over a split factor: such results cannot stay partial.
    """
    rule, shared = rule_of_op(graph, op.id), sharing_axes(op, sizes)
    found = _halo_exchanges(rule, placement, graph.operands(op), sizes)
    found += [("all_reduce", shared, float(v.bytes)) for v in graph.results(op) if shared and v.bytes]
    axes = tuple(a for a in sizes if a in reduced_axes(rule, placement))
    if rule.reduction == "sum" or not axes:
        return found
    for i, v in enumerate(graph.results(op)):
        kind, item = combination(rule.reduction, v.dtype)
        block = item * v.num_elements / _shards(rule.results[i], placement, sizes)
        found.append((kind, axes, block * (prod(sizes[a] for a in axes) if kind == "all_gather" else 1)))
    return found


def _halo_exchanges(
    rule: Rule, placement: OpPlacement, operands: Sequence[Value], sizes: Mapping[str, int]
) -> list[tuple[str, tuple[str, ...], float]]:
    found = list[tuple[str, tuple[str, ...], float]]()
    blocks = dict[int, list[int]]()
    for halo in rule.halos:
        axes = tuple(a for a in sizes if a in placement.factors[halo.factor])
        if not axes:
            continue
        value, dims = operands[halo.operand], rule.operands[halo.operand]
        block = blocks.setdefault(
            halo.operand, [n // _shards((d,), placement, sizes) for n, d in zip(value.shape, dims, strict=True)]
        )
        row = item_bytes(value.dtype) * prod(n for d, n in enumerate(block) if d != halo.dim)
        found += [("permute", axes, float(row * rows)) for rows in (halo.before, halo.after) if rows]
        block[halo.dim] += halo.before + halo.after
    return found


class Estimator:
    """A machine whose arrays are nothing at all: it adds up seconds, FLOPs and collectives."""

    def __init__(self, pricer: Pricer, *, stage: int, phase: str, runs: int) -> None:
        """`runs`: how often the task runs per step."""
        self.pricer = pricer
        self.stage = stage
        self.phase = phase
        self.runs = runs
        self.trips: float = 1
        self.compute_seconds = 0.0
        self.flops = 0.0
        self.collectives: list[CollectiveUse] = []

    @property
    def seconds(self) -> float:
        """Seconds of one run of the task."""
        return self.compute_seconds + sum(u.seconds * u.count for u in self.collectives) / max(1, self.runs)

    def literal(self, value: Value) -> None:
        """Scalars are free."""

    def reshard(self, array: None, value: Value, steps: tuple[Step, ...], op: Op | None) -> None:
        """Price the moves."""
        for step in steps:
            if not step.is_local:
                self._use(step.kind, step.bytes_factor * value.bytes, step.axes, op)

    def _use(self, kind: str, buffer: float, axes: tuple[str, ...], op: Op | None) -> None:
        self.collectives.append(
            CollectiveUse(
                kind=kind,
                bytes=buffer,
                axis="·".join(axes),
                num_devices=prod(self.pricer.sizes[a] for a in axes),
                count=self.runs * self.trips,
                seconds=self.pricer.collective_seconds(kind, buffer, axes),
                stage=self.stage,
                phase=self.phase,
                source=op.source if op else "",
            )
        )

    def apply(self, application: Application, operands: list[None]) -> list[None]:
        """Price one op."""
        op, graph = application.op, application.graph
        price = self.pricer.price(graph, op, application.placement)
        self.compute_seconds += price.seconds * self.trips
        self.flops += price.flops * self.trips
        for kind, axes, buffer in price.collectives:
            self._use(kind, buffer, axes, op)
        return [None] * len(op.results)

    def control_flow(
        self, application: Application, operands: list[None], wiring: Wiring, walk: Walk[None]
    ) -> list[None]:
        """Price each body once and multiply by its trips."""
        before = self.trips
        self.trips *= wiring.trips
        for number in range(len(application.op.bodies)):
            body_walk(application, wiring, number, walk, operands)
        self.trips = before
        return [None] * len(application.op.results)


def local_bytes(value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
    """Bytes of one device's block."""
    return value.num_elements * item_bytes(value.dtype) / num_shards(spec, sizes)
