"""Price an op, a resharding or a whole task on one logical mesh with a cost model.

    seconds(op)       = cost_model.compute(flops / Π split axes, local bytes)     (`Pricer.op_seconds`)
    seconds(move)     = cost_model.collective(kind, local buffer, group of axis)  (`Pricer.step_seconds`)
    seconds(transfer) = its moves inside the meshes + max over devices and hosts of the time to send or receive
                                                                                  (`transfer_seconds`)

`Estimator` is a machine that is driven by a walk (`alpa_lite.plan.walk.Walk`), so that it prices a task exactly as it
will be emitted. Ops of one class (`PriceClass`) have equal prices under equal placements and are priced once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

from alpa_lite.plan.plan import CollectiveUse, OpPlacement
from alpa_lite.plan.walk import Application, Walk, body_walk, combination, reduced_axes, sharing_axes
from alpa_lite.program.ir import MOVES, TO_DEVICE, TO_HOST, Graph, Op, Value, Wiring, item_bytes
from alpa_lite.program.memo import memoized
from alpa_lite.rules import Rule
from alpa_lite.rules.fusion import Access, accesses, on_chip
from alpa_lite.rules.op_info import OpClass, op_class, rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh, axis_group
from alpa_lite.sharding.specs import Move, Spec, num_shards
from alpa_lite.sharding.transfer import Placement, PlannedTransfer
from cost_models.cluster import Cluster
from cost_models.composed import CostModel
from cost_models.hardware import Fusion
from cost_models.overlap import Stream, StreamTask, loop_seconds, serial_seconds, simulate
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


class Estimator:
    """A machine whose arrays are the numbers of the stream tasks that make them; it prices a task of a plan.

    Kernels and collectives become `overlap.StreamTask`s, which run concurrently unless one needs the other. Loops are
    priced from their first trips. NOTHING stands for arrays that exist from the start.
    """

    NOTHING = -1

    def __init__(
        self,
        pricer: Pricer,
        *,
        stage: int,
        phase: str,
        runs: int,
        batch_dims: Callable[[Graph], Sequence[int | None]] = lambda graph: (),
    ) -> None:
        """Create an estimator for one task of a stage and phase.

        `runs` is its number of executions per step. `batch_dims` returns the dim of the samples of each value of a
        graph; without it, no product counts as those of several experts.
        """
        self.pricer = pricer
        self.batch_dims = batch_dims
        self.stage = stage
        self.phase = phase
        self.runs = runs
        self.trips: float = 1
        self.compute_seconds = 0.0
        self.flops = 0.0
        self.calls = 0.0
        self.collectives: list[CollectiveUse] = []
        self.tasks: list[StreamTask] = []

    @property
    def seconds(self) -> float:
        """The seconds of one execution of the task."""
        # The host launches kernels while others run: the slower of the two counts.
        return max(self.simulated(self.tasks), self.host_seconds)

    @property
    def host_seconds(self) -> float:
        """The seconds that the host needs to launch one execution of the task, if it launches kernels one by one."""
        return self.calls * self.pricer.cost_model.backend.call_seconds

    def literal(self, value: Value) -> int:
        """Return NOTHING, since scalars are free."""
        return self.NOTHING

    def reshard(self, array: int, value: Value, steps: tuple[Move, ...], op: Op | None) -> int:
        """Price the moves and return the last one."""
        for step in steps:
            # A local move takes a part of what each device holds already.
            if not step.is_local:
                array = self._use(step.kind, step.bytes_factor * value.bytes, step.axes, op, (array,))
        return array

    def _use(self, kind: str, buffer: float, axes: tuple[str, ...], op: Op | None, needs: Sequence[int]) -> int:
        """Append a collective that waits for the tasks `needs` and return its number."""
        # Listed once per place in the code, and counted with the trips of all loops around it.
        seconds = self.pricer.collective_seconds(kind, buffer, axes)
        self.collectives.append(
            CollectiveUse(
                kind=kind,
                bytes=buffer,
                axis="·".join(axes),
                num_devices=prod(self.pricer.sizes[a] for a in axes),
                count=self.runs * self.trips,
                seconds=seconds,
                stage=self.stage,
                phase=self.phase,
                source=op.source if op else "",
            )
        )
        # The host launches a collective as it launches a kernel.
        self.calls += self.trips
        # A product makes the parts of its sum one after the other.
        streams = kind == "reduce_scatter" and self.pricer.cost_model.backend.overlap_products
        return self._add(seconds, "communication", needs, streams=streams)

    def _add(self, seconds: float, stream: Stream, needs: Sequence[int], *, streams: bool = False) -> int:
        """Append a stream task that waits for the tasks `needs` and return its number."""
        # An op may read the same result twice.
        needed = tuple(dict.fromkeys(n for n in needs if n != self.NOTHING))
        self.tasks.append(StreamTask(seconds=seconds, stream=stream, needs=needed, streams=streams))
        return len(self.tasks) - 1

    def apply(self, application: Application, operands: list[int]) -> list[int]:
        """Price one op with its own collectives, which follow its kernel."""
        op, graph = application.op, application.graph
        price = self.pricer.price(graph, op, application.placement)
        self.compute_seconds += price.seconds * self.trips
        self.flops += price.flops * self.trips
        # Backends that launch kernels one by one need host time for each, whatever runs on the device.
        self.calls += price.num_kernels * self._num_weights(application) * self.trips
        streams = self.pricer.cost_model.backend.overlap_products and application.rule.work_kind == "matmul"
        if op.primitive in MOVES:
            return [self._moved(op, price, operands)]
        made = self._add(price.seconds, "compute", operands, streams=streams)
        for kind, axes, buffer in price.collectives:
            made = self._use(kind, buffer, axes, op, (made,))
        return [made] * len(op.results)

    def _num_weights(self, application: Application) -> int:
        """Return the kernels as which the host issues a product: libraries have one for each weight, as of experts.

        1 where nothing is issued by itself. Weights, and their gradients, are the arrays of a product without samples.
        """
        rule, op = application.rule, application.op
        if not self.pricer.cost_model.backend.call_seconds or rule.work_kind != "matmul" or len(op.operands) != 2:
            return 1
        batch, dims = self.batch_dims(application.graph), (*rule.operands, *rule.results)
        if not batch or sum(batch[v] is None for v in (*op.operands, *op.results)) != 1:
            return 1
        shared = set[int].intersection(*({f for factors in each for f in factors} for each in dims))
        cuts = cuts_of(application.placement, self.pricer.sizes)
        return prod(rule.sizes[f] // cuts[f] for f in shared)

    def _moved(self, op: Op, price: OpPrice, operands: Sequence[int]) -> int:
        """Append a copy to the host or from there. What comes back starts where it stands in the program."""
        # Memory is counted from there on, and the link has no reason to wait longer.
        before = [len(self.tasks) - 1] if op.primitive == TO_DEVICE and self.tasks else []
        stream = "to_host" if op.primitive == TO_HOST else "to_device"
        return self._add(price.host_seconds, stream, [*operands, *before])

    def control_flow(self, application: Application, operands: list[int], wiring: Wiring, walk: Walk[int]) -> list[int]:
        """Price each body from its first trips."""
        op, trips, tasks, seconds = application.op, self.trips, self.tasks, 0.0
        self.trips *= wiring.trips
        for number in range(len(op.bodies)):
            # Operands stand at the beginning as tasks without duration, so that body tasks can wait for carried values.
            self.tasks = [StreamTask(seconds=0.0) for _ in operands]
            outputs = body_walk(application, wiring, number, walk, list(range(len(operands))))
            pairs = zip(outputs, wiring.outputs[number], strict=True)
            handed_on = [(task, r) for task, r in pairs if r is not None and task != self.NOTHING]
            # The next trip waits for these tasks at the operands that they replace.
            carried = [(task, wiring.carried[r]) for task, r in handed_on if r in wiring.carried]
            seconds += self._looped(self.tasks, carried, wiring.trips)
        self.trips, self.tasks = trips, tasks
        # Work and collectives overlap inside the loop, but not with what is outside: it occupies both streams.
        return [self._add(seconds, "both", operands)] * len(op.results)

    def simulated(self, tasks: Sequence[StreamTask]) -> float:
        """Return the seconds of some stream tasks that run concurrently where they can."""
        return self._looped(tasks, (), 1.0)

    def laid_out(self, tasks: Sequence[StreamTask]) -> list[tuple[float, float]]:
        """Return start and end in seconds of each of some stream tasks, as `simulated` runs them."""
        if self.pricer.runs_in_turn:
            ends = list(accumulate(task.seconds for task in tasks))
            return [(end - task.seconds, end) for task, end in zip(tasks, ends, strict=True)]
        run = simulate(tasks, contention=self.pricer.cost_model.cluster.device.contention)
        return list(zip(run.starts, run.ends, strict=True))

    def _looped(self, tasks: Sequence[StreamTask], carried: Sequence[tuple[int, int]], trips: float) -> float:
        if self.pricer.runs_in_turn:
            return trips * serial_seconds(tasks)
        return loop_seconds(tasks, carried, trips, contention=self.pricer.cost_model.cluster.device.contention)


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
