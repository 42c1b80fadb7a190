"""Everything about ops and values on one logical mesh that does not depend on the stage around them.

    leaders    the placements of a deciding op, and their seconds                       (leader)
    followers  the placement of an op under each spec of its main operand               (following)
    moves      seconds from every offered spec of a value to every demanded one         (move_table)

Answers are kept by what an op does (`rules.graph_facts.op_class`), not by which op it is: the layers of a model share
them, and so do all stages on the same mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpa_lite.graph.ir import Graph, Op, Value, item_bytes
from alpa_lite.plan import OpPlacement
from alpa_lite.pricing import Pricer
from alpa_lite.rules import Rule
from alpa_lite.rules.graph_facts import op_class, rule_of_op
from alpa_lite.sharding import Spec, reshard
from alpa_lite.spmd import operand_specs, raw_result_specs
from alpa_lite.strategies import AxisRole, Restriction, Split, all_specs, follow, placements

FloatArray = NDArray[np.float64]

#: Additions, which may take partial sums and resolve them once.
ADDITIONS = ("add", "add_any")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The placements of an op by strategy: seconds of one run, and the spec demanded of each operand."""

    placements: tuple[OpPlacement, ...]
    seconds: FloatArray
    demanded: tuple[tuple[Spec, ...], ...]


