"""Programs of a step at a batch size, in parts where loops over layers are cut; also for batches of one sample.

JAX writes another program for dims of size 1. What that means for the two uses of a batch of one:

    micro-batches of one sample   the program of larger batches, at size 1                   (at_one_sample)
    a full batch of one sample    the user's own program, in which the values of that of
                                  larger batches, at size 1, are found again: they tell
                                  which dims hold the batch                                  (batch_of_one)

The program of a step at some batch size, from the same program at others.

Every integer n of shapes and parameters, those of loop bodies included, is taken for an affine function of the batch
size b; what is no integer is the same at every size, and scalar literals are those of size p:

    n(b) = n(p) + (b - p) (n(q) - n(p)) / (q - p)      from the two smallest sizes p < q         (_Line.number)

    one sample    JAX writes another program for dims of size 1: the transpose of a broadcast sums over them, an index
                  along them is squeezed. A micro-batch of one sample is therefore not traced. A third size checks its
                  integers, and JAX the shapes of what each op makes                        (at_one_sample, _check)
    to plan       a search asks for the step at many sizes, of which two or more were traced; the one that it chooses is
                  traced as well                                                                         (likely_at)
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import TraceError
from alpa_lite.program.equations import Equation, GraphWithEquations, plain_params
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import LeafPart, batch_dims, body_scopes, check_same_structure
from alpa_lite.program.verify import verify
from alpa_lite.trace.alignment import align
from alpa_lite.trace.from_jaxpr import from_jaxpr, loops_over_samples
from alpa_lite.trace.passes.sink_constants import sink_free_values
from alpa_lite.trace.passes.split_stacked import PartedProgram, part_stacks
from alpa_lite.trace.trace import Traced


def at_one_sample(programs: Mapping[int, GraphWithEquations]) -> GraphWithEquations:
    """The program at batch size 1 of a step whose programs at three or more sizes are given, by size; see `at_size`."""
    return at_size(1, programs)


def at_size(size: int, programs: Mapping[int, GraphWithEquations]) -> GraphWithEquations:
    """The program at a batch size that JAX writes otherwise, from programs at three or more sizes, by size.

    Raises `TraceError` with the user's line where sizes show different programs, where an integer is no affine function
    of the size, or where JAX makes other shapes at one sample.
    """
    known = [programs[size] for size in sorted(programs)]
    for program in known[:-1]:
        check_same_structure(known[-1].graph, program.graph)
    made = likely_at(size, programs)
    _check(made.graph, made.equations)
    verify(made.graph)
    return made


def likely_at(size: int, programs: Mapping[int, GraphWithEquations]) -> GraphWithEquations:
    """The program at a batch size if it is like those at two or more others, given by size, which have one structure.

    Raises `TraceError` as `at_one_sample`.
    """
    sizes = tuple(sorted(programs))
    known = [programs[size] for size in sizes]
    graph, equations = _Line(sizes, size).program([p.graph for p in known], [p.equations for p in known])
    return GraphWithEquations(graph=graph, equations=equations, constants=known[-1].constants)


class _Unlike(Exception):
    """Something that is neither the same at every size nor an affine function of it; says what."""


class _Line:
    """Integers as functions of the batch size, through what they are at `sizes`, for the size `at`."""

    def __init__(self, sizes: tuple[int, ...], at: int) -> None:
        self.sizes, self.at = sizes, at
        # Trips of one loop share the parameters of their equations, as one object.
        self.known: dict[tuple[int, ...], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self.bodies: dict[tuple[Graph, ...], tuple[Graph, tuple[Equation, ...]]] = {}

    def number(self, seen: Sequence[int]) -> int:
        """The integer at the size."""
        p, q = self.sizes[:2]
        rise, run = seen[1] - seen[0], q - p
        straight = all((n - seen[0]) * run == (b - p) * rise for b, n in zip(self.sizes, seen, strict=True))
        # Half of the batch is a whole number at even sizes.
        more, rest = divmod((self.at - p) * rise, run)
        if rest or not straight:
            raise _Unlike(f"{_listed(seen)}, which is no affine function of the batch size")
        return int(seen[0] + more)

    def anything(self, seen: Sequence[Any], *, bodies_apart: bool = False) -> Any:
        """A parameter at the size; with `bodies_apart` the programs in it are dealt with elsewhere."""
        first = seen[0]
        if all(_equal(first, x) for x in seen[1:]):
            return first
        if all(type(x) is type(first) for x in seen):
            if isinstance(first, numbers.Integral) and not isinstance(first, bool):
                return self.number(seen)
            if isinstance(first, (tuple, list)) and len({len(x) for x in seen}) == 1:
                items = [self.anything(x, bodies_apart=bodies_apart) for x in zip(*seen, strict=True)]
                return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
            if dataclasses.is_dataclass(first) and not isinstance(first, type):
                fields = [f.name for f in dataclasses.fields(first) if f.init]
                return dataclasses.replace(
                    first,
                    **{f: self.anything([getattr(x, f) for x in seen], bodies_apart=bodies_apart) for f in fields},
                )
            if _is_program(first) and (bodies_apart or len({str(x) for x in seen}) == 1):
                return first
        raise _Unlike(f"{_listed(seen)}, which is known at these sizes alone")

    def value(self, seen: Sequence[Value]) -> Value:
        """A value at the size."""
        first = seen[0]
        if all(v.shape == first.shape and v.dtype == first.dtype for v in seen):
            return first
        if len({(v.dtype, v.rank) for v in seen}) > 1:
            raise _Unlike(f"{_listed(seen)}, which are different kinds of arrays")
        shape = tuple(self.number(dims) for dims in zip(*(v.shape for v in seen), strict=True))
        if any(n < 0 for n in shape):
            raise _Unlike(f"{_listed(seen)}, which would be {list(shape)} at {_samples(self.at)}")
        return dataclasses.replace(first, shape=shape)

    def params(self, op: Op, seen: Sequence[Equation]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The parameters of an op and its equations at the size, and the same as plain data."""
        key = tuple(id(e.params) for e in seen)
        if key not in self.known:
            made = {
                name: self.anything([e.params[name] for e in seen], bodies_apart=bool(seen[0].bodies))
                for name in seen[0].params
            }
            same = all(value is seen[0].params[name] for name, value in made.items())
            self.known[key] = (seen[0].params, op.params) if same else (made, plain_params(made))
        return self.known[key]

    def program(
        self, graphs: Sequence[Graph], equations: Sequence[Sequence[Equation]]
    ) -> tuple[Graph, tuple[Equation, ...]]:
        """A graph or body at the size, with its equations."""
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
                params, plain = self.params(op, run)
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
        """A body at the size; one object for loops that share theirs at every size."""
        if graphs not in self.bodies:
            self.bodies[graphs] = self.program(graphs, equations)
        return self.bodies[graphs]

    def _sentence(self, where: str, what: str) -> str:
        return (
            f"{where} has, at batches of {_listed(self.sizes)} samples, "
            f"{what}. The program of a micro-batch of {_samples(self.at)} is not known then; use fewer micro-batches, "
            "so that each holds two samples or more."
        )


