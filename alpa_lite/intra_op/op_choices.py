"""Which placements each op of a stage may choose: leaders, followers, partial sums, and the user's layout constraints.

`Deciding` classifies the ops: leaders choose their own placement, and every other op follows one of its operands.
`PartialSums` says which results may remain partial sums, and until when: an addition, the end of a loop, or the update.

`Keeping` restricts the strategies of a stage to the layout constraints that the user gave.

    constraint(v) = ((axis, dim), …)      dim None: the axis splits no dim of v       axes that are not named are free

An op keeps only the placements in which all its operands and results satisfy their constraints (`Keeping.options`), and
a sum over micro-batches only the accumulators that do (`Keeping.sums`). A follower must not demand its main operand in
a spec that violates the operand's constraint, nor split a result dim that must not be split (`Keeping.penalty`). A
constrained dim that the main operand lacks comes out unsplit; it is sliced where it is read, which needs no
communication. If nothing remains, the op cannot be sharded as requested, and PlanError is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from alpa_lite.errors import PlanError
from alpa_lite.intra_op.interning import frozen
from alpa_lite.intra_op.problem import FloatArray
from alpa_lite.intra_op.stage import GivenLayout, Key, Offer, StageScope, StageView, Wanted
from alpa_lite.intra_op.strategy_catalogue import PlacementOptions, SumOptions
from alpa_lite.program.ir import ADDITIONS, Graph, Op, Value, wiring_of
from alpa_lite.program.user_shardings import USER_SHARDING
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import is_zero, ranked_values, rule_of_op
from alpa_lite.sharding.specs import Spec


class PartialSums:
    """Classification of the ops of a stage, and of the bodies in it by scope number."""

    def __init__(self, view: StageView, scopes: Sequence[StageScope]) -> None:
        """Start with the builder's `scopes`, which grow while the stage is laid out."""
        self.view = view
        self.scopes = scopes
        self.around: dict[int, tuple[int, Op]] = {}

    def enter(self, scope: int, op: Op, inner: int) -> None:
        """Record that scope `inner` is a body of `op`, which belongs to `scope`."""
        self.around[inner] = (scope, op)

    @cached_property
    def crossing(self) -> frozenset[int]:
        """The values that the loop of the stage sums over micro-batches."""
        return frozenset(self.view.crossing)

    def in_loop(self, scope: int, op: Op) -> bool:
        """Return True for an op that runs once per micro-batch."""
        return self.scopes[scope].in_loop if scope > 0 else self.view.step.phases[op.id].in_loop

    def only_crosses(self, scope: int, op: Op) -> bool:
        """Return True when no op inside the loop reads the result before it is summed over micro-batches."""
        if scope > 0 or len(op.results) != 1:
            return False
        (result,), phases = op.results, self.view.step.phases
        return result in self.crossing and not any(phases[c].in_loop for c in self.view.graph.consumers[result])

    def stacks_up(self, scope: int, op: Op) -> bool:
        """Return True for a result inside a loop that is stacked, trip by trip, into a sum over micro-batches.

        Ops that are linear in it alone may lie between.
        """
        if scope == 0 or not self.in_loop(scope, op):
            return False
        graph, batch_dims = self.scopes[scope].graph, self.scopes[scope].batch_dims
        while len(op.results) == 1 and batch_dims[op.results[0]] is None:
            (v,) = op.results
            if v in graph.outputs:
                return graph.outputs.count(v) == 1 and not graph.consumers[v] and self._stacked_result_crosses(scope, v)
            if len(graph.consumers[v]) != 1:
                return False
            op = graph.ops[graph.consumers[v][0]]
            if op.bodies or rule_of_op(graph, op.id).linear != ((op.operands.index(v),),):
                return False
        return False

    def _stacked_result_crosses(self, scope: int, output: int) -> bool:
        outer, loop = self.around[scope]
        wiring = wiring_of(loop)
        if wiring is None or len(loop.bodies) != 1:
            return False
        result = wiring.outputs[0][self.scopes[scope].graph.outputs.index(output)]
        if result is None or result not in wiring.stacked:
            return False
        stack = loop.results[result]
        # The stack may be stacked once more, by a loop around this one.
        if outer > 0:
            graph = self.scopes[outer].graph
            ends = graph.outputs.count(stack) == 1 and not graph.consumers[stack]
            return ends and self._stacked_result_crosses(outer, stack)
        phases = self.view.step.phases
        return stack in self.crossing and not any(phases[c].in_loop for c in self.view.graph.consumers[stack])

    def feeds_addition(self, scope: int, op: Op) -> bool:
        """Return True when the only reader of the result, a partial sum until then, is an addition of this stage."""
        graph, result = self.scopes[scope].graph, op.results[0]
        readers = graph.consumers[result]
        # A value that leaves the stage or the body must be whole.
        return result not in self._leaves(scope) and len(readers) == 1 and graph.ops[readers[0]].primitive in ADDITIONS

    def feeds_sum(self, scope: int, op: Op) -> bool:
        """Return True when the result may remain a partial sum until an addition."""
        return self.feeds_addition(scope, op) or self.feeds_gradients(scope, op)

    def feeds_gradients(self, scope: int, op: Op) -> bool:
        """Return True when the result, which has no batch, reaches an addition through ops linear in it alone."""
        graph, batch_dims = self.scopes[scope].graph, self.scopes[scope].batch_dims
        while len(op.results) == 1 and len(graph.consumers[op.results[0]]) == 1:
            (v,), (reader,) = op.results, graph.consumers[op.results[0]]
            if batch_dims[v] is not None or v in self._leaves(scope):
                return False
            op = graph.ops[reader]
            if op.primitive in ADDITIONS:
                return self.in_loop(scope, op)
            if op.bodies or rule_of_op(graph, reader).linear != ((op.operands.index(v),),):
                return False
        return False

    def adds_sums(self, scope: int, op: Op) -> bool:
        """Return True for an addition in the update of sums from the loop alone (several uses of one weight)."""
        if scope > 0 or op.primitive not in ADDITIONS or self.in_loop(scope, op):
            return False
        return self._pending.issuperset(op.operands)

    @cached_property
    def _pending(self) -> frozenset[int]:
        """The sums of the loop, and values linear in one of them alone, with a single reader, which is in this stage.

        Operands precede results in a program, so one pass suffices, however long a chain of additions is.
        """
        graph, leaves = self.view.graph, self.view.leaves
        pending: set[int] = set()
        for op in map(graph.ops.__getitem__, self.view.ops):
            if pending.isdisjoint(op.operands):
                candidates = self.crossing.intersection(op.results)
            else:
                added = op.primitive in ADDITIONS and not self.in_loop(0, op) and pending.issuperset(op.operands)
                linear = () if op.bodies else rule_of_op(graph, op.id).linear
                alone = len(linear) == 1 and len(linear[0]) == 1 and op.operands[linear[0][0]] in pending
                candidates = op.results if added or alone else self.crossing.intersection(op.results)
            pending.update(v for v in candidates if v not in leaves and len(graph.consumers[v]) == 1)
        return frozenset(pending)

    def feeds_sums(self, v: int) -> bool:
        """Return True for a sum of the loop that reaches an addition of sums through ops linear in it alone."""
        graph = self.view.graph
        while v in self._pending:
            op = graph.ops[graph.consumers[v][0]]
            if self.adds_sums(0, op):
                return True
            if len(op.results) != 1:
                return False
            (v,) = op.results
        return False

    def feeds_scalars(self, scope: int, op: Op) -> bool:
        """Return True for a scalar that only an addition of scalars of the same micro-batch reads."""
        if len(op.results) != 1 or not self.feeds_addition(scope, op):
            return False
        graph, (result,) = self.scopes[scope].graph, op.results
        # A sum that crosses out of the loop waits in its accumulator instead.
        crosses = scope == 0 and result in self.crossing
        return not crosses and is_scalar_sum(graph, graph.ops[graph.consumers[result][0]])

    def _leaves(self, scope: int) -> Collection[int]:
        return self.view.leaves if scope == 0 else self.scopes[scope].graph.outputs


