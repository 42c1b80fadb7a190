"""Compute the memory that each strategy of a stage takes over time, from lifetimes (`liveness`) and the nodes' specs.

    state, accumulators             always
    values                          during their lifetime; of saved values, all but one of the k micro-batches in
                                    flight are held throughout the loop: b over its life + (k - 1) b over the
                                    loop                                                                     (_values)
    sums without micro-batches      in the stored spec until the update begins to read them, then in the
                                    resolved spec                                                            (_sum)
    scattered sums                  as they are made, until they are scattered                         (_scattered)
    all_reduced values              the operand too, when they are reduced, where the backend does not reduce in place;
                                    gradients until the update begins                     (_incomplete, _combined)
    additions to sums               the addend until it is added, and one new sum at a time, where the backend does not
                                    add in place                                                           (_added)
    gradients of several updates    once more, where the product makes them                                  (_sum)
    copies                          an operand resharded for its reader, while that runs: a gathered activation, a
                                    gathered weight                                                        (_copies)
                                    a weight is gathered while the reader of the one before runs    (_gathered_from)
                                    or, for a parameter that remains gathered, until its last reader in the
                                    loop ends, and in a trip until the last one that reads the same copy    (_until)
    relaid                          a copy once more where it is made, if its reader needs its dims in order (_relaid)
    library                         arrays that are written for the library that reduces, of at least `LIBRARY_ELEMENTS`
                                                                                                            (_early)
    early                           transposed operands of convolutions, from when the operand is there on   (_early)
    scratch                         a result before its reduce_scatter, laid out anew where this is along an inner dim
                                                                                                       (_incomplete)
                                    the indices by which the gradient of max pooling finds the maxima       (_early)

A copy depends on the strategies of two nodes, but a memory row has terms of one node each. It is therefore charged to
the node of the value where the reader demands one spec under all of its strategies, and else to the reader, but only
where the operand has that spec under no choice of its own node. All bytes are per device, from the
specs of one logical mesh; nothing is reserved for fragmentation or for the buffers of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.interning import SharedArrays
from alpa_lite.intra_op.library_reductions import LIBRARY_ELEMENTS
from alpa_lite.intra_op.liveness import Life, Lives, LiveSpan, lives_of
from alpa_lite.intra_op.one_trip_loops import Path
from alpa_lite.intra_op.problem import FloatArray
from alpa_lite.intra_op.stage import Key, Offer, Placed, PlacedBodies, PlacedSum, StageScope, StageView
from alpa_lite.intra_op.stored_values import KernelModel, reads_whole
from alpa_lite.intra_op.strategies import BatchSplit
from alpa_lite.intra_op.strategy_catalogue import Catalogue, PlacementOptions, SumOptions
from alpa_lite.plan.parts import WorkBytes
from alpa_lite.plan.walk import stacked
from alpa_lite.program.ir import Op, Value, is_one_trip_loop, item_bytes, wiring_of
from alpa_lite.program.phases import Phase, is_parameter, parameters
from alpa_lite.rules.fusion import is_folded
from alpa_lite.sharding.specs import Spec


class Held(Enum):
    """Whether the tasks of a stage pass an array to each other."""

    INSIDE = auto()
    """No: it is made and read by one task."""
    SAVED = auto()
    """The forward pass makes it and the backward pass reads it, which may be one task."""
    PASSED = auto()
    """It is an argument or a result of a task in any case."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UsageOf:
    """The bytes of a value by strategy of a node, from time `start` to before `end`."""

    value: Key
    node: int
    sizes: FloatArray
    start: int
    end: int
    held: Held = Held.INSIDE


