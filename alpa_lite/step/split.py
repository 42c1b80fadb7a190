"""Split a traced step into micro-batches as a `StepGraph`, refusing steps that are no sum over their samples.

    full batch trace ─┐
                      ├─ same ops? ─ proof (step.additivity) ─ merged program ─ loop / update ─▶ StepGraph (+ equations)
    micro-batch trace ┘

The merged program has the ops that touch the batch at the size of a micro-batch, and all others as in the full batch.

The user may accept a step that is no sum: with on_non_additive="mean_of_means" each micro-batch runs the step of its
own size, literals included, and the update receives the mean over micro-batches of floats, and the sum of counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from alpa_lite._jax import Array
from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.program.collector import rare_collection
from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import Graph, Op, verify
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import (
    Combination,
    LoopResults,
    StepBatch,
    StepGraph,
    assign_phases,
    batch_dims,
    body_scopes,
    effects_before,
    loop_ops,
    loop_without_batch,
    trains_in_bodies,
    with_own_bodies,
    without_gaps,
)
from alpa_lite.rules.dims import follow_batch
from alpa_lite.step.additivity import Proof, prove
from alpa_lite.step.interpreter import BodyMarks, Marks
from alpa_lite.step.relations import Refusal, Relation, RelationKind
from alpa_lite.step.transfer_functions import FOLLOWING
from alpa_lite.trace.passes.code_motion import Precomputed, hoist_values, inputs_of_data
from alpa_lite.trace.passes.split_stacked import PartedProgram
from alpa_lite.trace.step_programs import (
    batch_of_one,
    extrapolated,
    extrapolated_in_parts,
    from_larger,
    full_in_parts,
    over_samples,
    program_of,
    traces_alike,
    with_other_in_parts,
)
from alpa_lite.trace.trace import Traced

_Body = tuple[Graph, tuple[Equation, ...]]
"""A graph or body with the equations of its ops."""

_OpWithEquation = tuple[Op, Equation]


def merge(full: GraphWithEquations, small: GraphWithEquations, marks: Mapping[int, Marks]) -> GraphWithEquations:
    """Return the program that runs once per micro-batch, with the marks of `additivity.prove` applied.

    An op that has the same shapes at both sizes is taken from the full batch, with its parameters: `decay ** B` is one
    number, whatever a micro-batch holds. Literals are those of the full batch throughout, such as the 1 / B of a mean.
    """
    one, other = (full.graph, full.equations), (small.graph, small.equations)
    graph, equations = _merged(one, other, tuple(marks.items()), {})
    return GraphWithEquations(graph=graph, equations=equations, constants=full.constants)


def _merged(at_full: _Body, at_small: _Body, marks: BodyMarks, memo: dict[object, _Body]) -> _Body:
    """Merge a graph or body at both sizes; merged bodies are memoized in `memo`."""
    (full, of_full), (small, of_small), marked = at_full, at_small, dict(marks)
    pairs = zip(full.values, small.values, strict=True)
    # Scalars have the same shape at both sizes, so that literals are those of the full batch.
    values = tuple([v if v.shape == w.shape else w for v, w in pairs])
    ops: list[Op] = []
    equations: list[Equation] = []
    pairs_at_full, pairs_at_small = zip(full.ops, of_full, strict=True), zip(small.ops, of_small, strict=True)
    for one, other in zip(pairs_at_full, pairs_at_small, strict=True):
        op, mark = one[0], marked.get(one[0].id)
        if op.bodies and mark is not None:
            made = _with_bodies(one, other, mark, memo)
        # An op with bodies and without marks does not run in micro-batches (`Marks.looked_into`).
        elif op.bodies or not _touches(full, small, op):
            made = one
        else:
            made = other
        ops.append(_marked(made[0], mark) if mark is not None else made[0])
        equations.append(made[1])
    return Graph(values=values, ops=tuple(ops), inputs=full.inputs, outputs=full.outputs), tuple(equations)


def _touches(full: Graph, small: Graph, op: Op) -> bool:
    """Return whether an operand or result of an op has another shape at the other size."""
    return any(full.values[v].shape != small.values[v].shape for v in (*op.operands, *op.results))


def _marked(op: Op, mark: Marks) -> Op:
    """Return an op with its marks as fields."""
    if not mark.once and not mark.own_columns:
        return op
    return replace(op, once=frozenset(op.operands[i] for i in mark.once), own_columns=mark.own_columns)


def _with_bodies(
    one: _OpWithEquation, other: _OpWithEquation, mark: Marks, memo: dict[object, _Body]
) -> _OpWithEquation:
    """Return the op of the micro-batch (`other`), with bodies merged with those of the full batch, and its equation."""
    bodies: list[_Body] = []
    for number, inner_marks in enumerate(mark.bodies):
        at_full, at_small = ((op.bodies[number], equation.bodies[number]) for op, equation in (one, other))
        # Loops that share their body at both sizes, with equal marks, go on sharing one.
        key = (at_full[0], at_small[0], inner_marks)
        if key not in memo:
            memo[key] = _merged(at_full, at_small, inner_marks, memo)
        bodies.append(memo[key])
    merged = replace(other[0], bodies=tuple(graph for graph, _ in bodies))
    return merged, replace(other[1], bodies=tuple(equations for _, equations in bodies))


def bodies_apart(full: GraphWithEquations, small: GraphWithEquations) -> GraphWithEquations:
    """Return the full program in which two ops share a body only if they also share it at the other batch size."""
    graph, equations = _apart(full.graph, small.graph, full.equations, {})
    return replace(full, graph=graph, equations=equations)


def _apart(full: Graph, small: Graph, equations: Sequence[Equation], memo: dict[object, _Body]) -> _Body:
    """Separate the bodies of a graph; results are memoized by pairs of bodies in `memo`."""
    ops: list[Op] = []
    for op, other, equation in zip(full.ops, small.ops, equations, strict=True):
        bodies: list[Graph] = []
        for number, pair in enumerate(zip(op.bodies, other.bodies, strict=True)):
            if pair not in memo:
                memo[pair] = _apart(*pair, equation.bodies[number], memo)
            bodies.append(memo[pair][0])
        ops.append(replace(op, bodies=tuple(bodies)) if bodies else op)
    return replace(full, ops=tuple(ops)), tuple(equations)


OnNonAdditive = Literal["refuse", "mean_of_means"]
"""The treatment of a step that is no sum over its samples: refusal, or an average over micro-batches."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step at a number of micro-batches.

    Attributes:
        step: its graph, phases and batch dims.
        equations: equation of each op of the graph.
        constants: captured arrays, the last inputs of the traced program.
        precomputed: the part that is computed before the loop, if any.
        runs: argument leaf → (batch dim, number of runs of samples), for arguments of which a micro-batch takes rows
            from several runs.
    """

    step: StepGraph
    equations: tuple[Equation, ...]
    constants: tuple[Array, ...]
    precomputed: Precomputed | None = None
    runs: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def inputs(self, arguments: Sequence[Array]) -> list[Array]:
        """Return all inputs of the graph, from the flat arguments of a call."""
        given = [*arguments, *self.constants]
        further = self.precomputed(given) if self.precomputed is not None else ()
        # After the precomputed part, which reads the batch in its original order.
        for leaf, (dim, count) in self.runs.items():
            given[leaf] = by_micro_batch(given[leaf], dim, count, self.step.num_microbatches)
        return [*given, *further]


def by_micro_batch(array: Array, dim: int, runs: int, num_microbatches: int) -> Array:
    """Return an array whose samples lie in several runs, with the rows of each micro-batch moved together.

    Args:
        array: the array; a NumPy array stays one.
        dim: the dim of the samples, of size runs · num_microbatches · rows.
        runs: number of runs of samples.
        num_microbatches: number of micro-batches.
    """
    shape = np.shape(array)
    cut = (*shape[:dim], runs, num_microbatches, shape[dim] // (runs * num_microbatches), *shape[dim + 1 :])
    # Arrays of JAX have a sharding; arrays of NumPy stay on the host.
    library = jnp if hasattr(array, "sharding") else np
    return library.swapaxes(library.reshape(array, cut), dim, dim + 1).reshape(shape)


@rare_collection()
def split_step(
    traced: Traced,
    num_microbatches: int,
    *,
    loop_parts: int = 0,
    on_non_additive: OnNonAdditive = "refuse",
    exact: bool = True,
) -> TracedStep:
    """Return the step with its phases for `num_microbatches` micro-batches.

    Args:
        traced: the traced step.
        num_microbatches: number of micro-batches; must divide the batch size.
        loop_parts: about how many loops to make of each scan over layers, with the arrays that it scans; 0 leaves them
            whole.
        on_non_additive: what to do if micro-batches would change the meaning of the step.
        exact: trace the step at the size of a micro-batch. Otherwise its program is extrapolated from two sizes
            where that is possible, without checking it (`extrapolated_in_parts`): the planner's search does this, and
            traces the plan that it chooses.

    Raises:
        BatchError: the batch is unknown, or its size is not divisible.
        NonAdditiveError: micro-batches would change the meaning of the step.
        TraceError: the step cannot be traced at the size of a micro-batch.
    """
    if trains_in_bodies(full_in_parts(traced, 0, frozenset()).program.graph):
        loop_parts = 0  # its trips are steps of training rather than layers
    if num_microbatches != 1:
        sizes: tuple[int, ...] = (_microbatch_size(traced, num_microbatches),)
    else:
        sizes = () if traced.batch.size is None else _probe_sizes(traced.batch.size)
    problem = traced.batch.problem
    for size in sizes:
        try:
            full, other = at_two_sizes(traced, size, loop_parts, exact=exact)
        except TraceError as error:
            # With one micro-batch the other size only shows the batch dims, and a further size may do as well.
            if num_microbatches > 1:
                raise
            problem = f"The batch was lost: {error}"
            continue
        verify(full.program.graph)
        if num_microbatches > 1:
            try:
                return _proven(traced, full, other, num_microbatches, loop_parts)
            except NonAdditiveError:
                if on_non_additive == "refuse":
                    raise
        return _cut(traced, full, other, num_microbatches, loop_parts)
    return _at_one_size(traced, full_in_parts(traced, loop_parts, frozenset()), loop_parts, problem)


def at_two_sizes(
    traced: Traced, size: int, loop_parts: int, *, exact: bool = True
) -> tuple[PartedProgram, PartedProgram]:
    """Return the programs at the full batch and at another size, which have equal structure.

    Where JAX writes another program at that size, as it does for one sample, the program is extrapolated from the full
    batch and larger sizes.

    Args:
        traced: the traced step.
        size: the other batch size in samples.
        loop_parts: number of loops per scan over layers.
        exact: trace the program; otherwise an unchecked extrapolation from two sizes suffices.

    Raises:
        TraceError: the programs differ in structure, and no extrapolation is possible.
    """
    batch = traced.require_batch()
    if size > 1 and (not exact or size in _probe_sizes(batch)):
        seen = _seen(traced, loop_parts)
        other = seen.get(size) if exact else extrapolated_in_parts(seen, size)
        if other is not None:
            return seen[batch], other
    try:
        if size == 1 and not traces_alike(traced, size):
            return _of_one_sample(traced, loop_parts)
        return _traced_at(traced, size, loop_parts)
    except TraceError as error:
        try:
            return from_larger(traced, loop_parts, size)
        except TraceError:
            raise error from None  # the first error names the op that differs


@memoized
def _seen(traced: Traced, loop_parts: int) -> Mapping[int, PartedProgram]:
    """Return the programs by batch size from which others are extrapolated: the full batch, and the first to probe.

    The same for every search: a plan must not depend on the numbers of micro-batches that were looked at before.
    """
    batch = traced.require_batch()
    # JAX writes other ops for a single sample, so that such a program is no basis for an extrapolation.
    for size in (size for size in _probe_sizes(batch) if size > 1):
        with suppress(TraceError):
            full, other = _traced_at(traced, size, loop_parts)
            return {batch: full, size: other}
    return {}


def _of_one_sample(traced: Traced, loop_parts: int) -> tuple[PartedProgram, PartedProgram]:
    """Return the programs at the full batch and, extrapolated, at one sample."""
    made = extrapolated(traced, loop_parts)[1]
    return with_other_in_parts(traced, made, loop_parts, over_samples(traced, loop_parts))


def _traced_at(traced: Traced, size: int, loop_parts: int) -> tuple[PartedProgram, PartedProgram]:
    """Return the programs at the full batch and at another size, both traced."""
    loops = over_samples(traced, loop_parts, (traced.require_batch(), size))
    program = program_of(traced, traced.at_batch_size(size), loop_parts, loops)
    return with_other_in_parts(traced, program, loop_parts, loops)


def _at_one_size(traced: Traced, full: PartedProgram, loop_parts: int, problem: str) -> TracedStep:
    """Return the step as one micro-batch when no other batch size can be traced.

    The batch dims then come from propagation through the ops (`follow_batch`) instead of a comparison of shapes.
    """
    # Loops that share a body may have the batch in different dims of it, so each gets its own copy.
    graph = with_own_bodies(verify(full.program.graph))
    full = replace(full, program=replace(full.program, graph=graph))
    leaves = dict(enumerate(traced.batch.dims))
    batch_of_values: dict[Graph, dict[int, int | None]] = {}
    if traced.batch.size == 1:
        try:
            batch_of_values, problem = batch_of_one(traced, full, loop_parts), ""
        except TraceError as error:
            problem = f"{problem} {error}"
    batch, bodies = follow_batch(graph, [leaves.get(part.leaf) for part in full.input_parts], batch_of_values)
    loop = loop_ops(graph, batch)
    if not batch_of_values:
        # Propagation may lose the batch dim before the loss; the name stacks of the backward pass show where the loop
        # ends.
        loop |= loop_without_batch(graph)
    step = _step(
        traced,
        full,
        graph=graph,
        batch_dims=batch,
        loop=loop | effects_before(graph, loop),
        num_microbatches=1,
        bodies=bodies,
        batch=StepBatch(size=traced.batch.size, problem=problem),
        loop_parts=loop_parts,
    )
    return TracedStep(step=step, equations=full.program.equations, constants=full.program.constants)


def _step(
    traced: Traced,
    full: PartedProgram,
    *,
    graph: Graph,
    batch_dims: tuple[int | None, ...],
    loop: set[int],
    **more: Any,
) -> StepGraph:
    """Return the step with its phases.

    Args:
        traced: the traced step.
        full: the program at the full batch.
        graph: the program at the size of a micro-batch.
        batch_dims: for each value the dim that holds the batch, or None.
        loop: ids of the ops that run once per micro-batch.
        more: other fields of the step.
    """
    if more["num_microbatches"] == 1:
        # Of several micro-batches it is proven that the loop reads nothing that follows from its own sums.
        loop = without_gaps(graph, loop)
    return StepGraph(
        graph=graph,
        full_shapes=tuple(v.shape for v in full.program.graph.values),
        batch_dims=batch_dims,
        phases=assign_phases(graph, loop, batch_dims, forward_only=trains_in_bodies(graph)),
        input_parts=full.input_parts,
        output_parts=full.output_parts,
        aliases=_aliases(traced, full),
        **more,
    )


def _aliases(traced: Traced, parted: PartedProgram) -> dict[int, int]:
    """Return graph output → the graph input that it replaces in the next step, part by part.

    Inputs that are returned unchanged have no alias.
    """
    graph = parted.program.graph
    inputs = {(part.leaf, part.rows): v for v, part in zip(graph.inputs, parted.input_parts, strict=True)}
    pairs = {
        # A part of the new state replaces the same rows of the old one; -1 is the number of no leaf.
        v: inputs.get((traced.aliases.get(part.leaf, -1), part.rows))
        for v, part in zip(graph.outputs, parted.output_parts, strict=True)
        if graph.producer[v] is not None
    }
    return {out: into for out, into in pairs.items() if into is not None}


def _proven(
    traced: Traced, full: PartedProgram, other: PartedProgram, num_microbatches: int, loop_parts: int
) -> TracedStep:
    """Return the step in micro-batches that are proven to add up to the full batch.

    Raises:
        NonAdditiveError: they do not, with the reason.
    """
    _refuse_effects(full, other)
    exact = _exact(traced, full, other, num_microbatches, {})
    refusals = exact.proof.refusals
    for cut in sorted({r.cut for r in refusals} - {1}):
        # The step divides its batch into runs itself; it may be exact if each micro-batch takes rows of every run.
        runs = {leaf: cut for leaf, dim in enumerate(traced.batch.dims) if dim is not None}
        again = _exact(traced, full, other, num_microbatches, runs)
        if not again.proof.refusals:
            return _cut_exactly(traced, again, num_microbatches, loop_parts)
    if refusals and any(r.text in FOLLOWING for r in refusals):
        # The user's code depends on its batch size, so that it traces to other ops in a micro-batch. The full batch's
        # program, extrapolated to that size, may still be exact.
        with suppress(TraceError):
            own = from_larger(traced, loop_parts, _microbatch_size(traced, num_microbatches))
            again = _exact(traced, *own, num_microbatches, {})
            if not again.proof.refusals:
                return _cut_exactly(traced, again, num_microbatches, loop_parts)
    if refusals:
        raise NonAdditiveError(_sentence(refusals[0]))
    return _cut_exactly(traced, exact, num_microbatches, loop_parts)


@dataclass(frozen=True, kw_only=True)
class _Exact:
    """A step at two sizes without its hoisted part, and what was proven of it.

    Attributes:
        full: the program at the full batch.
        other: the program at the size of a micro-batch.
        precomputed: the hoisted part, if any.
        proof: the proof.
        runs: argument leaf → number of runs of samples along its batch dim.
    """

    full: PartedProgram
    other: PartedProgram
    precomputed: Precomputed | None
    proof: Proof
    runs: Mapping[int, int]


def _exact(
    traced: Traced, full: PartedProgram, other: PartedProgram, num_microbatches: int, runs: Mapping[int, int]
) -> _Exact:
    """Prove as much as possible, hoisting sums of data as needed; `runs`: argument leaf → number of runs of samples."""
    precomputed: Precomputed | None = None
    while True:
        graph, parts = full.program.graph, full.input_parts
        cut = {v: runs[part.leaf] for v, part in zip(graph.inputs, parts, strict=True) if part.leaf in runs}
        # Values are hoisted once: without inputs of data, the next proof hoists nothing and ends the loop.
        data = inputs_of_data(graph, parts, traced.batch.dims) if precomputed is None else frozenset[int]()
        found = prove(full.program, other.program, num_microbatches, of_data=data, runs=cut)
        if not found.hoisted or found.refusals:
            return _Exact(full=full, other=other, precomputed=precomputed, proof=found, runs=runs)
        rest = hoist_values(full, other, found.hoisted, traced.batch.dims)
        full, other, precomputed = rest.full, rest.other, rest.precomputed


def _cut_exactly(traced: Traced, exact: _Exact, num_microbatches: int, loop_parts: int) -> TracedStep:
    """Return the step in micro-batches whose proof succeeded."""
    full, other, proof = exact.full, exact.other, exact.proof
    whole, small = full.program.graph, other.program.graph
    merged = merge(full.program, other.program, proof.marks)
    batch = batch_dims(whole, small)
    loop = loop_ops(whole, batch)
    step = _step(
        traced,
        full,
        graph=merged.graph,
        batch_dims=batch,
        loop=loop,
        num_microbatches=num_microbatches,
        batch=StepBatch(size=traced.batch.size),
        bodies=body_scopes(merged.graph, whole, small),
        loop_parts=loop_parts,
        loop_results=LoopResults(
            combined={r: c for i in loop for r in whole.ops[i].results if (c := _combined(proof.relations[r]))},
            runs={
                v: proof.relations[v].blocks or 1 for v in whole.outputs if proof.relations[v].blocks not in (None, 1)
            },
        ),
    )
    return TracedStep(
        step=step,
        equations=merged.equations,
        constants=merged.constants,
        precomputed=exact.precomputed,
        runs={leaf: (traced.batch.dims[leaf] or 0, count) for leaf, count in exact.runs.items()},
    )


def _combined(relation: Relation) -> Combination | None:
    """Return how a value without batch dim is combined over micro-batches; None if it is summed."""
    return {
        RelationKind.INVARIANT: Combination.SAME,
        RelationKind.MAX: Combination.MAX,
        RelationKind.MIN: Combination.MIN,
    }.get(relation.kind)


def _refuse_effects(full: PartedProgram, other: PartedProgram) -> None:
    """Raise `NonAdditiveError` if an op with an effect would run once per micro-batch."""
    graph = full.program.graph
    if not any(op.effectful for op in graph.ops):
        return
    loop = loop_ops(graph, batch_dims(graph, other.program.graph))
    # An effect whose result the loop reads would run with it.
    loop |= effects_before(graph, loop)
    for op in graph.ops:
        if op.id in loop and op.effectful:
            raise NonAdditiveError(
                f"{op.source}: {op.primitive} would be called once per micro-batch, on its samples, instead of once. "
                "Move it to where the loss and the gradients are known, or use num_microbatches=1."
            )


def _sentence(refusal: Refusal) -> str:
    """Return the message that says why the step is no sum over its samples, and what to do about it."""
    where = f"{refusal.source or 'an unknown line'}: "
    if refusal.primitive:
        shapes = ", ".join(str(list(shape)) for shape in refusal.shapes)
        what = f"{refusal.primitive}{f' of {shapes}' if shapes else ''} {refusal.text}"
    else:
        what = refusal.text
    return (
        f"{where}{what}. That micro-batches give the same cannot be proven. Use num_microbatches=1, rewrite this line "
        "per sample (statistics of the data alone, and divisors that are constants, are fine), or accept the mean of "
        'what the micro-batches give by themselves, with on_non_additive="mean_of_means".'
    )


def _cut(
    traced: Traced,
    full: PartedProgram,
    other: PartedProgram,
    num_microbatches: int,
    loop_parts: int,
) -> TracedStep:
    """Return the step as one micro-batch, or as micro-batches whose results are averaged."""
    whole, small = full.program.graph, other.program.graph
    batch = batch_dims(whole, small)
    loop = loop_ops(whole, batch)
    averaged = num_microbatches > 1
    if averaged:
        _refuse_effects(full, other)
    # An averaged micro-batch runs the step of its own size, with its literals; a single one is the full batch.
    chosen = other.program if averaged else bodies_apart(full.program, other.program)
    step = _step(
        traced,
        full,
        graph=chosen.graph,
        batch_dims=batch,
        loop=loop | effects_before(whole, loop),
        num_microbatches=num_microbatches,
        batch=StepBatch(size=traced.batch.size),
        bodies=body_scopes(chosen.graph, whole, small),
        loop_parts=loop_parts,
        loop_results=LoopResults(averaged=averaged),
    )
    return TracedStep(step=step, equations=chosen.equations, constants=full.program.constants)


def _microbatch_size(traced: Traced, num_microbatches: int) -> int:
    """Return the samples of a micro-batch.

    Raises:
        BatchError: the batch is unknown, or its size is not divisible.
    """
    size = traced.require_batch()
    if num_microbatches < 1 or size % num_microbatches:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise BatchError(
            f"num_microbatches={num_microbatches} does not divide the batch of {size} samples. "
            f"Choose one of {divisors if len(divisors) <= 24 else divisors[:24] + ['…']}."
        )
    return size // num_microbatches


def _probe_sizes(size: int) -> tuple[int, ...]:
    """Return other batch sizes (in samples) at which to trace the step to see which dims follow the batch.

    Several are returned, since JAX may choose other algorithms at some sizes.
    """
    # Sizes that divide the batch come first: the search needs these traces for micro-batches as well.
    smaller = [size // p for p in range(2, size) if size % p == 0]
    return tuple(dict.fromkeys((*smaller[:2], 2 * size, 3 * size, *smaller[2:3])))
