"""From a stage and a logical mesh to the intra-op problem, and from a solution back to placements.

Nodes choose one strategy each:

    input    a spec for a graph input, or for a value that another stage sends                       (_add_input)
    leader   a placement of a contraction, convolution, gather, scatter, sort or addition of sums    (_add_leader)
    crossing how a value that is summed over micro-batches is stored, and how the update reads it    (_add_crossing)

All other ops follow their main operand: their strategies are those of its node (_add_follower). An edge prices the
resharding between what a node offers and what an op demands:

    R[i, j] = runs × seconds(spec offered under i → spec demanded under j)                           (_add_edge)

Costs are seconds per step: what runs in the loop counts once per micro-batch. A loop's body is laid out in the same
problem, with its cost multiplied by the trip count and its carried values tied to the specs that they came in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from alpa_lite.graph.ir import Graph, Op, Value, item_bytes
from alpa_lite.graph.phases import Phase
from alpa_lite.intra_op.problem import Edge, Problem, Usage
from alpa_lite.intra_op.stage import StageView
from alpa_lite.plan import Accumulator, OpPlacement
from alpa_lite.pricing import Pricer, local_bytes
from alpa_lite.rules import Rule
from alpa_lite.sharding import Spec, replicated, reshard
from alpa_lite.spmd import (
    free_values,
    op_class,
    operand_specs,
    raw_result_specs,
    replicated_placement,
    rule_of_op,
    stacked,
)
from alpa_lite.strategies import AxisRole, Restriction, all_specs, follow, placements, resolutions

Key = tuple[int, int]
"""A value: (scope, value id). Scope 0 is the graph of the step, every loop body has its own."""

_UNIT = 0  # the node of everything that has no choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is known of a value: the node that decides it and its spec under each of the node's strategies."""

    node: int
    specs: tuple[Spec, ...]