def work_bytes(view: StageView, lives: Lives, usages: Iterable[UsageOf], choices: Sequence[int]) -> WorkBytes:
    """Return what the programs of a stage take beside their arguments and results under some choices."""
    saved, inside = np.zeros(lives.end + 1), np.zeros(lives.end + 1)
    for usage in usages:
        if usage.held is not Held.PASSED:
            curve, size = (saved if usage.held is Held.SAVED else inside), usage.sizes[choices[usage.node]]
            curve[usage.start] += size
            curve[min(usage.end, lives.end)] -= size
    saved, inside = np.cumsum(saved), np.cumsum(inside)
    phases = view.step.phases
    passed = [lives.spans[(), o].start for o in view.ops if phases[o] is Phase.BACKWARD]
    begin, end = min(passed, default=lives.loop_end), lives.loop_end

    def most(curve: FloatArray) -> float:
        return max(0.0, float(curve.max())) if curve.size else 0.0

    return WorkBytes(
        forward=most(inside[:begin]),
        backward=most(inside[begin:end]),
        loop=most((saved + inside)[:end]),
        update=most(inside[end:]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The specs that a value has and those that a reader demands, by strategy of a node.

    Attributes:
        node: the node that copies are charged to.
        offered: specs that the value may have.
        demanded: spec that the reader demands under each strategy of the node.
        paired: whether `offered[i]` belongs to `demanded[i]`; else the value may have any of `offered`.
    """

    node: int
    offered: tuple[Spec, ...]
    demanded: tuple[Spec, ...]
    paired: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class StageLayout:
    """The records of a builder about its stage: scopes, offers, placements and crossings."""

    view: StageView
    catalogue: Catalogue
    scopes: Sequence[StageScope]
    offers: Mapping[Key, Offer]
    placed: Mapping[Key, Placed | PlacedSum | PlacedBodies]
    demanded: Mapping[Key, PlacementOptions]
    crossings: Mapping[int, tuple[int, SumOptions]]

    def value(self, key: Key) -> Value:
        """Return the value of a key."""
        return self.scopes[key[0]].graph.values[key[1]]

    def paths(self) -> dict[int, Path]:
        """Return the path from the graph of the step to each scope."""
        found: dict[int, Path] = {0: ()}
        if len(self.scopes) == 1:
            return found
        # Scopes are numbered from outside in, so the path of an outer scope is set before its inner ones need it.
        for (scope, op_id), placed in sorted(self.placed.items(), key=lambda item: item[0]):
            if isinstance(placed, PlacedBodies):
                found |= {inner: (*found[scope], (op_id, n)) for n, inner in enumerate(placed.scopes)}
        return found


def stage_lives(view: StageView, catalogue: Catalogue) -> Lives:
    """Return the lifetimes of a stage's values on the backend of a catalogue's cost model."""
    gathers = catalogue.restriction.parameters is BatchSplit.MUST
    return lives_of(view, KernelModel.of(catalogue.pricer.cost_model, prod(catalogue.sizes.values()), gathers=gathers))


def usages_of(layout: StageLayout, arrays: SharedArrays, *, in_flight: int) -> tuple[UsageOf, ...]:
    """Return all usages of a stage with `in_flight` micro-batches held at the peak."""
    return tuple(_Collector(layout, arrays, in_flight).collect())


class _Collector:
    def __init__(self, layout: StageLayout, arrays: SharedArrays, in_flight: int) -> None:
        self.layout, self.arrays, self.in_flight = layout, arrays, in_flight
        self.catalogue = layout.catalogue
        self.lives = stage_lives(layout.view, layout.catalogue)
        self.accumulates = layout.view.step.accumulates
        self.external = frozenset(layout.view.external)
        one_program = layout.view.part.is_whole and layout.view.step.num_microbatches == 1
        # Sums that are not added up: a task of the loop returns them, and the update takes them.
        self.gradients = Held.INSIDE if self.accumulates or one_program else Held.PASSED
        self.held: set[tuple[Key, frozenset[Spec]]] = set()  # copies charged to an earlier op
        self.last_read = self._last_read()
        self.sums = {self._made_as(v): v for v in layout.crossings}  # what ops write of a sum → the sum

    def collect(self) -> Iterator[UsageOf]:
        found = (*self._state(), *self._values(), *self._moved())
        # Usages of nothing would only enlarge the problem.
        return (usage for usage in found if usage.end > usage.start and self.arrays.any(usage.sizes))

    def _use(
        self,
        key: Key,
        offer: Offer,
        start: int,
        end: int,
        copies: float = 1.0,
        *,
        held: Held = Held.PASSED,
    ) -> UsageOf:
        sizes = self.arrays.product(self.catalogue.local_sizes(self.layout.value(key), offer.specs), copies)
        return UsageOf(value=key, node=offer.node, sizes=sizes, start=start, end=end, held=held)

    def _held(self, life: Life) -> Held:
        part = self.layout.view.part
        if not life.path and (life.value in part.leaves or life.value in self.external):
            return Held.PASSED
        return Held.SAVED if life.saved else Held.INSIDE

    def _state(self) -> Iterator[UsageOf]:
        view, end = self.layout.view, self.lives.end
        for v in view.external:
            if view.graph.producer[v] is None and view.step.batch_dims[v] is None:
                yield self._use((0, v), self.layout.offers[(0, v)], 0, end)
        if self.accumulates:
            for v, (node, options) in self.layout.crossings.items():
                yield self._use((0, v), Offer(node=node, specs=options.stored), 0, end)

    def _values(self) -> Iterator[UsageOf]:
        numbers = {path: scope for scope, path in self.layout.paths().items()}
        for life in self.lives.lives:
            key = (numbers.get(life.path, -1), life.value)
            if key in self.sums:
                maker = self.layout.scopes[key[0]].graph.producer[life.value]
                late = life.loop_end if maker is None else self.lives.completed.get((life.path, maker), life.loop_end)
                yield from self._sum(replace(life, path=(), value=self.sums[key]), late)
            elif key in self.layout.offers:
                offer = self.layout.offers[key]
                yield self._use(key, offer, life.start, life.end, held=self._held(life))
                if life.saved and self.in_flight > 1:
                    # The other micro-batches are at any point of their passes: their values are held throughout.
                    yield self._use(key, offer, 0, self.lives.loop_end, self.in_flight - 1.0)

    def _sum(self, life: Life, late: int) -> Iterator[UsageOf]:
        view, (node, options) = self.layout.view, self.layout.crossings[life.value]
        readers = [c for c in view.graph.consumers[life.value] if c in view.op_set]
        times = [self.lives.spans[(), c].start for c in readers if view.step.phases[c] is Phase.UPDATE]
        if self.accumulates:
            yield from self._added(life, node, options, late)
        elif view.step.num_updates > 1:
            # The gradient of each update is a result of its own, which is copied from where the product made it.
            stored = Offer(node=node, specs=options.stored)
            yield self._use((0, life.value), stored, life.start, self.lives.loop_end, held=Held.INSIDE)
        yield from self._scattered(life, node, options, late)
        reduced = self._all_reduced(life.value, options) if times else None
        if reduced is None:
            yield from self._sum_in_place(life, node, options, times)
            return
        for usage in self._sum_in_place(life, node, options, times):
            yield replace(usage, sizes=np.where(reduced, 0.0, usage.sizes))
        for usage in self._combined(life, node, options):
            yield replace(usage, sizes=np.where(reduced, usage.sizes, 0.0))

    def _sum_in_place(self, life: Life, node: int, options: SumOptions, times: Sequence[int]) -> Iterator[UsageOf]:
        """Yield the usages of a sum that an all_reduce overwrites. `times`: when the update begins to read it."""
        # A sum is stored in one spec while the loop adds to it, and resolved to another one for the update.
        key, stored = (0, life.value), Offer(node=node, specs=options.stored)
        read = min(times, default=life.end)
        # With accumulators this is the addend of one micro-batch; `_state` has counted the sum itself.
        end = life.loop_end if self.accumulates else min(read + 1, life.end)
        yield self._use(key, stored, life.start, end, held=self.gradients)
        value, end = self.layout.value(key), max(life.end, read + 1) if times else read
        moved = self.catalogue.copy_sizes(value, options.stored, options.resolved, paired=True)
        yield UsageOf(value=key, node=node, sizes=moved, start=read, end=end)
        if not self.accumulates:
            whole = self.catalogue.local_sizes(value, options.stored)
            # Where resolving makes a copy, the copy replaces the sum; elsewhere the sum stays where it is.
            kept = self.arrays.kept_where_zero(whole, moved)
            yield UsageOf(value=key, node=node, sizes=kept, start=read + 1, end=end, held=self.gradients)

    def _scattered(self, life: Life, node: int, options: SumOptions, late: int) -> Iterator[UsageOf]:
        """Yield a sum that is stored in parts as its op makes it, until it is scattered. `late`: when this is.

        It counts where the op makes partial sums of larger blocks alone; if it may make the parts themselves, too, that
        is the choice of another node.
        """
        made, offered = self._offered(life.value)
        sums = [spec for spec in dict.fromkeys(offered) if any(self.catalogue.sizes[axis] > 1 for axis in spec.partial)]
        parts = self.catalogue.local_sizes(self.layout.value((0, life.value)), options.stored)
        whole, relaid, known = np.zeros(parts.shape), np.zeros(parts.shape), {_cuts(spec) for spec in offered}
        for i, spec in enumerate(options.stored):
            larger = tuple(s for s in sums if _cuts(s) < _cuts(spec)) if _cuts(spec) not in known else ()
            if larger:
                sizes = self.catalogue.local_sizes(self.layout.value(made), larger)
                whole[i] = sizes.min()
                one = larger[int(sizes.argmin())]
                if len(one.dims) == len(spec.dims) and self.catalogue.is_relaid(self.layout.value(made), spec, one):
                    relaid[i] = whole[i]
        key, late = (0, life.value), min(late, self.lives.loop_end - 1)
        ahead = np.where(whole > 0, whole - parts, 0.0)
        yield UsageOf(value=key, node=node, sizes=ahead, start=life.start, end=late)
        yield UsageOf(value=key, node=node, sizes=whole + relaid, start=late, end=late + 1)

    def _offered(self, v: int) -> tuple[Key, Sequence[Spec]]:
        """Return the array that is written of a sum, and the specs in which its op may make it; none if a loop does."""
        made = scope, value = next(key for key, crossing in self.sums.items() if crossing == v)
        graph = self.layout.scopes[scope].graph
        producer = graph.producer[value]
        placed = None if producer is None else self.layout.demanded.get((scope, producer))
        if producer is None or placed is None:
            return made, ()
        return made, placed.made[graph.ops[producer].results.index(value)]

    def _added(self, life: Life, node: int, options: SumOptions, late: int) -> Iterator[UsageOf]:
        """Yield what an addition to a partial sum over micro-batches writes beside the sum.

        Each device has its terms behind a dim of size 1. The CPU backend adds in place only where a kernel reads the
        sum element by element, and not through a reshape: it writes the new sum beside the addend, and copies it then.
        `late`: when the addition runs.
        """
        is_partial = np.array([bool(self.catalogue.summed(spec)) for spec in options.stored])
        whole = self.catalogue.local_sizes(self.layout.value((0, life.value)), options.stored)
        sizes = np.where(is_partial, whole, 0.0)
        # The addition is a kernel of its own, which waits for its turn as all do, and none is left for the update.
        late = min(late, self.lives.loop_end - 1)
        yield UsageOf(value=(0, life.value), node=node, sizes=sizes, start=life.loop_end, end=late + 1)
        # Additions run one after the other, and each frees its addend.
        values = self.layout.view.graph.values
        if life.value == max(self.layout.crossings, key=lambda v: values[v].bytes):
            yield UsageOf(value=(0, life.value), node=node, sizes=sizes, start=late, end=late + 1)

    def _combined(self, life: Life, node: int, options: SumOptions) -> Iterator[UsageOf]:
        """Yield the operand and the result of an all_reduce that is not in place.

        XLA combines the all_reduces of gradients: all results are allocated while all operands are.
        """
        key, stored, loop_end = (0, life.value), Offer(node=node, specs=options.stored), self.lives.loop_end
        sizes = self.catalogue.local_sizes(self.layout.value(key), options.stored)
        if not self.accumulates:
            yield self._use(key, stored, life.start, loop_end + 1, held=self.gradients)
            yield UsageOf(value=key, node=node, sizes=sizes, start=loop_end, end=max(life.end, loop_end + 1))
            return
        # Each addend is reduced before it is added, or the sum is when the loop has ended.
        is_each = np.array([not spec.partial for spec in options.stored])
        each, once = np.where(is_each, sizes, 0.0), np.where(is_each, 0.0, sizes)
        yield UsageOf(value=key, node=node, sizes=each, start=life.start, end=loop_end)
        yield UsageOf(value=key, node=node, sizes=each, start=loop_end - 1, end=loop_end)
        yield UsageOf(value=key, node=node, sizes=once, start=life.start, end=life.loop_end)
        yield UsageOf(value=key, node=node, sizes=once, start=loop_end, end=max(life.end, loop_end + 1))

    def _all_reduced(self, v: int, options: SumOptions) -> NDArray[np.bool_] | None:
        """Return the strategies of a sum in which an all_reduce completes it; None if that is in place, or in none.

        A sum that is stored complete counts if the op may make partial sums of these blocks. Whether it does, or
        computes them whole on each device, is the choice of another node. With accumulators it computes them whole
        where it may: partial sums would be added up as they are, and reduced once instead of for every micro-batch.
        """
        if self.catalogue.pricer.cost_model.cluster.reduces_in_place:
            return None
        (_, offered), summed = self._offered(v), self.catalogue.summed
        made: set[object] = {_axes(spec) for spec in offered if summed(spec)}
        if self.accumulates:
            made -= {_axes(spec) for spec in offered if not summed(spec)}
        found = np.array(
            [
                not resolved.partial
                and resolved.dims == stored.dims
                and (bool(summed(stored)) or _axes(stored) in made)
                for stored, resolved in zip(options.stored, options.resolved, strict=True)
            ]
        )
        return found if found.any() else None

    def _made_as(self, v: int) -> Key:
        """Return the array that is written of a sum, before ops that rename it, and in loops that XLA removes."""
        scope, value = 0, v
        while True:
            graph = self.layout.scopes[scope].graph
            producer = graph.producer[value]
            op = None if producer is None else graph.ops[producer]
            placed = None if op is None else self.layout.placed.get((scope, op.id))
            if op is not None and isinstance(placed, PlacedBodies) and is_one_trip_loop(op):
                (inner,), (outputs,) = placed.scopes, (op.bodies[0].outputs,)
                scope, value = inner, outputs[op.results.index(value)]
            elif op is not None and len(op.operands) == 1 and is_folded(graph, op):
                (value,) = op.operands
            else:
                return scope, value

    def _moved(self) -> Iterator[UsageOf]:
        """Yield the copies and the scratch memory of every op."""
        # Liveness names bodies by their path in the step, the builder by the number of their scope.
        paths, ahead = self.layout.paths(), self._gathered_from()
        for key, placed in self.layout.placed.items():
            scope, op_id = key
            op, span = self.layout.scopes[scope].graph.ops[op_id], self.lives.spans[paths[scope], op_id]
            if isinstance(placed, PlacedBodies):
                start = ahead.get(key, span).start
                yield from self._copies_of_loop(scope, op, placed, start, span)
            elif isinstance(placed, Placed) and key in self.layout.demanded:
                options = self.layout.demanded[key]
                end = self._end(paths[scope], op_id)
                for i, (v, specs) in enumerate(zip(op.operands, options.demanded, strict=True)):
                    start = moved = span.start
                    if self._is_parameter((scope, v)):
                        start, moved = ahead.get(key, LiveSpan(start, start))
                    early = self.lives.early.get((paths[scope], op_id, i))
                    if early is not None and op.primitive == "conv_general_dilated":
                        # What is gathered is brought into the order of dims that the convolution reads, and freed.
                        yield from self._copies((scope, v), placed.node, specs, start, max(start, early) + 1)
                        continue
                    yield from self._copies((scope, v), placed.node, specs, start, end)
                    if reads_whole(self.layout.scopes[scope].graph, op):
                        yield from self._relaid((scope, v), placed.node, specs, min(moved, end - 1))
                yield from self._incomplete(key, paths[scope], placed.node)
                yield from self._early((scope, op_id), paths[scope], placed.node)

    def _incomplete(self, key: Key, path: Path, node: int) -> Iterator[UsageOf]:
        """Yield results before the collectives that complete them, and what these need beside their results."""
        (scope, op_id), options = key, self.layout.demanded[key]
        graph, span = self.layout.scopes[scope].graph, self.lives.spans[path, op_id]
        op = graph.ops[op_id]
        made, late = (scope, op.results[0]), self.lives.completed.get((path, op_id), span.end - 1)
        sizes = self.catalogue.scratch_sizes(graph, op, options)
        if sizes is not None:
            begun = self.lives.filled.get((path, op_id), span.start)
            yield UsageOf(value=made, node=node, sizes=sizes, start=begun, end=late + 1)
        sizes = self.catalogue.relaid_scratch_sizes(graph, op, options)
        if sizes is not None:
            yield UsageOf(value=made, node=node, sizes=sizes, start=late, end=late + 1)
        sizes = self.catalogue.all_reduced_sizes(graph, op, options)
        # What crosses into the update is charged there (`_combined`).
        if sizes is not None and not any((scope, r) in self.sums for r in op.results):
            yield UsageOf(value=made, node=node, sizes=sizes, start=late, end=late + 1)

    def _early(self, key: Key, path: Path, node: int) -> Iterator[UsageOf]:
        """Yield what kernels write that do a part of the work of an op when one of its operands is there."""
        (scope, op_id), options = key, self.layout.demanded[key]
        graph, end = self.layout.scopes[scope].graph, self.lives.spans[path, op_id].end
        op = graph.ops[op_id]
        indices, made = self.catalogue.index_sizes(graph, op, options), (scope, op.results[0])
        if indices:
            start = self.lives.early.get((path, op_id, 1), end - 1)
            # Those of the elements that are searched need nothing: they are written when the program begins.
            begun = self.lives.begun[path, op_id]
            for sizes, since, until in zip(indices, (start, begun), (end, start + 1), strict=False):
                yield UsageOf(value=made, node=node, sizes=sizes, start=since, end=until)
            return
        for span in self.lives.library.get((path, op_id), ()):
            sizes = self.catalogue.local_sizes(graph.values[op.results[0]], options.results[0])
            elements = sizes / item_bytes(graph.values[op.results[0]].dtype)
            goes_on = elements * span.kept >= LIBRARY_ELEMENTS
            written = (elements >= LIBRARY_ELEMENTS) & (span.goes_on is None or goes_on == span.goes_on)
            yield UsageOf(value=made, node=node, sizes=np.where(written, sizes, 0.0), start=span.start, end=span.end)
        for i, (v, specs) in enumerate(zip(op.operands, options.demanded, strict=True)):
            start = self.lives.early.get((path, op_id, i))
            if start is not None:
                sizes = self.catalogue.local_sizes(graph.values[v], specs)
                yield UsageOf(value=(scope, v), node=node, sizes=sizes, start=start, end=end)

    def _is_parameter(self, key: Key) -> bool:
        return is_parameter(self.layout.view.step, self.layout.scopes[key[0]].graph, key[1])

    def _gathered_from(self) -> Mapping[Key, LiveSpan]:
        """Return for each op that reads parameters when those that lie in parts are gathered for it and laid out anew.

        Programs gather them while the op before that reads parameters runs (`lower.local_machine.Gathered`).
        """
        paths, found, latest = self.layout.paths(), dict[Key, LiveSpan](), dict[Path, int]()
        # In the order in which a program has the ops; those of a loop of one trip stand in its place.
        places = sorted(self.layout.placed, key=lambda key: (*(op_id for op_id, _ in paths[key[0]]), key[1]))
        for key in places:
            scope, op_id = key
            op, around = self.layout.scopes[scope].graph.ops[op_id], self._around(paths[scope])
            queued = self.lives.gathered.get((paths[scope], op_id))
            if isinstance(self.layout.placed[key], PlacedBodies):
                if not is_one_trip_loop(op):
                    # Its trips gather for themselves.
                    latest.pop(around, None)
                    found[key] = queued or self.lives.spans[paths[scope], op_id]
            elif any(self._is_parameter((scope, v)) for v in op.operands):
                start = self.lives.spans[paths[scope], op_id].start
                before = latest.get(around, start)
                found[key] = queued or LiveSpan(before, before)
                if scope or self.layout.view.step.phases[op_id] is not Phase.INVARIANT:
                    latest[around] = start
        return found

    def _around(self, path: Path) -> Path:
        """Return the path of the innermost body around a place whose loop runs more than one trip."""
        graph, found = self.layout.view.graph, ()
        for depth, (op_id, number) in enumerate(path):
            op = graph.ops[op_id]
            if not is_one_trip_loop(op):
                found = path[: depth + 1]
            graph = op.bodies[number]
        return found

    def _copies_of_loop(
        self, scope: int, op: Op, placed: PlacedBodies, gathered: int, span: LiveSpan
    ) -> Iterator[UsageOf]:
        wiring = wiring_of(op)
        for i, (v, offer) in enumerate(zip(op.operands, placed.operands, strict=True)):
            scanned = wiring is not None and i in wiring.scanned
            specs = tuple(map(stacked, offer.specs)) if scanned else offer.specs
            start = gathered if self._is_parameter((scope, v)) else span.start
            yield from self._copies((scope, v), offer.node, specs, start, span.end)

    def _copies(self, key: Key, node: int, specs: tuple[Spec, ...], start: int, end: int) -> Iterator[UsageOf]:
        end, held = self._until(key, specs, end)
        pair = None if held else self._pair(key, node, specs)
        if pair is not None:
            sizes = self.catalogue.copy_sizes(self.layout.value(key), pair.offered, pair.demanded, paired=pair.paired)
            yield UsageOf(value=key, node=pair.node, sizes=sizes, start=start, end=end)

    def _relaid(self, key: Key, node: int, specs: tuple[Spec, ...], start: int) -> Iterator[UsageOf]:
        """Yield the array of which a copy in another layout is made when it is there."""
        pair = self._pair(key, node, specs)
        if pair is None:
            return
        value = self.layout.value(key)
        sizes = self.catalogue.relaid_sizes(value, pair.offered, pair.demanded, paired=pair.paired)
        if sizes is not None:
            yield UsageOf(value=key, node=pair.node, sizes=sizes, start=start, end=start + 1)

    def _pair(self, key: Key, node: int, specs: tuple[Spec, ...]) -> _Pair | None:
        """Return the specs of a value and those that a reader demands; None if they are the same, or it has no copies.

        They are those of the strategies of the reader's node, or of the value's node if the reader has no choice.
        """
        offer = self.layout.offers.get(key)
        if offer is None or self.layout.value(key).rank == 0 or offer.specs == specs:
            return None
        if offer.node != node and len(set(specs)) == 1:
            return _Pair(node=offer.node, offered=offer.specs, demanded=specs[:1] * len(offer.specs), paired=True)
        # Where one node decides on both specs, strategies of equal number belong together.
        return _Pair(node=node, offered=offer.specs, demanded=specs, paired=offer.node == node)

    def _until(self, key: Key, specs: tuple[Spec, ...], end: int) -> tuple[int, bool]:
        """Return when a copy that an op reads until `end` is freed, and whether an earlier op was charged for it."""
        copy, view = (key, frozenset(specs)), self.layout.view
        last = self.last_read.get(copy)
        if not key[0] and view.keeps_gathered and key[1] in parameters(view.step):
            phases, spans = view.step.phases, self.lives.spans
            readers = [c for c in view.graph.consumers[key[1]] if c in view.op_set]
            last = max([end, *(spans[(), c].end for c in readers if phases[c] is not Phase.UPDATE)])
        if last is None:
            return end, False
        held = copy in self.held
        self.held.add(copy)
        return last, held

    def _last_read(self) -> Mapping[tuple[Key, frozenset[Spec]], int]:
        """Return for values in bodies, and the one spec that ops demand, when the last of these ops has read it.

        A trip brings a value into a spec once, for all of its readers. Of ops that may demand several specs it is open
        which of them share a copy. For the CPU backend readers are counted further apart than they are, so that each is
        charged by itself.
        """
        if self.catalogue.pricer.cost_model.cluster.breadth_first:
            return {}
        paths, found = self.layout.paths(), dict[tuple[Key, frozenset[Spec]], int]()
        for (scope, op_id), options in self.layout.demanded.items():
            operands = self.layout.scopes[scope].graph.ops[op_id].operands
            for v, specs in zip(operands, options.demanded, strict=True):
                if scope and len(set(specs)) == 1:
                    copy, end = ((scope, v), frozenset(specs)), self._end(paths[scope], op_id)
                    found[copy] = max(found.get(copy, 0), end)
        return found

    def _end(self, path: Path, op_id: int) -> int:
        """Return when an op has read its operands."""
        return max(self.lives.spans[path, op_id].end, self.lives.read_until.get((path, op_id), 0))


def _axes(spec: Spec) -> Sequence[object]:
    """Return the axes that split an array, whatever the order of its dims is."""
    return tuple(sorted(axes for axes in spec.dims if axes))


def _cuts(spec: Spec) -> frozenset[str]:
    """Return the axes that split an array, in whatever form it is."""
    return frozenset(axis for axes in spec.dims for axis in axes)
