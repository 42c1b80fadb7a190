"""The part of a step that one stage runs, and the data about its layout.

`StageView` has the ops of a stage in execution order, its inputs and outputs, and the runs of each op. The user may
constrain the layout of its values: which tensor dim a mesh axis must split, for some or all values of the step
(`GivenLayout`). `op_choices` restricts the strategies of a stage to them.

The builder of the intra-op problem records a node and specs for each value (`Offer`) and placements for each op
(`Placed`, …), from which a solution is decoded (`placements_of`) into a `Choice`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from alpa_lite.intra_op.problem import Status
from alpa_lite.plan.parts import NO_COST, Choice, CollectiveUse, OpPlacement, StageCost
from alpa_lite.program.identity import FirstUses, params_texts, structure
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_ops, free_values, op_class
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.layers import Layers

Wanted = tuple[tuple[str, int | None], ...]
"""The layout constraint of one value: pairs of a mesh axis and the tensor dim that it must split; None means no dim."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenLayout:
    """The layout constraints of all values of a step, loop bodies included.

    `values` holds one constraint per value id of a graph; `exempt` holds the ids of the ops that need not satisfy the
    constraints of their operands and results. With `reads_otherwise`, an op that cannot read operands as they lie reads
    them otherwise. `advice` is what to do about an op that cannot satisfy its constraints, as a sentence.
    """

    values: Mapping[Graph, Sequence[Wanted]] = field(default_factory=dict[Graph, Sequence[Wanted]])
    exempt: Mapping[Graph, frozenset[int]] = field(default_factory=dict[Graph, frozenset[int]])
    reads_otherwise: bool = False
    advice: str = "Leave one of the names that split it out of the layout."

    def of(self, graph: Graph, v: int) -> Wanted:
        """Return the layout constraint of value `v` of a graph; it is empty if the graph has none."""
        return self.values[graph][v] if graph in self.values else ()


NO_LAYOUT = GivenLayout()


def _bodies(op: Op) -> Iterator[Graph]:
    """Yield the bodies of an op at any depth."""
    for body in op.bodies:
        yield body
        for _, inner in body.walk():
            yield from inner.bodies


def _loop_kind(graph: Graph, op: Op) -> tuple[object, ...]:
    """Return a key that is equal for ops whose bodies do the same to the same shapes."""
    literals = tuple([v.literal for v in graph.operands(op)])
    results = tuple([(v.shape, v.dtype) for v in graph.results(op)])
    return (op.primitive, params_texts(graph)[op.id], tuple(map(structure, op.bodies)), literals, results)


