"""Which values of a stage lie in device memory, and for how long.

    time         ops in order, one unit each; ops with bodies take one unit and then those of the bodies     (_spans)
    in memory    values that kernels write (`rules.fusion.accesses`), and what loops hand on                (_written)
    made again   cheap values that only fused kernels read, where that reads no more than the value takes:  p bytes
                 of sources at most for each byte, p = 1.25; the sources live as long instead          (_is_repeated)
    last use     of a value, through ops that only rename it or are fused into kernels that end later           (_use)
    in place     a kernel overwrites an operand of the same shape that nobody reads any more, a loop takes over what
                 it carries                                                                                  (_starts)

New state overwrites the old (`_new_state`). Inside a loop, what a trip hands to the next one lives until the end of
the trip, beside what came in; elements of stacks are copied out for kernels that cannot read them in place
(`elements`), and elements that are stacked up live until they are written. The stacks themselves are values of the
graph around the loop, from its start on.

The rules are what XLA does on GPUs and CPUs by and large (instruction fusion with duplication, buffer sharing).
`python -m benchmarks.memory` compares with its accounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from alpa_lite.intra_op.stage import StageView
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase
from alpa_lite.program.wiring import Wiring, wiring_of
from alpa_lite.rules.fusion import accesses, is_folded, is_fusible, is_repeatable
from alpa_lite.rules.op_info import free_values, rule_of_op
from cost_models.backend import Fusion

Path = tuple[tuple[int, int], ...]
"""The way from the graph of the step into a body: pairs of an op and the number of one of its bodies."""


class LiveSpan(NamedTuple):
    """From time `start` to before `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A value of the graph at `path` in memory from time `start` to before `end`.

    `saved`: it is made, or comes in, in the forward pass, and the backward pass reads it. `loop_end`: when its last
    reader before the update ends.
    """

    path: Path = ()
    value: int
    start: int
    end: int
    saved: bool = False
    loop_end: int = 0


class _Use(NamedTuple):
    """When the last kernel that reads a value ends; whether one does in the backward pass, or before the update."""

    end: int
    backward: bool
    loop_end: int


@dataclass(frozen=True, kw_only=True)
class Lives:
    """The lives of a stage, the span of each op in it, and when each phase is over.

    Values that are summed over micro-batches live, here, until the update has read them.
    """

    lives: tuple[Life, ...]
    spans: Mapping[tuple[Path, int], LiveSpan]
    loop_end: int
    end: int

    @cached_property
    def running(self) -> Mapping[int, tuple[Path, int]]:
        """What runs at a time: the innermost op that starts then."""
        return {span.start: key for key, span in self.spans.items()}


@memoized
def lives_of(view: StageView, *, fusion: Fusion = "all", fused_attention: bool = False) -> Lives:
    """The lives of the values of a stage that are neither state nor sums, in order of their start."""
    spans = dict(_spans(view.graph, view.ops, (), 0))
    end = max((span.end for span in spans.values()), default=0)
    phases = view.step.phases
    loop_end = max((spans[(), o].end for o in view.ops if phases[o].in_loop), default=0)
    options = _LivenessOptions(fusion=fusion, fused_attention=fused_attention)
    outer = _LiveScope(view.graph, (), view.ops, spans, end, options, view=view)
    # What goes from an operand's memory straight into a stack has no life of its own.
    found = [life for life in (*outer.external(), *outer.lives()) if life.start < life.end]
    return Lives(
        lives=tuple(sorted(found, key=lambda life: (life.start, life.end))), spans=spans, loop_end=loop_end, end=end + 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LivenessOptions:
    fusion: Fusion
    fused_attention: bool


def _spans(graph: Graph, ops: Sequence[int], path: Path, start: int) -> Iterator[tuple[tuple[Path, int], LiveSpan]]:
    """The span of each op, those in bodies included."""
    now = start
    for op_id in ops:
        op, begun = graph.ops[op_id], now
        now += 1
        for number, body in enumerate(op.bodies):
            inner = list(_spans(body, range(len(body.ops)), (*path, (op_id, number)), now))
            yield from inner
            now = max((span.end for _, span in inner), default=now)
        yield (path, op_id), LiveSpan(begun, now)


def _new_state(view: StageView) -> frozenset[int]:
    """Outputs that overwrite the state that they replace; arguments are taken to be donated."""
    step = view.step
    return frozenset(out for out, old in step.aliases.items() if step.batch_dims[old] is None)


@memoized
def _written(graph: Graph, options: _LivenessOptions) -> frozenset[int]:
    """Values of a graph that a kernel writes to memory."""
    table = accesses(graph, fusion=options.fusion, fused_attention=options.fused_attention)
    free = free_values(graph)
    found: set[int] = set()
    for op, access in zip(graph.ops, table, strict=True):
        if op.bodies:
            found.update(op.results)
        elif any(not slot.is_result for slot in access.writes):
            # An update of a part of an array: the array itself is what comes out.
            found.update(op.results)
        else:
            found.update(op.results[slot.number] for slot in access.writes)
    return frozenset(v for v in found if graph.values[v].rank > 0 and v not in free)


class _LiveScope:
    """The ops of one graph that a stage runs."""

    def __init__(
        self,
        graph: Graph,
        path: Path,
        ops: Sequence[int],
        spans: Mapping[tuple[Path, int], LiveSpan],
        end: int,
        options: _LivenessOptions,
        *,
        view: StageView | None = None,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """`end`: when the graph has run once. `kept`: outputs that live until then. `view`: of the outermost graph."""
        self.graph, self.path, self.ops, self.spans, self.end, self.options = graph, path, ops, spans, end, options
        self.view = view
        self.here = frozenset(ops)
        self.replaced = _new_state(view) if view is not None else frozenset[int]()
        self.kept = frozenset(graph.outputs) - self.replaced if view is not None else kept
        self._uses: dict[int, _Use] = {}
        self.written = set(_written(graph, options))
        if options.fusion != "none":
            # In order: what is made again does not count among the sources of what follows.
            for op in (graph.ops[o] for o in ops):
                self.written.difference_update([r for r in op.results if self._is_repeated(op, r)])
        for op_id in reversed(ops):  # last uses come from later ones: long chains stay shallow
            for r in graph.ops[op_id].results:
                self._use(r)

    def _is_repeated(self, op: Op, result: int) -> bool:
        """True for a result that its readers compute again from what takes no more memory, instead of reading it."""
        if result not in self.written or result in self.graph.outputs or not is_fusible(self.graph, op):
            return False
        readers = self._readers(result)
        if not readers or not all(is_fusible(self.graph, self.graph.ops[c]) for c in readers):
            return False
        if not is_repeatable(self.graph, op) and len(readers) > 1:
            return False
        if self.view is not None and self._leaves(op, result, readers):
            return False
        sources = sum(self.graph.values[v].bytes for v in self._sources(op))
        return sources <= _MOST_READ * self.graph.values[result].bytes

    def _leaves(self, op: Op, result: int, readers: Sequence[int]) -> bool:
        """True for a value that other tasks read: other stages, or the backward pass where it is a task of its own."""
        view = self.view
        if view is None or result in view.leaves:
            return True
        phases = {self._phase(c) for c in readers}
        whole = view.first == 0 and view.last == view.layers.num_layers - 1
        within = {Phase.INVARIANT, self._phase(op.id)} if not whole else set(Phase)
        return not phases <= within

    def span(self, op_id: int) -> LiveSpan:
        """When an op runs."""
        return self.spans[self.path, op_id]

    def lives(self) -> Iterator[Life]:
        """Of the results of the ops, and of what lives inside them."""
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
        """Of what a stage reads of other stages and of the batch."""
        if self.view is None:
            return
        step = self.view.step
        for v in self.view.external:
            producer = self.graph.producer[v]
            is_state = producer is None and step.batch_dims[v] is None
            readers = [c for c in self.graph.consumers[v] if c in self.here]
            if is_state or not readers or self.graph.values[v].rank == 0:
                continue
            use = self._use(v)
            early = producer is None or step.phases[producer] is Phase.FORWARD
            start = 0 if early else min(self.span(c).start for c in readers)
            yield Life(value=v, start=start, end=use.end, saved=early and use.backward)

    def _phase(self, op_id: int) -> Phase | None:
        return None if self.view is None else self.view.step.phases[op_id]

    def _inside(self, op: Op, wiring: Wiring) -> Iterator[Life]:
        """Lives in one trip of a loop, or in each of the branches of a condition."""
        for number, (body, inputs, outputs) in enumerate(zip(op.bodies, wiring.inputs, wiring.outputs, strict=True)):
            path = (*self.path, (op.id, number))
            end = max((self.spans[path, o.id].end for o in body.ops), default=0)
            kept = frozenset(
                v for v, r in zip(body.outputs, outputs, strict=True) if r is not None and r not in wiring.stacked
            )
            inner = _LiveScope(body, path, range(len(body.ops)), self.spans, end, self.options, kept=kept)
            yield from inner.elements(
                [v for v, i in zip(body.inputs, inputs, strict=True) if i in wiring.scanned and body.values[v].rank > 0]
            )
            yield from inner.lives()

    def elements(self, values: Sequence[int]) -> Iterator[Life]:
        """Of elements of stacks that are copied out: those that something other than a fused kernel reads."""
        for v in values:
            readers = self._readers(v)
            if any(self._reads_whole(op_id) for op_id in readers):
                start = min(self.span(op_id).start for op_id in readers)
                yield Life(path=self.path, value=v, start=start, end=max(self.span(o).end for o in readers))

    def _reads_whole(self, op_id: int) -> bool:
        op = self.graph.ops[op_id]
        return bool(op.bodies) or rule_of_op(self.graph, op_id).work_kind != "elementwise"

    def _readers(self, value: int) -> list[int]:
        """The ops that read a value, through those that rename it."""
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
        """What stands for a value in the results of an op that only renames; nothing for other ops."""
        op = self.graph.ops[op_id]
        if not is_folded(self.graph, op) or any(r in self.written for r in op.results):
            return ()
        if len(op.operands) != len(op.results):
            return op.results
        return [r for v, r in zip(op.operands, op.results, strict=True) if v == value]

    def _use(self, value: int) -> _Use:
        """The last use of a value by a kernel."""
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
        """The results in which a value lives on, where no kernel ends with the op; None where one does."""
        op = self.graph.ops[op_id]
        named = self._renamed(op_id, value)
        if named:
            return named
        fused = not op.bodies and not any(r in self.written for r in op.results)
        readers = any(c in self.here for r in op.results for c in self.graph.consumers[r])
        return op.results if fused and readers else None

    def _used_by(self, op_id: int, value: int) -> int:
        """When an op has read a value; a loop copies, or takes over, what it carries at its start."""
        op, span = self.graph.ops[op_id], self.span(op_id)
        wiring = wiring_of(op)
        if wiring is None:
            return span.end
        carried = set(wiring.carried.values())
        places = [i for i, v in enumerate(op.operands) if v == value]
        return span.start + 1 if all(i in carried for i in places) else span.end

    def _starts(self, op: Op) -> dict[int, int]:
        """When results start that take over the memory of an operand: once that is gone."""
        wiring = wiring_of(op)
        after = self.span(op.id).start + 1
        found: dict[int, int] = {}
        if wiring is not None:
            for r, i in wiring.carried.items():
                if self._dies(op.operands[i], after):
                    found[op.results[r]] = after
            return found
        if rule_of_op(self.graph, op.id).work_kind != "elementwise":
            return found
        dying = [v for v in self._sources(op) if self._dies(v, after)]
        for r in op.results:
            value = self.graph.values[r]
            match = next((v for v in dying if _alike(self.graph, v, r)), None)
            if match is not None and value.rank > 0:
                dying.remove(match)
                found[r] = after
        return found

    def _dies(self, value: int, time: int) -> bool:
        """True for a value made here whose memory is free from a time on."""
        return value in self.written and self.graph.producer[value] in self.here and self._use(value).end == time

    def _sources(self, op: Op) -> list[int]:
        """The values in memory that the kernel which ends with an op reads."""
        found: dict[int, None] = {}
        queue, seen = list(op.operands), set[int]()
        while queue:
            v = queue.pop()
            if v in seen:
                continue
            seen.add(v)
            producer = self.graph.producer[v]
            if v in self.written or producer is None or producer not in self.here:
                found[v] = None
            elif len(seen) < _MOST_SOURCES:
                queue += self.graph.ops[producer].operands
            else:
                found[v] = None
        return list(found)


#: A value is not kept if its readers can make it from at most so many times its bytes.
_MOST_READ = 1.25
#: How many values of a fused kernel are looked through for those that it reads from memory.
_MOST_SOURCES = 64


def _alike(graph: Graph, first: int, second: int) -> bool:
    a, b = graph.values[first], graph.values[second]
    return a.shape == b.shape and a.bytes == b.bytes
