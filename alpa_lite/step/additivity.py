"""Prove that micro-batches are exact: derive the relation of every value to its full-batch counterpart.

`prove` interprets a step at two batch sizes, op by op. The results of an op that touches the batch follow from its
transfer function (`transfer_functions`); any other op is the op of the full batch. The relations of outputs, and of
values read after the loop, determine how results of micro-batches are combined; MIXED outputs refuse the split.

Values that depend on data, keys and captured arrays alone can be computed for the whole batch before the loop, if they
are MIXED or used again per sample (`Proof.hoisted`): sums of masks, permutations of the data, returns by a reverse
scan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.program.equations import GraphWithEquations
from alpa_lite.program.ir import Op
from alpa_lite.step.interpreter import Interpreter, Marks, program_at, starting
from alpa_lite.step.relations import AFTER, INVARIANT, Fact, Own, Refusal, Relation, RelationKind, mixed, samples
from alpa_lite.step.transfer_functions import ODD
from alpa_lite.step.transfer_layout import WIDE


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of `prove`.

    Attributes:
        relations: the relation of each value, by value id.
        marks: op id → how the op differs from the traced one, for ops that do.
        hoisted: ids of the values to hoist out of the loop; empty when all is proven.
        refusals: why the step is no sum over its samples, one per reason; empty when all is proven.
    """

    relations: tuple[Relation, ...]
    marks: Mapping[int, Marks]
    hoisted: tuple[int, ...]
    refusals: tuple[Refusal, ...]


def prove(
    full: GraphWithEquations,
    small: GraphWithEquations,
    count: int,
    *,
    of_data: frozenset[int] = frozenset(),
    runs: Mapping[int, int] | None = None,
) -> Proof:
    """Derive the relations of all values of a step in `count` micro-batches.

    Args:
        full: the step at the full batch.
        small: the step at the size of a micro-batch: the same ops on the same value ids.
        count: number of micro-batches.
        of_data: inputs that may be read before the loop.
        runs: input → number of runs of samples into which its batch dim is divided; 1 for inputs without an entry.
    """
    return _OuterProgram(full, small, count, of_data, runs or {}).proof()