@dataclass(slots=True, kw_only=True)
class Placed:
    """An op with one placement per strategy of its node; `body` holds the ops of a loop."""

    node: int
    options: tuple[OpPlacement, ...]
    scope: int = 0
    body_scope: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decoded solution of one stage."""

    inputs: Mapping[int, Spec]
    ops: Mapping[int, OpPlacement]
    accumulators: Mapping[int, Accumulator]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """The placements of a following op under each spec of its main operand, their cost, and what they demand of each
    operand."""

    options: tuple[OpPlacement, ...]
    seconds: np.ndarray
    demanded: tuple[tuple[Spec, ...], ...]


@dataclass(kw_only=True)
class Memo:
    """Answers shared by all problems on one logical mesh: placements per op and seconds per resharding."""

    leaders: dict[tuple[Any, ...], tuple[tuple[OpPlacement, ...], np.ndarray]] = field(default_factory=dict)
    followers: dict[tuple[Any, ...], Followed] = field(default_factory=dict)
    moves: dict[tuple[Any, ...], float] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)
    demands: dict[tuple[Any, ...], tuple[Spec, ...]] = field(default_factory=dict)
    classes: dict[tuple[Any, ...], int] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def number(self, graph: Graph, op: Op) -> int:
        """A number shared by all ops that do the same to the same shapes."""
        key = (id(graph), op.id)
        if key not in self.numbers:
            self.numbers[key] = self.classes.setdefault(op_class(graph, op.id), len(self.classes))
        return self.numbers[key]


class Builder:
    """Builds the problem of one stage on one logical mesh."""

    def __init__(self, view: StageView, pricer: Pricer, restriction: Restriction, memo: Memo) -> None:
        """`memo` may be shared by builders with the same mesh and restriction."""
        self.view = view
        self.step = view.step
        self.pricer = pricer
        self.sizes = dict(pricer.sizes)
        self.restriction = restriction
        self.memo = memo
        self.costs: list[np.ndarray] = [np.zeros(1)]
        self.edges: dict[tuple[int, int], np.ndarray] = {}
        self.offers: dict[Key, Offer] = {}
        self.placed: dict[Key, Placed] = {}
        self.crossings: dict[int, tuple[int, tuple[Accumulator, ...]]] = {}
        self.usages: list[Usage] = []
        self.scopes: list[Graph] = [view.graph]
        self.crossing_values = frozenset(view.crossing)
        self.batch_dims: list[tuple[int | None, ...]] = [view.step.batch_dims]
        self.computed: set[int] = set()  # nodes that decide values of the loop rather than parameters

    # ------------------------------------------------------------------------------------------------ the problem

    def problem(self, *, limit_bytes: float | None, in_flight: int) -> Problem:
        """The problem of the whole stage; `in_flight` micro-batches are held when memory peaks."""
        graph = self.view.graph
        aliased = {i: o for o, i in self.view.aliases.items()}
        for v in self.view.external:
            self._add_input(v)
        for op_id in self.view.ops:
            op = graph.ops[op_id]
            self._add_op(0, graph, op, self.view.runs_of(op))
            for r in op.results:
                if r in self.crossing_values and (0, r) in self.offers:
                    self._add_crossing(r)
        for v in self.view.external:
            out = aliased.get(v)
            if out is not None and (0, out) in self.offers and out != v:
                offer = self.offers[(0, v)]
                self._add_edge((0, out), graph.values[out], offer.node, offer.specs, 1.0)
        self._add_usages(in_flight)
        return Problem(
            node_costs=tuple(self.costs),
            edges=tuple(Edge(source=u, target=v, costs=m) for (u, v), m in self.edges.items()),
            usages=tuple(self.usages),
            limit_bytes=limit_bytes,
        )

    def choice(self, choices: Sequence[int]) -> Choice:
        """Specs and placements of a solution."""
        inputs = {v: self.offers[(0, v)].specs[choices[self.offers[(0, v)].node]] for v in self.view.external}
        ops = {op_id: self._placement((0, op_id), choices) for op_id in self.view.ops if (0, op_id) in self.placed}
        sums = {v: options[choices[node]] for v, (node, options) in self.crossings.items()}
        return Choice(inputs=inputs, ops=ops, accumulators=sums)

    def _placement(self, key: Key, choices: Sequence[int]) -> OpPlacement:
        placed = self.placed[key]
        placement = placed.options[choices[placed.node]]
        if placed.body_scope < 0:
            return placement
        scope, body = placed.body_scope, self.scopes[placed.body_scope]
        inner = {o.id: self._placement((scope, o.id), choices) for o in body.ops if (scope, o.id) in self.placed}
        specs = tuple(self._chosen((scope, v), body, choices) for v in body.inputs)
        op = self.scopes[key[0]].ops[key[1]]
        carry = op.params["num_carry"]
        first = op.params["num_consts"]
        ys = [stacked(self._chosen((scope, v), body, choices)) for v in body.outputs[carry:]]
        return OpPlacement(
            factors=(), results=(*specs[first : first + carry], *ys), body=inner, body_inputs=specs
        )

    def _chosen(self, key: Key, graph: Graph, choices: Sequence[int]) -> Spec:
        offer = self.offers.get(key)
        if offer is None:
            return replicated(graph.values[key[1]].rank)
        return offer.specs[choices[offer.node]]

    # ------------------------------------------------------------------------------------------------ nodes

    def _node(self, costs: np.ndarray) -> int:
        self.costs.append(np.asarray(costs, dtype=float).copy())
        return len(self.costs) - 1

    def _add_input(self, v: int) -> None:
        value = self.view.graph.values[v]
        if value.rank == 0 or value.dtype.startswith("key<"):
            self.offers[(0, v)] = Offer(node=_UNIT, specs=(replicated(value.rank),))
            return
        specs = self._value_specs(value, self.step.batch_dims[v], self._input_kind(v))
        self.offers[(0, v)] = Offer(node=self._node(np.zeros(len(specs))), specs=specs)

    def _input_kind(self, v: int) -> str:
        graph, phases = self.view.graph, self.step.phases
        if graph.producer[v] is not None:
            return "boundary"
        read_in_loop = any(phases[c].in_loop or phases[c] is Phase.INVARIANT for c in graph.consumers[v])
        return "parameter" if read_in_loop else "optimizer"

    def _value_specs(self, value: Value, batch_dim: int | None, kind: str) -> tuple[Spec, ...]:
        """Specs that the restriction allows a value to have."""
        may_shard = {"parameter": self.restriction.shard_parameters, "optimizer": self.restriction.shard_optimizer}

        def allowed(axis: str, dim: int) -> bool:
            role = self.restriction.role(axis)
            if role is AxisRole.MODEL:
                return dim != batch_dim
            if role is AxisRole.BATCH:
                return dim == batch_dim if batch_dim is not None else may_shard.get(kind, False)
            return True

        return tuple(all_specs(value.shape, self.sizes, allowed))

    def _add_op(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        if all(r in free_values(graph) for r in op.results):
            return
        if op.primitive == "scan":
            self._add_scan(scope, graph, op, runs)
            return
        rule = rule_of_op(graph, op.id)
        if rule.opaque or op.bodies or all(v.rank == 0 for v in (*graph.operands(op), *graph.results(op))):
            self._add_fixed(scope, graph, op, runs)
        elif self._leads(scope, graph, op, rule):
            self._add_leader(scope, graph, op, rule, runs)
        else:
            self._add_follower(scope, graph, op, rule, runs)

    def _ranked(self, scope: int, graph: Graph, op: Op) -> list[int]:
        """Positions of the operands that somebody decided on."""
        return [i for i, v in enumerate(op.operands) if graph.values[v].rank > 0 and (scope, v) in self.offers]

    def _leads(self, scope: int, graph: Graph, op: Op, rule: Rule) -> bool:
        if rule.work_kind != "elementwise" or op.primitive == "gather" or op.primitive.startswith("scatter"):
            return True
        if not self._in_loop(scope, op) or op.primitive not in ("add", "add_any"):
            return not self._ranked(scope, graph, op)
        return len(self._ranked(scope, graph, op)) >= 2

    def _in_loop(self, scope: int, op: Op) -> bool:
        return scope > 0 or self.step.phases[op.id].in_loop

    def _add_fixed(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        """An op without a choice: everything whole."""
        placement = replicated_placement(graph, op)
        rule = rule_of_op(graph, op.id)
        seconds = self.pricer.op_seconds(rule, op, graph.operands(op), graph.results(op), placement)
        self.costs[_UNIT] = self.costs[_UNIT] + runs * seconds
        self._record(scope, graph, op, _UNIT, (placement,))
        self._demand(scope, graph, op, _UNIT, [operand_specs(rule, graph.operands(op), placement)], runs)

    def _add_leader(self, scope: int, graph: Graph, op: Op, rule: Rule, runs: float) -> None:
        options, seconds = self._leader_options(scope, graph, op, rule)
        node = self._node(seconds * runs)
        self._record(scope, graph, op, node, options)
        self._demand(scope, graph, op, node, [self._operand_specs(graph, op, rule, p) for p in options], runs)

    def _operand_specs(self, graph: Graph, op: Op, rule: Rule, placement: OpPlacement) -> tuple[Spec, ...]:
        key = (self.memo.number(graph, op), placement.factors, placement.partial)
        if key not in self.memo.demands:
            self.memo.demands[key] = operand_specs(rule, graph.operands(op), placement)
        return self.memo.demands[key]

    def _leader_options(
        self, scope: int, graph: Graph, op: Op, rule: Rule
    ) -> tuple[tuple[OpPlacement, ...], np.ndarray]:
        keep = self._only_crosses(scope, graph, op)
        keep_partial = keep or self._feeds_addition(scope, graph, op)
        batch_factors = self._batch_factors(scope, graph, op, rule)
        in_loop = self._in_loop(scope, op)
        key = (self.memo.number(graph, op), keep, keep_partial, batch_factors, in_loop)
        if key not in self.memo.leaders:
            values, results = graph.operands(op), graph.results(op)
            options = placements(
                rule,
                values,
                results,
                self.sizes,
                batch_factors=self._batch_factors(scope, graph, op, rule),
                restriction=self.restriction,
                in_loop=self._in_loop(scope, op),
                takes_partial=op.primitive in ("add", "add_any"),
                keep_partial=keep or self._feeds_addition(scope, graph, op),
                scatter=not keep,
            )
            seconds = np.array([self._option_seconds(rule, op, values, results, p) for p in options])
            self.memo.leaders[key] = options, seconds
        return self.memo.leaders[key]

    def _option_seconds(
        self, rule: Rule, op: Op, values: Sequence[Value], results: Sequence[Value], placement: OpPlacement
    ) -> float:
        seconds = self.pricer.op_seconds(rule, op, values, results, placement)
        for value, raw, target in zip(results, raw_result_specs(rule, placement), placement.results, strict=True):
            seconds += self._move_seconds(value, raw, target)
        return seconds

    def _batch_factors(self, scope: int, graph: Graph, op: Op, rule: Rule) -> frozenset[int]:
        dims = self.batch_dims[scope]
        found: set[int] = set()
        for tensor, v in zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True):
            dim = dims[v]
            if dim is not None:
                found.update(f for f in tensor[dim][:1])
        return frozenset(found)

    def _only_crosses(self, scope: int, graph: Graph, op: Op) -> bool:
        """True when nothing inside the loop reads the result before it is summed up over micro-batches."""
        if scope > 0 or len(op.results) != 1:
            return False
        result = op.results[0]
        return result in self.crossing_values and not any(
            self.step.phases[c].in_loop for c in graph.consumers[result]
        )

    def _feeds_addition(self, scope: int, graph: Graph, op: Op) -> bool:
        """True when one addition of this stage is all that reads the result: a partial sum may then wait for it."""
        result = op.results[0]
        readers = graph.consumers[result]
        leaves = result in (self.view.leaves if scope == 0 else graph.outputs)
        return not leaves and len(readers) == 1 and graph.ops[readers[0]].primitive in ("add", "add_any")

    def _add_follower(self, scope: int, graph: Graph, op: Op, rule: Rule, runs: float) -> None:
        main = self._main_operand(scope, graph, op)
        offer = self.offers[(scope, op.operands[main])]
        keep = self._only_crosses(scope, graph, op)
        key = (self.memo.number(graph, op), main, offer.specs, keep)
        if key not in self.memo.followers:
            self.memo.followers[key] = self._following(graph, op, rule, main, offer.specs, keep)
        followed = self.memo.followers[key]
        self.costs[offer.node] = self.costs[offer.node] + followed.seconds * runs
        self._record(scope, graph, op, offer.node, followed.options)
        for i, v in enumerate(op.operands):
            if i != main and (scope, v) in self.offers:
                self._add_edge((scope, v), graph.values[v], offer.node, followed.demanded[i], runs)

    def _following(
        self, graph: Graph, op: Op, rule: Rule, main: int, specs: tuple[Spec, ...], keep: bool
    ) -> Followed:
        """The placements of an op that follows its operand `main` in each of these specs."""
        values, results = graph.operands(op), graph.results(op)
        unique = list(dict.fromkeys(specs))
        options: list[OpPlacement] = []
        seconds = np.zeros(len(unique))
        for i, spec in enumerate(unique):
            placement = follow(rule, results, main, spec, self.sizes, keep_partial=keep)
            wanted = self._operand_specs(graph, op, rule, placement)[main]
            seconds[i] = self._option_seconds(rule, op, values, results, placement)
            seconds[i] += self._move_seconds(values[main], spec, wanted)
            options.append(placement)
        number = {spec: i for i, spec in enumerate(unique)}
        order = [number[spec] for spec in specs]
        demands = [self._operand_specs(graph, op, rule, p) for p in options]
        by_operand = tuple(tuple(demands[n][i] for n in order) for i in range(len(op.operands)))
        return Followed(options=tuple(options[n] for n in order), seconds=seconds[order], demanded=by_operand)

    def _main_operand(self, scope: int, graph: Graph, op: Op) -> int:
        """The operand that decides: one that a leader computed before one that came in, then larger, then later."""

        def rank(i: int) -> tuple[bool, int, int]:
            value = graph.values[op.operands[i]]
            offer = self.offers[(scope, value.id)]
            return (offer.node in self.computed, value.num_elements, value.id)

        return max(self._ranked(scope, graph, op), key=rank)

    def _record(self, scope: int, graph: Graph, op: Op, node: int, options: tuple[OpPlacement, ...]) -> None:
        self.placed[(scope, op.id)] = Placed(node=node, options=options, scope=scope)
        for i, r in enumerate(op.results):
            self.offers[(scope, r)] = Offer(node=node, specs=tuple(p.results[i] for p in options))
        if self._in_loop(scope, op) and node != _UNIT:
            self.computed.add(node)

    def _add_crossing(self, v: int) -> None:
        """Replace what the update sees of a value by a node of its own: stored inside the loop, resolved once after."""
        value = self.view.graph.values[v]
        offer = self.offers[(0, v)]
        allowed = self._crossing_filter()
        options: list[Accumulator] = []
        for stored in dict.fromkeys(offer.specs):
            for resolved in resolutions(stored, value.shape, self.sizes, keep=False, scatter=True, allowed=allowed):
                options.append(Accumulator(stored=stored, resolved=resolved))
        for spec in self._value_specs(value, None, "optimizer"):
            options.append(Accumulator(stored=spec, resolved=spec))
        options = list(dict.fromkeys(options))
        node = self._node(np.array([self._move_seconds(value, o.stored, o.resolved) for o in options]))
        self._add_edge((0, v), value, node, tuple(o.stored for o in options), self.step.num_microbatches)
        self.crossings[v] = (node, tuple(options))
        self.offers[(0, v)] = Offer(node=node, specs=tuple(o.resolved for o in options))
        self.computed.add(node)

    def _crossing_filter(self) -> Callable[[str], bool]:
        return lambda axis: self.restriction.role(axis) is not AxisRole.BATCH or self.restriction.shard_optimizer

    # ------------------------------------------------------------------------------------------------ loops

    def _add_scan(self, scope: int, graph: Graph, op: Op, runs: float) -> None:
        body, trips = op.bodies[0], op.params["length"]
        inner = len(self.scopes)
        self.scopes.append(body)
        self.batch_dims.append(self._infer_body_batch(scope, op, body))
        consts, carry = op.params["num_consts"], op.params["num_carry"]
        for i, (outer, v) in enumerate(zip(op.operands, body.inputs, strict=True)):
            self._add_body_input(scope, graph, outer, inner, body.values[v], runs, scanned=i >= consts + carry)
        for o in body.ops:
            self._add_op(inner, body, o, runs * trips)
        for i in range(carry):
            offer = self.offers[(inner, body.inputs[consts + i])]
            self._add_edge((inner, body.outputs[i]), body.values[body.outputs[i]], offer.node, offer.specs, runs * trips)
            self.offers[(scope, op.results[i])] = offer
        for r, v in zip(op.results[carry:], body.outputs[carry:], strict=True):
            offer = self.offers.get((inner, v))
            if offer is None:
                rank = body.values[v].rank
                offer = Offer(node=_UNIT, specs=(replicated(rank),))
                self.offers[(inner, v)] = offer
            self.offers[(scope, r)] = Offer(node=offer.node, specs=tuple(stacked(s) for s in offer.specs))
            self.computed.add(offer.node)
        self.placed[(scope, op.id)] = Placed(
            node=_UNIT, options=(replicated_placement(graph, op),), scope=scope, body_scope=inner
        )

    def _infer_body_batch(self, scope: int, op: Op, body: Graph) -> tuple[int | None, ...]:
        """Batch dims inside a loop body, followed from its operands through the rules of its ops."""
        outer = self.batch_dims[scope]
        first_scanned = op.params["num_consts"] + op.params["num_carry"]
        dims: list[int | None] = [None] * len(body.values)
        for i, (o, v) in enumerate(zip(op.operands, body.inputs, strict=True)):
            dim = outer[o]
            if dim is not None and (i < first_scanned or dim > 0):
                dims[v] = dim - (1 if i >= first_scanned else 0)
        for o in body.ops:
            if o.bodies:
                continue
            rule = rule_of_op(body, o.id)
            batch = {rule.operands[i][d][0] for i, v in enumerate(o.operands) if (d := dims[v]) is not None and rule.operands[i][d]}
            for r, tensor in zip(o.results, rule.results, strict=True):
                dims[r] = next((d for d, factors in enumerate(tensor) if factors and factors[0] in batch), None)
        return tuple(dims)

    def _add_body_input(
        self, scope: int, graph: Graph, outer: int, inner: int, value: Value, runs: float, *, scanned: bool
    ) -> None:
        if value.rank == 0 or value.dtype.startswith("key<"):
            self.offers[(inner, value.id)] = Offer(node=_UNIT, specs=(replicated(value.rank),))
            specs: tuple[Spec, ...] = (replicated(value.rank),)
            node = _UNIT
        else:
            batch_dim = self.batch_dims[inner][value.id]
            kind = "boundary" if batch_dim is not None else "parameter"
            specs = self._value_specs(value, batch_dim, kind)
            node = self._node(np.zeros(len(specs)))
            self.offers[(inner, value.id)] = Offer(node=node, specs=specs)
            if batch_dim is not None:
                self.computed.add(node)
        demanded = tuple(stacked(s) for s in specs) if scanned else specs
        self._add_edge((scope, outer), graph.values[outer], node, demanded, runs)

    # ------------------------------------------------------------------------------------------------ edges

    def _demand(
        self,
        scope: int,
        graph: Graph,
        op: Op,
        node: int,
        demands: Sequence[tuple[Spec, ...]],
        runs: float,
        *,
        skip: int = -1,
    ) -> None:
        for i, v in enumerate(op.operands):
            if i != skip and (scope, v) in self.offers:
                self._add_edge((scope, v), graph.values[v], node, tuple(d[i] for d in demands), runs)

    def _add_edge(self, key: Key, value: Value, node: int, demanded: tuple[Spec, ...], runs: float) -> None:
        """Price every (offered, demanded) pair of specs of one value."""
        offer = self.offers.get(key)
        if offer is None:
            return
        matrix = self._move_table(value, offer.specs, demanded) * runs
        if offer.node == node:
            self.costs[node] = self.costs[node] + np.diagonal(matrix)
        elif matrix.any():
            self._accumulate(offer.node, node, matrix)

    def _move_table(self, value: Value, offered: tuple[Spec, ...], demanded: tuple[Spec, ...]) -> np.ndarray:
        key = (value.shape, value.dtype, offered, demanded)
        if key not in self.memo.tables:
            sources, targets = list(dict.fromkeys(offered)), list(dict.fromkeys(demanded))
            table = np.array([[self._move_seconds(value, s, t) for t in targets] for s in sources])
            rows = [sources.index(s) for s in offered]
            columns = [targets.index(t) for t in demanded]
            self.memo.tables[key] = table[np.ix_(rows, columns)]
        return self.memo.tables[key]

    def _accumulate(self, u: int, v: int, matrix: np.ndarray) -> None:
        if (v, u) in self.edges:
            self.edges[(v, u)] = self.edges[(v, u)] + matrix.T
        else:
            self.edges[(u, v)] = self.edges.get((u, v), 0.0) + matrix

    def _move_seconds(self, value: Value, source: Spec, target: Spec) -> float:
        if source == target:
            return 0.0
        key = (value.shape, value.dtype, source, target)
        if key not in self.memo.moves:
            steps = reshard(source, target, value.shape, self.sizes, item_bytes(value.dtype))
            seconds = float("inf") if steps is None else self.pricer.steps_seconds(steps, float(value.bytes))
            self.memo.moves[key] = seconds
        return self.memo.moves[key]

    # ------------------------------------------------------------------------------------------------ memory

    def _add_usages(self, in_flight: int) -> None:
        """Memory over the ops of the stage as time: state and sums always, saved values until their last reader."""
        graph, ops = self.view.graph, self.view.ops
        time = {op_id: t for t, op_id in enumerate(ops)}
        end = len(ops) + 1
        for v in self.view.external:
            if graph.producer[v] is None and self.step.batch_dims[v] is None:
                self._use(v, self.offers[(0, v)], 0, end, 1.0)
        for v, (node, options) in self.crossings.items():
            stored = Offer(node=node, specs=tuple(o.stored for o in options))
            if self.step.num_microbatches > 1:
                self._use(v, stored, 0, end, 1.0)
        for v, start, stop, saved in saved_values(self.view, time):
            if (0, v) in self.offers and v not in self.crossings:
                self._use(v, self.offers[(0, v)], start, stop, float(in_flight) if saved else 1.0)

    def _use(self, v: int, offer: Offer, start: int, end: int, copies: float) -> None:
        value = self.view.graph.values[v]
        sizes = np.array([local_bytes(value, s, self.sizes) * copies for s in offer.specs])
        if sizes.any() and end > start:
            self.usages.append(Usage(node=offer.node, bytes=sizes, start=start, end=end))


def saved_values(view: StageView, time: Mapping[int, int]) -> list[tuple[int, int, int, bool]]:
    """Values that XLA keeps in memory, as (value, first time, last time, saved for the backward pass).

    Element-wise chains are fused, so a value counts only when a contraction makes or reads it, when several ops read
    it, or when the backward pass reads what the forward pass made.
    """
    graph, phases = view.graph, view.step.phases
    found: list[tuple[int, int, int, bool]] = []
    for op_id in view.ops:
        op = graph.ops[op_id]
        heavy = rule_of_op(graph, op_id).work_kind != "elementwise"
        for r in op.results:
            readers = [c for c in graph.consumers[r] if c in time]
            saved = phases[op_id] is Phase.FORWARD and any(phases[c] is Phase.BACKWARD for c in readers)
            read_by_heavy = any(rule_of_op(graph, c).work_kind != "elementwise" for c in readers)
            if saved or heavy or read_by_heavy or len(readers) > 1:
                found.append((r, time[op_id], max((time[c] for c in readers), default=time[op_id]) + 1, saved))
    return found


def remap(choice: Choice, source: StageView, target: StageView) -> Choice:
    """The same decisions for a stage with an equal `signature`."""
    ops = dict(zip(source.ops, target.ops, strict=True))
    values = dict(zip(source.external, target.external, strict=True))
    sums = dict(zip(source.crossing, target.crossing, strict=True))
    return replace(
        choice,
        inputs={values[v]: s for v, s in choice.inputs.items()},
        ops={ops[o]: p for o, p in choice.ops.items()},
        accumulators={sums[v]: a for v, a in choice.accumulators.items()},
    )
