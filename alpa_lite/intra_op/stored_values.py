"""Find out which values the kernels of a graph write to memory, and in which order the kernels run.

    kernels      an op runs inside the kernels that read its result, unless one of them cannot compute it or the op
                 would run in several and is costly, or reads several arrays that they need not read       (_fuse)
    order        that of the ops                                                            (run_order)
                 on GPUs gradients of weights and the loss come at the end of the backward pass, or before the
                 recomputation or loop that waits for them                                 (_with_late_results)
                 on the CPU backend breadth first (`kernel_queue`): gradients of weights and what the backward pass
                 recomputes wait for their turn, and a broadcast is written long before it is read
    gathered     parameters that lie in parts are there when those before them were read, as programs gather for one
                 op ahead                                                                           (waits_for)

The rules follow XLA (instruction fusion with duplication, fusion of siblings). `KernelModel` states where backends
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from alpa_lite.intra_op.kernel_queue import Kernel, KernelQueue, KernelTask
from alpa_lite.intra_op.stage_ops import StageOps
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import GATHERED_AHEAD, Phase, is_parameter
from alpa_lite.rules.awaited import awaited_values
from alpa_lite.rules.fusion import (
    accesses,
    fusion_groups,
    is_folded,
    is_fusible,
    is_repeatable,
    on_chip,
    reads_several,
    reduces,
)
from alpa_lite.rules.op_info import free_values, rule_of_op
from cost_models.composed import CostModel
from cost_models.hardware import Fusion

MOST_SOURCES = 64
"""The most values of a fused kernel that are searched for its sources; beyond, values count as sources themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """What the kernels of a backend compute, and when they run.

    Attributes:
        fusion, fused_attention: see `Backend`.
        fuses_siblings, runs_siblings_at_once, instructions_per_byte, breadth_first: see `Cluster`.
        fuses_into_products: see `Device`.
        num_devices: number of devices that run the program.
        gathers: whether parameters lie in parts, which the program gathers where an op reads them.
        puts_off_results: whether what the update alone reads is made as late as it can be.
    """

    fusion: Fusion = "all"
    fused_attention: bool = False
    fuses_siblings: bool = True
    runs_siblings_at_once: bool = True
    instructions_per_byte: float = 20.0
    fuses_into_products: bool = False
    breadth_first: bool = False
    num_devices: int = 1
    gathers: bool = False
    puts_off_results: bool = False

    @classmethod
    def of(cls, cost_model: CostModel, num_devices: int, *, gathers: bool = False) -> KernelModel:
        """Return the kernels of the backend of a cost model, in programs for a number of devices."""
        backend, cluster = cost_model.backend, cost_model.cluster
        # Libraries of kernels, such as PyTorch's, neither repeat what takes long nor make one kernel of several.
        compiled = backend.fusion == "all"
        return cls(
            fusion=backend.fusion,
            fused_attention=backend.fused_attention,
            fuses_siblings=cluster.fuses_siblings,
            runs_siblings_at_once=compiled and cluster.runs_siblings_at_once,
            instructions_per_byte=cluster.instructions_per_byte if compiled else 0.0,
            fuses_into_products=cluster.device.fuses_into_products,
            breadth_first=cluster.breadth_first,
            # Elsewhere the same kernels run on any number of devices.
            num_devices=num_devices if cluster.breadth_first else 1,
            gathers=gathers and cluster.breadth_first,
            puts_off_results=compiled and cluster.runs_siblings_at_once and num_devices > 1,
        )


@memoized
def _written(graph: Graph, kernels: KernelModel) -> frozenset[int]:
    """Return the values of a graph that a kernel writes to memory."""
    table = accesses(graph, fusion=kernels.fusion, fused_attention=kernels.fused_attention)
    found: set[int] = set()
    for op, access in zip(graph.ops, table, strict=True):
        if op.bodies:
            found.update(op.results)
        elif any(not slot.is_result for slot in access.writes):
            # The op updates a part of its operand in place: the result is the buffer of the whole array.
            found.update(op.results)
        else:
            found.update(op.results[slot.number] for slot in access.writes)
    return frozenset(found & _writable(graph, kernels))