def is_scalar_sum(graph: Graph, op: Op) -> bool:
    """Return True for additions of scalars that may be partial sums."""
    if op.primitive not in ADDITIONS or not ranked_values(graph).isdisjoint((*op.operands, *op.results)):
        return False
    return bool(rule_of_op(graph, op.id).linear)


class Deciding:
    """Classification of the ops of a stage into leaders and followers, in execution order during its layout."""

    def __init__(
        self, view: StageView, scopes: Sequence[StageScope], sums: PartialSums, offers: Mapping[Key, Offer]
    ) -> None:
        """Start with the builder's `scopes` and `offers`, which grow while the stage is laid out."""
        self.view = view
        self.scopes = scopes
        self.sums = sums
        self.offers = offers
        self.computed: set[int] = set()  # nodes of values that the loop computes, in contrast to parameters
        self._extents: dict[Key, int] = {}  # least number of elements from the leader to a value that follows it

    def _ranked(self, scope: int, graph: Graph, op: Op) -> list[int]:
        """Return the positions of the operands of rank 1 and more that have a node."""
        ranked = ranked_values(graph)
        return [i for i, v in enumerate(op.operands) if v in ranked and (scope, v) in self.offers]

    def leads(self, scope: int, graph: Graph, op: Op, rule: Rule) -> bool:
        """Return True for an op that chooses its own placement, independent of the specs of its operands."""
        # A layout that the user demands is reached from any spec of the operand.
        if op.primitive == USER_SHARDING and self.view.layout.of(graph, op.results[0]):
            return True
        # Indexed ops do little work, but their placement decides what is communicated.
        if rule.work_kind != "elementwise" or op.primitive == "gather" or op.primitive.startswith("scatter"):
            return True
        ranked = self._ranked(scope, graph, op)
        if ranked and (self._is_shared(scope, graph, op) or self.sums.adds_sums(scope, op)):
            return True
        if not self.sums.in_loop(scope, op) or op.primitive not in ADDITIONS:
            # Without an operand that has a spec of its own there is nothing to follow.
            return not ranked
        # Zeros count as a partial sum too: the first addition of a loop whose body runs once adds to them.
        return len(ranked) + sum(is_zero(graph, v) for i, v in enumerate(op.operands) if i not in ranked) >= 2

    def _is_shared(self, scope: int, graph: Graph, op: Op) -> bool:
        """Return True for a sample value that several contractions of this stage read.

        As a leader it is resharded once for all of them. Weights are excluded: it is better that each contraction
        gathers them for itself.
        """
        if len(op.results) != 1 or self.scopes[scope].batch_dims[op.results[0]] is None:
            return False
        readers = {c for c in graph.consumers[op.results[0]] if scope > 0 or c in self.view.op_set}
        return sum(rule_of_op(graph, c).work_kind != "elementwise" for c in readers) > 1

    def follow(self, scope: int, graph: Graph, op: Op) -> int:
        """Return the position of the operand that an op follows.

        Operands computed by a leader precede stage inputs, then larger ones precede smaller ones, then later ones
        earlier ones. A broadcast value counts with its size before the broadcast, because its specs split none of the
        broadcast dims.
        """

        def rank(i: int) -> tuple[bool, int, int]:
            value = graph.values[op.operands[i]]
            offer = self.offers[(scope, value.id)]
            # The larger operand costs more to reshard; ids break ties, so that equal layers decide alike.
            return (offer.node in self.computed, self._extent(scope, value), value.id)

        ranked = self._ranked(scope, graph, op)
        main = max(ranked, key=rank) if len(ranked) > 1 else ranked[0]
        extent = self._extent(scope, graph.values[op.operands[main]])
        self._extents.update({(scope, v.id): min(extent, v.num_elements) for v in graph.results(op)})
        return main

    def _extent(self, scope: int, value: Value) -> int:
        return self._extents.get((scope, value.id), value.num_elements)


