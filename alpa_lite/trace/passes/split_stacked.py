"""Stacked arrays: what loops over layers read row by row, cut into parts of a few rows that can live apart.

A model that scans over its layers keeps the weights of all layers in single arrays [layers, ...], and with them their
gradients and optimizer state. Once the loop is cut into parts, for the stages of a pipeline, each part of these arrays
belongs with its layers. `part_stacks` rewrites the graph: arrays become several inputs and outputs, one per part.

    parted       arrays of which every row is read with others of its part alone, and what they
                 are computed from or combined with                                           (standing.Parting)
    part(x, j)   rows of part j: an input of its own, the pieces of a concatenation, the op of x on
                 the parts j of its operands, or a slice of what is whole                               (_part)
    f over rows  f(x) = f(part 0) + f(part 1) + …, for sums, maxima and minima over the leading dim     (_combined)

Nothing else changes: a value that is needed whole is put together again where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.core import primitives

from alpa_lite.program.equations import Equation, GraphWithEquations, PlainParams, without_dead_ops
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.phases import Part
from alpa_lite.trace.passes.split_analysis import Parting, Standing, joins_rows, rows_read

_COMBINERS = {
    "sum": Equation(primitive=primitives.add_p, params={}),
    "max": Equation(primitive=primitives.max_p, params={}),
    "min": Equation(primitive=primitives.min_p, params={}),
}
_JOIN = Equation(primitive=primitives.concatenate_p, params={"dimension": 0})


@dataclass(frozen=True, kw_only=True)
class PartedProgram:
    """A program with parts of stacked arrays as inputs and outputs, and what each input and output is a part of."""

    program: GraphWithEquations
    input_parts: tuple[Part, ...]
    output_parts: tuple[Part, ...]


def part_stacks(program: GraphWithEquations, of_samples: frozenset[int], num_parts: int) -> PartedProgram:
    """The program with its stacked arrays in about `num_parts` parts (`parts_of`).

    of_samples   inputs that hold the batch, and other values whose rows are samples; such are never cut
    """
    return _Rewriter(Parting(program, of_samples, num_parts)).rewritten()


class _Kind(NamedTuple):
    """What an op makes."""

    shape: tuple[int, ...]
    dtype: str


class _Rewriter:
    def __init__(self, parting: Parting) -> None:
        self.parting, self.program, self.graph = parting, parting.program, parting.graph
        self.plain = PlainParams()
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.equations: list[Equation] = []
        self.whole: dict[int, int] = {}
        self.parts: dict[tuple[int, int], int] = {}

    def rewritten(self) -> PartedProgram:
        """The program in parts; see `part_stacks`."""
        graph, split = self.graph, self.parting.split
        inputs: list[tuple[int, Part]] = []
        for number, v in enumerate(graph.inputs):
            value = graph.values[v]
            for j, rows in enumerate(self.parting.bounds(value.shape[0]) if v in split else ()):
                name = f"{value.name}[{rows[0]}:{rows[1]}]"
                part = self._new(replace(value, shape=(rows[1] - rows[0], *value.shape[1:]), name=name))
                self.parts[v, j] = part
                inputs.append((part, Part(leaf=number, rows=rows)))
            if v not in split:
                self.whole[v] = self._new(value)
                inputs.append((self.whole[v], Part(leaf=number)))
        for op in graph.ops:
            self._rewrite(op)
        outputs: list[tuple[int, Part]] = []
        for number, v in enumerate(graph.outputs):
            if self.parting.standing(v) is Standing.PARTED:
                bounds = self.parting.bounds(graph.values[v].shape[0])
                outputs += [(self._part(v, j), Part(leaf=number, rows=rows)) for j, rows in enumerate(bounds)]
            else:
                outputs.append((self._whole(v), Part(leaf=number)))
        made = Graph(
            values=tuple(self.values),
            ops=tuple(self.ops),
            inputs=tuple(v for v, _ in inputs),
            outputs=tuple(v for v, _ in outputs),
        )
        program = replace(self.program, graph=made, equations=tuple(self.equations))
        return PartedProgram(
            program=without_dead_ops(program),
            input_parts=tuple(part for _, part in inputs),
            output_parts=tuple(part for _, part in outputs),
        )

    def _rewrite(self, op: Op) -> None:
        rows, factor = rows_read(self.graph, op), self.parting.reduced.get(op.id)
        if rows is not None and self.parting.standing(op.operands[0]) is Standing.PARTED:
            self.whole[op.results[0]] = self._rows_of(op.operands[0], rows, op)
        elif factor is not None:
            self.whole[op.results[0]] = self._combined(op, factor)
        else:
            equation = self.program.equations[op.id]
            results = self._emit(
                op, equation, [self._whole(v) for v in op.operands], [*map(_kind, self.graph.results(op))]
            )
            self.whole.update(zip(op.results, results, strict=True))

    def _whole(self, v: int) -> int:
        """The new number of a value; of an input in parts their concatenation."""
        if v not in self.whole:
            value = self.graph.values[v]
            if value.literal is not None:
                self.whole[v] = self._new(value)
            else:
                parts = [self.parts[v, j] for j in range(len(self.parting.bounds(value.shape[0])))]
                reader = self.graph.ops[self.graph.consumers[v][0]] if self.graph.consumers[v] else None
                (self.whole[v],) = self._emit(reader, _JOIN, parts, [_kind(value)])
        return self.whole[v]

    def _part(self, v: int, j: int) -> int:
        if (v, j) not in self.parts:
            value, op = self.graph.values[v], self.graph.ops[self.graph.producer[v] or 0]
            start, stop = self.parting.bounds(value.shape[0])[j]
            if not self.parting.standing(v):
                self.parts[v, j] = self._rows(self._whole(v), (start, stop), op)
            elif joins_rows(op):
                pieces = [
                    p for p, end in zip(op.operands, self.parting.piece_ends(op), strict=True) if start < end <= stop
                ]
                part, operands = _rows_of_kind(value, stop - start), [*map(self._whole, pieces)]
                alone = op.primitive == "concatenate" and len(pieces) == 1
                emitted = operands if alone else self._emit(op, self.program.equations[op.id], operands, [part])
                self.parts[v, j] = emitted[0]
            else:
                factor = self.parting.row_factor(op, v)
                assert factor is not None
                results = self._on_part(op, factor, j)
                self.parts.update({(r, j): made for r, made in zip(op.results, results, strict=True)})
        return self.parts[v, j]

    def _on_part(self, op: Op, factor: int, j: int) -> list[int]:
        """The op on the rows of one part."""
        rule = self.parting.rule(op)
        start, stop = self.parting.bounds(rule.sizes[factor])[j]
        rows, equation = stop - start, self.parting.part_equation(op, factor, stop - start)
        assert equation is not None
        operands = [
            self._part(v, j) if dims and dims[0] == (factor,) else self._whole(v)
            for v, dims in zip(op.operands, rule.operands, strict=True)
        ]
        results = [
            _rows_of_kind(value, rows) if dims and dims[0] == (factor,) else _kind(value)
            for value, dims in zip(self.graph.results(op), rule.results, strict=True)
        ]
        return self._emit(op, equation, operands, results)

    def _combined(self, op: Op, factor: int) -> int:
        rule, (value,) = self.parting.rule(op), self.graph.results(op)
        parts = [self._on_part(op, factor, j)[0] for j in range(len(self.parting.bounds(rule.sizes[factor])))]
        total = parts[0]
        for part in parts[1:]:
            (total,) = self._emit(op, _COMBINERS[rule.reduction], [total, part], [_kind(value)])
        return total

    def _rows_of(self, v: int, rows: tuple[int, int], op: Op) -> int:
        """Some rows of a value in parts."""
        length = self.graph.values[v].shape[0]
        j = self.parting.part_with(length, rows)
        if j is None:
            return self._rows(self._whole(v), rows, op)
        first = self.parting.bounds(length)[j][0]
        return self._rows(self._part(v, j), (rows[0] - first, rows[1] - first), op)

    def _rows(self, source: int, rows: tuple[int, int], op: Op) -> int:
        """Some rows of a new value."""
        value = self.values[source]
        if rows == (0, value.shape[0]):
            return source
        start, stop = ((row, *rest) for row, rest in zip(rows, ([0] * (value.rank - 1), value.shape[1:]), strict=True))
        params = {"start_indices": start, "limit_indices": stop, "strides": None}
        taken = _rows_of_kind(value, rows[1] - rows[0])
        return self._emit(op, Equation(primitive=primitives.slice_p, params=params), [source], [taken])[0]

    def _new(self, like: Value) -> int:
        self.values.append(like.numbered(len(self.values)))
        return len(self.values) - 1

    def _emit(self, op: Op | None, equation: Equation, operands: Sequence[int], results: Sequence[_Kind]) -> list[int]:
        """Append an op that stands where `op` stood."""
        made = range(len(self.values), len(self.values) + len(results))
        self.values += [Value(id=v, shape=kind.shape, dtype=kind.dtype) for v, kind in zip(made, results, strict=True)]
        same = op is not None and equation.primitive.name == op.primitive
        own = op is not None and equation.params is self.program.equations[op.id].params
        self.ops.append(
            Op(
                id=len(self.ops),
                primitive=equation.primitive.name,
                operands=tuple(operands),
                results=tuple(made),
                params=op.params if op is not None and own else self.plain.of(equation.params),
                source=op.source if op is not None else "",
                name_stack=op.name_stack if op is not None else "",
                bodies=op.bodies if op is not None and same else (),
                effectful=op is not None and same and op.effectful,
            )
        )
        self.equations.append(equation)
        return list(made)


def _kind(value: Value) -> _Kind:
    return _Kind(value.shape, value.dtype)


def _rows_of_kind(value: Value, rows: int) -> _Kind:
    return _Kind((rows, *value.shape[1:]), value.dtype)