@memoized
def _writable(graph: Graph, kernels: KernelModel) -> frozenset[int]:
    """Return the values of a graph that take memory of a device where a kernel writes them."""
    unwritten = free_values(graph) | (on_chip(graph).values if kernels.fused_attention else frozenset[int]())
    # The memory of the host is counted by `plan.host_use`.
    return frozenset(
        v for v, value in enumerate(graph.values) if value.rank > 0 and v not in unwritten and not value.on_host
    )


def reads_whole(graph: Graph, op: Op) -> bool:
    """Return True for ops whose kernels read operands as arrays that lie in memory: loops, products and the like."""
    return bool(op.bodies) or rule_of_op(graph, op.id).work_kind != "elementwise"


def kept_outputs(op: Op, number: int) -> frozenset[int]:
    """Return the outputs of a body of an op that are not stacked."""
    wiring = wiring_of(op)
    if wiring is None:
        return frozenset(op.bodies[number].outputs)
    outputs = zip(op.bodies[number].outputs, wiring.outputs[number], strict=True)
    return frozenset(v for v, r in outputs if r is not None and r not in wiring.stacked)


def merges_dims(op: Op, rank: int) -> bool:
    """Return True for a product that reads operands of a rank as matrices."""
    if op.primitive != "dot_general":
        return False
    (contracted, _), (batch, _) = op.params["dimension_numbers"]
    return len(contracted) > 1 or rank - len(batch) - len(contracted) > 1


def early_operands(op: Op) -> Sequence[int]:
    """Return the operands that kernels of their own read, without the others, on the CPU backend.

    The maxima of windows are searched, and what a convolution reads is transposed, unless its dims are in order: the
    batch first and the features last, in a kernel the space, the features that are read, and those that are made.
    """
    if op.primitive.startswith("select_and_scatter"):
        return (1,)
    if op.primitive != "conv_general_dilated":
        return ()
    numbers = op.params["dimension_numbers"]
    rank = len(numbers["lhs_spec"])
    space = range(rank - 2)
    in_order = (0, rank - 1, *(d + 1 for d in space)), (rank - 1, rank - 2, *space)
    return [i for i, spec in enumerate((numbers["lhs_spec"], numbers["rhs_spec"])) if tuple(spec) != in_order[i]]


def filled_results(op: Op, free: Set[int]) -> Sequence[int]:
    """Return the results that begin as arrays of zeros or the like, which are filled piece by piece. `free`: values."""
    wiring = wiring_of(op)
    if wiring is not None:
        return [op.results[r] for r in wiring.stacked]
    if op.primitive.startswith("select_and_scatter"):
        return op.results
    return op.results if op.primitive.startswith("scatter") and op.operands[0] in free else ()