# Without slots, which would leave no place for cached properties.
@dataclass(frozen=True, kw_only=True, eq=False)
class StageView:
    """The ops of layers `first..last` of a step, with the invariant ops that they read.

    `pins`: prescribed specs of some graph inputs. `outputs`: prescribed specs of some graph outputs. `keeps_gathered`:
    parameters that the forward pass gathers remain gathered for the backward pass. `layout`: layout constraints of any
    values, bodies included.
    """

    step: StepGraph
    layers: Layers
    first: int
    last: int
    pins: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    outputs: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    keeps_gathered: bool = False
    layout: GivenLayout = NO_LAYOUT

    @property
    def graph(self) -> Graph:
        """The graph of the whole step, which value and op ids refer to."""
        return self.step.graph

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The ids of the ops of this stage in order, with the free and invariant ops of others that it repeats."""
        graph, of_op, free = self.graph, self.layers.of_op, free_ops(self.graph)
        chosen = set(chain.from_iterable(map(self.layers.ops_of, range(self.first, self.last + 1))))
        waiting = [v for op_id in chosen for v in graph.ops[op_id].operands]
        if self.first == 0 or self.step.num_updates > 1:
            # Outputs that depend on nothing but inputs (step counters, new keys) are made by the first stage, and by
            # all that read them where stages do not wait for each other's updates.
            waiting += [v for v in graph.outputs if self.is_invariant_value(v)]
        while waiting:
            maker = graph.producer[waiting.pop()]
            if maker is not None and maker not in chosen and (of_op[maker] is None or maker in free):
                chosen.add(maker)
                waiting += graph.ops[maker].operands
        return tuple(sorted(chosen))  # ids are in execution order

    @property
    def free(self) -> frozenset[int]:
        """The values that every stage computes for itself."""
        return free_values(self.graph)

    def is_invariant_value(self, value: int) -> bool:
        """Return True for results of invariant ops."""
        producer = self.graph.producer[value]
        return producer is not None and self.step.phases[producer] is Phase.INVARIANT

    def is_read_in_loop(self, value: int) -> bool:
        """Return True for values that forward or backward ops read, directly or through invariant ops."""
        graph, phases, queue, seen = self.graph, self.step.phases, [value], {value}
        while queue:
            for c in graph.consumers[queue.pop()]:
                if phases[c].in_loop:
                    return True
                if phases[c] is Phase.INVARIANT:
                    queue += [r for r in graph.ops[c].results if r not in seen]
                    seen.update(graph.ops[c].results)
        return False

    @cached_property
    def op_set(self) -> frozenset[int]:
        """The ids of `ops` as a set."""
        return frozenset(self.ops)

    @cached_property
    def external(self) -> tuple[int, ...]:
        """The values read here but computed elsewhere: graph inputs and values of other stages (no literals)."""
        # A dict serves as an ordered set: `remap` pairs the values of two stages by their order.
        graph, found = self.graph, dict[int, None]()
        for op_id in self.ops:
            for v in graph.ops[op_id].operands:
                producer = graph.producer[v]
                if graph.values[v].literal is None and (producer is None or producer not in self.op_set):
                    found[v] = None
        for v in graph.inputs:
            # State that passes through unread still takes memory on some stage.
            if not graph.consumers[v] and self.lives_here(v):
                found[v] = None
        return tuple(found)

    def lives_here(self, value: int) -> bool:
        """Return True for graph inputs that are stored in this stage."""
        if value not in self._homes:
            return False
        return self.first <= self._homes[value] <= self.last

    @cached_property
    def _homes(self) -> dict[int, int]:
        return dict(zip(self.graph.inputs, self.layers.of_input, strict=True))

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The values computed here that other stages or the caller read."""
        outputs = set(self.graph.outputs)
        return frozenset(
            r
            for op_id in self.ops
            for r in self.graph.ops[op_id].results
            if r in outputs or not self.op_set.issuperset(self.graph.consumers[r])
        )

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """The values that the loop of this stage sums over micro-batches, for updates or for the caller."""
        graph, step = self.graph, self.step
        outputs = set(graph.outputs)
        return tuple(
            r
            for op_id in self.ops
            if step.phases[op_id].in_loop
            for r in graph.ops[op_id].results
            if step.batch_dims[r] is None
            and (r in outputs or any(step.phases[c] is Phase.UPDATE for c in graph.consumers[r]))
        )

    def runs_of(self, op: Op) -> int:
        """Return how often an op runs per step here; invariant ops run as often as their most frequent reader."""
        if self.step.phases[op.id] is not Phase.INVARIANT:
            return self.step.runs_of(op)
        return self.step.num_microbatches if op.id in self._invariant_in_loop else self.step.num_updates

    @cached_property
    def _invariant_in_loop(self) -> frozenset[int]:
        graph, step, found, needed = self.graph, self.step, set[int](), set[int]()
        # Backwards: an invariant op is in the loop if a reader is, and readers follow the ops that they read.
        for op_id in reversed(self.ops):
            op = graph.ops[op_id]
            if step.phases[op_id].in_loop or any(r in needed for r in op.results):
                needed.update(op.operands)
                if step.phases[op_id] is Phase.INVARIANT:
                    found.add(op_id)
        return frozenset(found)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for stages that run the same ops on the same shapes, wherever they lie in the graph."""
        graph, number = self.graph, FirstUses[int]()
        # By first use, so that the place of the stage in the graph plays no part.
        local = number.__getitem__
        values, batch_dims, rows = graph.values, self.step.batch_dims, list[object]()
        for op_id in self.ops:
            op = graph.ops[op_id]
            # The class covers shapes, but compares bodies by identity; `_loop_kind` compares contents.
            kind = _loop_kind(graph, op) if op.bodies else op_class(graph, op_id).price
            operands = tuple([local(v) if values[v].literal is None else None for v in op.operands])
            results = tuple([(local(r), batch_dims[r]) for r in op.results])
            rows.append((kind, operands, results, self.step.phases[op_id].value))
        outer = tuple(
            (local(v), graph.values[v].shape, graph.values[v].dtype, self.step.batch_dims[v], self.lives_here(v))
            for v in self.external
        )
        # State that is replaced must come back in its own spec, which ties nodes of the problem together.
        aliases = tuple((local(o), local(i)) for o, i in self.step.aliases.items() if o in number and i in number)
        pins = tuple((local(v), self.pins[v]) for v in self.external if v in self.pins)
        pins += tuple((local(v), spec) for v, spec in self.outputs.items())
        pins += (self.keeps_gathered,)
        # A value that other stages read is kept in memory, and is not recomputed by its readers.
        leaves = tuple(sorted(local(v) for v in self.leaves))
        runs = self.step.num_microbatches, self.step.num_updates
        return (tuple(rows), outer, aliases, leaves, runs, pins, self._layout_signature(number))

    def _layout_signature(self, number: Mapping[int, int]) -> tuple[object, ...]:
        """Return the layout constraints of values with these numbers, and of those inside the loops of this stage."""
        layout = self.layout.values
        if not layout:
            return ()
        bodies = [body for o in self.ops for body in _bodies(self.graph.ops[o])]
        inside = tuple(tuple(layout.get(body, ())) for body in bodies)
        own = layout.get(self.graph, [()] * len(self.graph.values))
        return (tuple((local, own[v]) for v, local in sorted(number.items(), key=lambda item: item[1])), inside)


def remap(choice: Choice, source: StageView, target: StageView) -> Choice:
    """Transfer the decisions to another stage whose `signature` is equal."""
    # Stages of equal signature list their ops, inputs and sums in corresponding order.
    ops = dict(zip(source.ops, target.ops, strict=True))
    values = dict(zip(source.external, target.external, strict=True))
    sums = dict(zip(source.crossing, target.crossing, strict=True))
    return replace(
        choice,
        inputs={values[v]: s for v, s in choice.inputs.items()},
        ops={ops[o]: p for o, p in choice.ops.items()},
        accumulators={sums[v]: a for v, a in choice.accumulators.items()},
        outputs=target.outputs,
    )


@dataclass(frozen=True, kw_only=True)
class StageSolution:
    """The decisions for one stage and their cost.

    `choice` is None when nothing fits; `peak_bytes` then is the least peak that the solver reached. `compute_seconds`
    and `flops` are those of a whole step on one device; `collectives` are all of a step.
    """

    choice: Choice | None
    status: Status
    objective: float
    bound: float
    peak_bytes: float
    cost: StageCost = NO_COST
    compute_seconds: float = 0.0
    flops: float = 0.0
    collectives: tuple[CollectiveUse, ...] = ()

    @property
    def gap(self) -> float:
        """The relative gap (objective - bound) / objective, in [0, 1]; 1 where no bound is proven."""
        if self.choice is None or self.objective <= 0.0:
            return 0.0
        return min(1.0, max(0.0, (self.objective - self.bound) / self.objective))


Key = tuple[int, int]
"""A value or an op as (scope, id). Scope 0 is the graph of the step; every body has a scope of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The node that decides on a value, and the value's spec under each strategy of that node."""

    node: int
    specs: tuple[Spec, ...]


