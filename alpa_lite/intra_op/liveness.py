"""Compute which values of a stage are held in device memory, and for how long.

    time         the ops in the order in which their kernels run (`stored_values`), one unit each; an op with bodies
                 takes one unit, then those of the bodies                                             (_Timing.run)
    in memory    what kernels write (`stored_values`), and results of loops
    last use     of a value, through ops that only rename it or are fused into kernels that end later         (_use)
    in place     a kernel overwrites an operand of equal shape that nobody reads later, and a loop takes over
                 the buffers of its carried values                                                          (_starts)
    arguments    a value that a program is given is there from its start to its end                       (external)
    early        on the CPU backend, arrays of zeros that are filled piece by piece, and parts of an op that wait for
                 one operand alone                                                                      (_run_early)
    together     on GPUs, kernels that read the same array, which are one                  (`sibling_kernels`)
    library      on the CPU backend, arrays that are written for the library that reduces       (`library_reductions`)

New state overwrites the old one (`_new_state`). Inside a loop, a value that one trip passes to the next lives until the
end of the trip, in addition to the incoming value. Elements of stacked arrays are copied out for kernels that cannot
read them in place (`elements`), and elements that are stacked up live until they are written. The stacked arrays
themselves are values of the graph around the loop, and live from its start on.

An op that is not stored costs no memory, but its sources live until the last of its kernels has run: the mask of a ReLU
is computed again from the input of the ReLU, which stays in memory for that, in addition to the output. Compilers fuse
before they know what fits. `KernelModel` states where backends differ.

The rules follow XLA (`stored_values`, and buffer sharing). `python -m benchmarks.memory` compares them with
XLA's own memory analysis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from alpa_lite.intra_op.kernel_queue import Kernel, KernelTask
from alpa_lite.intra_op.library_reductions import LibraryReductions
from alpa_lite.intra_op.one_trip_loops import Flattened, Path, without_one_trip_loops
from alpa_lite.intra_op.sibling_kernels import SiblingKernels
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stage_ops import StageOps
from alpa_lite.intra_op.stored_values import (
    MOST_SOURCES,
    KernelModel,
    StoredValues,
    early_operands,
    filled_results,
    kept_outputs,
    merges_dims,
    reads_whole,
)
from alpa_lite.program.ir import MOVES, Graph, Op, Wiring, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph, parameters
from alpa_lite.rules.fusion import may_overwrite, reduces
from alpa_lite.rules.op_info import free_values


class LiveSpan(NamedTuple):
    """The half-open time interval from `start` to before `end`."""

    start: int
    end: int


class LibrarySpan(NamedTuple):
    """The time from `start` to before `end` in which an array is in memory; for the others see `LibraryArray`."""

    start: int
    end: int
    kept: float
    goes_on: bool | None


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

    Values that are summed over micro-batches live until the update has read them. `read_until`: when the last of the
    kernels in which an op runs has read its operands, for ops that run in several, or in a later one. `early`: from
    when on a kernel reads an operand, by its number, that does a part of the work of an op without the other operands.
    `library`: when arrays as large as the result of an op are in memory for the library that reduces. `completed`: when
    a collective runs that completes the partial sums of an op, where it waits for its turn as all kernels do. `begun`:
    when the program begins that runs an op, or the first trip of the loop around it. `gathered`: when parameters that
    lie in parts are gathered for an op, and when they are laid out anew then. `filled`: when the array of zeros is
    written that an op fills; for gradients of a loop, when the trip begins that scatters those of the one before.
    """

    lives: tuple[Life, ...]
    spans: Mapping[tuple[Path, int], LiveSpan]
    read_until: Mapping[tuple[Path, int], int]
    early: Mapping[tuple[Path, int, int], int]
    library: Mapping[tuple[Path, int], Sequence[LibrarySpan]]
    completed: Mapping[tuple[Path, int], int]
    begun: Mapping[tuple[Path, int], int]
    gathered: Mapping[tuple[Path, int], LiveSpan]
    filled: Mapping[tuple[Path, int], int]
    loop_end: int
    end: int

    def running_at(self, time: int) -> tuple[Path, int] | None:
        """Return the innermost op that runs at a time; None after the last one."""
        number = bisect_right(self._starts, time, key=lambda each: each[0])
        return self._starts[number - 1][2] if number and time < self.end - 1 else None

    @cached_property
    def _starts(self) -> Sequence[tuple[int, int, tuple[Path, int]]]:
        """The start of each op and the number of bodies around it, in order, with its key."""
        return sorted((span.start, len(key[0]), key) for key, span in self.spans.items())