def gathered_after(units: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return for each op that reads gathered parameters the earlier one that it waits for, if there is one.

    `units`: the ops in the order of the program, and the bytes that they read. The rule is that of the programs
    (`lower.local_machine.Gathered`), for the sizes of whole arrays.
    """
    found, largest = dict[int, int](), 0
    for number, (op_id, size) in enumerate(units):
        largest = max(largest, size)
        room = GATHERED_AHEAD * largest - size
        for before, gathered in reversed(units[:number]):
            room -= gathered
            if room < 0:
                found[op_id] = before
                break
    return found


class StoredValues:
    """The values of one graph (the step's own, or a loop body) that the kernels of a stage write.

    written   their ids
    """

    def __init__(
        self,
        graph: Graph,
        kernels: KernelModel,
        stage: StageOps | None = None,
        inlined: Set[int] = frozenset(),
        carried: frozenset[int] | None = None,
    ) -> None:
        """Decide what is fused. `stage`: the ops of the stage, for the outermost graph; of a body all ops run.

        `inlined`: those of its ops that are in loops of one trip in the program as traced. `carried`: of the body of a
        loop of the backward pass, the outputs that it does not stack.
        """
        self.carried = carried
        self.inlined = inlined
        self.graph, self.kernels, self.stage = graph, kernels, stage
        self.ops = stage.ops if stage is not None else range(len(graph.ops))
        self.here = frozenset(self.ops)
        self.outputs = frozenset(graph.outputs)
        self.writable = _writable(graph, kernels)
        self.written = set(_written(graph, kernels))
        # By `run_order`: the kernel behind which one runs that reads the result of an op as soon as it is there.
        self.behind: dict[int, Kernel] = {}
        # By `run_order`: ops on GPUs whose results are scattered late, if at all.
        self.scattered_late: Set[int] = frozenset()
        if kernels.fusion != "none":
            self._fuse()

    def _fuse(self) -> None:
        """Find out which values of fusible ops are written, as instruction fusion of XLA decides it.

        Kernels are visited from the last to the first. An op runs in the kernels that run its readers, whatever they
        then read and for how long, unless that repeats what should not be repeated.
        """
        model = self.kernels
        groups: Sequence[int] = range(len(self.graph.ops))
        if model.fuses_siblings:
            groups = fusion_groups(self.graph, within_calls=model.fusion == "calls")
        kernels: dict[int, frozenset[int]] = {}
        for op_id in reversed(self.ops):
            op, own = self.graph.ops[op_id], frozenset((groups[op_id],))
            kernels[op_id] = own
            if is_folded(self.graph, op) or not is_fusible(self.graph, op):
                continue
            readers = [c for r in op.results for c in self.readers(r)]
            inside = frozenset[int]().union(*(kernels[c] for c in readers))
            if not self._is_stored(op, readers, inside, own):
                self.written.difference_update(op.results)
                kernels[op_id] = inside or own
            else:
                self.written.update(self.writable.intersection(op.results))

    def _is_stored(self, op: Op, readers: Sequence[int], inside: frozenset[int], own: frozenset[int]) -> bool:
        """Return True for a fusible op whose results are written. `inside`: kernels of its readers; `own`: its own."""
        if not self.outputs.isdisjoint(op.results) or not all(self._takes_in(c, op) for c in readers):
            return True
        if inside <= own:
            return False
        if not is_repeatable(self.graph, op) and any(self._reads_again(c, op) for c in readers):
            return True
        if self.stage is not None and self._leaves(op, readers):
            return True
        if reduces(self.graph, op) or op.primitive.startswith("arg"):
            return True
        if len(inside) == 1:
            return False
        if not is_repeatable(self.graph, op, instructions_per_byte=self.kernels.instructions_per_byte):
            return True
        # Of several arrays of its size, an op is repeated only if that is all that its readers need it for.
        several = len(readers) > 1 and reads_several(self.graph, op)
        return several and any(self._reads_also_behind(c, op) for c in readers)

    def _reads_also_behind(self, op_id: int, op: Op) -> bool:
        """Return True for a reader of an op that reads also what other ops compute from its results, or may do so."""
        made, seen = set(op.results), set[int]()
        queue = [v for v in self.graph.ops[op_id].operands if v not in made]
        while queue:
            v = queue.pop()
            producer = self.graph.producer[v]
            if v in seen or producer is None or producer < op.id:
                continue
            seen.add(v)
            operands = self.graph.ops[producer].operands
            if not made.isdisjoint(operands) or len(seen) > MOST_SOURCES:
                return True
            queue += operands
        return False

    def _takes_in(self, op_id: int, producer: Op) -> bool:
        """Return True for an op whose kernel can compute elements of what another op makes as it reads them."""
        op = self.graph.ops[op_id]
        if is_fusible(self.graph, op):
            return True
        if op.primitive == "gather":
            # An element may be gathered several times.
            indices = {op.operands[1], self.origin(op.operands[1])}
            return is_repeatable(self.graph, producer) and indices.isdisjoint(producer.results)
        is_product = not op.bodies and rule_of_op(self.graph, op_id).work_kind != "elementwise"
        return is_product and self.kernels.fuses_into_products

    def _reads_again(self, op_id: int, producer: Op) -> bool:
        """Return True for an op that reads each element of what another one makes several times."""
        values = self.graph.values
        size = values[producer.results[0]].num_elements
        return any(values[r].num_elements > size for r in self.graph.ops[op_id].results)

    def _leaves(self, op: Op, readers: Sequence[int]) -> bool:
        """Return True for an op whose results other tasks read: other stages, or the backward pass as its own task."""
        stage = self.stage
        if stage is None or not stage.leaves.isdisjoint(op.results):
            return True
        # A stage that is the whole step may run as one program, which fuses across phases.
        programs = {Phase.INVARIANT, self.program(op.id)}
        return not stage.is_whole and any(self.program(c) not in programs for c in readers)

    def readers(self, value: int) -> list[int]:
        """Return the ops that read a value, directly or through ops that only rename it."""
        found: list[int] = []
        waiting = [value]
        while waiting:
            value = waiting.pop()
            for c in self.graph.consumers[value]:
                if c in self.here:
                    named = self.renamed(c, value)
                    waiting += named
                    found += [] if named else [c]
        return found

    def renamed(self, op_id: int, value: int) -> Sequence[int]:
        """Return the results of an op that only renames an operand; empty for other ops."""
        op = self.graph.ops[op_id]
        if not is_folded(self.graph, op) or any(r in self.written for r in op.results):
            return ()
        if len(op.operands) != len(op.results):
            return op.results
        return [r for v, r in zip(op.operands, op.results, strict=True) if v == value]

    def phase(self, op_id: int) -> Phase | None:
        """Return the phase of an op of the step's own graph; None inside a body."""
        return None if self.stage is None else self.stage.step.phases[op_id]

    def program(self, op_id: int) -> Phase | None:
        """Return the phase whose program runs an op: the last stage runs both passes as one."""
        phase = self.phase(op_id)
        return Phase.FORWARD if phase is Phase.BACKWARD and self.stage is not None and self.stage.is_last else phase

    def run_order(self) -> Iterator[Kernel]:
        """Yield the kernels in the order in which they run; what runs inside of kernels comes before these."""
        if not self.kernels.breadth_first:
            ops = self._with_late_results() if self.kernels.puts_off_results else self.ops
            yield from (Kernel(op_id, KernelTask.RUN) for op_id in ops)
            return
        for program in self.programs:
            waits, named = self.waits_for(program), self._named_anew(program)
            delayed = self.delayed(program)
            queue = KernelQueue(self.graph, program, self.is_kernel, waits=waits, named=named, delayed=delayed)
            yield from queue.kernels()
            self.behind.update(queue.behind)

    def _with_late_results(self) -> Sequence[int]:
        """Return the ops in order, but the loss and gradients of weights at the end of the backward pass.

        XLA:GPU orders programs with collectives from their end, so that nothing runs before it has to: what the update
        alone reads runs last, or before the recomputation that waits for it, and what its kernel reads stays in memory.
        So does what the trips of a loop of the backward pass stack, in each trip. Nothing waits for gradients to be
        scattered: those of a trip are scattered while the next one runs, and those that a loop waits for at the end of
        the backward pass.
        """
        if self.stage is None and self.carried is None:
            return self.ops
        end, due = len(self.graph.ops), dict[int | None, int]()
        awaited = {} if self.stage is None else awaited_values(self.stage.step, self.ops)
        for op_id, values in reversed(awaited.items()):
            due.update((self.graph.producer[v], op_id) for v in values)
        late, passed_on = dict[int, int](), set[int]()
        for op_id in reversed(self.ops):
            op = self.graph.ops[op_id]
            readers = [c for r in op.results for c in self.graph.consumers[r]]
            if self._can_be_late(op, readers) and all(c in passed_on or self._reads_late(c, op_id) for c in readers):
                late[op_id] = min([due.get(op_id, end), *(late.get(c, end) for c in readers)])
                if not reads_whole(self.graph, op) and not reduces(self.graph, op):
                    passed_on.add(op_id)
        loops = {o for o, before in due.items() if o is not None and self.graph.ops[before].bodies}
        self.scattered_late = late.keys() if self.stage is None else loops
        # What is late comes before the op that waits for it.
        return sorted(self.ops, key=lambda o: (self.phase(o) is Phase.UPDATE, late.get(o, o), o not in late))

    def _can_be_late(self, op: Op, readers: Sequence[int]) -> bool:
        """Return True for an op of both passes whose results are stacked, or read; what nothing reads does not run."""
        if op.bodies or self.phase(op.id) not in (None, Phase.FORWARD, Phase.BACKWARD):
            return False
        handed_on = self.carried is not None and not self.carried.isdisjoint(op.results)
        return not handed_on and bool(readers or self.outputs.intersection(op.results))

    def _reads_late(self, op_id: int, maker: int) -> bool:
        """Return True for a reader in the update, or in the stage that a backward pass hands its result to."""
        sent = op_id not in self.here and self.phase(maker) is Phase.BACKWARD
        return sent or self.phase(op_id) is Phase.UPDATE

    @cached_property
    def programs(self) -> Sequence[Sequence[int]]:
        """The ops of the programs of a stage, which run one after the other."""
        if self.stage is None:
            return (self.ops,)
        # The update waits for the reductions of the gradients.
        found = {o: self.program(o) or Phase.INVARIANT for o in self.ops}
        order = [*Phase]
        for op_id in reversed(self.ops):
            if found[op_id] is Phase.INVARIANT:
                # Programs repeat what is the same for all micro-batches: it belongs to the first that reads it.
                results = self.graph.ops[op_id].results
                readers = [found[c] for r in results for c in self.graph.consumers[r] if c in found]
                found[op_id] = min(readers, key=order.index, default=Phase.INVARIANT)
        return [[o for o, own in found.items() if own is phase] for phase in Phase]

    def _named_anew(self, program: Sequence[int]) -> frozenset[int]:
        """Return the ops of a program whose results are named anew before a collective: gradients after both passes.

        See `lower.local_machine.LocalMachine.reshard`. What reads a result waits for the collective as well, so that
        nothing else runs in between; results that the update alone reads wait for their turn.
        """
        phases, inside = {o: self.phase(o) for o in program}, frozenset(program)
        if Phase.FORWARD not in phases.values():
            return frozenset()
        last = (o for o, phase in phases.items() if phase is Phase.BACKWARD)
        return frozenset(
            o for o in last if inside.isdisjoint(c for r in self.graph.ops[o].results for c in self.readers(r))
        )

    def delayed(self, program: Sequence[int]) -> Mapping[int, int]:
        """Return for the barriers before what is recomputed the op of the backward pass whose result they wait for.

        Programs delay what the forward pass has made, outside of loops alone (`lower.local_machine.once_there`).
        """
        if self.stage is None:
            return {}
        awaited = awaited_values(self.stage.step, program)
        makers = {op_id: self.graph.producer[latest] for op_id, (latest, *_) in awaited.items()}
        # Of what comes back from the host, these programs delay nothing: it never left their memory.
        return {
            op_id: maker
            for op_id, maker in makers.items()
            if maker is not None
            and op_id not in self.inlined
            and self.graph.ops[op_id].primitive == "optimization_barrier"
        }

    def waits_for(self, ops: Sequence[int]) -> Mapping[int, int | None]:
        """Return for ops of a program that read gathered parameters the earlier one after which these are gathered.

        None: nothing is waited for.
        """
        if self.stage is None or not self.kernels.gathers:
            return {}
        values, step = self.graph.values, self.stage.step
        units: list[tuple[int, int]] = []
        for op_id in ops:
            read = [v for v in self.graph.ops[op_id].operands if values[v].rank > 0]
            size = sum(values[v].bytes for v in read if is_parameter(step, self.graph, v))
            # What is computed of parameters alone is computed of their parts.
            if size and step.phases[op_id] is not Phase.INVARIANT:
                units.append((op_id, size))
        return {**dict.fromkeys(op_id for op_id, _ in units), **gathered_after(units)}

    def origin(self, value: int) -> int:
        """Return the value that an op made of which only ops that rename it have made a value."""
        maker = self.graph.producer[value]
        while maker is not None and maker in self.here and len(self.graph.ops[maker].operands) == 1:
            op = self.graph.ops[maker]
            if not is_folded(self.graph, op) or self.is_kernel(maker):
                break
            (value,) = op.operands
            maker = self.graph.producer[value]
        return value

    def is_kernel(self, op_id: int) -> bool:
        """Return True for an op with whose results a kernel ends."""
        op = self.graph.ops[op_id]
        return bool(op.bodies) or not self.written.isdisjoint(op.results)
