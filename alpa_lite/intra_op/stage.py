"""The part of a step that one stage runs, and the data about its layout.

`StageView` has the ops of a stage (`stage_ops.StageOps`) and constraints on its layout. The user may constrain the
layout of its values: which tensor dim a mesh axis must split, for some or all values of the step
(`GivenLayout`). `op_choices` restricts the strategies of a stage to them.

The builder of the intra-op problem records a node and specs for each value (`Offer`) and placements for each op
(`Placed`, …), from which a solution is decoded (`placements_of`) into a `Choice`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.stage_ops import StageOps, stage_ops
from alpa_lite.plan.parts import NO_COST, Choice, CollectiveUse, OpPlacement, StageCost
from alpa_lite.program.identity import FirstUses
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import StepGraph
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


# Without slots, which would leave no place for cached properties.
@dataclass(frozen=True, kw_only=True, eq=False)
class StageView:
    """The ops of layers `first..last` of a step, with the invariant ops that they read, and constraints on layouts.

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

    @cached_property
    def part(self) -> StageOps:
        """The ops of this stage, which views of equal ops of one step share, whatever their constraints are."""
        return stage_ops(self.step, self.layers, self.first, self.last)

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for views of the same ops under the same constraints; layouts compare by identity."""
        return self.part, (*self.pins.items(),), (*self.outputs.items(),), self.keeps_gathered, self.layout

    @property
    def graph(self) -> Graph:
        """The graph of the whole step, which value and op ids refer to."""
        return self.step.graph

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The ids of the ops of this stage in order, with the free and invariant ops of others that it repeats."""
        return self.part.ops

    @cached_property
    def op_set(self) -> frozenset[int]:
        """The ids of `ops` as a set."""
        return self.part.op_set

    @cached_property
    def external(self) -> tuple[int, ...]:
        """The values read here but computed elsewhere: graph inputs and values of other stages (no literals)."""
        return self.part.external

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The values computed here that other stages or the caller read."""
        return self.part.leaves

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """The values that the loop of this stage sums over micro-batches, for updates or for the caller."""
        return self.part.crossing

    def is_read_in_loop(self, value: int) -> bool:
        """Return True for values that forward or backward ops read, directly or through invariant ops."""
        return self.part.is_read_in_loop(value)

    def lives_here(self, value: int) -> bool:
        """Return True for graph inputs that are stored in this stage."""
        return self.part.lives_here(value)

    def runs_of(self, op: Op) -> int:
        """Return how often an op runs per step here; invariant ops run as often as their most frequent reader."""
        return self.part.runs_of(op)

    @property
    def size(self) -> tuple[int, ...]:
        """Numbers that are equal for views of equal `signature`, and quickly told."""
        step, part = self.step, self.part
        return (len(part.ops), len(part.external), step.num_microbatches, step.num_updates)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for stages that run the same ops on the same shapes, wherever they lie in the graph."""
        part = self.part
        # A copy, since an output that another stage makes gets a number here.
        number = FirstUses[int](part.numbers)
        local = number.__getitem__
        pins = tuple((local(v), self.pins[v]) for v in self.external if v in self.pins)
        pins += tuple((local(v), spec) for v, spec in self.outputs.items())
        pins += (self.keeps_gathered,)
        return (part.signature, pins, self._layout_signature(number))

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
