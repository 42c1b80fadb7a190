"""Programs of a step at a batch size, in parts where loops over layers are cut; also for batches of one sample.

JAX writes another program for dims of size 1. What that means for the two uses of a batch of one:

    micro-batches of one sample   the program of larger batches, at size 1                   (at_one_sample)
    a full batch of one sample    the user's own program, in which the values of that of
                                  larger batches, at size 1, are found again: they tell
                                  which dims hold the batch                                  (batch_of_one)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.errors import TraceError
from alpa_lite.program.equations import GraphWithEquations
from alpa_lite.program.ir import Graph
from alpa_lite.program.memo import kept
from alpa_lite.program.phases import Part, batch_dims, body_scopes, check_same_structure
from alpa_lite.trace.alignment import align
from alpa_lite.trace.extrapolate import at_one_sample, at_size, likely_at
from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.loops import loops_over_samples
from alpa_lite.trace.passes.sink_constants import sink_free_values
from alpa_lite.trace.passes.split_stacked import PartedProgram, part_stacks
from alpa_lite.trace.trace import Traced

#: Batch sizes that show the program of any size, and one that checks it where the full batch is among them.
_SHOWING, _CHECKING = (2, 3), 5


def program_of(traced: Traced, jaxpr: Any, loop_parts: int, over_samples: frozenset[int]) -> GraphWithEquations:
    """The program of a jaxpr of the step; loops over samples are never cut."""
    return sink_free_values(from_jaxpr(jaxpr, traced.names, num_parts=loop_parts, kept=over_samples))


@kept
def full_program(traced: Traced, loop_parts: int, over_samples: frozenset[int]) -> GraphWithEquations:
    """The program at the full batch: the same for all numbers of micro-batches."""
    return program_of(traced, traced.jaxpr, loop_parts, over_samples)


@kept
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


@kept
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
        input_parts=tuple(Part(leaf=i) for i in range(len(program.graph.inputs))),
        output_parts=tuple(Part(leaf=i) for i in range(len(program.graph.outputs))),
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