def lives_of(view: StageView, kernels: KernelModel | None = None) -> Lives:
    """Return the lifetimes of the values of a stage except state and accumulated sums, in order of their start.

    `kernels`: by default, those of XLA on plain array code on a GPU.
    """
    return _lives(view.part, kernels or KernelModel())


@memoized
def _lives(stage: StageOps, kernels: KernelModel) -> Lives:
    found = without_one_trip_loops(stage)
    if found is None:
        return _lives_of_ops(stage, kernels, frozenset())
    inlined = frozenset(op_id for op_id, (path, _) in enumerate(found[1].ops) if path)
    return _as_traced(_lives_of_ops(found[0], kernels, inlined), found[1])


def _as_traced(found: Lives, flattened: Flattened) -> Lives:
    """Return lifetimes and times of a stage without loops of one trip as those of the stage with them."""
    bodies = {path: flattened.body(path) for path in {path for path, _ in found.spans}}

    def original(path: Path, op_id: int) -> tuple[Path, int]:
        outer, body = bodies[path]
        inner, number = body.ops[op_id]
        return (*outer, *inner), number

    def named(life: Life) -> Life:
        outer, body = bodies[life.path]
        inner, value = body.values[life.value]
        return replace(life, path=(*outer, *inner), value=value)

    spans: dict[tuple[Path, int], LiveSpan] = {}
    for key, span in found.spans.items():
        # An op runs in all loops of one trip around it.
        path, op_id = original(*key)
        around = [(path[:depth], path[depth][0]) for depth in range(len(bodies[key[0]][0]), len(path))]
        for place in ((path, op_id), *around):
            known = spans.get(place, span)
            spans[place] = LiveSpan(min(known.start, span.start), max(known.end, span.end))
    for outer, body in bodies.values():
        for (inner, loop), count in body.inlined.items():
            path = (*outer, *inner)
            for number in range(count if (path, loop) in spans else 0):
                # Nobody needs what the others make.
                spans.setdefault(((*path, (loop, 0)), number), spans[path, loop])
    return replace(
        found,
        lives=tuple(map(named, found.lives)),
        spans=spans,
        read_until={original(*key): until for key, until in found.read_until.items()},
        early={(*original(path, op_id), number): time for (path, op_id, number), time in found.early.items()},
        library={original(*key): of_op for key, of_op in found.library.items()},
        completed={original(*key): time for key, time in found.completed.items()},
        begun={original(*key): time for key, time in found.begun.items()},
        gathered={original(*key): time for key, time in found.gathered.items()},
        filled={original(*key): time for key, time in found.filled.items()},
    )


def _lives_of_ops(stage: StageOps, kernels: KernelModel, inlined: frozenset[int]) -> Lives:
    timing = _Timing(kernels, inlined)
    spans = timing.spans
    timing.run(stage.graph, (), 0, stage)
    end = max((span.end for span in spans.values()), default=0)
    phases = stage.step.phases
    loop_end = max((spans[(), o].end for o in stage.ops if phases[o].in_loop), default=0)
    outer = _LiveScope(stage.graph, (), timing, stage=stage)
    # A value that goes from an operand's buffer straight into a stacked array has an empty lifetime.
    found = [life for life in (*outer.external(), *outer.lives()) if life.start < life.end]
    # One more than the last op, so that state has a lifetime even in a stage without ops.
    return Lives(
        lives=tuple(sorted(found, key=lambda life: (life.start, life.end))),
        spans=spans,
        read_until=timing.read_until,
        early=timing.early,
        library=timing.library,
        completed=timing.completed,
        begun=timing.begun,
        gathered=timing.gathered,
        filled=timing.filled,
        loop_end=loop_end,
        end=end + 1,
    )


