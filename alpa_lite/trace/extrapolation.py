"""Extrapolate the program of a train step at a batch size from its programs at other sizes.

Every integer n among shapes and parameters, those of loop bodies included, is taken for an affine function of the batch
size b. Everything else must be equal at all sizes:

    n(b) = n(p) + (b - p) (n(q) - n(p)) / (q - p)             for the first two sizes p, q             (`_Line.number`)

Abstract evaluation checks the result shapes of each op (`_Line.check`), and a third size, if given, the integers.

A micro-batch runs the program of the full batch on fewer samples. Where integers follow the batch size that its shapes
do not imply, those of the full batch are meant (`full` of `at_size`): `h[:, batch % 5]` is one column, whatever a
micro-batch holds. Literals are those of the first size.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import TraceError
from alpa_lite.program.equations import Equation, GraphWithEquations, plain_params
from alpa_lite.program.identity import params_texts
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import check_same_structure
from alpa_lite.trace.kernels.kernel_params import is_kernel, kernel_params


def at_size(size: int, programs: Mapping[int, GraphWithEquations], *, full: int | None = None) -> GraphWithEquations:
    """Return the program of a step at a batch size, from its programs at two or more others.

    Args:
        size: the batch size in samples.
        programs: batch size in samples → the program at that size.
        full: the batch size whose parameters the ops have as far as these give the right shapes; None extrapolates all.

    Raises:
        TraceError: the programs differ in structure, an integer is no affine function of the batch size, or an op would
            have other result shapes at this size. The message names the user's line.
    """
    sizes = tuple(sorted(programs, key=lambda n: (n != full, n)))
    ordered = [programs[size] for size in sizes]
    for program in ordered[:-1]:
        # Programs of other structure would pair unrelated ops below.
        check_same_structure(ordered[-1].graph, program.graph)
    line = _Line(sizes, size, full is not None)
    graph, equations = line.program([p.graph for p in ordered], [p.equations for p in ordered])
    line.check(graph, equations)
    return GraphWithEquations(graph=graph, equations=equations, constants=ordered[-1].constants)


_FEWER = "Use fewer micro-batches, of more samples each."


class _Unlike(Exception):
    """A property is neither equal at all sizes nor affine in the size; the message says which."""


class _Line:
    """Integers as affine functions of the batch size, given at `sizes` and evaluated at size `at` (in samples).

    With `of_first`, an op has its parameters at the first size if these give the right shapes.
    """

    def __init__(self, sizes: tuple[int, ...], at: int, of_first: bool) -> None:
        self.sizes, self.at, self.of_first = sizes, at, of_first
        # Memo by object identity: the inlined trips of one loop share the parameters of their equations.
        self.memo: dict[Hashable, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self.bodies: dict[tuple[Graph, ...], tuple[Graph, tuple[Equation, ...]]] = {}

    def number(self, seen: Sequence[int]) -> int:
        """Return the integer at the size, from its values at the given sizes."""
        p, q = self.sizes[:2]
        rise, run = seen[1] - seen[0], q - p
        straight = all((n - seen[0]) * run == (b - p) * rise for b, n in zip(self.sizes, seen, strict=True))
        # A division with rest: half of the batch, for example, is an integer at even sizes only.
        if not straight:
            raise _Unlike(f"{_listed(seen)}, which is no affine function of the batch size")
        number = seen[0] + Fraction((self.at - p) * rise, run)
        if number.denominator != 1:
            raise _Unlike(f"{_listed(seen)}, which would be {number} at {_samples(self.at)}")
        return int(number)

    def anything(self, seen: Sequence[Any], *, bodies_apart: bool = False) -> Any:
        """Return a parameter at the size; with `bodies_apart`, jaxprs inside it are left to `body` and not compared."""
        first = seen[0]
        if all(_equal(first, x) for x in seen[1:]):
            return first
        if all(type(x) is type(first) for x in seen):
            # A flag that differs between sizes means another program, although bool is an int.
            if isinstance(first, numbers.Integral) and not isinstance(first, bool):
                return self._integer(seen)
            if isinstance(first, (tuple, list)) and len({len(x) for x in seen}) == 1:
                items = [self.anything(x, bodies_apart=bodies_apart) for x in zip(*seen, strict=True)]
                # Named tuples, such as `GatherDimensionNumbers`, take their fields one by one.
                return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
            if dataclasses.is_dataclass(first) and not isinstance(first, type):
                fields = [f.name for f in dataclasses.fields(first) if f.init]
                return dataclasses.replace(
                    first,
                    **{f: self.anything([getattr(x, f) for x in seen], bodies_apart=bodies_apart) for f in fields},
                )
            if isinstance(first, _jax.ShapedArray) and len({(str(x.dtype), x.ndim) for x in seen}) == 1:
                array: Any = first  # the type of an array in the parameters of a kernel
                return array.update(shape=tuple(self.number(n) for n in zip(*(x.shape for x in seen), strict=True)))
            # Jaxprs compare by identity, but two traces of the same code print the same text.
            if _is_program(first) and (bodies_apart or len({str(x) for x in seen}) == 1):
                return first
        raise _Unlike(f"{_listed(seen)}, which is known at these sizes alone")

    def _integer(self, seen: Sequence[int]) -> int:
        """Return an integer among parameters at the size."""
        try:
            return self.number(seen)
        except _Unlike:
            if not self.of_first:
                raise
            return seen[0]

    def value(self, seen: Sequence[Value]) -> Value:
        """Return a value at the size."""
        first = seen[0]
        if all(v.shape == first.shape and v.dtype == first.dtype for v in seen):
            return first
        if len({(v.dtype, v.rank) for v in seen}) > 1:
            raise _Unlike(f"{_listed(seen)}, which are different kinds of arrays")
        shape = tuple(self.number(dims) for dims in zip(*(v.shape for v in seen), strict=True))
        if any(n < 0 for n in shape):
            raise _Unlike(f"{_listed(seen)}, which would be {list(shape)} at {_samples(self.at)}")
        return dataclasses.replace(first, shape=shape)

    def params(
        self, op: Op, seen: Sequence[Equation], values: Sequence[Value]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the parameters of an op's equation at the size, and the same as plain data for the op.

        `values` is indexed by value id, and holds the operands and results of the op at the size.
        """
        key: Hashable = tuple(id(e.params) for e in seen)
        if self.of_first:
            key = (key, *(values[v].shape for v in (*op.operands, *op.results)))
        if key not in self.memo:
            first = seen[0].params
            made = {
                name: self.anything([e.params[name] for e in seen], bodies_apart=bool(seen[0].bodies)) for name in first
            }
            # Unchanged parameters remain the same object: `program` and later memos recognise them by identity.
            if not _changed(made, first):
                made = first
            elif self.of_first and _can_evaluate(op, values):
                made = self._nearest(seen[0], made, op, values)
            self.memo[key] = (first, op.params) if made is first else (made, _plain_form(op, made))
        return self.memo[key]

    def _nearest(self, first: Equation, made: Mapping[str, Any], op: Op, values: Sequence[Value]) -> Mapping[str, Any]:
        """Return the parameters that are nearest to those of the first size and give the right shapes.

        Those of the batch dim mostly must follow it, so that tuples with an entry per dim are tried dim by dim.
        """
        operands = tuple([(values[v].shape, values[v].dtype) for v in op.operands])
        shapes = [values[v].shape for v in op.results]
        if _shapes(first, operands) == shapes:
            return first.params
        for dim in range(len(operands[0][0]) if operands else 0):
            trial = {name: _with_entry(value, first.params[name], dim) for name, value in made.items()}
            if _changed(trial, made) and _shapes(dataclasses.replace(first, params=trial), operands) == shapes:
                made = trial
        return made

    def program(
        self, graphs: Sequence[Graph], equations: Sequence[Sequence[Equation]]
    ) -> tuple[Graph, tuple[Equation, ...]]:
        """Return a graph or body at the size, with its equations."""
        first = graphs[0]
        ops: list[Op] = []
        made: list[Equation] = []
        values = list(first.values)
        for v in first.inputs:
            try:
                values[v] = self.value([g.values[v] for g in graphs])
            except _Unlike as error:
                raise TraceError(self._sentence(f"The input {first.values[v].name!r}", str(error))) from error
        for same in zip(*(g.ops for g in graphs), strict=True):
            op, run = same[0], [e[same[0].id] for e in equations]
            try:
                for results in zip(*(o.results for o in same), strict=True):
                    values[results[0]] = self.value([g.values[r] for g, r in zip(graphs, results, strict=True)])
                params, plain = self.params(op, run, values)
            except (_Unlike, KeyError) as error:
                where = f"{op.source or 'an unknown line'}: {op.primitive}"
                raise TraceError(self._sentence(where, str(error))) from error
            inner = [
                self.body(bodies, below)
                for bodies, below in zip(
                    zip(*(o.bodies for o in same), strict=True), zip(*(e.bodies for e in run), strict=True), strict=True
                )
            ]
            if inner or params is not run[0].params:
                op = dataclasses.replace(op, params=plain, bodies=tuple(body for body, _ in inner))
                run[0] = dataclasses.replace(run[0], params=params, bodies=tuple(below for _, below in inner))
            ops.append(op)
            made.append(run[0])
        return Graph(values=tuple(values), ops=tuple(ops), inputs=first.inputs, outputs=first.outputs), tuple(made)

    def body(
        self, graphs: tuple[Graph, ...], equations: Sequence[Sequence[Equation]]
    ) -> tuple[Graph, tuple[Equation, ...]]:
        """Return a body at the size; loops that share their body at every size share the result."""
        if graphs not in self.bodies:
            self.bodies[graphs] = self.program(graphs, equations)
        return self.bodies[graphs]

    def check(self, graph: Graph, equations: Sequence[Equation]) -> None:
        """Raise `TraceError` where abstract evaluation of an op gives other result shapes than the graph has."""
        seen: set[object] = set()
        for inner, op, equation in _flat(graph, equations):
            kinds = [tuple((v.shape, v.dtype) for v in values) for values in (inner.operands(op), inner.results(op))]
            key = (equation.primitive, id(equation.params), *kinds)
            if key in seen or not _can_evaluate(op, inner.values):
                continue
            seen.add(key)
            # If all parameters have a plain form, equal plain forms mean equal parameters, whatever object holds them.
            if len(op.params) == len(equation.params):
                made = _known_shapes(_Applied(equation.primitive, params_texts(inner)[op.id], kinds[0], equation))
            else:
                made = _shapes(equation, kinds[0])
            if made != [shape for shape, _ in kinds[1]]:
                given, expected = ([list(shape) for shape, _ in kind] for kind in kinds)
                raise TraceError(
                    f"{op.source or 'an unknown line'}: {op.primitive} of {given} should make {expected} in a "
                    f"micro-batch of {_samples(self.at)}, but JAX makes "
                    f"{'nothing' if made is None else [list(shape) for shape in made]} of it. {_FEWER}"
                )

    def _sentence(self, where: str, what: str) -> str:
        return (
            f"{where} has, at batches of {_listed(self.sizes)} samples, "
            f"{what}. The program of a micro-batch of {_samples(self.at)} is not known then. {_FEWER}"
        )


