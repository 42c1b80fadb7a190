"""From a stage and a logical mesh to the intra-op problem, and from a solution back to placements.

Nodes choose one strategy each:

    input    a spec for a graph input, or for a value that another stage sends                       (_add_input)
    leader   a placement of a contraction, convolution, gather, scatter, sort or addition of sums    (_add_leader),
             and of samples that several contractions read: they are moved for all of them at once
    crossing how a value that is summed over micro-batches is stored, and how the update reads it    (_add_crossing);
             what the update only adds to other such sums may stay a partial sum until then

All other ops (`deciding`) follow their main operand: their strategies are those of its node (_add_follower). Scalars
that are added up (a gradient norm) stay partial sums until the last addition, which is never worse (_add_sum). An edge
prices the resharding between what a node offers and what an op demands:

    R[i, j] = runs × seconds(spec offered under i → spec demanded under j)                           (_add_edge)

Costs are seconds per step: what runs in the loop counts once per micro-batch. A loop's body is laid out in the same
problem, with its cost multiplied by its trips and its carried values tied to the specs that they came in; so is each
branch of a `cond`, and what the branches make has one spec.

Parameters that stay gathered from the forward to the backward pass: what the backward pass makes of them alone.

The turned kernel of a convolution, say, is made of the kernel as it was gathered, not of its part, of which it would
have to be gathered once more.

The builders of stages on one mesh, of which the last few are kept: a stage is often solved quickly and then well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from alpa_lite.intra_op.interning import FloatArray, Recent, SharedArrays
from alpa_lite.intra_op.layout_constraints import Keeping
from alpa_lite.intra_op.leaders import Deciding
from alpa_lite.intra_op.placements import Choice, Key, Offer, Placed, PlacedBodies, PlacedSum, StageScope, placements_of
from alpa_lite.intra_op.problem import Edge, Problem, Usage
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue, PlacementOptions, SumOptions, batch_factors
from alpa_lite.intra_op.sums import PartialSums, is_scalar_sum
from alpa_lite.intra_op.usages import StageLayout, UsageOf, usages_of
from alpa_lite.plan.walk import stacked
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.phases import Phase, parameters
from alpa_lite.program.wiring import Wiring, accumulators, wiring_of
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import free_values, ranked_values, rule_of_op
from alpa_lite.sharding.specs import Spec, replicated


def reads_gathered(view: StageView, op: Op, operand: int) -> bool:
    """Whether an op makes something for the backward pass alone of a parameter that the forward pass reads itself."""
    graph, phases, v = view.graph, view.step.phases, op.operands[operand]
    if not view.keeps_gathered or not parameters(view.step).issuperset((v, *op.results)):
        return False
    beside = any(phases[c] is Phase.FORWARD for c in graph.consumers[v])
    return beside and all(phases[c] is Phase.BACKWARD for r in op.results for c in graph.consumers[r])


def gathered(spec: Spec, restriction: Restriction) -> Spec:
    """The spec of a parameter that is split over BATCH axes no more."""
    kept = tuple(tuple(a for a in dim if restriction.role(a) is not AxisRole.BATCH) for dim in spec.dims)
    return Spec(kept, spec.partial)


_UNIT = 0  # the node of everything that has no choice


class Builder:
    """Builds the problems of one stage on one logical mesh, which differ in their memory alone."""

    def __init__(self, view: StageView, catalogue: Catalogue) -> None:
        """Lay the stage out. The catalogue may be shared by all builders with its mesh and restriction."""
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
        self.demanded: dict[Key, PlacementOptions] = {}  # what ops without bodies want of their operands
        self.scopes = [StageScope(graph=view.graph, batch_dims=view.step.batch_dims, in_loop=False)]
        self.sums = PartialSums(view, self.scopes)
        self.accumulating: set[Key] = set()  # additions to what a loop carries
        self.waiting: set[Key] = set()  # scalars that stay partial sums until they are added
        self.deciding = Deciding(view, self.scopes, self.sums, self.offers)
        self._last_problem: dict[tuple[float | None, int], Problem] = {}
        self._last_usages: dict[int, tuple[UsageOf, ...]] = {}
        self._lay_out()

    # ------------------------------------------------------------------------------------------------ the problem

    def problem(self, *, limit_bytes: float | None, in_flight: int) -> Problem:
        """The problem of the whole stage; `in_flight` micro-batches are held when memory peaks."""
        key = (limit_bytes, in_flight)
        if key not in self._last_problem:
            problem = Problem.of(
                node_costs=self.costs,
                edges=(Edge(source=u, target=v, costs=m) for (u, v), m in self.edges.items()),
                usages=(Usage(node=u.node, bytes=u.sizes, start=u.start, end=u.end) for u in self.usages(in_flight)),
                limit_bytes=limit_bytes,
            )
            self._last_problem = {key: problem}
        return self._last_problem[key]

    def usages(self, in_flight: int) -> tuple[UsageOf, ...]:
        """The memory that the choices take when so many micro-batches are held."""
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
            self._add_op(0, graph, op, self.view.runs_of(op))
            for r in op.results:
                if r in self.sums.crossing and (0, r) in self.offers:
                    self._add_crossing(r)
        for v in self.view.external:
            out = aliased.get(v)
            if out is not None and (0, out) in self.offers and out != v and out not in self.view.outputs:
                offer = self.offers[(0, v)]
                self._add_edge((0, out), graph.values[out], offer.node, offer.specs, 1.0)
        for out, spec in self.view.outputs.items():
            producer = graph.producer[out]
            if producer is not None:
                runs = 1 if out in self.crossings else self.view.runs_of(graph.ops[producer])
                self._add_edge((0, out), graph.values[out], _UNIT, (spec,), runs)

    def choice(self, choices: Sequence[int]) -> Choice:
        """Specs and placements of a solution."""
        inputs = {v: self.offers[(0, v)].specs[choices[self.offers[(0, v)].node]] for v in self.view.external}
        ops = placements_of(self.placed, self.offers, self.scopes, self.view.ops, choices)
        sums = {v: options.accumulators[choices[node]] for v, (node, options) in self.crossings.items()}
        return Choice(inputs=inputs, ops=ops, accumulators=sums)

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
        """Add to what the strategies of a node cost."""
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
        """Whether a value without batch is split over BATCH axes: parameters and optimizer state differ (ZeRO)."""
        if self.view.graph.producer[v] is not None:
            return BatchSplit.NEVER
        restriction = self.catalogue.restriction
        return restriction.parameters if self.view.is_read_in_loop(v) else restriction.optimizer

    def _add_op(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        if free_values(graph).issuperset(op.results):
            return
        wiring = wiring_of(op)
        if wiring is not None:
            self._add_control_flow(scope, graph, op, wiring, runs)
            return
        if self.on_one_device:
            return self._add_fixed(scope, graph, op, runs)
        rule = rule_of_op(graph, op.id)
        if (scope, op.id) in self.accumulating:
            self._add_leader(scope, graph, op, rule, runs)
        elif is_scalar_sum(graph, op) and any((scope, v) in self.waiting for v in op.operands):
            self._add_sum(scope, graph, op, runs)
        elif rule.opaque or ranked_values(graph).isdisjoint((*op.operands, *op.results)):
            self._add_fixed(scope, graph, op, runs)
        elif self.deciding.leads(scope, graph, op, rule):
            self._add_leader(scope, graph, op, rule, runs)
        else:
            self._add_follower(scope, graph, op, runs)

    def _add_fixed(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        """An op without a choice: everything whole."""
        options = self.catalogue.whole(graph, op)
        self._charge(_UNIT, options.seconds, runs)
        self._record(scope, op, _UNIT, options)
        self._demand(scope, graph, op, _UNIT, options, runs)

    def _add_sum(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        """An addition of scalars, of which some are partial sums: what the sum costs is all but the same everywhere."""
        self._charge(_UNIT, self.catalogue.whole(graph, op).seconds, runs)
        (result,) = op.results
        waits = self._wait(scope, op)
        keys = tuple((scope, v) for v in op.operands if graph.values[v].literal is None)
        self.placed[(scope, op.id)] = PlacedSum(operands=keys, result=(scope, result), waits=waits)
        self.offers[(scope, result)] = self._whole(graph.values[result])

    def _stacks_sums(self, scope: int, op: Op) -> bool:
        """True when a loop may stack partial sums up, which are added up once per step.

        Where gradients must be stored split, they are scattered trip by trip.
        """
        return self.catalogue.restriction.parameters is not BatchSplit.MUST and self.sums.stacks_up(scope, op)

    def _wait(self, scope: int, op: Op) -> bool:
        """Let a scalar stay a partial sum if it is only added up; True when it does."""
        waits = self.sums.feeds_scalars(scope, op)
        self.waiting |= {(scope, op.results[0])} if waits else set()
        return waits

    def _add_leader(self, scope: int, graph: Graph, op: Op, rule: Rule, runs: float) -> None:
        options = self.catalogue.leader(
            graph,
            op,
            batch_factors=batch_factors(rule, op, self.scopes[scope].batch_dims),
            in_loop=self.sums.in_loop(scope, op),
            only_crosses=self.sums.only_crosses(scope, op),
            may_wait=self.sums.feeds_sum(scope, op) or self._stacks_sums(scope, op),
            accumulates=(scope, op.id) in self.accumulating,
        )
        options = self.keeping.options(graph, op, options)
        node = self._node(self.arrays.product(options.seconds, runs))
        self._record(scope, op, node, options)
        self._demand(scope, graph, op, node, options, runs)

    def _add_follower(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        main = self.deciding.follow(scope, graph, op)
        offer = self.offers[(scope, op.operands[main])]
        keep = self.sums.only_crosses(scope, op) or self._wait(scope, op) or self._stacks_sums(scope, op)
        anew = scope == 0 and reads_gathered(self.view, op, main)
        specs = tuple(gathered(s, self.catalogue.restriction) for s in offer.specs) if anew else offer.specs
        options = self.catalogue.following(graph, op, main, specs, keep_partial=keep)
        self._charge(offer.node, options.seconds, runs)
        if (penalty := self.keeping.penalty(graph, op, main, offer.specs, options)) is not None:
            self._charge(offer.node, penalty, 1.0)
        self._record(scope, op, offer.node, options)
        self._demand(scope, graph, op, offer.node, options, runs, skip=-1 if anew else main)

    def _record(self, scope: int, op: Op, node: int, options: PlacementOptions) -> None:
        self.placed[(scope, op.id)] = Placed(node=node, options=options.placements)
        self.demanded[(scope, op.id)] = options
        for r, specs in zip(op.results, options.results, strict=True):
            self.offers[(scope, r)] = Offer(node=node, specs=specs)
        if self.sums.in_loop(scope, op) and node != _UNIT:
            self.deciding.computed.add(node)

    def _add_crossing(self, v: int) -> None:
        """Replace what the update sees of a value by a node of its own: stored inside the loop, resolved once after."""
        value = self.view.graph.values[v]
        options = self.catalogue.sums(value, self.offers[(0, v)].specs, keep_partial=self.sums.feeds_sums(v))
        options = self.keeping.sums(self.view.graph, v, options)
        node = self._node(options.seconds)
        self._add_edge((0, v), value, node, options.stored, self.step.num_microbatches)
        self.crossings[v] = (node, options)
        self.offers[(0, v)] = Offer(node=node, specs=options.resolved)
        self.deciding.computed.add(node)

    # ------------------------------------------------------------------------------------------------ control flow

    def _add_control_flow(self, scope: int, graph: Graph, op: Op, wiring: Wiring, runs: float) -> None:
        """Bodies are laid out in the same problem: operands, and results that are no operands, are nodes."""
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
        operands = [
            self._add_operand(scope, graph, op, wiring, scopes, i, runs, sums=i in added_to)
            for i in range(len(op.operands))
        ]
        results: dict[int, Offer] = {r: operands[i] for r, i in wiring.carried.items()}
        for n, body, inputs, outputs in zip(scopes, op.bodies, wiring.inputs, wiring.outputs, strict=True):
            self.offers.update({(n, v): operands[i] for v, i in zip(body.inputs, inputs, strict=True)})
            for o in body.ops:
                self._add_op(n, body, o, runs * wiring.trips)
            for v, r in zip(body.outputs, outputs, strict=True):
                if r in wiring.stacked:
                    # The loop hands on what its body made, as a stack; what is free is made as it is wanted.
                    offer = self.offers.get((n, v)) or self._add_slot(
                        body, body.values[v], self.scopes[n].batch_dims[v], BatchSplit.MAY
                    )
                    results[r] = replace(offer, specs=tuple(map(stacked, offer.specs)))
                    self.deciding.computed.add(offer.node)
                elif r is not None:
                    if r not in results:
                        results[r] = self._add_slot(body, body.values[v], self.scopes[n].batch_dims[v], split)
                    self._add_edge((n, v), body.values[v], results[r].node, results[r].specs, runs * wiring.trips)
        self.offers.update({(scope, v): results[r] for r, v in enumerate(op.results)})
        ordered = tuple(results[r] for r in range(len(op.results)))
        self.placed[(scope, op.id)] = PlacedBodies(scopes=scopes, operands=tuple(operands), results=ordered)

    def _add_operand(
        self,
        scope: int,
        graph: Graph,
        op: Op,
        wiring: Wiring,
        scopes: Sequence[int],
        number: int,
        runs: float,
        *,
        sums: bool,
    ) -> Offer:
        """The spec in which the bodies read an operand (each slice of a scanned one), and what it takes to have it.

        `sums`: the loop only adds to it.
        """
        outer = graph.values[op.operands[number]]
        readers = [
            (n, inputs.index(number)) for n, inputs in zip(scopes, wiring.inputs, strict=True) if number in inputs
        ]
        if not readers:
            return self._whole(outer)
        n, place = readers[0]
        value = self.scopes[n].graph.values[self.scopes[n].graph.inputs[place]]
        # What every device can make for itself is no parameter to be stored split, and what all trips read alike may be
        # gathered once before the loop, as any other parameter is before it is used.
        split = self._split_inside(in_loop=self.sums.in_loop(scope, op))
        if outer.id in free_values(graph):
            split = BatchSplit.NEVER
        elif split is BatchSplit.MUST and number not in wiring.scanned and number not in wiring.carried.values():
            split = BatchSplit.MAY
        elif self.view.keeps_gathered and number in wiring.scanned and self.scopes[n].batch_dims[value.id] is None:
            split = BatchSplit.NEVER
        offer = self._add_slot(self.scopes[n].graph, value, self.scopes[n].batch_dims[value.id], split, sums=sums)
        demanded = tuple(map(stacked, offer.specs)) if number in wiring.scanned else offer.specs
        self._add_edge((scope, outer.id), outer, offer.node, demanded, runs)
        return offer

    def _whole(self, value: Value) -> Offer:
        return Offer(node=_UNIT, specs=(replicated(value.rank),))

    def _split_inside(self, *, in_loop: bool) -> BatchSplit:
        """Whether values without a batch are split over BATCH axes inside control flow.

        An update may leave its values as they come: only what the loop reads is stored split at any price.
        """
        restriction = self.catalogue.restriction
        outside = BatchSplit.NEVER if restriction.optimizer is BatchSplit.NEVER else BatchSplit.MAY
        return restriction.parameters if in_loop else outside

    def _add_slot(
        self, graph: Graph, value: Value, batch_dim: int | None, split: BatchSplit, *, sums: bool = False
    ) -> Offer:
        """A value inside control flow that keeps one spec of its own choice; `sums`: it may be a partial sum."""
        if value.dtype.startswith("key<") or (value.rank == 0 and not sums):
            return self._whole(value)
        specs = self.catalogue.value_specs(value, batch_dim, split=split)
        # Where gradients must be stored split, they are scattered trip by trip.
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

    def _demand(
        self, scope: int, graph: Graph, op: Op, node: int, options: PlacementOptions, runs: float, *, skip: int = -1
    ) -> None:
        for i, v in enumerate(op.operands):
            if i != skip and (scope, v) in self.offers:
                self._add_edge((scope, v), graph.values[v], node, options.demanded[i], runs)

    def _add_edge(self, key: Key, value: Value, node: int, demanded: tuple[Spec, ...], runs: float) -> None:
        """Price every (offered, demanded) pair of specs of one value."""
        offer = self.offers.get(key)
        if offer is None:
            return
        table = self.catalogue.move_table(value, offer.specs, demanded)
        if offer.node == node:
            self._charge(node, self.arrays.diagonal(table), runs)
        elif self.arrays.any(matrix := self.arrays.product(table, runs)):
            self._accumulate(offer.node, node, matrix)

    def _accumulate(self, u: int, v: int, matrix: FloatArray) -> None:
        if (v, u) in self.edges:
            (u, v), matrix = (v, u), self.arrays.transposed(matrix)
        known = self.edges.get((u, v))
        self.edges[(u, v)] = matrix if known is None else self.arrays.sum(known, matrix)


_NUM_BUILDERS = 4


class Builders:
    """Makes them from one catalogue, which they share."""

    def __init__(self, catalogue: Catalogue) -> None:
        """Start without any."""
        self.catalogue = catalogue
        self._recent: Recent[StageView, Builder] = Recent(_NUM_BUILDERS)

    def of(self, view: StageView) -> Builder:
        """The builder of a stage."""
        return self._recent(view, lambda: Builder(view, self.catalogue))
