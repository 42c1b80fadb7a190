"""Which arrays of a program come in parts of some rows: `stacks` rewrites the program so.

seeds        values of which every row is read by itself or by the loop of its part; concatenations
             along the leading dim; inputs of which a part is asked for then              (_seeds, split)
parted       what such values are computed from, or combined with element by element               (standing)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from itertools import accumulate
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.wiring import parts_of, wiring_of
from alpa_lite.rules import FactorKind, Rule
from alpa_lite.rules.op_info import op_class, rule_of_op

#: Reductions that combine part by part.
COMBINED = ("sum", "max", "min")
#: Ops that name the shape of their result.
_SHAPED = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}


class Standing(IntEnum):
    """Whether a value may be cut into parts, and whether it should."""

    WHOLE = 0
    FITS = 1
    PARTED = 2


class Parting:
    """What of a program comes in parts.

    `of_samples`: values that are never cut, since samples are no layers. `num_parts`: how many parts to make
    (`parts_of`).
    """

    def __init__(self, program: GraphWithEquations, of_samples: frozenset[int], num_parts: int) -> None:
        """Find the inputs to split, and what follows from them."""
        self.program, self.graph, self.num_parts = program, program.graph, num_parts
        self.of_samples = of_samples
        self.known_bounds: dict[int, list[tuple[int, int]]] = {}
        self.seeds = self._seeds()
        lengths = {self.graph.values[v].shape[0] for v in self.seeds}
        #: Values as long as what comes in parts.
        self.leading = {v.id for v in self.graph.values if v.shape and v.shape[0] in lengths} - of_samples
        self.known: dict[int, Standing] = {}
        self.part_equations: dict[tuple[object, ...], Equation | None] = {}
        reducing = ((op.id, self._leading_reduction(op)) for op in self.graph.ops)
        self.reducing = {op: factor for op, factor in reducing if factor is not None}
        self.split = self._split_inputs()
        while not self.split <= self.seeds:
            # What comes in parts is read in parts, by reductions too.
            self.seeds, self.known = self.seeds | self.split, {}
            self.split = self._split_inputs()
        #: Ops on parted operands that reduce over the leading dim of these, in a way that combines; and the factor.
        self.reduced = self._reduced()

    def bounds(self, length: int) -> list[tuple[int, int]]:
        """First and last + 1 row of each part."""
        if length not in self.known_bounds:
            self.known_bounds[length] = parts_of(length, self.num_parts)
        return self.known_bounds[length]

    def part_with(self, length: int, rows: tuple[int, int]) -> int | None:
        """The part that has these rows; None when no part has all of them."""
        bounds = self.bounds(length)
        return next((j for j, (a, b) in enumerate(bounds) if a <= rows[0] and rows[1] <= b), None)

    def _seeds(self) -> set[int]:
        """Values of which every row is read with others of its part alone."""
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
        """The inputs that some part is asked of: by rows that are read, by outputs, by reductions."""
        graph = self.graph
        queue = [v for v in (*self.seeds, *graph.outputs) if self.standing(v) is Standing.PARTED]
        queue += [v for op in self._reduced() for v in graph.ops[op].operands]
        found, seen = set[int](), set[int]()
        while queue:
            v = queue.pop()
            if v in seen or not self.standing(v):
                continue  # known already, or sliced where a part is asked of it
            seen.add(v)
            producer = graph.producer[v]
            if producer is None:
                found.add(v)
            elif not joins_rows(graph.ops[producer]):
                queue += graph.ops[producer].operands
        return found

    def standing(self, v: int) -> Standing:
        """Whether the value is cut; remembered."""
        if v not in self.known:
            found = self._standing(self.graph.values[v])
            self.known[v] = Standing.PARTED if found and v in self.seeds else found
        return self.known[v]

    def _standing(self, value: Value) -> Standing:
        if value.id not in self.leading or value.dtype.startswith("key<"):
            return Standing.WHOLE
        producer = self.graph.producer[value.id]
        if producer is None:
            return Standing.FITS
        op = self.graph.ops[producer]
        if joins_rows(op):
            fits = {stop for _, stop in self.bounds(value.shape[0])} <= set(self.piece_ends(op))
            return Standing.PARTED if fits else Standing.WHOLE
        factor = self.row_factor(op, value.id)
        if factor is None or self.rule(op).kinds[factor] is not FactorKind.PASS:
            return Standing.WHOLE
        return self._standing_of_operands(op, factor)

    def _standing_of_operands(self, op: Op, factor: int) -> Standing:
        """The standing of what an op makes of its operands along a factor; one in parts takes whole ones along."""
        found = [Standing.FITS]
        for v, dims in zip(op.operands, self.rule(op).operands, strict=True):
            if any(factor in factors for factors in dims):
                if dims[0] != (factor,) or any(factor in factors for factors in dims[1:]):
                    return Standing.WHOLE
                found.append(self.standing(v))
        sizes = {stop - start for start, stop in self.bounds(self.rule(op).sizes[factor])}
        if any(self.part_equation(op, factor, rows) is None for rows in sizes):
            return Standing.WHOLE
        return Standing.PARTED if Standing.PARTED in found else min(found)

    def rule(self, op: Op) -> Rule:
        """The rule of an op."""
        return rule_of_op(self.graph, op.id)

    def _runs_on_rows(self, op: Op) -> bool:
        """False for bodies, for ops without a rule, and where indices would count other rows than those of a part."""
        return not (op.bodies or self.rule(op).opaque or self.rule(op).positional)

    def row_factor(self, op: Op, result: int) -> int | None:
        """The factor that is all of the result's leading dim, of ops that are the same op on some rows."""
        if not self._runs_on_rows(op):
            return None
        dims = self.rule(op).results[op.results.index(result)]
        return dims[0][0] if len(dims[0]) == 1 else None

    def _leading_reduction(self, op: Op) -> int | None:
        """The leading dim of operands, as long as what comes in parts, that an op reduces over and that combines."""
        if self.leading.isdisjoint(op.operands):
            return None
        if not self._runs_on_rows(op) or len(op.results) != 1 or self.rule(op).reduction not in COMBINED:
            return None
        rule = self.rule(op)
        firsts = (dims[0][0] for dims in rule.operands if dims and len(dims[0]) == 1)
        return next((f for f in firsts if rule.kinds[f] is FactorKind.REDUCTION and not rule.has_halo(f)), None)

    def _reduced(self) -> dict[int, int]:
        pairs = self.reducing.items()
        return {i: f for i, f in pairs if self._standing_of_operands(self.graph.ops[i], f) is Standing.PARTED}

    def piece_ends(self, op: Op) -> list[int]:
        """The last row + 1 of each operand in the result of an op that joins rows."""
        sizes = [1 if op.primitive == "stack" else self.graph.values[v].shape[0] for v in op.operands]
        return list(accumulate(sizes))

    def part_equation(self, op: Op, factor: int, rows: int) -> Equation | None:
        """The equation of an op on a part of so many rows; None where its parameters would have to say more than
        the shape."""
        equation = self.program.equations[op.id]
        # Equal as plain data are equal, if all of them can be said so.
        same = () if len(op.params) == len(equation.params) else (id(equation.params),)
        key = (op_class(self.graph, op.id), factor, rows, *same)
        if key not in self.part_equations:
            params = self._part_params(op, factor, rows)
            self.part_equations[key] = None if params is None else replace(equation, params=params)
        return self.part_equations[key]

    def _part_params(self, op: Op, factor: int, rows: int) -> Mapping[str, Any] | None:
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
            made = jax.eval_shape(lambda *xs: _jax.bind(primitive, params, xs), *structs)
        except (TypeError, ValueError):
            return None
        return params if [m.shape for m in made] == expected else None


def rows_read(graph: Graph, op: Op) -> tuple[int, int] | None:
    """First and last + 1 of the rows that an op takes out of its operand's leading dim: one, or those of a loop.

    None when it does anything else.
    """
    if op.primitive != "slice":
        return None
    (operand,), (result,) = graph.operands(op), graph.results(op)
    if operand.rank == 0 or result.shape[1:] != operand.shape[1:] or operand.shape[0] < 2:
        return None
    if result.shape[0] != 1 and not any(_scans(graph.ops[c], result.id) for c in graph.consumers[result.id]):
        return None
    start, strides = int(op.params["start_indices"][0]), op.params["strides"]
    return None if strides is not None and strides[0] != 1 else (start, start + result.shape[0])


def _scans(op: Op, value: int) -> bool:
    """True for loops that take the value row by row."""
    wiring = wiring_of(op)
    return wiring is not None and any(op.operands[i] == value for i in wiring.scanned)


def joins_rows(op: Op) -> bool:
    """True for ops that put their operands one after the other along the leading dim."""
    return op.params.get({"concatenate": "dimension", "stack": "axis"}.get(op.primitive, "")) == 0