def _can_evaluate(op: Op, values: Sequence[Value]) -> bool:
    """Return whether `_shapes` can evaluate an op."""
    # Ops with effects are refused in micro-batches elsewhere; float0 values cannot be bound to a primitive.
    float0 = any(values[v].dtype == "float0" for v in (*op.operands, *op.results))
    return not op.bodies and not op.effectful and not float0


def _changed(params: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a parameter is another object than before."""
    return any(value is not before[name] for name, value in params.items())


def _with_entry(value: Any, first: Any, dim: int) -> Any:
    """Return a parameter with the entry of a dim taken from that of the first size, if it has one and this differs."""
    entries = isinstance(value, tuple) and not hasattr(value, "_fields") and dim < len(value)
    if not entries or value[dim] == first[dim]:
        return value
    return (*value[:dim], first[dim], *value[dim + 1 :])


def _plain_form(op: Op, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return parameters of an op's equation as plain data."""
    if is_kernel(op.primitive):
        return kernel_params(op.primitive, params, frozenset(op.params.get("unread", ()))) or {}
    return plain_params(params)


def _samples(number: int) -> str:
    return "one sample" if number == 1 else f"{number} samples"


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    # In Python 1 == True == 1.0, but these are different parameters.
    if type(a) is not type(b):
        return False
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _is_program(value: Any) -> bool:
    return hasattr(_jax.open_jaxpr(value), "eqns")


_Kinds = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each operand."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Applied:
    """An equation whose parameters are all in `params`, on operands of these kinds."""

    primitive: Any
    params: str
    operands: _Kinds
    # One of those with these parameters.
    equation: Equation = dataclasses.field(compare=False)


@memoized(entries=20_000)
def _known_shapes(applied: _Applied) -> list[tuple[int, ...]] | None:
    # At other sizes, and with loops in other numbers of parts, a step has mostly the same equations.
    return _shapes(applied.equation, applied.operands)


def _shapes(equation: Equation, operands: _Kinds) -> list[tuple[int, ...]] | None:
    """Return the result shapes of an equation by abstract evaluation; None if JAX rejects the operands."""
    structs = [_jax.struct(*kind) for kind in operands]
    try:
        made = jax.eval_shape(lambda *xs: _jax.bind(equation.primitive, dict(equation.params), xs), *structs)
    except Exception:  # shape rules assert, index and divide before they check what does not fit
        return None
    return [m.shape for m in made]


def _flat(graph: Graph, equations: Sequence[Equation]) -> list[tuple[Graph, Op, Equation]]:
    """Return every op, those of bodies included, with the graph that holds it and its equation."""
    found: list[tuple[Graph, Op, Equation]] = []
    for op, equation in zip(graph.ops, equations, strict=True):
        found.append((graph, op, equation))
        for body, below in zip(op.bodies, equation.bodies, strict=True):
            found += _flat(body, below)
    return found
