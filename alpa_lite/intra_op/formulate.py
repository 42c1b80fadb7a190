"""Build the intra-op problem of a stage on a logical mesh, and decode a solution into placements.

Every node chooses one strategy:

    input    a spec for a graph input, or for a value that another stage sends                       (_add_input)
    leader   a placement of a contraction, convolution, gather, scatter, sort or addition of partial
             sums, or of a sample value that several contractions read: it is resharded once for all
             of them                                                                                 (_add_leader)
    crossing how a value that is summed over micro-batches is stored, and the spec in which the
             update reads it; if the update only adds it to other sums of this kind, it may remain
             a partial sum until that addition                                                     (_add_crossing)

All other ops (`op_choices`) follow their main operand: their strategies are those of its node (_add_follower). Scalars
that are only added up (a gradient norm) remain partial sums until the last addition, which is never worse (_add_sum).
An edge prices the resharding from the spec that a node offers to the spec that an op demands:

    R[i, j] = runs × seconds(spec offered under i → spec demanded under j)                           (_add_edge)

Costs are seconds per step: what runs inside the micro-batch loop counts once per micro-batch. A loop body is laid out
in the same problem, with its cost multiplied by its trip count and its carried values tied to the specs in which they
enter. The branches of a `cond` are laid out likewise, and the results of all branches have the same spec.

If parameters remain gathered from the forward to the backward pass, so does what the backward pass computes from them
alone. The transposed kernel of a convolution, for example, is computed from the gathered kernel and not from one shard
of it, which would have to be gathered a second time.

`Builders` caches the last few builders of stages on one mesh, since a stage is often solved twice: first with a rough
and then with a close gap.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.interning import Recent, SharedArrays
from alpa_lite.intra_op.one_trip_loops import Path
from alpa_lite.intra_op.op_choices import Deciding, Keeping, PartialSums, is_scalar_sum
from alpa_lite.intra_op.problem import Edge, FloatArray, Problem, Usage
from alpa_lite.intra_op.stage import (
    Key,
    Offer,
    Placed,
    PlacedBodies,
    PlacedSum,
    StageScope,
    StageView,
    placements_of,
)
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, OpUse, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue, PlacementOptions, SumOptions, batch_factors
from alpa_lite.intra_op.usages import StageLayout, UsageOf, usages_of
from alpa_lite.plan.parts import Choice
from alpa_lite.plan.walk import stacked
from alpa_lite.program.ir import Graph, Op, Value, Wiring, accumulators, wiring_of
from alpa_lite.program.phases import Phase, parameters
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import free_values, ranked_values, rule_of_op
from alpa_lite.sharding.specs import Spec, replicated


def reads_gathered(view: StageView, op: Op, operand: int) -> bool:
    """Return True if an op derives a value for the backward pass alone from a parameter that forward reads too.

    Such an op reads the gathered parameter when the stage keeps parameters gathered.
    """
    graph, phases, v = view.graph, view.step.phases, op.operands[operand]
    if not view.keeps_gathered or not parameters(view.step).issuperset((v, *op.results)):
        return False
    beside = any(phases[c] is Phase.FORWARD for c in graph.consumers[v])
    return beside and all(phases[c] is Phase.BACKWARD for r in op.results for c in graph.consumers[r])


def gathered(spec: Spec, restriction: Restriction) -> Spec:
    """Return the spec of a parameter after an all-gather over all BATCH axes."""
    kept = tuple(tuple(a for a in dim if restriction.role(a) is not AxisRole.BATCH) for dim in spec.dims)
    return Spec(kept, spec.partial)


_UNIT = 0  # the node with a single strategy, shared by all values and ops without a choice


class CollectiveWeights(NamedTuple):
    """The weights of collectives in the objective: less than 1 for those that may run beside kernels.

    Attributes:
        values: of collectives on values between ops, which mostly wait for each other.
        state: of collectives on state and on sums over micro-batches, which may run at any time before they are read.
        at_once: of collectives on sums in the pass that makes them, in addition. With one micro-batch the update may as
            well run them.
        stacks: whether loops may stack partial sums, which are reduced when all trips are over; without, each trip
            reduces its own, beside the kernels of the next one.
    """

    values: float = 1.0
    state: float = 1.0
    at_once: float = 1.0
    stacks: bool = True


UNWEIGHTED = CollectiveWeights()
"""Kernels and collectives run one after the other."""


class _LaidOp(NamedTuple):
    """An op as it is laid out: in the scope with this number and graph, where it runs `runs` times per step."""

    scope: int
    graph: Graph
    op: Op
    runs: float

    def key(self, value: int) -> Key:
        """Return the key of a value in the scope of the op."""
        return self.scope, value


class Builder:
    """Builder of the intra-op problems of one stage on one logical mesh, which differ in their memory terms alone."""

    def __init__(self, view: StageView, catalogue: Catalogue) -> None:
        """Lay out the stage. All builders of the same mesh and restriction may share the catalogue."""
        self.view = view
        self.step = view.step
        self.catalogue = catalogue
        self.sizes = catalogue.sizes
        self.on_one_device = catalogue.is_one_device
        self.arrays = SharedArrays()
        self.costs: list[FloatArray] = [self.arrays.zeros(1)]
        self.edges: dict[tuple[int, int], FloatArray] = {}
        self.keeping = Keeping(layout=view.layout)
        self.offers: dict[Key, Offer] = {}
        self.placed: dict[Key, Placed | PlacedSum | PlacedBodies] = {}
        self.crossings: dict[int, tuple[int, SumOptions]] = {}
        self.into_sums: set[tuple[int, int]] = set()  # the edges from what a pass makes to its sum
        self.demanded: dict[Key, PlacementOptions] = {}  # placements of ops without bodies, with their operand specs
        self.scopes = [StageScope(graph=view.graph, batch_dims=view.step.batch_dims, in_loop=False)]
        self.sums = PartialSums(view, self.scopes)
        self.accumulating: set[Key] = set()  # ops that add to a carried value of a loop
        self.stacks: dict[int, NDArray[np.bool_]] = {}  # by node: the strategies whose partial sums a loop stacks
        self.waiting: set[Key] = set()  # scalars that remain partial sums until an addition reads them
        self.deciding = Deciding(view, self.scopes, self.sums, self.offers)
        self._last_problem: dict[tuple[float | None, int, CollectiveWeights], Problem] = {}
        self._last_usages: dict[int, tuple[UsageOf, ...]] = {}
        self._lay_out()

    # ------------------------------------------------------------------------------------------------ the problem

    def problem(
        self,
        *,
        limit_bytes: float | None,
        in_flight: int,
        weights: CollectiveWeights = UNWEIGHTED,
    ) -> Problem:
        """Return the problem of the whole stage within `limit_bytes` per device.

        `in_flight` is the number of micro-batches whose activations are held at the memory peak, and `weights` those of
        the collectives between ops.
        """
        key = (limit_bytes, in_flight, weights)
        if key not in self._last_problem:
            problem = Problem.of(
                node_costs=self.costs if weights.stacks else self._without_stacks(),
                edges=self._weighted_edges(weights),
                usages=(Usage(node=u.node, bytes=u.sizes, start=u.start, end=u.end) for u in self.usages(in_flight)),
                limit_bytes=limit_bytes,
            )
            # Only the last one, since the problem of a large stage takes a lot of memory.
            self._last_problem = {key: problem}
        return self._last_problem[key]

    def _weighted_edges(self, weights: CollectiveWeights) -> Iterator[Edge]:
        """Yield the edges, whose costs count as much as their collectives do."""
        state = self._state_nodes()
        for (u, v), costs in self.edges.items():
            weight = weights.values if state.isdisjoint((u, v)) else weights.state
            yield Edge(
                source=u, target=v, costs=weight * (weights.at_once if (u, v) in self.into_sums else 1.0) * costs
            )

    def _without_stacks(self) -> list[FloatArray]:
        """Return the costs of nodes, infinite where a loop would stack partial sums that each trip can reduce."""
        costs = [*self.costs]
        for node, stacks in self.stacks.items():
            costs[node] = np.where(stacks & ~stacks.all(), np.inf, costs[node])
        return costs

    def _state_nodes(self) -> frozenset[int]:
        """Return the nodes of state and of sums over micro-batches."""
        graph, dims = self.view.graph, self.step.batch_dims
        state = (v for v in self.view.external if graph.producer[v] is None and dims[v] is None)
        return frozenset(self.offers[(0, v)].node for v in state).union(node for node, _ in self.crossings.values())

    def usages(self, in_flight: int) -> tuple[UsageOf, ...]:
        """Return the memory usages of all strategies when `in_flight` micro-batches are held."""
        if in_flight not in self._last_usages:
            self._last_usages = {in_flight: usages_of(self._layout(), self.arrays, in_flight=in_flight)}
        return self._last_usages[in_flight]

    def _lay_out(self) -> None:
        graph = self.view.graph
        aliased = {i: o for o, i in self.step.aliases.items()}
        for v in self.view.external:
            self._add_input(v)
        for op_id in self.view.ops:
            op = graph.ops[op_id]
            self._add_op(_LaidOp(scope=0, graph=graph, op=op, runs=self.view.runs_of(op)))
            for r in op.results:
                if r in self.sums.crossing and (0, r) in self.offers:
                    self._add_crossing(r)
        for v in self.view.external:
            # New state must come back in the spec in which the old state lives.
            out = aliased.get(v)
            if out is not None and (0, out) in self.offers and out != v and out not in self.view.outputs:
                offer = self.offers[(0, v)]
                self._add_edge((0, out), graph.values[out], offer.node, offer.specs, 1.0)
        for out, spec in self.view.outputs.items():
            producer = graph.producer[out]
            if producer is not None:
                # A sum leaves the loop once per step, whatever computes it.
                runs = 1 if out in self.crossings else self.view.runs_of(graph.ops[producer])
                self._add_edge((0, out), graph.values[out], _UNIT, (spec,), runs)

    def choice(self, choices: Sequence[int]) -> Choice:
        """Decode a solution (one strategy per node) into specs, placements and accumulators."""
        inputs = {v: self.offers[(0, v)].specs[choices[self.offers[(0, v)].node]] for v in self.view.external}
        ops = placements_of(self.placed, self.offers, self.scopes, self.view.ops, choices)
        sums = {v: options.accumulators[choices[node]] for v, (node, options) in self.crossings.items()}
        view = self.view
        return Choice(
            inputs=inputs, ops=ops, accumulators=sums, outputs=view.outputs, keeps_gathered=view.keeps_gathered
        )

    def paths(self) -> Mapping[int, Path]:
        """Return the path from the graph of the step to each scope."""
        return self._layout().paths()

    def _layout(self) -> StageLayout:
        return StageLayout(
            view=self.view,
            catalogue=self.catalogue,
            scopes=self.scopes,
            offers=self.offers,
            placed=self.placed,
            demanded=self.demanded,
            crossings=self.crossings,
        )

    # ------------------------------------------------------------------------------------------------ nodes

    def _node(self, costs: FloatArray) -> int:
        self.costs.append(costs)
        return len(self.costs) - 1

    def _charge(self, node: int, seconds: FloatArray, runs: float) -> None:
        """Add `seconds` (one entry per strategy) times `runs` to the costs of a node."""
        self.costs[node] = self.arrays.sum(self.costs[node], self.arrays.product(seconds, runs))

    def _add_input(self, v: int) -> None:
        value = self.view.graph.values[v]
        if value.rank == 0 or value.dtype.startswith("key<"):
            self.offers[(0, v)] = self._whole(value)
            return
        specs = self.catalogue.value_specs(value, self.step.batch_dims[v], split=self._split_of(v))
        if v in self.view.pins:
            specs = (self.view.pins[v],)
        specs = self.keeping.specs(self.view.graph, v, specs)
        self.offers[(0, v)] = Offer(node=self._node(self.arrays.zeros(len(specs))), specs=specs)

    def _split_of(self, v: int) -> BatchSplit:
        """Return whether a value without a batch dim is split over BATCH axes; state may differ (ZeRO)."""
        if self.view.graph.producer[v] is not None:
            return BatchSplit.NEVER
        restriction = self.catalogue.restriction
        return restriction.parameters if self.view.is_read_in_loop(v) else restriction.optimizer

    def _add_op(self, at: _LaidOp) -> None:
        scope, graph, op = at.scope, at.graph, at.op
        if free_values(graph).issuperset(op.results):
            return
        wiring = wiring_of(op)
        if wiring is not None:
            self._add_control_flow(at, wiring)
            return
        if self.on_one_device:
            return self._add_fixed(at)
        rule = rule_of_op(graph, op.id)
        if (scope, op.id) in self.accumulating:
            self._add_leader(at, rule)
        elif is_scalar_sum(graph, op) and any((scope, v) in self.waiting for v in op.operands):
            self._add_sum(at)
        elif rule.opaque or ranked_values(graph).isdisjoint((*op.operands, *op.results)):
            self._add_fixed(at)
        elif self.deciding.leads(scope, graph, op, rule):
            self._add_leader(at, rule)
        else:
            self._add_follower(at)

    def _add_fixed(self, at: _LaidOp) -> None:
        """Add an op without a choice: all of its operands and results are replicated."""
        options = self.catalogue.whole(at.graph, at.op)
        self._charge(_UNIT, options.seconds, at.runs)
        self._record(at, _UNIT, options)
        self._demand(at, _UNIT, options)

    def _add_sum(self, at: _LaidOp) -> None:
        """Add an addition of scalars, some of which are partial sums.

        It gets no node: the cost of adding scalars hardly depends on their placement.
        """
        self._charge(_UNIT, self.catalogue.whole(at.graph, at.op).seconds, at.runs)
        (result,) = at.op.results
        waits = self._wait(at.scope, at.op)
        keys = tuple(at.key(v) for v in at.op.operands if at.graph.values[v].literal is None)
        self.placed[at.key(at.op.id)] = PlacedSum(operands=keys, result=at.key(result), waits=waits)
        self.offers[at.key(result)] = self._whole(at.graph.values[result])

    def _stacks_sums(self, scope: int, op: Op) -> bool:
        """Return True if a loop may stack the partial sums that an op computes, to be reduced once per step.

        Where gradients must be stored sharded, they are reduce-scattered in every trip instead.
        """
        return self.catalogue.restriction.parameters is not BatchSplit.MUST and self.sums.stacks_up(scope, op)

    def _wait(self, scope: int, op: Op) -> bool:
        """Record that a scalar remains a partial sum if it is only added up; return True in that case."""
        waits = self.sums.feeds_scalars(scope, op)
        self.waiting |= {(scope, op.results[0])} if waits else set()
        return waits

    def _add_leader(self, at: _LaidOp, rule: Rule) -> None:
        scope, graph, op = at.scope, at.graph, at.op
        # A result that no other op in the loop reads may remain a partial sum at nobody's cost. So may the operand of
        # an addition, and what a loop adds to a carried value, until the addition or the end of the loop.
        only_crosses = self.sums.only_crosses(scope, op)
        stacks = self._stacks_sums(scope, op)
        may_wait = self.sums.feeds_sum(scope, op) or stacks
        use = OpUse(
            batch_factors=batch_factors(rule, op, self.scopes[scope].batch_dims),
            in_loop=self.sums.in_loop(scope, op),
            keep_partial=only_crosses or may_wait or (scope, op.id) in self.accumulating,
            # How a crossing sum is scattered is chosen with its accumulator (`Catalogue.sums`), not where it is made.
            scatter=not only_crosses,
        )
        options = self.keeping.options(graph, op, self.catalogue.leader(graph, op, use))
        node = self._node(self.arrays.product(options.seconds, at.runs))
        if stacks:
            self.stacks[node] = np.array([bool(spec.partial) for spec in options.results[0]])
        self._record(at, node, options)
        self._demand(at, node, options)

    def _add_follower(self, at: _LaidOp) -> None:
        scope, graph, op = at.scope, at.graph, at.op
        main = self.deciding.follow(scope, graph, op)
        offer = self.offers[(scope, op.operands[main])]
        keep = self.sums.only_crosses(scope, op) or self._wait(scope, op) or self._stacks_sums(scope, op)
        anew = scope == 0 and reads_gathered(self.view, op, main)
        specs = tuple(gathered(s, self.catalogue.restriction) for s in offer.specs) if anew else offer.specs
        options = self.catalogue.following(graph, op, main, specs, keep_partial=keep)
        self._charge(offer.node, options.seconds, at.runs)
        if (penalty := self.keeping.penalty(graph, op, main, offer.specs, options)) is not None:
            self._charge(offer.node, penalty, 1.0)
        self._record(at, offer.node, options)
        # A follower takes its main operand as it comes, without an edge, unless that is gathered anew.
        self._demand(at, offer.node, options, skip=-1 if anew else main)

    def _record(self, at: _LaidOp, node: int, options: PlacementOptions) -> None:
        self.placed[at.key(at.op.id)] = Placed(node=node, options=options.placements)
        self.demanded[at.key(at.op.id)] = options
        for r, specs in zip(at.op.results, options.results, strict=True):
            self.offers[at.key(r)] = Offer(node=node, specs=specs)
        if self.sums.in_loop(at.scope, at.op) and node != _UNIT:
            self.deciding.computed.add(node)

    def _add_crossing(self, v: int) -> None:
        """Replace the offer of a value that crosses into the update by a node of its own.

        Inside the loop the value is accumulated in the stored spec; once after the loop it is resharded to the resolved
        spec.
        """
        value = self.view.graph.values[v]
        # Each micro-batch adds to the accumulator.
        additions = self.step.num_microbatches if self.step.accumulates else 0
        options = self.catalogue.sums(
            value,
            self.offers[(0, v)].specs,
            keep_partial=self.sums.feeds_sums(v),
            additions=additions,
            fused=self.catalogue.pricer.fuses_additions(self.view.graph, v),
        )
        options = self.keeping.sums(self.view.graph, v, options)
        node = self._node(options.seconds)
        # Before that, its part is resharded to the spec of the accumulator.
        self._add_edge((0, v), value, node, options.stored, self.step.num_microbatches)
        self.into_sums.add((self.offers[(0, v)].node, node))
        self.crossings[v] = (node, options)
        self.offers[(0, v)] = Offer(node=node, specs=options.resolved)
        self.deciding.computed.add(node)

    # ------------------------------------------------------------------------------------------------ control flow

    def _add_control_flow(self, at: _LaidOp, wiring: Wiring) -> None:
        """Lay out the bodies of a control-flow op in the same problem.

        Operands become nodes, and so do the results that are not carried operands.
        """
        scope, op = at.scope, at.op
        first, in_loop = len(self.scopes), self.sums.in_loop(scope, op)
        split = self._split_inside(in_loop=in_loop)
        for body in op.bodies:
            known = self.step.bodies.get(body)
            dims = known.batch_dims if known is not None else (None,) * len(body.values)
            self.scopes.append(StageScope(graph=body, batch_dims=dims, in_loop=in_loop))
        scopes = tuple(range(first, len(self.scopes)))
        for inner in scopes:
            self.sums.enter(scope, op, inner)
        added_to = accumulators(op, wiring)
        self.accumulating |= {(scopes[-1], o) for o in added_to.values()}
        operands = [self._add_operand(at, wiring, scopes, i, sums=i in added_to) for i in range(len(op.operands))]
        results: dict[int, Offer] = {r: operands[i] for r, i in wiring.carried.items()}
        for n, body, inputs, outputs in zip(scopes, op.bodies, wiring.inputs, wiring.outputs, strict=True):
            self.offers.update({(n, v): operands[i] for v, i in zip(body.inputs, inputs, strict=True)})
            for o in body.ops:
                self._add_op(_LaidOp(scope=n, graph=body, op=o, runs=at.runs * wiring.trips))
            for v, r in zip(body.outputs, outputs, strict=True):
                if r in wiring.stacked:
                    # A stacked output keeps the spec of the body's value, with an unsplit leading dim. A value that
                    # every device computes for itself has no offer and gets a slot, since it may have any spec.
                    offer = self.offers.get((n, v)) or self._add_slot(
                        body, body.values[v], self.scopes[n].batch_dims[v], BatchSplit.MAY
                    )
                    results[r] = replace(offer, specs=tuple(map(stacked, offer.specs)))
                    self.deciding.computed.add(offer.node)
                elif r is not None:
                    if r not in results:
                        results[r] = self._add_slot(body, body.values[v], self.scopes[n].batch_dims[v], split)
                    self._add_edge((n, v), body.values[v], results[r].node, results[r].specs, at.runs * wiring.trips)
        self.offers.update({(scope, v): results[r] for r, v in enumerate(op.results)})
        ordered = tuple(results[r] for r in range(len(op.results)))
        self.placed[(scope, op.id)] = PlacedBodies(scopes=scopes, operands=tuple(operands), results=ordered)

    def _add_operand(self, at: _LaidOp, wiring: Wiring, scopes: Sequence[int], number: int, *, sums: bool) -> Offer:
        """Add the node of an operand of control flow, and the edge that prices resharding it to what the bodies read.

        For a scanned operand the spec describes each slice. `sums`: the loop only adds to the operand, which may then
        be a partial sum.
        """
        outer = at.graph.values[at.op.operands[number]]
        readers = [
            (n, inputs.index(number)) for n, inputs in zip(scopes, wiring.inputs, strict=True) if number in inputs
        ]
        if not readers:
            return self._whole(outer)
        n, place = readers[0]
        value = self.scopes[n].graph.values[self.scopes[n].graph.inputs[place]]
        # A value that every device computes for itself is not stored, so it is never split over BATCH axes. A value
        # that all trips read alike may be gathered once before the loop, as any other parameter is before its use.
        split = self._split_inside(in_loop=self.sums.in_loop(at.scope, at.op))
        if outer.id in free_values(at.graph):
            split = BatchSplit.NEVER
        elif split is BatchSplit.MUST and number not in wiring.scanned and number not in wiring.carried.values():
            split = BatchSplit.MAY
        elif self.view.keeps_gathered and number in wiring.scanned and self.scopes[n].batch_dims[value.id] is None:
            split = BatchSplit.NEVER
        offer = self._add_slot(self.scopes[n].graph, value, self.scopes[n].batch_dims[value.id], split, sums=sums)
        demanded = tuple(map(stacked, offer.specs)) if number in wiring.scanned else offer.specs
        self._add_edge(at.key(outer.id), outer, offer.node, demanded, at.runs)
        return offer

    def _whole(self, value: Value) -> Offer:
        return Offer(node=_UNIT, specs=(replicated(value.rank),))

    def _split_inside(self, *, in_loop: bool) -> BatchSplit:
        """Return whether values without a batch dim are split over BATCH axes inside control flow.

        Only what the micro-batch loop reads must be stored sharded under BatchSplit.MUST: inside the update, values may
        keep the specs in which they come.
        """
        restriction = self.catalogue.restriction
        outside = BatchSplit.NEVER if restriction.optimizer is BatchSplit.NEVER else BatchSplit.MAY
        return restriction.parameters if in_loop else outside

    def _add_slot(
        self, graph: Graph, value: Value, batch_dim: int | None, split: BatchSplit, *, sums: bool = False
    ) -> Offer:
        """Add a node for a value inside control flow that keeps one spec; with `sums` it may be a partial sum."""
        if value.dtype.startswith("key<") or (value.rank == 0 and not sums):
            return self._whole(value)
        specs = self.catalogue.value_specs(value, batch_dim, split=split)
        # Where gradients must be stored sharded, they are reduce-scattered in every trip and are no partial sums.
        if sums and (split is not BatchSplit.MUST or value.rank == 0):
            sums_of = [
                Spec(spec.dims, axes)
                for spec in self.catalogue.value_specs(value, batch_dim, split=BatchSplit.NEVER)
                for number in range(1, len(self.sizes) + 1)
                for axes in combinations(sorted(self.sizes), number)
                if not spec.axes & set(axes)
            ]
            specs += tuple(sums_of if value.rank == 0 else self.catalogue.restriction.sums_at_once(sums_of))
        specs = self.keeping.specs(graph, value.id, specs)
        offer = Offer(node=self._node(self.arrays.zeros(len(specs))), specs=specs)
        if batch_dim is not None:
            self.deciding.computed.add(offer.node)
        return offer

    # ------------------------------------------------------------------------------------------------ edges

    def _demand(self, at: _LaidOp, node: int, options: PlacementOptions, *, skip: int = -1) -> None:
        for i, v in enumerate(at.op.operands):
            if i != skip and at.key(v) in self.offers:
                self._add_edge(at.key(v), at.graph.values[v], node, options.demanded[i], at.runs)

    def _add_edge(self, key: Key, value: Value, node: int, demanded: tuple[Spec, ...], runs: float) -> None:
        """Price the resharding of one value for every (offered, demanded) pair of specs, `runs` times per step."""
        offer = self.offers.get(key)
        if offer is None:
            return
        table = self.catalogue.move_table(value, offer.specs, demanded)
        if offer.node == node:
            # Both specs depend on the same choice, so only the diagonal of the table can occur.
            self._charge(node, self.arrays.diagonal(table), runs)
        elif self.arrays.any(matrix := self.arrays.product(table, runs)):
            self._accumulate(offer.node, node, matrix)

    def _accumulate(self, u: int, v: int, matrix: FloatArray) -> None:
        # One edge per pair of nodes, in the direction in which it was first added.
        if (v, u) in self.edges:
            (u, v), matrix = (v, u), self.arrays.transposed(matrix)
        known = self.edges.get((u, v))
        self.edges[(u, v)] = matrix if known is None else self.arrays.sum(known, matrix)


_NUM_BUILDERS = 4


class Builders:
    """Cache of the builders of the last few stages, which share one catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        """Start without any builder."""
        self.catalogue = catalogue
        self._recent: Recent[Hashable, Builder] = Recent(_NUM_BUILDERS)

    def of(self, view: StageView) -> Builder:
        """Return the builder of a stage, from the cache if it is among the last few."""
        return self._recent(view.key, lambda: Builder(view, self.catalogue))
