"""The program of a train step at a batch size: traced, or extrapolated from its programs at other sizes.

Extrapolation treats every integer n among shapes and parameters, those of loop bodies included, as an affine function
of the batch size b. Everything else must be equal at all sizes; scalar literals are those of the smallest size p:

    n(b) = n(p) + (b - p) (n(q) - n(p)) / (q - p)      for the two smallest traced sizes p < q      (`_Line.number`)

It serves three purposes:

    micro-batch of one sample   JAX writes another program for dims of size 1: the transpose of a broadcast sums over
                                them, an index along them is squeezed. The program of larger batches is therefore
                                evaluated at size 1. A third size checks its integers, and abstract evaluation checks
                                the result shapes of each op                           (`at_one_sample`, `_check`)
    full batch of one sample    The step keeps the user's own program. Its values are matched with those of the
                                extrapolated program, which shows the dims that hold the batch   (`batch_of_one`)
    search                      The planner needs the step at many sizes, of which two are traced. The chosen size is
                                traced as well                                                      (`extrapolate`)

Scans over layers are split into parts on request, with the stacked arrays that they read (`in_parts`).
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
from alpa_lite._jax import AnyJaxpr, ClosedJaxpr, JaxprEqn
from alpa_lite.errors import TraceError
from alpa_lite.program.equations import Equation, GraphWithEquations, plain_params
from alpa_lite.program.identity import params_texts
from alpa_lite.program.ir import Graph, Op, Value, verify
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import LeafPart, batch_dims, body_scopes, check_same_structure
from alpa_lite.trace.alignment import align
from alpa_lite.trace.from_jaxpr import from_jaxpr, loops_over_samples
from alpa_lite.trace.kernels.kernel_params import is_kernel, kernel_params
from alpa_lite.trace.passes.code_motion import sink_free_values
from alpa_lite.trace.passes.split_stacked import PartedProgram, part_stacks
from alpa_lite.trace.trace import Traced


def at_one_sample(programs: Mapping[int, GraphWithEquations]) -> GraphWithEquations:
    """Return the program at batch size 1, from the programs at three or more sizes (keys in samples); see `at_size`."""
    return at_size(1, programs)


def at_size(size: int, programs: Mapping[int, GraphWithEquations]) -> GraphWithEquations:
    """Return the program at a batch size at which JAX writes another one, from programs at three or more sizes.

    Args:
        size: the batch size in samples.
        programs: batch size in samples → the program at that size.

    Raises:
        TraceError: the programs differ in structure, an integer is no affine function of the batch size, or an op would
            have other result shapes at this size. The message names the user's line.
    """
    ordered = [programs[size] for size in sorted(programs)]
    for program in ordered[:-1]:
        # Programs of other structure would pair unrelated ops below.
        check_same_structure(ordered[-1].graph, program.graph)
    made = extrapolate(size, programs)
    _check(made.graph, made.equations)
    verify(made.graph)
    return made


def extrapolate(size: int, programs: Mapping[int, GraphWithEquations]) -> GraphWithEquations:
    """Return the program at a batch size under the assumption that it has the structure of those at other sizes.

    The assumption is not verified, which makes this cheap; `at_size` verifies it.

    Args:
        size: the batch size in samples.
        programs: batch size in samples → the program at that size; two or more, of equal structure.

    Raises:
        TraceError: an integer is no affine function of the batch size.
    """
    sizes = tuple(sorted(programs))
    ordered = [programs[size] for size in sizes]
    graph, equations = _Line(sizes, size).program([p.graph for p in ordered], [p.equations for p in ordered])
    return GraphWithEquations(graph=graph, equations=equations, constants=ordered[-1].constants)


class _Unlike(Exception):
    """A property is neither equal at all sizes nor affine in the size; the message says which."""


class _Line:
    """Integers as affine functions of the batch size, given at `sizes` and evaluated at size `at` (in samples)."""

    def __init__(self, sizes: tuple[int, ...], at: int) -> None:
        self.sizes, self.at = sizes, at
        # Memo by object identity: the inlined trips of one loop share the parameters of their equations.
        self.memo: dict[tuple[int, ...], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self.bodies: dict[tuple[Graph, ...], tuple[Graph, tuple[Equation, ...]]] = {}

    def number(self, seen: Sequence[int]) -> int:
        """Return the integer at the size, from its values at the given sizes."""
        p, q = self.sizes[:2]
        rise, run = seen[1] - seen[0], q - p
        straight = all((n - seen[0]) * run == (b - p) * rise for b, n in zip(self.sizes, seen, strict=True))
        # A division with rest: half of the batch, for example, is an integer at even sizes only.
        more, rest = divmod((self.at - p) * rise, run)
        if rest or not straight:
            raise _Unlike(f"{_listed(seen)}, which is no affine function of the batch size")
        return int(seen[0] + more)

    def anything(self, seen: Sequence[Any], *, bodies_apart: bool = False) -> Any:
        """Return a parameter at the size; with `bodies_apart`, jaxprs inside it are left to `body` and not compared."""
        first = seen[0]
        if all(_equal(first, x) for x in seen[1:]):
            return first
        if all(type(x) is type(first) for x in seen):
            # A flag that differs between sizes means another program, although bool is an int.
            if isinstance(first, numbers.Integral) and not isinstance(first, bool):
                return self.number(seen)
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

    def params(self, op: Op, seen: Sequence[Equation]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the parameters of an op's equation at the size, and the same as plain data for the op."""
        key = tuple(id(e.params) for e in seen)
        if key not in self.memo:
            made = {
                name: self.anything([e.params[name] for e in seen], bodies_apart=bool(seen[0].bodies))
                for name in seen[0].params
            }
            # Unchanged parameters remain the same object: `program` and later memos recognise them by identity.
            same = all(value is seen[0].params[name] for name, value in made.items())
            self.memo[key] = (seen[0].params, op.params) if same else (made, _plain_form(op, made))
        return self.memo[key]

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
        """Return a body at the size; loops that share their body at every size share the result."""
        if graphs not in self.bodies:
            self.bodies[graphs] = self.program(graphs, equations)
        return self.bodies[graphs]

    def _sentence(self, where: str, what: str) -> str:
        return (
            f"{where} has, at batches of {_listed(self.sizes)} samples, "
            f"{what}. The program of a micro-batch of {_samples(self.at)} is not known then; use fewer micro-batches, "
            "so that each holds two samples or more."
        )


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


