"""Price an op, a resharding or a whole task on one logical mesh with a cost model.

    seconds(op)       = cost_model.compute(flops / Π split axes, local bytes)     (`Pricer.op_seconds`)
    seconds(move)     = cost_model.collective(kind, local buffer, group of axis)  (`Pricer.step_seconds`)
    seconds(transfer) = its moves inside the meshes + max over devices and hosts of the time to send or receive
                                                                                  (`transfer_seconds`)
    bytes(sum += part)  = the sum, read by the kernel that makes the part; else a kernel reads both and writes the sum
                                                                                  (`Pricer.addition_work`)

Ops of one class (`PriceClass`) have equal prices under equal placements and are priced once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.walk import combination, reduced_axes, sharing_axes
from alpa_lite.program.ir import MOVES, Graph, Op, Value, item_bytes
from alpa_lite.program.memo import memoized
from alpa_lite.rules import Rule
from alpa_lite.rules.fusion import Access, accesses, on_chip, take_addends
from alpa_lite.rules.op_info import OpClass, op_class, rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh, axis_group
from alpa_lite.sharding.specs import Move, Spec, num_shards
from alpa_lite.sharding.transfer import Placement, PlannedTransfer
from cost_models.cluster import Cluster
from cost_models.composed import CostModel
from cost_models.hardware import Fusion
from cost_models.work import Collective, Group, Product, Work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceClass:
    """A class of ops with equal prices under equal placements: their op class, memory accesses and fused attention.

    Equal classes are one object across graphs, except for ops with bodies.

    Attributes:
        op: class of the op.
        access: operands and results that it reads and writes in memory, after fusion.
        in_attention: whether it runs inside a fused attention kernel.
        half_masked: whether that kernel skips half of the product because of a causal mask.
    """

    op: OpClass
    access: Access
    in_attention: bool
    half_masked: bool


@memoized
def price_classes(graph: Graph, fusion: Fusion = "all", fused_attention: bool = False) -> tuple[PriceClass, ...]:
    """Return the price class of each op of a graph; `fused_attention`: the backend has a kernel for attention."""
    table = accesses(graph, fusion=fusion, fused_attention=fused_attention)
    kernels = on_chip(graph) if fused_attention else None
    return tuple(
        # Not interned: the global table would keep bodies alive.
        (_class_of if op.bodies else _class)(
            op_class(graph, op.id),
            access,
            # The softmax between the products is a part of their rate (`composed`, head loss), not work beside it.
            kernels is not None and not kernels.values.isdisjoint((*op.operands, *op.results)),
            kernels is not None and op.id in kernels.half_masked,
        )
        for op, access in zip(graph.ops, table, strict=True)
    )


def _class_of(op: OpClass, access: Access, in_attention: bool, half_masked: bool) -> PriceClass:
    return PriceClass(op=op, access=access, in_attention=in_attention, half_masked=half_masked)


@memoized(entries=50_000)
def _class(op: OpClass, access: Access, in_attention: bool, half_masked: bool) -> PriceClass:
    """Return the interned price class, so that comparison by identity suffices."""
    return _class_of(op, access, in_attention, half_masked)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrice:
    """The price of one device's part of an op.

    Attributes:
        seconds: compute time in seconds.
        flops: FLOPs of one device.
        num_kernels: kernels that the host launches.
        collectives: (kind, axes, buffer bytes) of the op's `own_collectives`.
        host_seconds: time of a copy to the host or from there, on the link between them.
    """

    seconds: float
    flops: float
    num_kernels: float
    collectives: tuple[tuple[str, tuple[str, ...], float], ...] = ()
    host_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Pricer:
    """Prices in seconds on one logical mesh over one submesh; all are memoized by class.

    Attributes:
        cost_model: the cost model.
        submesh: the devices.
        mesh: the logical mesh over them.
    """

    cost_model: CostModel
    submesh: Submesh
    mesh: LogicalMesh
    _memo: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float], repr=False)
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict[tuple[str, ...], Group], repr=False)
    _prices: dict[tuple[object, ...], OpPrice] = field(default_factory=dict[tuple[object, ...], OpPrice], repr=False)
    _local: dict[tuple[object, ...], OpPrice] = field(default_factory=dict[tuple[object, ...], OpPrice], repr=False)

    def elsewhere(self, submesh: Submesh, mesh: LogicalMesh) -> Pricer:
        """Return a pricer for another mesh with the same cost model; they share prices of one device's part of ops."""
        return Pricer(cost_model=self.cost_model, submesh=submesh, mesh=mesh, _local=self._local)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of devices along each mesh axis."""
        return self.mesh.axis_sizes

    @property
    def runs_in_turn(self) -> bool:
        """Whether kernels and collectives never run at the same time."""
        return self.cost_model.cluster.shared_processor or not self.cost_model.backend.overlap

    def group(self, axes: tuple[str, ...]) -> Group:
        """Return the devices that communicate along some axes."""
        if axes not in self._groups:
            g = axis_group(self.submesh, self.mesh, *axes, hosts_per_domain=self.cost_model.cluster.hosts_per_domain)
            self._groups[axes] = Group(
                num_devices=g.num_devices,
                devices_per_host=g.devices_per_host,
                num_concurrent=g.num_concurrent,
                devices_per_domain=g.devices_per_domain,
                stride=g.stride,
            )
        return self._groups[axes]

    def step_seconds(self, step: Move, array_bytes: float) -> float:
        """Return the seconds of one move of an array of `array_bytes` bytes (unsharded)."""
        if step.is_local:
            return 0.0
        return self.collective_seconds(step.kind, step.bytes_factor * array_bytes, step.axes)

    def collective_seconds(self, kind: str, buffer_bytes: float, axes: tuple[str, ...]) -> float:
        """Return the seconds of one collective over axes with `buffer_bytes` bytes per device."""
        key = (kind, buffer_bytes, axes)
        # The search prices few distinct collectives very many times.
        if key not in self._memo:
            collective = Collective(kind=kind, bytes=buffer_bytes, group=self.group(axes))  # type: ignore[arg-type]
            self._memo[key] = self.cost_model.collective_seconds(collective)
        return self._memo[key]

    def host_seconds(self, block: float) -> float:
        """Return the seconds of a copy of `block` bytes between a device and its host, in one direction."""
        host = self.cost_model.cluster.host_memory
        return host.link.seconds(block) if host is not None and block else 0.0

    def price_class(self, graph: Graph, op_id: int) -> PriceClass:
        """Return the price class of an op, which is equal for ops with equal prices under equal placements."""
        backend = self.cost_model.backend
        return price_classes(graph, backend.fusion, backend.fused_attention)[op_id]

    def op_work(self, graph: Graph, op: Op, placement: OpPlacement) -> Work:
        """Return the work of one device for one op: its part of the FLOPs, and its memory traffic after fusion."""
        return local_work(self.price_class(graph, op.id), cuts_of(placement, self.sizes))

    def price(self, graph: Graph, op: Op, placement: OpPlacement) -> OpPrice:
        """Return the price of an op without bodies on one device."""
        kind = self.price_class(graph, op.id)
        key = (kind, placement.factors)
        found = self._prices.get(key)
        if found is None and op.primitive in MOVES:
            (value,), (spec,) = graph.results(op), placement.results
            size = block_bytes(value, spec, self.sizes)
            found = self._prices[key] = OpPrice(
                seconds=0.0, flops=0.0, num_kernels=0.0, host_seconds=self.host_seconds(size)
            )
        if found is None:
            local = self.local_price(kind, cuts_of(placement, self.sizes))
            # Groups of axes differ between meshes, so that collectives are not part of the shared price.
            if has_own_collectives(graph, op):
                local = replace(local, collectives=tuple(own_collectives(graph, op, placement, self.sizes)))
            found = self._prices[key] = local
        return found

    def local_price(self, kind: PriceClass, cuts: tuple[int, ...]) -> OpPrice:
        """Return the price, without collectives, of an op of a class whose factors are split into `cuts` parts.

        It does not depend on which axes split them, so meshes share it.
        """
        # All devices of a mesh run the same op at the same time.
        active = self.mesh.num_devices
        # Devices that share a processor slow each other down, so that the price depends on their number.
        key = (kind, cuts, active if self.cost_model.cluster.shared_processor else 1)
        found = self._local.get(key)
        if found is None:
            work, seconds = local_work(kind, cuts), 0.0
            # Ops without any work, such as folded ones, run no kernel.
            if work.flops or work.bytes or work.num_kernels:
                seconds = self.cost_model.compute_seconds(work, num_active_devices=active)
            found = self._local[key] = OpPrice(seconds=seconds, flops=work.flops, num_kernels=work.num_kernels)
        return found

    def fuses_additions(self, graph: Graph, value: int) -> bool:
        """Return whether the kernel that makes a micro-batch's part of a value adds it to the sum.

        XLA fuses additions with element-wise ops, and gives products the sum as their addend; on CPUs it calls a
        library, which takes none. After anything else, a loop for example, the addition is a kernel of its own, as it
        always is without a compiler.
        """
        producer, model = graph.producer[value], self.cost_model
        fuses = model.backend.fusion == "all" and not model.cluster.shared_processor
        return fuses and producer is not None and take_addends(graph)[producer]

    def addition_work(self, part: Value, stored: Spec, *, fused: bool) -> Work:
        """Return one device's work to add a micro-batch's part of a value to its sum, which lies in the spec `stored`.

        `fused`: the kernel that makes the part reads the sum, and writes that instead; else another one reads both.
        """
        block = local_bytes(part, stored, self.sizes) if part.rank else 0.0
        if fused or not block:
            return Work(bytes=block, dtype=part.dtype, num_kernels=0)
        return Work(flops=block / item_bytes(part.dtype), bytes=3 * block, dtype=part.dtype)

    def addition_seconds(self, part: Value, stored: Spec, *, fused: bool) -> float:
        """Return the seconds of `addition_work`."""
        work = self.addition_work(part, stored, fused=fused)
        return self.cost_model.compute_seconds(work, num_active_devices=self.mesh.num_devices) if work.bytes else 0.0

    def op_seconds(self, graph: Graph, op: Op, placement: OpPlacement) -> float:
        """Return the seconds of one op, including the collectives that are part of it (`own_collectives`)."""
        price = self.price(graph, op, placement)
        return (
            price.seconds
            + price.host_seconds
            + sum(self.collective_seconds(kind, buffer, axes) for kind, axes, buffer in price.collectives)
        )


def local_work(kind: PriceClass, cuts: Sequence[int]) -> Work:
    """Return the work of one device for an op of a class whose factors are split into `cuts` parts."""
    rule, view, access = kind.op.rule, kind.op.view, kind.access
    matrix, moved = rule.work_kind != "elementwise", 0.0
    for is_result, number, part in (*access.reads, *access.writes):
        values, dims = (view.results, rule.results) if is_result else (view.operands, rule.operands)
        moved += part * values[number].bytes / _shards(dims[number], cuts)
    # Under a causal mask the kernel skips the half of the product above the diagonal.
    flops = rule.flops / prod(cuts) * (0.5 if kind.half_masked else 1.0)
    # A matrix product runs at the rate of its operands' dtype, whatever the dtype of its accumulator and result.
    values = (*view.operands, *view.results) if matrix else (*view.results, *view.operands)
    floats = (v.dtype for v in values if v.is_float)
    return Work(
        flops=flops,
        bytes=moved,
        kind="attention" if kind.in_attention else rule.work_kind,
        dtype=next(floats, "float32"),
        num_kernels=access.num_kernels,
        product=local_product(rule, view.results[0], cuts) if matrix and flops else None,
    )


def cuts_of(placement: OpPlacement, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the number of parts into which a placement splits each factor."""
    return tuple([prod([sizes[a] for a in axes]) if axes else 1 for axes in placement.factors])