@dataclass(slots=True, kw_only=True)
class Placed:
    """An op with one placement per strategy of its node."""

    node: int
    options: tuple[OpPlacement, ...]


@dataclass(slots=True, kw_only=True)
class PlacedBodies:
    """A control-flow op: the scopes of its bodies, and the offers of its operands (as seen inside) and results."""

    scopes: tuple[int, ...]
    operands: tuple[Offer, ...]
    results: tuple[Offer, ...]


@dataclass(slots=True, kw_only=True)
class PlacedSum:
    """An addition of scalars, partial over all axes over which an operand is; the result stays so if it `waits`."""

    operands: tuple[Key, ...]
    result: Key
    waits: bool

    def placement(self, operands: Sequence[Spec]) -> OpPlacement:
        """Return the placement for operands in these specs."""
        # An operand that is whole on an axis becomes an addend of one device there, which costs nothing.
        partial = tuple(sorted({axis for spec in operands for axis in spec.partial}))
        return OpPlacement(factors=(), partial=partial, results=(Spec((), partial if self.waits else ()),))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageScope:
    """One graph of the stage: the step's own graph (number 0) or a body."""

    graph: Graph
    batch_dims: tuple[int | None, ...]
    in_loop: bool


def placements_of(
    placed: Mapping[Key, Placed | PlacedSum | PlacedBodies],
    offers: Mapping[Key, Offer],
    scopes: Sequence[StageScope],
    ops: Iterable[int],
    choices: Sequence[int],
) -> dict[int, OpPlacement]:
    """Return the placements of ops of the step, in order, under the given choices of the nodes."""
    return _Chosen(placed=placed, offers=offers, scopes=scopes, choices=choices).within(0, ops)


@dataclass(slots=True, kw_only=True)
class _Chosen:
    """Lookup of placements and specs under some choices. `sums`: the specs of the scalar additions decoded so far."""

    placed: Mapping[Key, Placed | PlacedSum | PlacedBodies]
    offers: Mapping[Key, Offer]
    scopes: Sequence[StageScope]
    choices: Sequence[int]
    sums: dict[Key, Spec] = field(default_factory=dict[Key, Spec])

    def within(self, scope: int, numbers: Iterable[int]) -> dict[int, OpPlacement]:
        return {n: self.placement(self.placed[(scope, n)]) for n in numbers if (scope, n) in self.placed}

    def placement(self, op: Placed | PlacedSum | PlacedBodies) -> OpPlacement:
        if isinstance(op, Placed):
            return op.options[self.choices[op.node]]
        if isinstance(op, PlacedSum):
            # Ops are decoded in order, so that the sums among the operands are known; free values are whole.
            made = op.placement([self.spec(key) for key in op.operands if key in self.sums or key in self.offers])
            (self.sums[op.result],) = made.results
            return made
        bodies = tuple(self.within(n, range(len(self.scopes[n].graph.ops))) for n in op.scopes)
        results, operands = (
            tuple(offer.specs[self.choices[offer.node]] for offer in offers) for offers in (op.results, op.operands)
        )
        return OpPlacement(factors=(), results=results, bodies=bodies, body_operands=operands)

    def spec(self, key: Key) -> Spec:
        if key in self.sums:
            return self.sums[key]
        offer = self.offers[key]
        return offer.specs[self.choices[offer.node]]