def _check(graph: Graph, equations: Sequence[Equation]) -> None:
    """Raise `TraceError` where abstract evaluation of an op gives other result shapes than the extrapolated graph."""
    seen: set[object] = set()
    for inner, op, equation in _flat(graph, equations):
        kinds = [tuple((v.shape, v.dtype) for v in values) for values in (inner.operands(op), inner.results(op))]
        key = (equation.primitive, id(equation.params), *kinds)
        # Ops with effects are refused in micro-batches elsewhere; float0 values cannot be bound to a primitive.
        if key in seen or op.bodies or op.effectful or any(dtype == "float0" for kind in kinds for _, dtype in kind):
            continue
        seen.add(key)
        # If all parameters have a plain form, equal plain forms mean equal parameters, whatever object holds them.
        told = (equation.primitive, params_texts(inner)[op.id], *kinds)
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
    """Return the result shapes of an equation by abstract evaluation; None if JAX rejects the operands."""
    structs = [_jax.struct(v.shape, v.dtype) for v in operands]
    try:
        made = jax.eval_shape(lambda *xs: _jax.bind(equation.primitive, dict(equation.params), xs), *structs)
    except (TypeError, ValueError):
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


#: Batch sizes (in samples) from which programs are extrapolated, and one to check them if the full batch is no larger.
_SHOWING, _CHECKING = (2, 3), 5


def program_of(traced: Traced, jaxpr: ClosedJaxpr, loop_parts: int, over_samples: frozenset[int]) -> GraphWithEquations:
    """Return the program of a jaxpr of the step, in which scans over layers are split; scans over samples never are.

    Args:
        traced: the traced step.
        jaxpr: its closed jaxpr at some batch size.
        loop_parts: number of loops per scan over layers; 0 leaves them whole.
        over_samples: indices of the scans over samples.
    """
    return sink_free_values(from_jaxpr(jaxpr, traced.inputs.names, num_parts=loop_parts, whole=over_samples))


@memoized
def full_program(traced: Traced, loop_parts: int, over_samples: frozenset[int]) -> GraphWithEquations:
    """Return the program at the full batch, which is the same for all numbers of micro-batches."""
    return program_of(traced, traced.jaxpr, loop_parts, over_samples)


@memoized
def full_in_parts(
    traced: Traced, loop_parts: int, over_samples: frozenset[int], of_samples: frozenset[int] = frozenset()
) -> PartedProgram:
    """Return the program at the full batch with its stacked arrays split; see `in_parts`."""
    return in_parts(traced, full_program(traced, loop_parts, over_samples), loop_parts, of_samples)


def with_other_in_parts(
    traced: Traced, other: GraphWithEquations, loop_parts: int, over_samples: frozenset[int]
) -> tuple[PartedProgram, PartedProgram]:
    """Return the programs at the full batch and at another size, with their stacked arrays split in the same places.

    Raises:
        TraceError: the two programs differ in more than shapes.
    """
    of_samples = _rows_of_samples(full_program(traced, loop_parts, over_samples), other)
    # Without parts the last argument has no effect; a constant lets the memo serve all callers by one entry.
    parted = full_in_parts(traced, loop_parts, over_samples, of_samples if loop_parts else frozenset())
    return parted, in_parts(traced, other, loop_parts, of_samples)


