"""Split stacked arrays into row blocks of a few layers each, which can live on different stages.

A model that scans over its layers holds the weights of all layers in single arrays [layers, ...], and with them their
gradients and optimizer state. Once the loop is split into parts, for the stages of a pipeline, each row block belongs
with the layers that read it. `SplitStacked` rewrites the program so that these arrays become several inputs and
outputs, one per block (below: part).

Which values are split (`SplitAnalysis`):

    seeds        values of which every row is read together with rows of its own part only; concatenations along the
                 leading dim; then inputs that are read in parts                         (`_seeds`, `_split_inputs`)
    parted       values from which such values are computed, or with which they are combined elementwise (`splittable`)

How the program is rewritten (`_StackedRewriter`):

    part(x, j)   rows of part j: an input of its own, pieces of a concatenation, the op of x on the parts j of its
                 operands, or a slice of a whole value                                                   (`_part`)
    f over rows  f(x) = f(part 0) + f(part 1) + …, for sums, maxima and minima over the leading dim  (`_combined`)

Nothing else changes: a value that is needed whole is concatenated again where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import Any

import jax
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite.program.editor import ProgramEditor, without_dead_ops
from alpa_lite.program.equations import Equation, GraphWithEquations, PlainParams
from alpa_lite.program.ir import Graph, Op, Value, parts_of, wiring_of
from alpa_lite.program.phases import LeafPart
from alpa_lite.rules import FactorKind, Rule
from alpa_lite.rules.op_info import op_class, rule_of_op

#: Reductions whose results over parts combine to the result over the whole.
COMBINED = ("sum", "max", "min")
#: The parameter that holds the result's shape, by primitive.
_SHAPED = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}


class Splittable(IntEnum):
    """Whether a value can be split into parts (FITS), and whether it is (PARTED); the order is used by `min`."""

    WHOLE = 0
    FITS = 1
    PARTED = 2


class SplitAnalysis:
    """Find the values of a program that are split into parts.

    Args:
        program: the program.
        of_samples: values that are never split, since their rows are samples and not layers.
        num_parts: number of parts to make (`parts_of`).
    """

    def __init__(self, program: GraphWithEquations, of_samples: frozenset[int], num_parts: int) -> None:
        """Find the inputs to split and all that follows from them."""
        self.program, self.graph, self.num_parts = program, program.graph, num_parts
        self.of_samples = of_samples
        self.bounds_memo: dict[int, list[tuple[int, int]]] = {}
        self.seeds = self._seeds()
        lengths = {self.graph.values[v].shape[0] for v in self.seeds}
        #: Values whose leading dim is as long as that of a seed.
        self.leading = {v.id for v in self.graph.values if v.shape and v.shape[0] in lengths} - of_samples
        self.memo: dict[int, Splittable] = {}
        self.part_equations: dict[tuple[object, ...], Equation | None] = {}
        reducing = ((op.id, self._leading_reduction(op)) for op in self.graph.ops)
        self.reducing = {op: factor for op, factor in reducing if factor is not None}
        self.split = self._split_inputs()
        while not self.split <= self.seeds:
            # A split input is a seed for what is combined with it, which may split further inputs: iterate to a fixed
            # point. It terminates since seeds only grow.
            self.seeds, self.memo = self.seeds | self.split, {}
            self.split = self._split_inputs()
        #: Op id → the reduced factor, for ops that reduce split operands over their leading dim part by part.
        self.reduced = self._reduced()

    def bounds(self, length: int) -> list[tuple[int, int]]:
        """Return the row bounds (first, last + 1) of each part of an array with `length` rows."""
        if length not in self.bounds_memo:
            self.bounds_memo[length] = parts_of(length, self.num_parts)
        return self.bounds_memo[length]

    def part_with(self, length: int, rows: tuple[int, int]) -> int | None:
        """Return the number of the part that contains these rows (first, last + 1), or None if they cross parts."""
        bounds = self.bounds(length)
        return next((j for j, (a, b) in enumerate(bounds) if a <= rows[0] and rows[1] <= b), None)

    def _seeds(self) -> set[int]:
        """Return the values of which every row is read, always together with rows of its own part only."""
        read: dict[int, set[tuple[int, int]]] = {}
        for op in self.graph.ops:
            rows = rows_read(self.graph, op)
            if rows is not None:
                read.setdefault(op.operands[0], set()).add(rows)

        def in_parts(length: int, found: set[tuple[int, int]]) -> bool:
            inside = all(self.part_with(length, rows) is not None for rows in found)
            return inside and len({row for rows in found for row in range(*rows)}) == length > 1

        found = {v for v, rows in read.items() if in_parts(self.graph.values[v].shape[0], rows)}
        return found - self.of_samples

    def _split_inputs(self) -> set[int]:
        """Return the inputs of which a part is needed: by row reads, by outputs, or by reductions."""
        graph = self.graph
        queue = [v for v in (*self.seeds, *graph.outputs) if self.splittable(v) is Splittable.PARTED]
        queue += [v for op in self._reduced() for v in graph.ops[op].operands]
        found, seen = set[int](), set[int]()
        while queue:
            v = queue.pop()
            if v in seen or not self.splittable(v):
                continue  # visited before, or whole: its parts are slices
            seen.add(v)
            producer = graph.producer[v]
            if producer is None:
                found.add(v)
            elif not joins_rows(graph.ops[producer]):
                queue += graph.ops[producer].operands
        return found

    def splittable(self, v: int) -> Splittable:
        """Return whether a value is split, memoized."""
        if v not in self.memo:
            found = self._splittable_of(self.graph.values[v])
            self.memo[v] = Splittable.PARTED if found and v in self.seeds else found
        return self.memo[v]

    def _splittable_of(self, value: Value) -> Splittable:
        """Return whether a value can be split, from its producer; whether it is a seed is not considered."""
        if value.id not in self.leading or value.dtype.startswith("key<"):
            return Splittable.WHOLE
        producer = self.graph.producer[value.id]
        if producer is None:
            return Splittable.FITS
        op = self.graph.ops[producer]
        if joins_rows(op):
            fits = {stop for _, stop in self.bounds(value.shape[0])} <= set(self.piece_ends(op))
            return Splittable.PARTED if fits else Splittable.WHOLE
        factor = self.row_factor(op, value.id)
        if factor is None or self.rule(op).kinds[factor] is not FactorKind.PASS:
            return Splittable.WHOLE
        return self._splittable_along(op, factor)

    def _splittable_along(self, op: Op, factor: int) -> Splittable:
        """Return whether the result of an op can be split along a factor, from its operands that hold the factor.

        One operand in parts splits the whole ones too.
        """
        found = [Splittable.FITS]
        for v, dims in zip(op.operands, self.rule(op).operands, strict=True):
            if any(factor in factors for factors in dims):
                if dims[0] != (factor,) or any(factor in factors for factors in dims[1:]):
                    return Splittable.WHOLE
                found.append(self.splittable(v))
        sizes = {stop - start for start, stop in self.bounds(self.rule(op).sizes[factor])}
        if any(self.part_equation(op, factor, rows) is None for rows in sizes):
            return Splittable.WHOLE
        return Splittable.PARTED if Splittable.PARTED in found else min(found)

    def rule(self, op: Op) -> Rule:
        """Return the factor rule of an op."""
        return rule_of_op(self.graph, op.id)

    def _runs_on_rows(self, op: Op) -> bool:
        """Return whether an op can run on a part: no bodies, a rule, and no indices that count rows of the array."""
        return not (op.bodies or self.rule(op).opaque or self.rule(op).positional)

    def row_factor(self, op: Op, result: int) -> int | None:
        """Return the factor that is all of a result's leading dim, if the op can run on some of its rows; else None."""
        if not self._runs_on_rows(op):
            return None
        dims = self.rule(op).results[op.results.index(result)]
        return dims[0][0] if len(dims[0]) == 1 else None

    def _leading_reduction(self, op: Op) -> int | None:
        """Return the factor of split operands' leading dim that an op reduces if partial results combine, else None.

        Only sums, maxima and minima combine (`COMBINED`).
        """
        # Most ops touch no value of that length: leave before their rule is computed.
        if self.leading.isdisjoint(op.operands):
            return None
        if not self._runs_on_rows(op) or len(op.results) != 1 or self.rule(op).reduction not in COMBINED:
            return None
        rule = self.rule(op)
        firsts = (dims[0][0] for dims in rule.operands if dims and len(dims[0]) == 1)
        return next((f for f in firsts if rule.kinds[f] is FactorKind.REDUCTION and not rule.has_halo(f)), None)

    def _reduced(self) -> dict[int, int]:
        """Return op id → factor for the reductions whose operands are split."""
        pairs = self.reducing.items()
        return {i: f for i, f in pairs if self._splittable_along(self.graph.ops[i], f) is Splittable.PARTED}

    def piece_ends(self, op: Op) -> list[int]:
        """Return for each operand of an op that joins rows the last row + 1 that it fills in the result."""
        sizes = [1 if op.primitive == "stack" else self.graph.values[v].shape[0] for v in op.operands]
        return list(accumulate(sizes))

    def part_equation(self, op: Op, factor: int, rows: int) -> Equation | None:
        """Return the equation of an op on a part of `rows` rows; None if other than shape parameters would change."""
        equation = self.program.equations[op.id]
        # The op class compares plain parameters only; parameters without a plain form are compared by identity.
        same = () if len(op.params) == len(equation.params) else (id(equation.params),)
        key = (op_class(self.graph, op.id), factor, rows, *same)
        if key not in self.part_equations:
            params = self._part_params(op, factor, rows)
            self.part_equations[key] = None if params is None else replace(equation, params=params)
        return self.part_equations[key]

    def _part_params(self, op: Op, factor: int, rows: int) -> Mapping[str, Any] | None:
        """Return the parameters of an op on a part of `rows` rows; None if abstract evaluation contradicts them."""
        rule, params = self.rule(op), dict(self.program.equations[op.id].params)

        def shape_of(v: int, dims: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
            shape = self.graph.values[v].shape
            return (rows, *shape[1:]) if dims and dims[0] == (factor,) else shape

        expected = [shape_of(v, dims) for v, dims in zip(op.results, rule.results, strict=True)]
        if op.primitive in _SHAPED:
            params[_SHAPED[op.primitive]] = expected[0]
        structs = [
            _jax.struct(shape_of(v, dims), self.graph.values[v].dtype)
            for v, dims in zip(op.operands, rule.operands, strict=True)
        ]
        primitive = self.program.equations[op.id].primitive
        try:
            # Other parameters may hold the number of rows as well: then the shapes differ, or JAX refuses them.
            made = jax.eval_shape(lambda *xs: _jax.bind(primitive, params, xs), *structs)
        except (TypeError, ValueError):
            return None
        return params if [m.shape for m in made] == expected else None


def rows_read(graph: Graph, op: Op) -> tuple[int, int] | None:
    """Return the rows (first, last + 1) that a slice takes, one or those of a loop; None for any other op."""
    if op.primitive != "slice":
        return None
    (operand,), (result,) = graph.operands(op), graph.results(op)
    # Only slices of whole rows count, and an array with one row cannot be split.
    if operand.rank == 0 or result.shape[1:] != operand.shape[1:] or operand.shape[0] < 2:
        return None
    # Several rows count where a loop reads them one by one: other readers need them as one array.
    if result.shape[0] != 1 and not any(_scans(graph.ops[c], result.id) for c in graph.consumers[result.id]):
        return None
    # With strides the rows would not be contiguous, as those of a part are.
    start, strides = int(op.params["start_indices"][0]), op.params["strides"]
    return None if strides is not None and strides[0] != 1 else (start, start + result.shape[0])


def _scans(op: Op, value: int) -> bool:
    """Return whether an op is a loop that reads the value row by row."""
    wiring = wiring_of(op)
    return wiring is not None and any(op.operands[i] == value for i in wiring.scanned)


def joins_rows(op: Op) -> bool:
    """Return whether an op concatenates or stacks its operands along the leading dim."""
    return op.params.get({"concatenate": "dimension", "stack": "axis"}.get(op.primitive, "")) == 0


_COMBINERS = {
    "sum": Equation(primitive=primitives.add_p, params={}),
    "max": Equation(primitive=primitives.max_p, params={}),
    "min": Equation(primitive=primitives.min_p, params={}),
}
_JOIN = Equation(primitive=primitives.concatenate_p, params={"dimension": 0})


@dataclass(frozen=True, kw_only=True)
class PartedProgram:
    """A program with parts of stacked arrays as inputs and outputs.

    Attributes:
        program: the program.
        input_parts: for each graph input the argument leaf, and the rows of it, that it holds.
        output_parts: for each graph output the output leaf, and the rows of it, that it holds.
        split: by what its stacked arrays were split; None if they are whole.
    """

    program: GraphWithEquations
    input_parts: tuple[LeafPart, ...]
    output_parts: tuple[LeafPart, ...]
    split: SplitAnalysis | None = None

    @staticmethod
    def of(program: GraphWithEquations) -> PartedProgram:
        """Return a program whose stacked arrays are whole."""
        graph = program.graph
        inputs, outputs = (tuple(LeafPart(leaf=i) for i in range(len(v))) for v in (graph.inputs, graph.outputs))
        return PartedProgram(program=program, input_parts=inputs, output_parts=outputs)

    @property
    def graph(self) -> Graph:
        """The graph of the program."""
        return self.program.graph


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStacked:
    """The pass that splits the stacked arrays of a program, all whole before, into parts (`parts_of`).

    Attributes:
        of_samples: inputs that hold the batch, and other values whose rows are samples; these are never split.
        num_parts: about how many parts to make of each stacked array.
    """

    of_samples: frozenset[int]
    num_parts: int
    name = "split stacked arrays"

    def apply(self, program: PartedProgram) -> PartedProgram:
        """Return the program in parts."""
        return _StackedRewriter(SplitAnalysis(program.program, self.of_samples, self.num_parts)).rewritten()


class _StackedRewriter:
    """Rewrite a program so that split values are computed part by part.

    `whole` maps an old value id to the new one, `parts` maps (old value id, part) to the new one.
    """

    def __init__(self, analysis: SplitAnalysis) -> None:
        self.analysis, self.program, self.graph = analysis, analysis.program, analysis.graph
        self.plain = PlainParams()
        self.editor = ProgramEditor()
        self.whole: dict[int, int] = {}
        self.parts: dict[tuple[int, int], int] = {}

    def rewritten(self) -> PartedProgram:
        """Return the program in parts."""
        graph, split = self.graph, self.analysis.split
        inputs: list[tuple[int, LeafPart]] = []
        for number, v in enumerate(graph.inputs):
            value = graph.values[v]
            for j, rows in enumerate(self.analysis.bounds(value.shape[0]) if v in split else ()):
                # Plans and messages tell the parts of one argument apart by their rows.
                name = f"{value.name}[{rows[0]}:{rows[1]}]"
                part = self.editor.add(replace(value, shape=(rows[1] - rows[0], *value.shape[1:]), name=name))
                self.parts[v, j] = part
                inputs.append((part, LeafPart(leaf=number, rows=rows)))
            if v not in split:
                self.whole[v] = self.editor.add(value)
                inputs.append((self.whole[v], LeafPart(leaf=number)))
        for op in graph.ops:
            self._rewrite(op)
        outputs: list[tuple[int, LeafPart]] = []
        for number, v in enumerate(graph.outputs):
            if self.analysis.splittable(v) is Splittable.PARTED:
                bounds = self.analysis.bounds(graph.values[v].shape[0])
                outputs += [(self._part(v, j), LeafPart(leaf=number, rows=rows)) for j, rows in enumerate(bounds)]
            else:
                outputs.append((self._whole(v), LeafPart(leaf=number)))
        program = self.editor.program([v for v, _ in inputs], [v for v, _ in outputs], self.program.constants)
        return PartedProgram(
            # Ops on whole values have no readers left where all readers take parts.
            program=without_dead_ops(program),
            input_parts=tuple(part for _, part in inputs),
            output_parts=tuple(part for _, part in outputs),
            split=self.analysis,
        )

    def _rewrite(self, op: Op) -> None:
        """Append an op to the new program; an op whose results are split is appended when a part is needed."""
        rows, factor = rows_read(self.graph, op), self.analysis.reduced.get(op.id)
        if rows is not None and self.analysis.splittable(op.operands[0]) is Splittable.PARTED:
            self.whole[op.results[0]] = self._rows_of(op.operands[0], rows, op)
        elif factor is not None:
            self.whole[op.results[0]] = self._combined(op, factor)
        else:
            equation = self.program.equations[op.id]
            results = self._emit(op, equation, [self._whole(v) for v in op.operands], self.graph.results(op))
            self.whole.update(zip(op.results, results, strict=True))

    def _whole(self, v: int) -> int:
        """Return the new id of a whole value; parts of a split input are concatenated on first use."""
        if v not in self.whole:
            value = self.graph.values[v]
            if value.literal is not None:
                self.whole[v] = self.editor.add(value)
            else:
                parts = [self.parts[v, j] for j in range(len(self.analysis.bounds(value.shape[0])))]
                # The user's code has no line for this concatenation: its first reader lends one.
                reader = self.graph.ops[self.graph.consumers[v][0]] if self.graph.consumers[v] else None
                (self.whole[v],) = self._emit(reader, _JOIN, parts, [value])
        return self.whole[v]

    def _part(self, v: int, j: int) -> int:
        """Return the new id of part j of a value, computed on first use."""
        if (v, j) not in self.parts:
            value, producer = self.graph.values[v], self.graph.producer[v]
            start, stop = self.analysis.bounds(value.shape[0])[j]
            # Inputs and literals have no producer: the line that reads them first stands for it.
            op = self.graph.ops[self.graph.consumers[v][0] if producer is None else producer]
            if not self.analysis.splittable(v):
                self.parts[v, j] = self._rows(self._whole(v), (start, stop), op)
                return self.parts[v, j]
            assert producer is not None, "the parts of split inputs are inputs of the new program"
            if joins_rows(op):
                # The bounds of parts coincide with ends of pieces: otherwise the value would not be splittable.
                pieces = [
                    p for p, end in zip(op.operands, self.analysis.piece_ends(op), strict=True) if start < end <= stop
                ]
                part, operands = _of_rows(value, stop - start), [*map(self._whole, pieces)]
                # A stack of one piece still adds a dim, while a concatenation of one does nothing.
                alone = op.primitive == "concatenate" and len(pieces) == 1
                emitted = operands if alone else self._emit(op, self.program.equations[op.id], operands, [part])
                self.parts[v, j] = emitted[0]
            else:
                factor = self.analysis.row_factor(op, v)
                assert factor is not None
                results = self._on_part(op, factor, j)
                self.parts.update({(r, j): made for r, made in zip(op.results, results, strict=True)})
        return self.parts[v, j]

    def _on_part(self, op: Op, factor: int, j: int) -> list[int]:
        """Append an op on the rows of part j and return its results."""
        rule = self.analysis.rule(op)
        start, stop = self.analysis.bounds(rule.sizes[factor])[j]
        rows, equation = stop - start, self.analysis.part_equation(op, factor, stop - start)
        assert equation is not None
        operands = [
            self._part(v, j) if dims and dims[0] == (factor,) else self._whole(v)
            for v, dims in zip(op.operands, rule.operands, strict=True)
        ]
        results = [
            _of_rows(value, rows) if dims and dims[0] == (factor,) else value
            for value, dims in zip(self.graph.results(op), rule.results, strict=True)
        ]
        return self._emit(op, equation, operands, results)

    def _combined(self, op: Op, factor: int) -> int:
        """Append a reduction part by part, with the ops that combine the parts, and return the total."""
        rule, (value,) = self.analysis.rule(op), self.graph.results(op)
        parts = [self._on_part(op, factor, j)[0] for j in range(len(self.analysis.bounds(rule.sizes[factor])))]
        total = parts[0]
        for part in parts[1:]:
            (total,) = self._emit(op, _COMBINERS[rule.reduction], [total, part], [value])
        return total

    def _rows_of(self, v: int, rows: tuple[int, int], op: Op) -> int:
        """Return the new id of some rows (first, last + 1) of a split value."""
        length = self.graph.values[v].shape[0]
        j = self.analysis.part_with(length, rows)
        if j is None:
            return self._rows(self._whole(v), rows, op)
        first = self.analysis.bounds(length)[j][0]
        return self._rows(self._part(v, j), (rows[0] - first, rows[1] - first), op)

    def _rows(self, source: int, rows: tuple[int, int], op: Op) -> int:
        """Append a slice of rows (first, last + 1) of a new value, unless they are all of its rows, and return it."""
        value = self.editor.values[source]
        if rows == (0, value.shape[0]):
            return source
        start, stop = ((row, *rest) for row, rest in zip(rows, ([0] * (value.rank - 1), value.shape[1:]), strict=True))
        params = {"start_indices": start, "limit_indices": stop, "strides": None}
        taken = _of_rows(value, rows[1] - rows[0])
        return self._emit(op, Equation(primitive=primitives.slice_p, params=params), [source], [taken])[0]

    def _emit(self, op: Op | None, equation: Equation, operands: Sequence[int], results: Sequence[Value]) -> list[int]:
        """Append an op with the source line and name stack of `op`, and return its results, which have no names."""
        values = [self.editor.add(replace(value, name="")) for value in results]
        same = op is not None and equation.primitive.name == op.primitive
        # Converting parameters to plain data takes time: where they are unchanged, the op has the plain ones.
        own = op is not None and equation.params is self.program.equations[op.id].params
        made = Op(
            id=len(self.editor.ops),
            primitive=equation.primitive.name,
            operands=tuple(operands),
            results=tuple(values),
            params=op.params if op is not None and own else self.plain.of(equation.params),
            source=op.source if op is not None else "",
            name_stack=op.name_stack if op is not None else "",
            bodies=op.bodies if op is not None and same else (),
            effectful=op is not None and same and op.effectful,
        )
        self.editor.emit(made, made.operands, made.results, equation)
        return values


def _of_rows(value: Value, rows: int) -> Value:
    return replace(value, shape=(rows, *value.shape[1:]))