def _facts(program: GraphWithEquations, count: int) -> dict[int, Fact]:
    """Return facts about captured arrays: `numpy.arange(batch)` holds own numbers, and a mask may be uniformly true."""
    found: dict[int, Fact] = {}
    graph = program.graph
    for v, array in zip(graph.inputs[len(graph.inputs) - len(program.constants) :], program.constants, strict=True):
        value = graph.values[v]
        # All elements lie along one dim.
        counts = value.dtype in WIDE and value.num_elements == max(value.shape, default=0)
        if counts and np.array_equal(np.asarray(array).reshape(-1), np.arange(value.num_elements)):
            found[v] = Own(value.num_elements // count)
        elif value.dtype == "bool" and value.num_elements and np.asarray(array).all() == np.asarray(array).any():
            found[v] = bool(np.asarray(array).all())
    return found


#: Relations of values that are not complete before all micro-batches have run.
_PARTIAL = frozenset((RelationKind.SUM, RelationKind.MAX, RelationKind.MIN, RelationKind.AFTER))
#: Ops of the loop that may read partial sums: as the array they add to, or to repeat them per sample and take one copy.
_ONTO_SUMS = ("scatter", "broadcast_in_dim", "slice")


class _OuterProgram:
    """The interpretation of a step's outermost program; bodies are left to `Interpreter`."""

    def __init__(
        self,
        full: GraphWithEquations,
        small: GraphWithEquations,
        count: int,
        of_data: frozenset[int],
        runs: Mapping[int, int],
    ) -> None:
        self.graph = full.graph
        self.facts = _facts(full, count)
        self.program = program_at(full.graph, small.graph, (full.equations, small.equations), count)
        self.interpreter = Interpreter(count)
        self.table = starting(
            self.graph, self.graph.inputs, [self._input(v, runs.get(v, 1)) for v in self.graph.inputs]
        )
        self.marks: dict[int, Marks] = {}
        # Literals are known before the loop.
        self.of_data = {v.id for v in self.graph.values if v.literal is not None} | set(of_data)
        # For each value that is complete only after the loop: the reductions over the batch from which it follows.
        self.origins: dict[int, frozenset[int]] = {}
        self.hoistable: dict[int, None] = {}
        # The reasons for which values are MIXED, in the order of the ops.
        self.refused: dict[Refusal, None] = {}

    def _input(self, v: int, runs: int) -> Relation:
        """Return the relation of an input, from the dim in which its two shapes differ."""
        dim = self.program.dims[v]
        if dim is None:
            return INVARIANT
        value = self.graph.values[v]
        if dim == ODD or self.program.small.values[v].shape[dim] % runs:
            return mixed(Refusal("", "", (value.shape,), f"{value.name} of {list(value.shape)} is not cut evenly"))
        # With several runs, the rows of a micro-batch are not numbered consecutively.
        return samples(dim, runs, self.facts.get(v) if runs == 1 else None)

    def proof(self) -> Proof:
        """Interpret all ops in order and return the proof."""
        for op in self.graph.ops:
            self._read(op)
        returned = dict.fromkeys(r.refusal for v in self.graph.outputs if (r := self._returned(v)).refusal is not None)
        # The first in the order of the program is closest to the cause: a backward pass follows the forward pass.
        refusals = [r for r in (*self.refused, *returned) if r in returned]
        hoisted = self._hoisted() if self.hoistable else ()
        relations = tuple([self.table.get(v.id, INVARIANT) for v in self.graph.values])
        # One line of the user's code often spoils many outputs.
        return Proof(relations=relations, marks=self.marks, hoisted=hoisted, refusals=tuple(dict.fromkeys(refusals)))

    def _returned(self, v: int) -> Relation:
        """Return the relation of an output, MIXED for a sum over the batch that is returned once per sample."""
        relation, producer = self.table[v], self.graph.producer[v]
        if producer is None:
            return relation
        op = self.graph.ops[producer]
        if relation.is_reduced and (relation.dim >= 0 or op.primitive == "slice"):
            shape = self.graph.values[v].shape
            return mixed(
                Refusal(op.source, op.primitive, (shape,), "returns what was reduced over the batch per sample")
            )
        return relation

    def _read(self, op: Op) -> None:
        """Derive the relations of the results of an op."""
        relations = [self.table[v] for v in op.operands]
        # An effect must not move in front of the loop.
        data = not op.effectful and self.of_data.issuperset(op.operands)
        if data:
            self.of_data.update(op.results)
        kinds = {r.kind for r in relations}
        if self.program.touching[op.id]:
            if not kinds.isdisjoint(_PARTIAL):
                relations = [self._in_loop(op, v, r) for v, r in zip(op.operands, relations, strict=True)]
            results, marks = self.interpreter.op(self.program, op, relations)
        elif kinds.isdisjoint(_PARTIAL) or RelationKind.MIXED in kinds:
            results, marks = self.interpreter.op(self.program, op, relations)
        else:
            results, marks = self._of_reduced(op, relations), Marks()
        if marks:
            self.marks[op.id] = marks
        for r, relation in zip(op.results, results, strict=True):
            if relation.refusal is not None:
                self.refused[relation.refusal] = None
            self.table[r] = self._rescued(r, relation) if data and relation.kind is RelationKind.MIXED else relation
            # A reduction over the batch begins here; otherwise the value follows from those of the operands.
            if relation.is_reduced and not any(s.is_reduced for s in relations):
                self.origins[r] = frozenset((r,))
            elif relation.is_reduced or relation.kind is RelationKind.AFTER:
                self.origins[r] = self._origins(op)

    def _origins(self, op: Op) -> frozenset[int]:
        """Return the values at which the reductions begin that the results of an op follow from.

        One that is not made of data stands for all: which others there are makes no difference to what reads them, and
        a norm over all gradients has thousands of them.
        """
        origins = frozenset[int]().union(*(self.origins.get(v, ()) for v in op.operands))
        others = origins - self.of_data
        return frozenset((min(others),)) if others else origins

    def _of_reduced(self, op: Op, relations: Sequence[Relation]) -> tuple[Relation, ...]:
        """Return the relations of an op outside the loop that reads sums.

        Linear ops give sums again, which loops may continue to add to; any other op runs after the loop.
        """
        if not op.bodies and not any(r.kind is RelationKind.AFTER for r in relations):
            results, marks = self.interpreter.op(self.program, op, relations)
            if not marks and all(r.is_reduced for r in results):
                return results
        return (AFTER,) * len(op.results)

    def _rescued(self, v: int, relation: Relation) -> Relation:
        """Return the relation of a value of data that is computed before the loop, and record it as a candidate."""
        dim = self.program.dims[v]
        if dim == ODD:
            return relation
        self.hoistable[v] = None
        return INVARIANT if dim is None else samples(dim, 1)

    def _in_loop(self, op: Op, v: int, relation: Relation) -> Relation:
        """Return the relation of an operand as an op of the loop reads it.

        A sum over the batch is not complete inside the loop, unless it is a sum of data and can be computed before.
        """
        # A loop may carry the sum on, and a scatter adds to its first operand: neither needs the total.
        goes_on_adding = op.bodies or (op.primitive.startswith(_ONTO_SUMS) and v == op.operands[0])
        if not relation.is_reduced and relation.kind is not RelationKind.AFTER:
            return relation
        if relation.is_reduced and goes_on_adding and not self.origins[v] <= self.of_data:
            return relation
        origins = self.origins[v]
        if origins <= self.of_data:
            self.hoistable.update(dict.fromkeys(sorted(origins)))
            return INVARIANT
        origin = next(o for o in sorted(origins) if o not in self.of_data)
        producer = self.graph.producer[origin]
        assert producer is not None, "only results of ops are reduced over the batch"
        reduction = self.graph.ops[producer]
        text = (
            f"a value that was reduced over the batch ({reduction.primitive}) is used again per sample at {op.source} "
            f"({op.primitive}); batch norm does this, and a loss over a denominator that parameters decide"
        )
        return mixed(Refusal(reduction.source, "", (), text))

    def _hoisted(self) -> tuple[int, ...]:
        """Return the candidates for hoisting that some output depends on, ascending."""
        graph, needed, found = self.graph, set(self.graph.outputs), list[int]()
        found += [v for v in graph.outputs if v in self.hoistable]
        for op in reversed(graph.ops):
            # A hoisted value becomes an input, so that the ops that make it are needed no more.
            if not any(r in needed and r not in self.hoistable for r in op.results):
                continue
            needed.update(op.operands)
            found += [v for v in op.operands if v in self.hoistable]
        return tuple(sorted(dict.fromkeys(found)))
