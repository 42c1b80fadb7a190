"""Strategies and prices of ops and values on one logical mesh, independent of the stage around them.

    leaders    the placements of an op that chooses for itself, and their seconds       (leader)
    followers  the placement of an op under each spec of its main operand               (following)
    moves      seconds from every offered spec of a value to every demanded one         (move_table)

Results are cached by op class (`Pricer.price_class`) and not by op, so that the layers of a model and all stages on the
same mesh share them. Lists of specs are keyed by number (`interning.Numbering`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.interning import Numbering, frozen
from alpa_lite.intra_op.problem import FloatArray
from alpa_lite.intra_op.strategies import (
    AxisRole,
    BatchSplit,
    Followed,
    LeadingOp,
    OpUse,
    Restriction,
    all_specs,
    follow,
    placements,
    resolutions,
)
from alpa_lite.plan.plan import Accumulator, OpPlacement
from alpa_lite.plan.pricing import Pricer, cuts_of, has_own_collectives, local_bytes
from alpa_lite.plan.walk import PlacedSpecs, placed_specs, replicated_placement
from alpa_lite.program.ir import ADDITIONS, Graph, Op, Value
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import OpClass, op_class, rule_of_op
from alpa_lite.sharding.reshard import SpecGraph, spec_graph
from alpa_lite.sharding.specs import Spec, local_shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementOptions:
    """The placements of an op by strategy: seconds of one run, and the specs of each operand and each result.

    `demanded[i][s]` is the spec of operand i under strategy s, and `results` likewise. `made`: the spec in which each
    result is computed, before a partial sum is resolved to its planned spec.
    """

    placements: tuple[OpPlacement, ...]
    seconds: FloatArray
    demanded: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    made: tuple[tuple[Spec, ...], ...]

    def only(self, kept: Sequence[int]) -> PlacementOptions:
        """Return the options with some of the strategies alone."""

        def pick(columns: tuple[tuple[Spec, ...], ...]) -> tuple[tuple[Spec, ...], ...]:
            return tuple(tuple(column[i] for i in kept) for column in columns)

        return PlacementOptions(
            placements=tuple(self.placements[i] for i in kept),
            seconds=frozen(self.seconds[list(kept)]),
            demanded=pick(self.demanded),
            results=pick(self.results),
            made=pick(self.made),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumOptions:
    """The accumulators of a value summed over micro-batches, by strategy.

    seconds      per step, of the additions to the accumulator and of its resolution
    """

    accumulators: tuple[Accumulator, ...]
    seconds: FloatArray
    stored: tuple[Spec, ...]
    resolved: tuple[Spec, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """The way in which ops of one layout class follow an operand: the fields of `PlacementOptions` except the seconds.

    first      the index of the first occurrence of each distinct spec
    place      for each spec, its index among the distinct ones
    cuts       the number of parts into which each distinct spec splits each factor
    """

    first: tuple[int, ...]
    place: NDArray[np.intp]
    cuts: tuple[tuple[int, ...], ...]
    placements: tuple[OpPlacement, ...]
    demanded: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    made: tuple[tuple[Spec, ...], ...]


class Catalogue:
    """Cached placements and prices on one logical mesh under one restriction."""

    def __init__(self, pricer: Pricer, restriction: Restriction) -> None:
        """Start with empty caches."""
        self.pricer = pricer
        self.sizes: Mapping[str, int] = dict(pricer.sizes)
        self.restriction = restriction.on(self.sizes)
        self._leaders: dict[object, PlacementOptions] = {}
        self._whole: dict[object, PlacementOptions] = {}
        self._followers: dict[object, PlacementOptions] = {}
        self._ways: dict[object, _Way] = {}
        self._follows: dict[object, Followed] = {}
        self._sums: dict[object, SumOptions] = {}
        self._graphs: dict[tuple[int, ...], SpecGraph] = {}
        self._moves: dict[object, FloatArray] = {}
        self._numbers: dict[object, NDArray[np.int64]] = {}
        self._tables: dict[object, FloatArray] = {}
        self._sizes: dict[object, FloatArray] = {}
        self._copies: dict[object, FloatArray] = {}
        self._relaid: dict[object, FloatArray] = {}
        # Keyed by identity, since options compare so; the caches above make equal options one object.
        self._all_reduced: dict[PlacementOptions, FloatArray] = {}
        self._relaid_scratch: dict[PlacementOptions, FloatArray] = {}
        self._scratch: dict[PlacementOptions, FloatArray | None] = {}
        self._indices: dict[PlacementOptions, tuple[FloatArray, ...]] = {}
        self._value_specs: dict[object, tuple[Spec, ...]] = {}
        self._number: Numbering[tuple[Spec, ...]] = Numbering()

    @property
    def is_one_device(self) -> bool:
        """True if there is nothing to choose, as when layers are profiled; axes with a role exist on one device too."""
        roles = (self.restriction.role(axis) for axis in self.sizes)
        return all(size == 1 for size in self.sizes.values()) and all(role is AxisRole.ANY for role in roles)

    def leader(self, graph: Graph, op: Op, use: OpUse) -> PlacementOptions:
        """Return the placements of an op that chooses for itself."""
        key = (self.pricer.price_class(graph, op.id), use)
        if key not in self._leaders:
            leading = LeadingOp(
                rule=rule_of_op(graph, op.id),
                operands=graph.operands(op),
                results=graph.results(op),
                use=use,
                takes_partial=op.primitive in ADDITIONS,
            )
            self._leaders[key] = self._options(graph, op, placements(leading, self.sizes, self.restriction))
        return self._leaders[key]

    def following(
        self, graph: Graph, op: Op, main: int, specs: tuple[Spec, ...], *, keep_partial: bool
    ) -> PlacementOptions:
        """Return the placements of an op that follows its operand number `main` in each of these specs."""
        # Numbers in place of long tuples of specs, which would be hashed for every op.
        key = (self.pricer.price_class(graph, op.id), main, self._number(specs), keep_partial)
        found = self._followers.get(key)
        if found is None:
            way = self._way(graph, op, main, specs, keep_partial)
            found = self._followers[key] = PlacementOptions(
                placements=way.placements,
                # Ops of one layout class follow alike, but their prices differ with their work.
                seconds=self._seconds_of(graph, op, main, specs, way),
                demanded=way.demanded,
                results=way.results,
                made=way.made,
            )
        return found

    def _way(self, graph: Graph, op: Op, main: int, specs: tuple[Spec, ...], keep_partial: bool) -> _Way:
        """Return how all ops of this op's layout class follow."""
        kind = op_class(graph, op.id)
        key = (kind.layout, main, self._number(specs), keep_partial)
        found = self._ways.get(key)
        if found is None:
            numbers: dict[Spec, int] = {}
            # Strategies of the followed node often share a spec: each distinct one is followed and priced once.
            place = [numbers.setdefault(spec, len(numbers)) for spec in specs]
            different = [self._followed(kind, main, spec, keep_partial) for spec in numbers]
            followed = [different[i] for i in place]
            demanded, made, results = self._columns(op, [f.placement for f in followed], [f.specs for f in followed])
            found = self._ways[key] = _Way(
                first=tuple(place.index(i) for i in range(len(different))),
                place=np.array(place, dtype=np.intp),
                cuts=tuple(cuts_of(f.placement, self.sizes) for f in different),
                placements=tuple(f.placement for f in followed),
                demanded=demanded,
                results=results,
                made=made,
            )
        return found

    def _followed(self, kind: OpClass, main: int, spec: Spec, keep_partial: bool) -> Followed:
        key = (kind.layout, main, spec, keep_partial)
        found = self._follows.get(key)
        if found is None:
            found = self._follows[key] = follow(kind, main, spec, self.sizes, keep_partial=keep_partial)
        return found

    def _seconds_of(self, graph: Graph, op: Op, main: int, specs: tuple[Spec, ...], way: _Way) -> FloatArray:
        """Return the seconds of a run of a following op for each placement: its work, and the resharding around it."""
        # Its own collectives depend on the mesh axes; all other work depends on the sizes of the blocks alone.
        if has_own_collectives(graph, op):
            seconds = [self.pricer.op_seconds(graph, op, way.placements[n]) for n in way.first]
        else:
            kind = self.pricer.price_class(graph, op.id)
            seconds = [self.pricer.local_price(kind, cuts).seconds for cuts in way.cuts]
        # Equal lists of specs are one object (`Numbering.one`), so that identity tells whether anything moves.
        moved = [(r, m, t) for r, m, t in zip(op.results, way.made, way.results, strict=True) if m is not t]
        # The op cannot take its operand in every spec, and then gathers it first.
        if way.demanded[main] != specs:
            moved.append((op.operands[main], specs, way.demanded[main]))
        for v, sources, targets in moved:
            value = graph.values[v]
            moves = [self.move_seconds(value, sources[n], targets[n]) for n in way.first]
            seconds = [s + m for s, m in zip(seconds, moves, strict=True)]
        return frozen(np.array(seconds, dtype=float)[way.place])

    def whole(self, graph: Graph, op: Op) -> PlacementOptions:
        """Return the only placement of an op without a choice: all operands and results are replicated."""
        key = self.pricer.price_class(graph, op.id)
        if key not in self._whole:
            self._whole[key] = self._options(graph, op, [replicated_placement(graph, op)])
        return self._whole[key]

    def _options(self, graph: Graph, op: Op, found: Sequence[OpPlacement]) -> PlacementOptions:
        demanded, made, results = self._columns(op, found, [placed_specs(graph, op, p) for p in found])
        seconds = np.array([self.pricer.op_seconds(graph, op, p) for p in found], dtype=float)
        for value, raw, targets in zip(graph.results(op), made, results, strict=True):
            if raw is not targets:
                seconds += [self.move_seconds(value, *pair) for pair in zip(raw, targets, strict=True)]
        return PlacementOptions(
            placements=tuple(found), seconds=frozen(seconds), demanded=demanded, results=results, made=made
        )

    def _columns(self, op: Op, found: Sequence[OpPlacement], placed: Sequence[PlacedSpecs]) -> _Columns:
        """Return specs by operand or result and then by placement; equal lists are one object."""
        one = self._number.one
        return _Columns(
            demanded=tuple(one(tuple([p.operands[i] for p in placed])) for i in range(len(op.operands))),
            made=tuple(one(tuple([p.results[i] for p in placed])) for i in range(len(op.results))),
            results=tuple(one(tuple([p.results[i] for p in found])) for i in range(len(op.results))),
        )

    def value_specs(self, value: Value, batch_dim: int | None, *, split: BatchSplit) -> tuple[Spec, ...]:
        """Return the specs that the restriction allows for a value.

        `split` says whether BATCH axes split values without a batch dim. A BATCH axis splits the batch wherever it
        divides it.
        """
        key = (value.shape, batch_dim, split)
        if key not in self._value_specs:
            self._value_specs[key] = self._allowed_specs(value.shape, batch_dim, split)
        return self._value_specs[key]

    def _allowed_specs(self, shape: tuple[int, ...], batch_dim: int | None, split: BatchSplit) -> tuple[Spec, ...]:
        roles = {axis: self.restriction.role(axis) for axis in self.sizes}

        def allowed(axis: str, dim: int) -> bool:
            if batch_dim is None:
                return self.restriction.state_split(axis, split) is not BatchSplit.NEVER
            if roles[axis].splits_batch:
                return dim == batch_dim
            return dim != batch_dim or roles[axis] in (AxisRole.ANY, AxisRole.EXPERT, AxisRole.DENSE)

        specs = all_specs(shape, self.sizes, allowed, self.restriction)
        if batch_dim is None:
            specs = self.restriction.on_one_dim(specs)
        for axis, role in roles.items():
            # An axis that splits the batch, or must split state, does so wherever it can: specs that leave it unused
            # remain only if no spec uses it.
            using = [spec for spec in specs if axis in spec.axes]
            state_must = batch_dim is None and self.restriction.state_split(axis, split) is BatchSplit.MUST
            if using and (state_must or (batch_dim is not None and role.splits_batch)):
                specs = using
        return tuple(specs)

    def sums(
        self,
        value: Value,
        offered: tuple[Spec, ...],
        *,
        keep_partial: bool,
        additions: int = 0,
        fused: bool = False,
    ) -> SumOptions:
        """Return the accumulators of a value that a loop offers in these specs: stored inside, resolved once after it.

        `keep_partial`: the update adds the value to other sums of this kind; it may remain a partial sum until then.
        `additions`: additions to the sum per step, and `fused`: whether the kernels that make the parts do them.
        Where gradients must be stored sharded, they are scattered before they are accumulated.
        """
        key = (value.shape, value.dtype, self._number(offered), keep_partial, additions, fused)
        if key not in self._sums:
            found: list[Accumulator] = []
            allowed, parameters = self.restriction.may_scatter, self.restriction.parameters
            split = {axis for axis in self.sizes if self.restriction.state_split(axis, parameters) is BatchSplit.MUST}
            for stored in dict.fromkeys(offered):
                if value.rank > 0 and split.intersection(stored.partial):
                    continue
                targets = resolutions(stored, value.shape, self.sizes, keep=keep_partial, may_scatter=allowed)
                found += [Accumulator(stored=stored, resolved=r) for r in self.restriction.on_one_dim(targets)]
            may_split = BatchSplit.NEVER if self.restriction.optimizer is BatchSplit.NEVER else BatchSplit.MAY
            found += [Accumulator(stored=s, resolved=s) for s in self.value_specs(value, None, split=may_split)]
            # The two sources overlap, and a strategy should occur once.
            found = list(dict.fromkeys(found))
            self._sums[key] = SumOptions(
                accumulators=tuple(found),
                seconds=frozen(np.array([self._sum_seconds(value, a, additions, fused=fused) for a in found])),
                stored=tuple(a.stored for a in found),
                resolved=tuple(a.resolved for a in found),
            )
        return self._sums[key]

    def _sum_seconds(self, value: Value, sums: Accumulator, additions: int, *, fused: bool) -> float:
        added = additions * self.pricer.addition_seconds(value, sums.stored, fused=fused)
        return self.move_seconds(value, sums.stored, sums.resolved) + added

    def move_seconds(self, value: Value, source: Spec, target: Spec) -> float:
        """Return the seconds of resharding one value once; inf if no sequence of moves leads to the target."""
        if source == target:
            return 0.0
        number, known = self._graph(value).number(target), self._moves_from(value, source)
        # `known` covers the specs reached from `source`; a spec with a later number is not among them.
        return float(known[number]) if number < known.size else math.inf

    def move_table(self, value: Value, offered: tuple[Spec, ...], demanded: tuple[Spec, ...]) -> FloatArray:
        """Return the (offered, demanded) matrix of seconds of resharding a value."""
        key = (value.shape, value.dtype, self._number(offered), self._number(demanded))
        if key not in self._tables:
            targets = self._spec_numbers(value, demanded)
            rows: dict[Spec, FloatArray] = {}
            for spec in dict.fromkeys(offered):
                known = self._moves_from(value, spec)
                # `known` covers the specs reached from `spec`; a spec with a later number is not among them.
                # The minimum keeps the look-up in bounds; `where` discards what it finds there.
                rows[spec] = np.where(targets < known.size, known[np.minimum(targets, known.size - 1)], math.inf)
            self._tables[key] = frozen(np.array([rows[spec] for spec in offered]))
        return self._tables[key]

    def _moves_from(self, value: Value, source: Spec) -> FloatArray:
        """Return the seconds from a spec to all others by their numbers; inf for specs that cannot be reached."""
        key = (value.shape, value.dtype, source)
        known = self._moves.get(key)
        if known is None:
            walks, size = self._graph(value).walks(source, value.bytes), float(value.bytes)
            known = self._moves[key] = walks.seconds(
                # The factor of the restriction steers the choice only: the chosen plan is priced without it.
                lambda step: self.pricer.step_seconds(step, size) * self.restriction.dearer(step)
            )
        return known

    def _graph(self, value: Value) -> SpecGraph:
        """Return the spec graph of a value's shape.

        The catalogue holds a reference, since `_moves` and `_numbers` use the graph's own numbering of specs.
        """
        if value.shape not in self._graphs:
            self._graphs[value.shape] = spec_graph(value.shape, tuple(self.sizes.items()))
        return self._graphs[value.shape]

    def _spec_numbers(self, value: Value, specs: tuple[Spec, ...]) -> NDArray[np.int64]:
        """Return the numbers of specs in the spec graph of a value's shape."""
        graph = self._graph(value)
        key = (graph, self._number(specs))
        if key not in self._numbers:
            self._numbers[key] = np.array([graph.number(spec) for spec in specs], dtype=np.int64)
        return self._numbers[key]

    def local_sizes(self, value: Value, specs: tuple[Spec, ...]) -> FloatArray:
        """Return the bytes of one device's block of a value under each spec."""
        key = (value.shape, value.dtype, value.on_host, self._number(specs))
        if key not in self._sizes:
            self._sizes[key] = frozen(np.array([local_bytes(value, spec, self.sizes) for spec in specs]))
        return self._sizes[key]

    def copy_sizes(
        self, value: Value, offered: tuple[Spec, ...], demanded: tuple[Spec, ...], *, paired: bool
    ) -> FloatArray:
        """Return the bytes of one device's copy of a value under each demanded spec, or 0 where no copy is needed.

        A copy is needed where the blocks of the demanded spec differ from the value's own and are no smaller. A partial
        sum is completed in place where the backend does so (`Cluster.reduces_in_place`). `paired`: the value is in the
        offered spec of the same index; otherwise in any of them, and the demanded spec must differ from all.
        """
        key = (value.shape, value.dtype, value.on_host, self._number(offered), self._number(demanded), paired)
        if key not in self._copies:
            homes, sizes = self.local_sizes(value, offered), self.local_sizes(value, demanded)
            # Specs that differ in partial sums alone have equal blocks: the sum may be completed in its own buffer.
            own, wanted = ([(spec.dims, self.summed(spec)) for spec in specs] for specs in (offered, demanded))
            if paired:
                other = np.array([a != b for a, b in zip(own, wanted, strict=True)]) & (sizes >= homes)
            else:
                # The node of the value may choose any of its specs: a copy counts only if it is one for all of them.
                other = np.array([spec not in own for spec in wanted]) & (sizes >= homes.max())
            self._copies[key] = frozen(np.where(other, sizes, 0.0))
        return self._copies[key]

    def relaid_sizes(
        self, value: Value, offered: tuple[Spec, ...], demanded: tuple[Spec, ...], *, paired: bool
    ) -> FloatArray | None:
        """Return the bytes of one device's copy of a value before it is laid out for its reader; see `copy_sizes`.

        A collective joins blocks one behind the other: along another dim than the first they are moved into place, from
        one array to another. None where readers take what is gathered as it is (`Cluster.reads_any_layout`).
        """
        if self.pricer.cost_model.cluster.reads_any_layout or value.rank < 2:
            return None
        key = (value.shape, value.dtype, value.on_host, self._number(offered), self._number(demanded), paired)
        if key not in self._relaid:
            copied = self.copy_sizes(value, offered, demanded, paired=paired)
            homes = [(spec,) for spec in offered] if paired else [offered] * len(demanded)
            moved = [
                all(self._joins_inner_dim(value, home, spec) for home in some)
                for some, spec in zip(homes, demanded, strict=True)
            ]
            self._relaid[key] = frozen(np.where(moved, copied, 0.0))
        return self._relaid[key]

    def _joins_inner_dim(self, value: Value, offered: Spec, demanded: Spec) -> bool:
        """Return whether blocks are joined along a dim that others of more than one element come before."""
        shape = local_shape(demanded, value.shape, self.sizes)
        before = local_shape(offered, value.shape, self.sizes)
        return any(
            own > had and math.prod(shape[:dim]) > 1 for dim, (own, had) in enumerate(zip(shape, before, strict=True))
        )

    def is_relaid(self, value: Value, part: Spec, whole: Spec) -> bool:
        """Return whether blocks are laid out anew before a collective makes parts of them (`relaid_scratch_sizes`)."""
        return not self.pricer.cost_model.cluster.reads_any_layout and self._joins_inner_dim(value, part, whole)

    def summed(self, spec: Spec) -> frozenset[str]:
        """Return the axes over which a partial sum is not completed in its own buffer."""
        if self.pricer.cost_model.cluster.reduces_in_place:
            return frozenset()
        return frozenset(axis for axis in spec.partial if self.sizes[axis] > 1)

    def scratch_sizes(self, graph: Graph, op: Op, options: PlacementOptions) -> FloatArray | None:
        """Return a device's bytes of results before a reduce_scatter, for each placement; None if there is none."""
        if options not in self._scratch:
            if options.made == options.results:
                self._scratch[options] = None
                return None
            total = np.zeros(len(options.placements))
            for value, made, results in zip(graph.results(op), options.made, options.results, strict=True):
                before, after = self.local_sizes(value, made), self.local_sizes(value, results)
                # Of all ways to complete a partial sum, only a reduce_scatter makes its block smaller.
                total += np.where(before > after, before, 0.0)
            self._scratch[options] = frozen(total)
        return self._scratch[options]

    def relaid_scratch_sizes(self, graph: Graph, op: Op, options: PlacementOptions) -> FloatArray | None:
        """Return a device's bytes of results laid out anew for a reduce_scatter, for each placement; None if of none.

        A collective scatters blocks that lie one behind the other: along another dim than the first they are moved into
        place, from one array to another (see `relaid_sizes`).
        """
        if self.pricer.cost_model.cluster.reads_any_layout or options.made == options.results:
            return None
        if options not in self._relaid_scratch:
            total = np.zeros(len(options.placements))
            for value, made, results in zip(graph.results(op), options.made, options.results, strict=True):
                before, after = self.local_sizes(value, made), self.local_sizes(value, results)
                pairs = zip(results, made, strict=True)
                inner = np.array([self._joins_inner_dim(value, part, whole) for part, whole in pairs])
                total += np.where(inner & (before > after), before, 0.0)
            self._relaid_scratch[options] = frozen(total)
        return self._relaid_scratch[options]

    def all_reduced_sizes(self, graph: Graph, op: Op, options: PlacementOptions) -> FloatArray | None:
        """Return a device's bytes of results before an all_reduce that is not in place, for each placement.

        None if there is none.
        """
        if self.pricer.cost_model.cluster.reduces_in_place or options.made == options.results:
            return None
        if options not in self._all_reduced:
            total = np.zeros(len(options.placements))
            for value, made, results in zip(graph.results(op), options.made, options.results, strict=True):
                before, after = self.local_sizes(value, made), self.local_sizes(value, results)
                reduced = np.array([bool(self.summed(a) - self.summed(b)) for a, b in zip(made, results, strict=True)])
                total += np.where(reduced & (before == after), before, 0.0)
            self._all_reduced[options] = frozen(total)
        return self._all_reduced[options]

    def index_sizes(self, graph: Graph, op: Op, options: PlacementOptions) -> tuple[FloatArray, ...]:
        """Return a device's bytes of indices by which an op finds the maxima of windows, for each placement.

        The first are those of the maxima, the others those of the elements that are searched. Nothing if the op does so
        inside a kernel (`Cluster.finds_maxima_in_kernels`), or has no windows.
        """
        if self.pricer.cost_model.cluster.finds_maxima_in_kernels or not op.primitive.startswith("select_and_scatter"):
            return ()
        if options not in self._indices:
            found: list[FloatArray] = []
            # An index along each dim. On GPUs those of the elements that are searched are computed in the search.
            searched = 2 if self.pricer.cost_model.cluster.breadth_first else 1
            for value, specs in zip(graph.operands(op)[:searched], options.demanded, strict=False):
                elements = self.local_sizes(value, specs) * (value.num_elements / max(1, value.bytes))
                found.append(frozen(elements * value.rank * _INDEX_BYTES))
            self._indices[options] = tuple(found)
        return self._indices[options]


_INDEX_BYTES = 4


class _Columns(NamedTuple):
    demanded: tuple[tuple[Spec, ...], ...]
    made: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]


def batch_factors(rule: Rule, op: Op, batch_dims: Sequence[int | None]) -> frozenset[int]:
    """Return the factors of an op that contain the batch dim."""
    tensors = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
    dims = ((tensor, batch_dims[v]) for tensor, v in tensors)
    # A dim is split by its first factor, the major one, whose blocks are contiguous.
    return frozenset(tensor[dim][0] for tensor, dim in dims if dim is not None and tensor[dim])