class Catalogue:
    """Placements and prices on one logical mesh under one restriction."""

    def __init__(self, pricer: Pricer, restriction: Restriction) -> None:
        """Start empty."""
        self.pricer = pricer
        self.restriction = restriction
        self.sizes: Mapping[str, int] = dict(pricer.sizes)
        self._leaders: dict[object, Options] = {}
        self._followers: dict[object, Options] = {}
        self._demands: dict[object, tuple[Spec, ...]] = {}
        self._moves: dict[object, float] = {}
        self._tables: dict[object, FloatArray] = {}
        self._classes: dict[object, int] = {}
        self._numbers: dict[tuple[Graph, int], int] = {}

    def leader(
        self,
        graph: Graph,
        op: Op,
        *,
        batch_factors: frozenset[int],
        in_loop: bool,
        only_crosses: bool,
        may_wait: bool,
        accumulates: bool,
    ) -> Options:
        """The placements of an op that decides for itself.

        only_crosses   the result is only summed over micro-batches: it may stay a partial sum, and nothing else pays
        may_wait       an addition reads the result: it may take a partial sum
        accumulates    a loop adds to what it carries: that may stay a partial sum until the loop ends
        """
        key = (self._number(graph, op), batch_factors, in_loop, only_crosses, may_wait, accumulates)
        if key not in self._leaders:
            found = placements(
                rule_of_op(graph, op.id),
                graph.operands(op),
                graph.results(op),
                self.sizes,
                batch_factors=batch_factors,
                restriction=self.restriction,
                in_loop=in_loop,
                takes_partial=op.primitive in ADDITIONS,
                keep_partial=only_crosses or may_wait or accumulates,
                scatter=not only_crosses,
            )
            self._leaders[key] = self._options(graph, op, found)
        return self._leaders[key]

    def following(self, graph: Graph, op: Op, main: int, specs: tuple[Spec, ...], *, keep_partial: bool) -> Options:
        """The placements of an op that follows its operand number `main` in each of these specs."""
        key = (self._number(graph, op), main, specs, keep_partial)
        if key not in self._followers:
            rule, unique = rule_of_op(graph, op.id), list(dict.fromkeys(specs))
            found = [
                follow(rule, graph.results(op), main, spec, self.sizes, keep_partial=keep_partial) for spec in unique
            ]
            options = self._options(graph, op, found)
            value = graph.operands(op)[main]
            gathers = [self.move_seconds(value, s, t) for s, t in zip(unique, options.demanded[main], strict=True)]
            number = {spec: i for i, spec in enumerate(unique)}
            order = [number[spec] for spec in specs]
            self._followers[key] = Options(
                placements=tuple(found[n] for n in order),
                seconds=(options.seconds + np.array(gathers))[order],
                demanded=tuple(tuple(by_option[n] for n in order) for by_option in options.demanded),
            )
        return self._followers[key]

    def _options(self, graph: Graph, op: Op, found: Sequence[OpPlacement]) -> Options:
        demands = [self._operand_specs(graph, op, p) for p in found]
        return Options(
            placements=tuple(found),
            seconds=np.array([self.seconds(graph, op, p) for p in found], dtype=float),
            demanded=tuple(tuple(d[i] for d in demands) for i in range(len(op.operands))),
        )

    def seconds(self, graph: Graph, op: Op, placement: OpPlacement) -> float:
        """One run of an op: its work, and bringing its results from partial sums to their planned specs."""
        rule, results = rule_of_op(graph, op.id), graph.results(op)
        total = self.pricer.op_seconds(graph, op, placement)
        for value, raw, target in zip(results, raw_result_specs(rule, placement), placement.results, strict=True):
            total += self.move_seconds(value, raw, target)
        return total

    def _operand_specs(self, graph: Graph, op: Op, placement: OpPlacement) -> tuple[Spec, ...]:
        key = (self._number(graph, op), placement.factors, placement.partial)
        if key not in self._demands:
            self._demands[key] = operand_specs(rule_of_op(graph, op.id), graph.operands(op), placement)
        return self._demands[key]

    def _number(self, graph: Graph, op: Op) -> int:
        """A number shared by all ops that do the same to the same shapes."""
        key = (graph, op.id)
        if key not in self._numbers:
            self._numbers[key] = self._classes.setdefault(op_class(graph, op.id), len(self._classes))
        return self._numbers[key]

    def value_specs(self, value: Value, batch_dim: int | None, *, split: Split) -> tuple[Spec, ...]:
        """Specs that the restriction allows a value to have; `split` is for values without a batch on BATCH axes.

        A BATCH axis splits the batch wherever it divides.
        """
        roles = {axis: self.restriction.role(axis) for axis in self.sizes}

        def allowed(axis: str, dim: int) -> bool:
            if roles[axis] is AxisRole.MODEL:
                return dim != batch_dim
            if roles[axis] is AxisRole.BATCH:
                return dim == batch_dim if batch_dim is not None else split is not Split.NEVER
            return True

        specs = all_specs(value.shape, self.sizes, allowed, self.restriction)
        for axis, role in roles.items():
            using = [spec for spec in specs if axis in spec.axes]
            if role is AxisRole.BATCH and using and (batch_dim is not None or split is Split.MUST):
                specs = using
        return tuple(specs)

    def move_seconds(self, value: Value, source: Spec, target: Spec) -> float:
        """Resharding one value once; infinite when there is no way."""
        if source == target:
            return 0.0
        key = (value.shape, value.dtype, source, target)
        if key not in self._moves:
            steps = reshard(source, target, value.shape, self.sizes, item_bytes(value.dtype))
            seconds = float("inf") if steps is None else self.pricer.steps_seconds(steps, float(value.bytes))
            self._moves[key] = seconds
        return self._moves[key]

    def move_table(self, value: Value, offered: tuple[Spec, ...], demanded: tuple[Spec, ...]) -> FloatArray:
        """Seconds from each offered to each demanded spec of a value."""
        key = (value.shape, value.dtype, offered, demanded)
        if key not in self._tables:
            sources, targets = list(dict.fromkeys(offered)), list(dict.fromkeys(demanded))
            table = np.array([[self.move_seconds(value, s, t) for t in targets] for s in sources])
            rows = [sources.index(s) for s in offered]
            columns = [targets.index(t) for t in demanded]
            self._tables[key] = table[np.ix_(rows, columns)]
        return self._tables[key]


def batch_factors(rule: Rule, op: Op, batch_dims: Sequence[int | None]) -> frozenset[int]:
    """The factors of an op that hold the batch."""
    tensors = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
    dims = ((tensor, batch_dims[v]) for tensor, v in tensors)
    return frozenset(tensor[dim][0] for tensor, dim in dims if dim is not None and tensor[dim])