class _Timing:
    """The time span of each op of a stage, and what is stored of its graphs, which all of its scopes share."""

    def __init__(self, kernels: KernelModel, inlined: frozenset[int]) -> None:
        self.kernels, self.inlined = kernels, inlined
        self.spans: dict[tuple[Path, int], LiveSpan] = {}
        self.stored: dict[Path, StoredValues] = {}
        self.read_until: dict[tuple[Path, int], int] = {}
        self.early: dict[tuple[Path, int, int], int] = {}
        self.library: dict[tuple[Path, int], list[LibrarySpan]] = {}
        self.completed: dict[tuple[Path, int], int] = {}
        self.begun: dict[tuple[Path, int], int] = {}
        self.gathered: dict[tuple[Path, int], LiveSpan] = {}
        self.filled: dict[tuple[Path, int], int] = {}

    def run(
        self,
        graph: Graph,
        path: Path,
        start: int,
        stage: StageOps | None = None,
        carried: frozenset[int] | None = None,
    ) -> int:
        """Set the time span of each op, ops in bodies included, and return when all have run.

        `carried`: of the body of a loop of the backward pass, the outputs that it does not stack.
        """
        stored = self.stored[path] = StoredValues(graph, self.kernels, stage, self.inlined, carried)
        now = start
        ends: dict[Kernel, int] = {}
        for kernel in stored.run_order():
            begun, (op_id, task) = now, kernel
            now = ends[kernel] = now + 1
            if task is not KernelTask.RUN:
                if task is not KernelTask.HOLD:
                    there = begun if task is KernelTask.GATHER else self.gathered[path, op_id].start
                    self.gathered[path, op_id] = LiveSpan(there, begun)
                continue
            backward = carried is not None or stored.phase(op_id) is Phase.BACKWARD
            for number, body in enumerate(graph.ops[op_id].bodies):
                kept = kept_outputs(graph.ops[op_id], number) if backward else None
                # Branches of a condition follow each other in time although one alone runs: their values never coexist.
                now = self.run(body, (*path, (op_id, number)), now, carried=kept)
            self.spans[path, op_id] = LiveSpan(begun, now)
            ends[kernel] = now
        self.completed.update({(path, o): ends[last] for o, last in stored.behind.items()})
        if stored.scattered_late:
            update = [self.spans[path, o].start for o in stored.ops if stored.phase(o) is Phase.UPDATE]
            self.completed.update({(path, o): min(update, default=now) - 1 for o in stored.scattered_late})
            # The gradients of the trip before are there while they are scattered.
            self.filled.update({(path, o): start for o in stored.scattered_late if stage is None})
        for program in stored.programs:
            first = [self.gathered.get((path, o), self.spans[path, o]).start for o in program]
            begun = min([*first, *(self.spans[path, o].start for o in program)], default=0)
            self.begun.update({(path, o): begun for o in program})
        return now