def _rows_of_samples(one: GraphWithEquations, two: GraphWithEquations) -> frozenset[int]:
    """Return the values whose leading dim differs between two programs, so that their rows are samples.

    Raises:
        TraceError: the programs differ in more than shapes.
    """
    check_same_structure(one.graph, two.graph)
    pairs = zip(one.graph.values, two.graph.values, strict=True)
    return frozenset(v.id for v, w in pairs if v.shape[:1] != w.shape[:1])


def extrapolated_in_parts(seen: Mapping[int, PartedProgram], size: int) -> PartedProgram | None:
    """Return the program at a batch size, extrapolated from those at two others; None if that is impossible."""
    if len(seen) < 2 or size in seen:
        return seen.get(size)
    try:
        program = extrapolate(size, {of: parted.program for of, parted in seen.items()})
    except TraceError:
        return None
    # Parts are rows of layers, never of samples, so they are the same at all batch sizes.
    return replace(next(iter(seen.values())), program=program)


def in_parts(traced: Traced, program: GraphWithEquations, loop_parts: int, of_samples: frozenset[int]) -> PartedProgram:
    """Return a program with its stacked arrays split into parts, if scans over layers are split.

    Args:
        traced: the traced step.
        program: its program at some batch size.
        loop_parts: number of loops per scan over layers; 0 leaves stacked arrays whole.
        of_samples: values whose rows are samples, which are never split.
    """
    if loop_parts > 0:
        # Captured arrays follow the arguments among the inputs, and never hold the batch.
        batched = {v for v, dim in zip(program.graph.inputs, traced.batch.dims, strict=False) if dim is not None}
        return part_stacks(program, of_samples | batched, loop_parts)
    return PartedProgram(
        program=program,
        input_parts=tuple(LeafPart(leaf=i) for i in range(len(program.graph.inputs))),
        output_parts=tuple(LeafPart(leaf=i) for i in range(len(program.graph.outputs))),
    )


def traces_alike(traced: Traced, size: int) -> bool:
    """Return whether JAX writes the same equations, on arrays of the same ranks, at the full batch and at `size`."""
    try:
        return _alike(traced.jaxpr, traced.at_batch_size(size))
    except TraceError:
        return False


def _alike(jaxpr: AnyJaxpr, other: AnyJaxpr) -> bool:
    """Return whether two jaxprs have the same primitives on arrays of the same ranks, bodies included."""
    a, b = _jax.open_jaxpr(jaxpr), _jax.open_jaxpr(other)
    return len(a.eqns) == len(b.eqns) and all(
        x.primitive is y.primitive
        and _ranks(x) == _ranks(y)
        and all(_alike(i, j) for i, j in zip(_jax.inner_jaxprs(x), _jax.inner_jaxprs(y), strict=True))
        for x, y in zip(a.eqns, b.eqns, strict=True)
    )


def _ranks(eqn: JaxprEqn) -> list[int]:
    return [_jax.aval_of(v).ndim for v in (*eqn.invars, *eqn.outvars)]


def over_samples(traced: Traced, loop_parts: int, sizes: tuple[int, int] = _SHOWING) -> frozenset[int]:
    """Return the indices of the scans over samples, which are not to be split, as two batch sizes show them."""
    # Two more traces, which nobody needs where loops stay whole.
    return loops_over_samples(*map(traced.at_batch_size, sizes)) if loop_parts else frozenset()


def extrapolated(traced: Traced, loop_parts: int) -> dict[int, GraphWithEquations]:
    """Return programs of the step by batch size (in samples): the one at size 1, and those from which it follows."""
    full, loops = traced.require_batch(), over_samples(traced, loop_parts)
    programs = {
        size: program_of(traced, traced.at_batch_size(size), loop_parts, loops)
        if size != full
        else full_program(traced, loop_parts, loops)
        # The full batch is traced already, so that it checks the line for free where it can.
        for size in (*_SHOWING, full if full > max(_SHOWING) else _CHECKING)
    }
    return {1: at_one_sample(programs), **programs}


def from_larger(traced: Traced, loop_parts: int, size: int) -> tuple[PartedProgram, PartedProgram]:
    """Return the programs at the full batch and at a smaller size at which JAX writes another program.

    The program at the smaller size is extrapolated from those at once, twice and three times the full batch.
    """
    batch = traced.require_batch()
    loops = over_samples(traced, loop_parts, (batch, 2 * batch))
    programs = {batch: full_program(traced, loop_parts, loops)}
    # Multiples of the batch, so that whatever divides it in the step divides these sizes too.
    for times in (2, 3):
        programs[times * batch] = program_of(traced, traced.at_batch_size(times * batch), loop_parts, loops)
    return with_other_in_parts(traced, at_size(size, programs), loop_parts, loops)


def batch_of_one(traced: Traced, own: PartedProgram, loop_parts: int) -> dict[Graph, dict[int, int | None]]:
    """Return the batch dims of a step traced at one sample, for each graph and body: value id → dim or None.

    At one sample no shape shows the batch. The values are therefore matched with those of the program that larger
    batches show at size 1; values without a match are missing from the result.
    """
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