def _samples(number: int) -> str:
    return "one sample" if number == 1 else f"{number} samples"


def _listed(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _is_program(value: Any) -> bool:
    return hasattr(_jax.open_jaxpr(value), "eqns")


def _check(graph: Graph, equations: Sequence[Equation]) -> None:
    """JAX's own word on the shapes that the ops make at one sample."""
    seen: set[object] = set()
    for inner, op, equation in _flat(graph, equations):
        kinds = [tuple((v.shape, v.dtype) for v in values) for values in (inner.operands(op), inner.results(op))]
        key = (equation.primitive, id(equation.params), *kinds)
        # Effects are refused in micro-batches; float0 has no array.
        if key in seen or op.bodies or op.effectful or any(dtype == "float0" for kind in kinds for _, dtype in kind):
            continue
        seen.add(key)
        # Parameters that are all plain data are equal where these are.
        told = (equation.primitive, repr(op.params), *kinds)
        if told in seen:
            continue
        if len(op.params) == len(equation.params):
            seen.add(told)
        made = _shapes(equation, inner.operands(op))
        if made != [shape for shape, _ in kinds[1]]:
            raise TraceError(
                f"{op.source or 'an unknown line'}: {op.primitive} of {[list(shape) for shape, _ in kinds[0]]} should "
                f"make {[list(shape) for shape, _ in kinds[1]]} in a micro-batch of one sample, but JAX makes "
                f"{'nothing' if made is None else [list(shape) for shape in made]} of it. Use fewer micro-batches, so "
                "that each holds two samples or more."
            )


def _shapes(equation: Equation, operands: Sequence[Value]) -> list[tuple[int, ...]] | None:
    structs = [_jax.struct(v.shape, v.dtype) for v in operands]
    try:
        made = jax.eval_shape(lambda *xs: _jax.bind(equation.primitive, dict(equation.params), xs), *structs)
    except (TypeError, ValueError):
        return None
    return [m.shape for m in made]


def _flat(graph: Graph, equations: Sequence[Equation]) -> list[tuple[Graph, Op, Equation]]:
    """Every op with the graph that holds it and its equation, those of bodies included."""
    found: list[tuple[Graph, Op, Equation]] = []
    for op, equation in zip(graph.ops, equations, strict=True):
        found.append((graph, op, equation))
        for body, below in zip(op.bodies, equation.bodies, strict=True):
            found += _flat(body, below)
    return found


#: Batch sizes that show the program of any size, and one that checks it where the full batch is among them.
_SHOWING, _CHECKING = (2, 3), 5


def program_of(traced: Traced, jaxpr: Any, loop_parts: int, over_samples: frozenset[int]) -> GraphWithEquations:
    """The program of a jaxpr of the step; loops over samples are never cut."""
    return sink_free_values(from_jaxpr(jaxpr, traced.names, num_parts=loop_parts, kept=over_samples))


@memoized
def full_program(traced: Traced, loop_parts: int, over_samples: frozenset[int]) -> GraphWithEquations:
    """The program at the full batch: the same for all numbers of micro-batches."""
    return program_of(traced, traced.jaxpr, loop_parts, over_samples)


@memoized
def full_in_parts(
    traced: Traced, loop_parts: int, over_samples: frozenset[int], of_samples: frozenset[int] = frozenset()
) -> PartedProgram:
    """The same with its stacked arrays in parts; see `in_parts`."""
    return in_parts(traced, full_program(traced, loop_parts, over_samples), loop_parts, of_samples)


def with_other_in_parts(
    traced: Traced, other: GraphWithEquations, loop_parts: int, over_samples: frozenset[int]
) -> tuple[PartedProgram, PartedProgram]:
    """The program at the full batch and that at another size, with their stacked arrays in the same parts.

    Raises `TraceError` where they are not one program at two sizes.
    """
    of_samples = _rows_of_samples(full_program(traced, loop_parts, over_samples), other)
    parted = full_in_parts(traced, loop_parts, over_samples, of_samples if loop_parts else frozenset())
    return parted, in_parts(traced, other, loop_parts, of_samples)


def _rows_of_samples(one: GraphWithEquations, two: GraphWithEquations) -> frozenset[int]:
    """The values whose leading dim differs between two programs. Raises `TraceError` where more than shapes does."""
    check_same_structure(one.graph, two.graph)
    pairs = zip(one.graph.values, two.graph.values, strict=True)
    return frozenset(v.id for v, w in pairs if v.shape[:1] != w.shape[:1])


@memoized
def seen_in_parts(traced: Traced, loop_parts: int) -> dict[int, PartedProgram]:
    """The programs that were traced, by batch size, for `likely_in_parts`: who traces one adds it."""
    del traced, loop_parts
    return {}


def likely_in_parts(traced: Traced, loop_parts: int, size: int) -> PartedProgram | None:
    """The program at a batch size as those at others show it; None where they do not show it."""
    known = seen_in_parts(traced, loop_parts)
    if len(known) < 2 or size in known:
        return known.get(size)
    try:
        program = likely_at(size, {of: parted.program for of, parted in known.items()})
    except TraceError:
        return None
    return replace(next(iter(known.values())), program=program)


def in_parts(traced: Traced, program: GraphWithEquations, loop_parts: int, of_samples: frozenset[int]) -> PartedProgram:
    """A program with its stacked arrays in parts, if loops were cut; `of_samples`: values whose rows are samples."""
    if loop_parts > 0:
        batched = {v for v, dim in zip(program.graph.inputs, traced.batch_leaves, strict=False) if dim is not None}
        return part_stacks(program, of_samples | batched, loop_parts)
    return PartedProgram(
        program=program,
        input_parts=tuple(LeafPart(leaf=i) for i in range(len(program.graph.inputs))),
        output_parts=tuple(LeafPart(leaf=i) for i in range(len(program.graph.outputs))),
    )


def traces_alike(traced: Traced, size: int) -> bool:
    """Whether JAX writes the same equations at the full batch and at another size, on arrays of as many dims."""
    try:
        return _alike(traced.jaxpr, traced.at_batch_size(size))
    except TraceError:
        return False


def _alike(jaxpr: Any, other: Any) -> bool:
    a, b = _jax.open_jaxpr(jaxpr), _jax.open_jaxpr(other)
    return len(a.eqns) == len(b.eqns) and all(
        x.primitive is y.primitive
        and [v.aval.ndim for v in (*x.invars, *x.outvars)] == [v.aval.ndim for v in (*y.invars, *y.outvars)]
        and all(_alike(i, j) for i, j in zip(_jax.inner_jaxprs(x), _jax.inner_jaxprs(y), strict=True))
        for x, y in zip(a.eqns, b.eqns, strict=True)
    )


def over_samples(traced: Traced, loop_parts: int, sizes: tuple[int, int] = _SHOWING) -> frozenset[int]:
    """The loops that are not to be cut because they go over samples, as two batch sizes show them."""
    return loops_over_samples(*map(traced.at_batch_size, sizes)) if loop_parts else frozenset()


def extrapolated(traced: Traced, loop_parts: int) -> dict[int, GraphWithEquations]:
    """The programs of the step by batch size: at one sample, and at the larger sizes that it follows from."""
    full, loops = traced.require_batch(), over_samples(traced, loop_parts)
    programs = {
        size: program_of(traced, traced.at_batch_size(size), loop_parts, loops)
        if size != full
        else full_program(traced, loop_parts, loops)
        for size in (*_SHOWING, full if full > max(_SHOWING) else _CHECKING)
    }
    return {1: at_one_sample(programs), **programs}


def from_larger(traced: Traced, loop_parts: int, size: int) -> tuple[PartedProgram, PartedProgram]:
    """The programs at the full batch and at a smaller size, where JAX writes another program at that size.

    The full batch and twice and three times as many samples show the program of the full batch at any size.
    """
    batch = traced.require_batch()
    loops = over_samples(traced, loop_parts, (batch, 2 * batch))
    programs = {batch: full_program(traced, loop_parts, loops)}
    for times in (2, 3):
        programs[times * batch] = program_of(traced, traced.at_batch_size(times * batch), loop_parts, loops)
    return with_other_in_parts(traced, at_size(size, programs), loop_parts, loops)


def batch_of_one(traced: Traced, own: PartedProgram, loop_parts: int) -> dict[Graph, dict[int, int | None]]:
    """Per graph and body of a step traced at one sample, the batch dims of the values that larger batches have too."""
    programs = extrapolated(traced, loop_parts)
    pair = programs[1], programs[_SHOWING[0]]
    of_samples = _rows_of_samples(*pair)
    made, larger = (in_parts(traced, program, loop_parts, of_samples) for program in pair)
    one, two = made.program.graph, larger.program.graph
    dims = {one: batch_dims(one, two)}
    dims |= {body: scope.batch_dims for body, scope in body_scopes(one, one, two).items()}
    places = {part: v for v, part in zip(one.inputs, made.input_parts, strict=True)}
    inputs = zip(own.program.graph.inputs, own.input_parts, strict=True)
    same = align(own.program.graph, one, {v: places[part] for v, part in inputs if part in places})
    return {graph: {v: dims[other][w] for v, w in values.items()} for graph, (other, values) in same.items()}
