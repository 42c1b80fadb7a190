"""Data that the builder records about values and ops, and the decoding of a solution into placements.

`Choice` is the decoded solution of one stage: specs, placements, and accumulators of sums over micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.intra_op.stage import StageView
from alpa_lite.plan.plan import Accumulator, OpPlacement
from alpa_lite.program.ir import Graph
from alpa_lite.sharding.specs import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decoded solution of a stage: specs of its inputs, placements of its ops and accumulators of its sums, by
    id.
    """

    inputs: Mapping[int, Spec]
    ops: Mapping[int, OpPlacement]
    accumulators: Mapping[int, Accumulator]


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
    )


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
    """An addition of scalars, partial over all axes over which an operand is partial; the result remains so if it
    `waits`.
    """

    operands: tuple[Key, ...]
    result: Key
    waits: bool

    def placement(self, operands: Sequence[Spec]) -> OpPlacement:
        """Return the placement for operands in these specs."""
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