def _shards(dims: tuple[tuple[int, ...], ...], cuts: Sequence[int]) -> int:
    """Return the number of blocks of a tensor whose dims hold these factors."""
    return prod([cuts[f] for factors in dims for f in factors])


def local_product(rule: Rule, result: Value, cuts: Sequence[int]) -> Product | None:
    """Return the matrix product that one device runs for a contraction or convolution, derived from its rule.

    count = factors of both operands and the result,  columns = factors of the second operand and the result alone
    rows  = elements of the result / (count * columns),  depth = FLOPs / (2 * elements of the result)
    """
    # A kernel of attention holds two products, whose shapes its rule does not tell.
    if len(rule.operands) < 2 or rule.work_kind == "attention":
        return None
    # Batch factors occur in all tensors, contracted ones in both operands, free ones in one operand and the result.
    first, second, made = ({f for factors in dims for f in factors} for dims in (*rule.operands[:2], rule.results[0]))
    blocks = [n // cut for n, cut in zip(rule.sizes, cuts, strict=True)]
    count = prod(blocks[f] for f in first & second & made)
    columns = prod(blocks[f] for f in (second & made) - first)
    elements = result.num_elements / _shards(rule.results[0], cuts)
    depth = rule.flops / prod(cuts) / (2 * elements)
    return Product(rows=elements / (count * columns), columns=columns, depth=depth, count=count)


def has_own_collectives(graph: Graph, op: Op) -> bool:
    """Return whether an op contains collectives under some placement."""
    rule = rule_of_op(graph, op.id)
    # Sums may stay partial and be reduced later, by a collective of their own.
    return op.effectful or bool(rule.halos) or rule.reduction != "sum"


def own_collectives(
    graph: Graph, op: Op, placement: OpPlacement, sizes: Mapping[str, int]
) -> list[tuple[str, tuple[str, ...], float]]:
    """Return (kind, axes, buffer bytes) of the collectives inside an op under a placement.

    These are halo exchanges of its operands, the broadcast of what an effect returns on one device, and the combination
    of a max, min, and, or, or product over a split factor, as such results cannot stay partial.
    """
    rule, shared = rule_of_op(graph, op.id), sharing_axes(op, sizes)
    found = _halo_exchanges(rule, placement, graph.operands(op), sizes)
    found += [("all_reduce", shared, float(v.bytes)) for v in graph.results(op) if shared and v.bytes]
    reduced = reduced_axes(rule, placement) if rule.reduction != "sum" else ()
    # In the order of the mesh, so that the same axes are always the same key.
    axes = tuple(a for a in sizes if a in reduced)
    if not axes:
        return found
    cuts = cuts_of(placement, sizes)
    for i, v in enumerate(graph.results(op)):
        kind, item = combination(rule.reduction, v.dtype)
        block = item * v.num_elements / _shards(rule.results[i], cuts)
        found.append((kind, axes, block * (prod(sizes[a] for a in axes) if kind == "all_gather" else 1)))
    return found


def _halo_exchanges(
    rule: Rule, placement: OpPlacement, operands: Sequence[Value], sizes: Mapping[str, int]
) -> list[tuple[str, tuple[str, ...], float]]:
    """Return the permutes that fetch the halos of an op's operands; a later halo includes the rows of earlier ones."""
    found = list[tuple[str, tuple[str, ...], float]]()
    blocks, cuts = dict[int, list[int]](), cuts_of(placement, sizes) if rule.halos else ()
    for halo in rule.halos:
        axes = tuple(a for a in sizes if a in placement.factors[halo.factor])
        if not axes:
            continue
        value, dims = operands[halo.operand], rule.operands[halo.operand]
        block = blocks.setdefault(
            halo.operand, [n // _shards((d,), cuts) for n, d in zip(value.shape, dims, strict=True)]
        )
        row = item_bytes(value.dtype) * prod(n for d, n in enumerate(block) if d != halo.dim)
        found += [("permute", axes, float(row * rows)) for rows in (halo.before, halo.after) if rows]
        # A halo along a second dim also carries the corners that the first one has fetched.
        block[halo.dim] += halo.before + halo.after
    return found


def transfer_seconds(
    planned: PlannedTransfer, cost_model: CostModel, *, source: Pricer | None = None, target: Pricer | None = None
) -> float:
    """Return the seconds of a transfer between submeshes: moves in the source mesh, sends, moves in the target mesh.

    All pieces are sent at once, and the busiest link into or out of a device or host determines the time.

    Args:
        planned: the transfer.
        cost_model: the cost model of the cluster.
        source: pricer of the moves in the source mesh, if its devices are not those of `cost_model`.
        target: the same for the target mesh.
    """

    def inside(layout: Placement, pricer: Pricer | None, steps: Sequence[Move]) -> float:
        pricer = pricer or Pricer(cost_model=cost_model, submesh=layout.submesh, mesh=layout.mesh)
        return sum(pricer.step_seconds(step, planned.array.bytes) for step in steps)

    before = inside(planned.source, source, planned.resolve)
    sending = max(link_seconds(planned, cost_model).values(), default=0.0)
    return before + sending + inside(planned.target, target, planned.gathers)


def link_seconds(planned: PlannedTransfer, cost_model: CostModel) -> dict[tuple[str, str, int], float]:
    """Return the seconds for which the sends of a transfer occupy each link.

    A link is ("device" or "host", "out" or "in", number). Sends within a host occupy links of devices, those between
    hosts links of hosts, and a shared processor is one link.
    """
    per_host = cost_model.cluster.devices_per_host
    within, across = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    busy: dict[tuple[str, int], set[int]] = {}
    for ends, sent in planned.bytes_between.items():
        hosts = [device // per_host for device in ends]
        for way, device, host in zip(("out", "in"), ends, hosts, strict=True):
            if hosts[0] == hosts[1]:
                # Inside a host each device has links of its own; hosts have one network that their devices share.
                within[way, device] += sent
            else:
                across[way, host] += sent
                busy.setdefault((way, host), set()).add(device)
    # A shared processor copies one piece after the other; `within` counts each piece twice, as sent and as received.
    loads = {("out", 0): sum(within.values()) / 2} if cost_model.cluster.shared_processor and within else within
    found = {("device", *at): cost_model.transfer_seconds(b, crosses_hosts=False) for at, b in loads.items()}
    for at, b in across.items():
        found["host", *at] = cost_model.transfer_seconds(b, crosses_hosts=True, num_links=len(busy[at]))
    return found


def dispatch_seconds(cluster: Cluster) -> float:
    """Return the seconds that dispatching a program adds to its time.

    They are 0 for devices with processors of their own, which continue to work during the dispatch.
    """
    return cluster.device.dispatch_seconds if cluster.shared_processor else 0.0


def crosses_hosts(cluster: Cluster, a: Submesh, b: Submesh) -> bool:
    """Return whether some devices of the two submeshes are on different hosts."""
    hosts = {d // cluster.devices_per_host for d in (*a.devices, *b.devices)}
    return len(hosts) > 1


def local_bytes(value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
    """Return the bytes of one device's block of a value; none for one that lies in the memory of the host."""
    return 0.0 if value.on_host else block_bytes(value, spec, sizes)


def block_bytes(value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
    """Return the bytes of one device's block of a value, in the memory of the device or its host."""
    return value.num_elements * item_bytes(value.dtype) / num_shards(spec, sizes)