def _new_state(step: StepGraph) -> frozenset[int]:
    """Return the outputs that overwrite the state that they replace; this assumes that arguments are donated."""
    return frozenset(out for out, old in step.aliases.items() if step.batch_dims[old] is None)


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
        elements: Sequence[int] = (),
    ) -> None:
        """Analyse the last uses of all values.

        `stage`: the ops of the stage, for the outermost graph alone; of the body of a loop all ops run. `kept`: the
        outputs of a body that live until it has run once. `elements`: its inputs that are elements of stacked arrays.
        """
        self.graph, self.path, self.stage, self.timing = graph, path, stage, timing
        self.spans = timing.spans
        self.ops = ops = stage.ops if stage is not None else range(len(graph.ops))
        self.end = max((self.spans[path, o].end for o in ops), default=0)  # when the graph has run once
        self.stored = stored = timing.stored[path]
        self.copied = [v for v in elements if any(reads_whole(graph, graph.ops[o]) for o in stored.readers(v))]
        self.elements = frozenset(elements) - frozenset(self.copied)
        self.here = stored.here
        self.replaced = _new_state(stage.step) if stage is not None else frozenset[int]()
        self.outputs = frozenset(graph.outputs)
        self.kept = self.outputs - self.replaced if stage is not None else kept
        # When the program of the backward pass ends, to which what was saved is given; 0 if there is none.
        self.passed = 0
        if stage is not None and not stage.is_last:
            self.passed = max([self.span(o).end for o in ops if stored.phase(o) is Phase.BACKWARD], default=0)
        self.filled: dict[int, int] = {}  # when arrays of zeros are written that ops fill
        self._uses: dict[int, _Use] = {}
        self.written = stored.written
        self.siblings: SiblingKernels | None = None
        self.together = dict[int, int]()  # by op: when its kernel runs, if that has several results
        if timing.kernels.breadth_first:
            self._run_early()
        elif timing.kernels.runs_siblings_at_once:
            # Not by a method of this object, which the garbage collector would have to free then.
            self.siblings = SiblingKernels(stored, self._sources, {o: self.span(o) for o in ops})
            self.together = self.siblings.times()
            self._fill_together()
        for op_id in reversed(ops):  # the last use recurses into later ones: in this order, they are cached already
            uses = [self._use(r) for r in graph.ops[op_id].results]
            if self.written.isdisjoint(graph.ops[op_id].results):
                timing.read_until[path, op_id] = max([use.end for use in uses], default=0)
        if timing.kernels.breadth_first:
            self._write_for_library()

    def _fill_together(self) -> None:
        """Let one kernel write the zeros that the loops of the backward pass fill, before the first of them."""
        backward = [o for o in self.ops if self.stored.phase(o) is Phase.BACKWARD and self.graph.ops[o].bodies]
        filled = [r for o in backward for r in filled_results(self.graph.ops[o], frozenset())]
        self.filled.update((r, self.span(backward[0]).start) for r in filled)

    def _run_early(self) -> None:
        """Find out what runs long before the op that it belongs to, as nothing that the op waits for holds it up.

        Arrays of zeros that an op fills, piece by piece, are written when the program begins. The maxima of windows are
        searched, and operands of convolutions brought into the order of dims that these need, when the array is there.
        """
        free = free_values(self.graph)
        for program in self.stored.programs:
            there = set(program)
            for op_id in program:
                op, begun = self.graph.ops[op_id], self.timing.begun[self.path, op_id]
                filled = filled_results(op, free)
                self.filled.update((r, begun) for r in filled)
                if filled:
                    self.timing.filled[self.path, op_id] = begun
                for i in early_operands(op):
                    maker = self.graph.producer[op.operands[i]]
                    time = self.span(maker).end if maker in there else begun
                    if self.stage is not None and op.operands[i] in parameters(self.stage.step):
                        # A parameter that is gathered is there when those before it were read.
                        gathered = self.timing.gathered.get((self.path, op_id))
                        time = time if gathered is None else gathered.end
                    self.timing.early[self.path, op_id, i] = time
        self._gather()

    def _gather(self) -> None:
        """Find out when parameters are gathered for ops that compute of them alone: when their readers may."""
        found = self.timing.gathered
        for op_id in reversed(self.ops if found else ()):
            if self.stored.phase(op_id) is Phase.INVARIANT:
                readers = [(self.path, c) for r in self.graph.ops[op_id].results for c in self.graph.consumers[r]]
                spans = [found[reader] for reader in readers if reader in found]
                if spans:
                    found[self.path, op_id] = min(spans)

    def _write_for_library(self) -> None:
        """Find out when arrays are in memory that are written for kernels of the library."""
        library = LibraryReductions(self.stored, self.elements)
        starts = {o: min([self.span(o).start for o in p], default=0) for p in self.stored.programs for o in p}
        known: dict[object, LibrarySpan] = {}
        first: dict[object, int] = {}
        for array in library.arrays():
            sources = self._sources(self.graph.ops[array.op]) if array.source is None else [array.source]
            makers = (self.graph.producer[self.stored.origin(v)] for v in sources)
            start = max([starts[array.op], *(self.span(maker).end for maker in makers if maker in self.here)])
            end = max(self.span(reader).end for reader in array.readers)
            form = array.op if array.source is None else (library.form(array.source, array.op), array.goes_on)
            found = LibrarySpan(start, end, array.kept, array.goes_on)
            before = known.get(form, found)
            known[form] = before._replace(end=max(before.end, end))
            first.setdefault(form, array.op)
        for form, span in known.items():
            self.timing.library.setdefault((self.path, first[form]), []).append(span)

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
                use, span = self._use(r), self.span(op_id)
                saved = use.backward and self.stored.phase(op_id) is Phase.FORWARD
                start = self.filled.get(r, starts.get(r, span.start))
                # Readers may come before a kernel of several results can run: they wait for it.
                time = self.together.get(op_id, span.end - 1)
                yield Life(
                    path=self.path,
                    value=r,
                    start=min(time, start) if op_id in self.together else start,
                    end=max(use.end, span.end, time + 1, self.passed if saved else 0),
                    saved=saved,
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
        # Buffers that a program reads stay until it ends: the last stage runs both passes as one program.
        running = [o for o in self.ops if step.phases[o] is not Phase.UPDATE or self._runs_as_one(self.stage)]
        ends = max((self.span(o).end for o in running), default=0) if self.stage.is_last else 0
        trains = any(step.phases[o] is Phase.BACKWARD for o in self.ops)
        for v in self.stage.external:
            producer = self.graph.producer[v]
            # State is held throughout, which `usages` charges, and scalars hardly take memory.
            is_state = producer is None and step.batch_dims[v] is None
            readers = [c for c in self.graph.consumers[v] if c in self.here]
            if is_state or not readers or self.graph.values[v].rank == 0:
                continue
            use = self._use(v)
            early = producer is None or step.phases[producer] is Phase.FORWARD
            stays = early and trains and self.stage.is_last
            span = self._there(use, readers, early=early)
            yield Life(value=v, start=span.start, end=max(span.end, ends), saved=stays or (early and use.backward))

    def _there(self, use: _Use, readers: Sequence[int], *, early: bool) -> LiveSpan:
        """Return when a value from outside is in memory: from the start (`early`), or as long as what it is made for.

        Values of another stage's backward pass arrive when they are read, and are arguments of the backward pass.
        """
        if early or not use.backward:
            start = 0 if early else min(self.span(c).start for c in readers)
            return LiveSpan(start, max(use.end, self.passed if use.backward else 0))
        passed = [self.span(o) for o in self.ops if self.stored.phase(o) is Phase.BACKWARD]
        return LiveSpan(min(span.start for span in passed), max(use.end, *(span.end for span in passed)))

    @staticmethod
    def _runs_as_one(stage: StageOps) -> bool:
        return stage.is_whole and stage.step.num_microbatches == 1

    def _inside(self, op: Op, wiring: Wiring) -> Iterator[Life]:
        """Yield the lifetimes of the values in one trip of a loop, or in each of the branches of a condition."""
        for number, (body, inputs) in enumerate(zip(op.bodies, wiring.inputs, strict=True)):
            path, kept = (*self.path, (op.id, number)), kept_outputs(op, number)
            scanned = (v for v, i in zip(body.inputs, inputs, strict=True) if i in wiring.scanned)
            elements = [v for v in scanned if body.values[v].rank > 0]
            inner = _LiveScope(body, path, self.timing, kept=kept, elements=elements)
            yield from inner.copies()
            yield from inner.lives()

    def copies(self) -> Iterator[Life]:
        """Yield the lifetimes of elements of stacked arrays that are copied out for a reader that is not fused."""
        for v in self.copied:
            readers = self.stored.readers(v)
            # Where kernels run when they can, nothing holds the copies up.
            first = self.ops if self.timing.kernels.breadth_first else readers
            start = min(self.span(op_id).start for op_id in first)
            yield Life(path=self.path, value=v, start=start, end=max(self.span(o).end for o in readers))

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
                phase = self.stored.phase(c)
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
        named = self.stored.renamed(op_id, value)
        if named:
            return named
        # A reduction to one number ends a kernel; on CPUs a second one sums up stored terms, which are not counted.
        reduced = reduces(self.graph, op) and not self.timing.kernels.breadth_first
        to_one = reduced and self.graph.values[op.results[0]].rank == 0
        fused = not (op.bodies or to_one or op.primitive in MOVES or any(r in self.written for r in op.results))
        readers = any(c in self.here for r in op.results for c in self.graph.consumers[r])
        return op.results if fused and readers else None

    def _used_by(self, op_id: int, value: int) -> int:
        """Return the time at which an op has read a value; a loop copies or takes over its carries when it starts."""
        op, span = self.graph.ops[op_id], self.span(op_id)
        wiring = wiring_of(op)
        if wiring is None:
            early = [self.timing.early.get((self.path, op_id, i)) for i, v in enumerate(op.operands) if v == value]
            end = self.together.get(op_id, span.end - 1) + 1
            return max([end if time is None else time + 1 for time in early])
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
        # A kernel of several results reads an operand for others too after it has written one.
        again = op.id in self.together or (self.siblings is not None and self.siblings.reduces(op.id))
        if again or not may_overwrite(self.graph, op):
            return found
        dying = [v for v in self._sources(op) if self._dies(v, after)]
        for r in op.results:
            if self.timing.kernels.breadth_first and self._is_written_merged(r):
                continue
            value = self.graph.values[r]
            match = next((v for v in dying if _alike(self.graph, v, r)), None)
            if match is not None and value.rank > 0:
                # A buffer is taken over only once.
                dying.remove(match)
                found[r] = after
        return found

    def _is_written_merged(self, value: int) -> bool:
        """Return True for a value that products alone read, with several of its dims as one.

        The CPU backend writes it with these dims: no operand of the kernel has the shape of its result.
        """
        readers = self.stored.readers(value)
        return bool(readers) and all(merges_dims(self.graph.ops[c], self.graph.values[value].rank) for c in readers)

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
            elif len(seen) < MOST_SOURCES:
                queue += self.graph.ops[producer].operands
            else:
                found[v] = None
        return list(found)


def _alike(graph: Graph, first: int, second: int) -> bool:
    a, b = graph.values[first], graph.values[second]
    return a.shape == b.shape and a.bytes == b.bytes
