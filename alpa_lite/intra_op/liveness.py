"""Compute which values of a stage are held in device memory, and for how long.

    time         the ops in order, one unit each; an op with bodies takes one unit, then those of the bodies  (_spans)
    in memory    what kernels write, and results of loops                                               (_written)
    kernels      an op runs inside the kernels that read its result, unless one of them cannot compute it or the op
                 would run in several and is costly, or reads several arrays that they need not read       (_fuse)
    last use     of a value, through ops that only rename it or are fused into kernels that end later         (_use)
    in place     a kernel overwrites an operand of equal shape that nobody reads later, and a loop takes over
                 the buffers of its carried values                                                          (_starts)

New state overwrites the old one (`_new_state`). Inside a loop, a value that one trip passes to the next lives until the
end of the trip, in addition to the incoming value. Elements of stacked arrays are copied out for kernels that cannot
read them in place (`elements`), and elements that are stacked up live until they are written. The stacked arrays
themselves are values of the graph around the loop, and live from its start on.

An op that is not stored costs no memory, but its sources live until the last of its kernels has run: the mask of a ReLU
is computed again from the input of the ReLU, which stays in memory for that, in addition to the output. Compilers fuse
before they know what fits. `KernelModel` states where backends differ.

The rules follow XLA (instruction fusion with duplication, fusion of siblings, buffer sharing). `python -m
benchmarks.memory` compares them with XLA's own memory analysis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stage_ops import StageOps
from alpa_lite.program.ir import MOVES, Graph, Op, Wiring, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.fusion import (
    accesses,
    fusion_groups,
    is_folded,
    is_fusible,
    is_repeatable,
    may_overwrite,
    on_chip,
    reads_several,
)
from alpa_lite.rules.op_info import free_values, rule_of_op
from cost_models.composed import CostModel
from cost_models.hardware import Fusion

Path = tuple[tuple[int, int], ...]
"""The position of a body in the graph of the step: pairs of an op id and the index of one of its bodies, outermost
first.
"""


class LiveSpan(NamedTuple):
    """The half-open time interval from `start` to before `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The lifetime of a value of the graph at `path`: it is in memory from time `start` to before `end`.

    `saved`: the value is made, or received, in the forward pass, and the backward pass reads it. `loop_end`: the time
    at which its last reader before the update ends.
    """

    path: Path = ()
    value: int
    start: int
    end: int
    saved: bool = False
    loop_end: int = 0


class _Use(NamedTuple):
    """The end of the last kernel that reads a value.

    `backward`: a kernel of the backward pass reads it; `loop_end`: the end of its last reader before the update, or 0.
    """

    end: int
    backward: bool
    loop_end: int


# Without slots, which would leave no place for the cached property.
@dataclass(frozen=True, kw_only=True)
class Lives:
    """The lifetimes of the values of a stage, the time span of each op, and the ends of the loop and of the stage.

    Values that are summed over micro-batches live until the update has read them.
    """

    lives: tuple[Life, ...]
    spans: Mapping[tuple[Path, int], LiveSpan]
    loop_end: int
    end: int

    @cached_property
    def running(self) -> Mapping[int, tuple[Path, int]]:
        """Map each time to the innermost op that starts then."""
        return {span.start: key for key, span in self.spans.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """What the kernels of a backend compute.

    Attributes:
        fusion, fused_attention: see `Backend`.
        fuses_siblings: see `Cluster`.
        fuses_into_products: see `Device`.
    """

    fusion: Fusion = "all"
    fused_attention: bool = False
    fuses_siblings: bool = True
    fuses_into_products: bool = False

    @classmethod
    def of(cls, cost_model: CostModel) -> KernelModel:
        """Return the kernels of the backend of a cost model."""
        backend, cluster = cost_model.backend, cost_model.cluster
        return cls(
            fusion=backend.fusion,
            fused_attention=backend.fused_attention,
            fuses_siblings=cluster.fuses_siblings,
            fuses_into_products=cluster.device.fuses_into_products,
        )


def lives_of(view: StageView, kernels: KernelModel | None = None) -> Lives:
    """Return the lifetimes of the values of a stage except state and accumulated sums, in order of their start.

    `kernels`: by default, those of XLA on plain array code on a GPU.
    """
    return _lives(view.part, kernels or KernelModel())


@memoized
def _lives(stage: StageOps, kernels: KernelModel) -> Lives:
    spans = dict(_spans(stage.graph, stage.ops, (), 0))
    end = max((span.end for span in spans.values()), default=0)
    phases = stage.step.phases
    loop_end = max((spans[(), o].end for o in stage.ops if phases[o].in_loop), default=0)
    outer = _LiveScope(stage.graph, (), _Timing(spans=spans, kernels=kernels), stage=stage)
    # A value that goes from an operand's buffer straight into a stacked array has an empty lifetime.
    found = [life for life in (*outer.external(), *outer.lives()) if life.start < life.end]
    # One more than the last op, so that state has a lifetime even in a stage without ops.
    return Lives(
        lives=tuple(sorted(found, key=lambda life: (life.start, life.end))), spans=spans, loop_end=loop_end, end=end + 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """The time span of each op of a stage, which all of its scopes share, and the kernels of the backend."""

    spans: Mapping[tuple[Path, int], LiveSpan]
    kernels: KernelModel


def _spans(graph: Graph, ops: Sequence[int], path: Path, start: int) -> Iterator[tuple[tuple[Path, int], LiveSpan]]:
    """Yield the time span of each op, ops in bodies included."""
    now = start
    for op_id in ops:
        op, begun = graph.ops[op_id], now
        now += 1
        for number, body in enumerate(op.bodies):
            # Branches of a condition follow each other in time although one alone runs: their values never coexist.
            inner = list(_spans(body, range(len(body.ops)), (*path, (op_id, number)), now))
            yield from inner
            now = max((span.end for _, span in inner), default=now)
        yield (path, op_id), LiveSpan(begun, now)


def _new_state(step: StepGraph) -> frozenset[int]:
    """Return the outputs that overwrite the state that they replace; this assumes that arguments are donated."""
    return frozenset(out for out, old in step.aliases.items() if step.batch_dims[old] is None)


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


class _LiveScope:
    """Liveness analysis of the ops of one graph (the step's own, or a loop body) that a stage runs."""

    def __init__(
        self,
        graph: Graph,
        path: Path,
        timing: _Timing,
        *,
        stage: StageOps | None = None,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """Analyse the last uses of all values.

        `stage`: the ops of the stage, for the outermost graph alone; of the body of a loop all ops run. `kept`: the
        outputs of a body that live until it has run once.
        """
        self.graph, self.path, self.stage, self.timing = graph, path, stage, timing
        self.spans = timing.spans
        self.ops = ops = stage.ops if stage is not None else range(len(graph.ops))
        self.end = max((self.spans[path, o].end for o in ops), default=0)  # when the graph has run once
        kernels = timing.kernels
        self.here = frozenset(ops)
        self.replaced = _new_state(stage.step) if stage is not None else frozenset[int]()
        self.outputs = frozenset(graph.outputs)
        self.kept = self.outputs - self.replaced if stage is not None else kept
        self._uses: dict[int, _Use] = {}
        self.writable = _writable(graph, kernels)
        self.written = set(_written(graph, kernels))
        if kernels.fusion != "none":
            self._fuse()
        for op_id in reversed(ops):  # the last use recurses into later ones: in this order, they are cached already
            for r in graph.ops[op_id].results:
                self._use(r)

    def _fuse(self) -> None:
        """Find out which values of fusible ops are written, as instruction fusion of XLA decides it.

        Kernels are visited from the last to the first. An op runs in the kernels that run its readers, whatever they
        then read and for how long, unless that repeats what should not be repeated.
        """
        model = self.timing.kernels
        groups: Sequence[int] = range(len(self.graph.ops))
        if model.fuses_siblings:
            groups = fusion_groups(self.graph, within_calls=model.fusion == "calls")
        kernels: dict[int, frozenset[int]] = {}
        for op_id in reversed(self.ops):
            op, own = self.graph.ops[op_id], frozenset((groups[op_id],))
            kernels[op_id] = own
            if is_folded(self.graph, op) or not is_fusible(self.graph, op):
                continue
            readers = [c for r in op.results for c in self._readers(r)]
            inside = frozenset[int]().union(*(kernels[c] for c in readers))
            if not self._is_stored(op, readers, inside, own):
                self.written.difference_update(op.results)
                kernels[op_id] = inside or own
            else:
                self.written.update(self.writable.intersection(op.results))

    def _is_stored(self, op: Op, readers: Sequence[int], inside: frozenset[int], own: frozenset[int]) -> bool:
        """Return True for a fusible op whose results are written. `inside`: kernels of its readers; `own`: its own."""
        if not self.outputs.isdisjoint(op.results) or not all(map(self._takes_in, readers)):
            return True
        if inside <= own:
            return False
        if self.stage is not None and self._leaves(op, readers):
            return True
        if op.primitive.startswith(("reduce_", "arg")) and op.primitive != "reduce_precision":
            return True
        if len(inside) == 1:
            return False
        if not is_repeatable(self.graph, op):
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
            if not made.isdisjoint(operands) or len(seen) > _MOST_SOURCES:
                return True
            queue += operands
        return False

    def _takes_in(self, op_id: int) -> bool:
        """Return True for an op whose kernel can compute elements of its operands as it reads them."""
        op = self.graph.ops[op_id]
        if is_fusible(self.graph, op):
            return True
        is_product = not op.bodies and rule_of_op(self.graph, op_id).work_kind != "elementwise"
        return is_product and self.timing.kernels.fuses_into_products

    def _leaves(self, op: Op, readers: Sequence[int]) -> bool:
        """Return True for an op whose results other tasks read: other stages, or the backward pass as its own task."""
        stage = self.stage
        if stage is None or not stage.leaves.isdisjoint(op.results):
            return True
        phases = {self._phase(c) for c in readers}
        # A stage that is the whole step may run as one program, which fuses across phases.
        within = set(Phase) if stage.is_whole else {Phase.INVARIANT, self._phase(op.id)}
        return not phases <= within

    def span(self, op_id: int) -> LiveSpan:
        """Return the time span in which an op runs."""
        return self.spans[self.path, op_id]

    def lives(self) -> Iterator[Life]:
        """Yield the lifetimes of the results of the ops, and of the values in their bodies."""
        for op_id in self.ops:
            op = self.graph.ops[op_id]
            made = [r for r in op.results if r in self.written and r not in self.replaced]
            starts = self._starts(op) if made else {}
            for r in made:
                use = self._use(r)
                yield Life(
                    path=self.path,
                    value=r,
                    start=starts.get(r, self.span(op_id).start),
                    end=max(use.end, self.span(op_id).end),
                    saved=use.backward and self._phase(op_id) is Phase.FORWARD,
                    loop_end=max(use.loop_end, self.span(op_id).end),
                )
            wiring = wiring_of(op)
            if wiring is not None:
                yield from self._inside(op, wiring)

    def external(self) -> Iterator[Life]:
        """Yield the lifetimes of the values that a stage receives from other stages and from the batch."""
        if self.stage is None:
            return
        step = self.stage.step
        for v in self.stage.external:
            producer = self.graph.producer[v]
            # State is held throughout, which `usages` charges, and scalars hardly take memory.
            is_state = producer is None and step.batch_dims[v] is None
            readers = [c for c in self.graph.consumers[v] if c in self.here]
            if is_state or not readers or self.graph.values[v].rank == 0:
                continue
            use = self._use(v)
            # Values of another stage's backward pass arrive only when they are read.
            early = producer is None or step.phases[producer] is Phase.FORWARD
            start = 0 if early else min(self.span(c).start for c in readers)
            yield Life(value=v, start=start, end=use.end, saved=early and use.backward)

    def _phase(self, op_id: int) -> Phase | None:
        return None if self.stage is None else self.stage.step.phases[op_id]

    def _inside(self, op: Op, wiring: Wiring) -> Iterator[Life]:
        """Yield the lifetimes of the values in one trip of a loop, or in each of the branches of a condition."""
        for number, (body, inputs, outputs) in enumerate(zip(op.bodies, wiring.inputs, wiring.outputs, strict=True)):
            path = (*self.path, (op.id, number))
            kept = frozenset(
                v for v, r in zip(body.outputs, outputs, strict=True) if r is not None and r not in wiring.stacked
            )
            inner = _LiveScope(body, path, self.timing, kept=kept)
            yield from inner.elements(
                [v for v, i in zip(body.inputs, inputs, strict=True) if i in wiring.scanned and body.values[v].rank > 0]
            )
            yield from inner.lives()

    def elements(self, values: Sequence[int]) -> Iterator[Life]:
        """Yield the lifetimes of elements of stacked arrays that are copied out for a reader that is not fused."""
        for v in values:
            readers = self._readers(v)
            if any(self._reads_whole(op_id) for op_id in readers):
                start = min(self.span(op_id).start for op_id in readers)
                yield Life(path=self.path, value=v, start=start, end=max(self.span(o).end for o in readers))

    def _reads_whole(self, op_id: int) -> bool:
        op = self.graph.ops[op_id]
        return bool(op.bodies) or rule_of_op(self.graph, op_id).work_kind != "elementwise"

    def _readers(self, value: int) -> list[int]:
        """Return the ops that read a value, directly or through ops that only rename it."""
        found: list[int] = []
        waiting = [value]
        while waiting:
            value = waiting.pop()
            for c in self.graph.consumers[value]:
                if c in self.here:
                    named = self._renamed(c, value)
                    waiting += named
                    found += [] if named else [c]
        return found

    def _renamed(self, op_id: int, value: int) -> Sequence[int]:
        """Return the results of an op that only renames an operand; empty for other ops."""
        op = self.graph.ops[op_id]
        if not is_folded(self.graph, op) or any(r in self.written for r in op.results):
            return ()
        if len(op.operands) != len(op.results):
            return op.results
        return [r for v, r in zip(op.operands, op.results, strict=True) if v == value]

    def _use(self, value: int) -> _Use:
        """Return the last use of a value by a kernel, from the cache if possible."""
        known = self._uses.get(value)
        if known is None:
            known = self._uses[value] = self._find_use(value)
        return known

    def _find_use(self, value: int) -> _Use:
        end, backward, loop_end = (self.end if value in self.kept else 0), False, 0
        for c in self.graph.consumers[value]:
            if c not in self.here:
                continue
            passed_on = self._passed_on(c, value)
            if passed_on is None:
                phase = self._phase(c)
                used = self._used_by(c, value)
                # Ops in bodies have no phase (None): `loop_end` matters for values of the step's own graph alone.
                later = _Use(used, phase is Phase.BACKWARD, used if phase is None or phase.in_loop else 0)
                end, backward = max(end, later.end), backward or later.backward
                loop_end = max(loop_end, later.loop_end)
                continue
            for r in passed_on:
                later = self._use(r)
                end, backward = max(end, later.end), backward or later.backward
                loop_end = max(loop_end, later.loop_end)
        return _Use(end, backward, loop_end)

    def _passed_on(self, op_id: int, value: int) -> Sequence[int] | None:
        """Return the results through which a value is still read later, or None if a kernel ends with the op."""
        op = self.graph.ops[op_id]
        named = self._renamed(op_id, value)
        if named:
            return named
        fused = not op.bodies and op.primitive not in MOVES and not any(r in self.written for r in op.results)
        readers = any(c in self.here for r in op.results for c in self.graph.consumers[r])
        return op.results if fused and readers else None

    def _used_by(self, op_id: int, value: int) -> int:
        """Return the time at which an op has read a value; a loop copies or takes over its carries when it starts."""
        op, span = self.graph.ops[op_id], self.span(op_id)
        wiring = wiring_of(op)
        if wiring is None:
            return span.end
        carried = set(wiring.carried.values())
        places = [i for i, v in enumerate(op.operands) if v == value]
        # An operand that the loop also reads as a constant or row by row must stay until it ends.
        return span.start + 1 if all(i in carried for i in places) else span.end

    def _starts(self, op: Op) -> dict[int, int]:
        """Return the times from which results take over the buffer of an operand, which is free then."""
        wiring = wiring_of(op)
        # An operand is read for one unit of time. The result that takes over its buffer begins after that, so that the
        # two are not counted together.
        after = self.span(op.id).start + 1
        found: dict[int, int] = {}
        if wiring is not None:
            for r, i in wiring.carried.items():
                if self._dies(op.operands[i], after):
                    found[op.results[r]] = after
            return found
        if not may_overwrite(self.graph, op):
            return found
        dying = [v for v in self._sources(op) if self._dies(v, after)]
        for r in op.results:
            value = self.graph.values[r]
            match = next((v for v in dying if _alike(self.graph, v, r)), None)
            if match is not None and value.rank > 0:
                # A buffer is taken over only once.
                dying.remove(match)
                found[r] = after
        return found

    def _dies(self, value: int, time: int) -> bool:
        """Return True for a value made here whose buffer is free from `time` on."""
        return value in self.written and self.graph.producer[value] in self.here and self._use(value).end == time

    def _sources(self, op: Op) -> list[int]:
        """Return the values in memory that the fused kernel ending with an op reads."""
        found: dict[int, None] = {}
        queue, seen = list(op.operands), set[int]()
        while queue:
            v = queue.pop()
            if v in seen:
                continue
            seen.add(v)
            producer = self.graph.producer[v]
            if self.graph.values[v].on_host:
                continue
            if v in self.written or producer is None or producer not in self.here:
                found[v] = None
            elif len(seen) < _MOST_SOURCES:
                queue += self.graph.ops[producer].operands
            else:
                found[v] = None
        return list(found)


#: The most values of a fused kernel that are searched for its sources; beyond, values count as sources themselves.
_MOST_SOURCES = 64


def _alike(graph: Graph, first: int, second: int) -> bool:
    a, b = graph.values[first], graph.values[second]
    return a.shape == b.shape and a.bytes == b.bytes