def agrees(spec: Spec, wanted: Wanted) -> bool:
    """Return True if every constrained axis splits exactly the dim that it must; partial sums are no splits."""
    return all(
        axis in axes if d == dim else axis not in axes for axis, dim in wanted for d, axes in enumerate(spec.dims)
    )


def _strays(spec: Spec, wanted: Wanted) -> bool:
    """Return True if a constrained axis splits a dim that it must not split."""
    return any(axis in axes and d != dim for axis, dim in wanted for d, axes in enumerate(spec.dims))


@dataclass(frozen=True, kw_only=True, eq=False)
class Keeping:
    """Filter of the strategies of a stage by layout constraints; results are cached by the options' identity."""

    layout: GivenLayout
    _options: dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, PlacementOptions]] = field(
        default_factory=dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, PlacementOptions]]
    )
    _penalties: dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, FloatArray]] = field(
        default_factory=dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, FloatArray]]
    )

    def of(self, graph: Graph, v: int) -> Wanted:
        """Return the layout constraint of a value."""
        return self.layout.of(graph, v)

    def specs(self, graph: Graph, v: int, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        """Return the specs of a value that satisfy its constraint. Raise PlanError if there are none."""
        wanted = self.of(graph, v)
        kept = tuple(spec for spec in specs if agrees(spec, wanted)) if wanted else tuple(specs)
        if not kept:
            raise PlanError(f"{_named(graph.values[v])} cannot lie {_show(wanted)}. Leave a name out of the layout.")
        return kept

    def options(self, graph: Graph, op: Op, options: PlacementOptions) -> PlacementOptions:
        """Return the placements of an op whose specs all satisfy their constraints.

        If the layout says so, an op that cannot read its operands as they lie under any placement need only make its
        results as they are to lie. Raises PlanError if it cannot.
        """
        wanted = self._around(graph, op)
        if not any(wanted) or op.id in self.layout.exempt.get(graph, ()):
            return options
        key = (id(options), wanted)
        if key not in self._options:
            # The entry holds the options, so that no other object can get their id.
            columns = (*options.demanded, *options.results)
            pairs = [(column, want) for column, want in zip(columns, wanted, strict=True) if want]
            # A column holds the specs of one operand or result under all placements; unconstrained ones are left out.
            fits = [all(agrees(c[i], w) for c, w in pairs) for i in range(len(options.placements))]
            if not any(fits) and self.layout.reads_otherwise:
                results = pairs[sum(map(bool, wanted[: len(op.operands)])) :]
                fits = [all(agrees(c[i], w) for c, w in results) for i in range(len(options.placements))]
            if op.primitive == USER_SHARDING:  # what the user lays out is whole sums
                fits = [fit and not result.partial for fit, result in zip(fits, options.results[0], strict=True)]
            if not any(fits):
                raise PlanError(_refusal(graph, op, self))
            self._options[key] = options, options.only([i for i, fit in enumerate(fits) if fit])
        return self._options[key][1]

    def penalty(
        self, graph: Graph, op: Op, main: int, specs: Sequence[Spec], options: PlacementOptions
    ) -> FloatArray | None:
        """Return inf for each spec of operand `main` that a follower cannot follow within the constraints, else 0.

        The result is None if no spec is penalised. Raise PlanError if all of them are.
        """
        wanted = self._around(graph, op)
        if not any(wanted) or op.id in self.layout.exempt.get(graph, ()):
            return None
        key = (id(options), wanted)
        if key not in self._penalties:
            # In `wanted` the constraints of the operands come first and the results follow.
            results = list(zip(options.results, wanted[len(op.operands) :], strict=True))
            needed, want = options.demanded[main], wanted[main]
            misses = [
                # If the offered spec violates the constraint already, the op that offers it answers for that.
                (agrees(spec, want) and not agrees(needed[i], want)) or any(_strays(c[i], w) for c, w in results)
                for i, spec in enumerate(specs)
            ]
            if all(misses) and self.layout.reads_otherwise:
                misses = [any(_strays(c[i], w) for c, w in results) for i in range(len(specs))]
            if all(misses):
                raise PlanError(_refusal(graph, op, self))
            self._penalties[key] = options, frozen(np.where(misses, np.inf, 0.0))
        penalty = self._penalties[key][1]
        # None spares the builder the sum of two arrays.
        return penalty if penalty.any() else None

    def sums(self, graph: Graph, v: int, options: SumOptions) -> SumOptions:
        """Return the accumulators of a sum whose two specs satisfy its constraint. Raises PlanError if none do."""
        wanted = self.of(graph, v)
        fits = [agrees(s, wanted) and agrees(r, wanted) for s, r in zip(options.stored, options.resolved, strict=True)]
        if all(fits):
            return options
        kept = np.flatnonzero(fits)
        if not kept.size:
            raise PlanError(f"{_named(graph.values[v])} cannot be summed {_show(wanted)}. Leave a name out.")
        return SumOptions(
            accumulators=tuple(options.accumulators[i] for i in kept),
            seconds=frozen(options.seconds[kept]),
            stored=tuple(options.stored[i] for i in kept),
            resolved=tuple(options.resolved[i] for i in kept),
        )

    def _around(self, graph: Graph, op: Op) -> tuple[Wanted, ...]:
        """Return the constraints of the operands and results of an op; () if the layout constrains nothing."""
        if not self.layout.values:
            return ()
        # What a sharding of the user demands, it demands of the result: the operand comes from any spec.
        operands = (
            [()] * len(op.operands) if op.primitive == USER_SHARDING else [self.of(graph, v) for v in op.operands]
        )
        return (*operands, *(self.of(graph, v) for v in op.results))


def _refusal(graph: Graph, op: Op, keeping: Keeping) -> str:
    values = ", ".join(f"{_named(graph.values[v])} {_show(keeping.of(graph, v))}" for v in (*op.operands, *op.results))
    return (
        f"{op.source or 'An op'}: the {op.primitive} cannot be run with its operands and results split as the layout "
        f"says ({values}). {keeping.layout.advice}"
    )


def _named(value: Value) -> str:
    return f"{value.name or value.dtype}{list(value.shape)}"


def _show(wanted: Wanted) -> str:
    split = [f"{axis} on dim {dim}" for axis, dim in wanted if dim is not None]
    return f"with {' and '.join(split)}" if split else "whole"
