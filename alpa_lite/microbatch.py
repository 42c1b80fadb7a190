"""From a traced step to a `StepGraph` at a number of micro-batches, refusing steps that are no sum over samples.

    full batch trace ─┐
                      ├─ same ops? ─ batch dims ─ loop / update ─ additive? ─▶ StepGraph (+ equations)
    micro-batch trace ┘

Steps that are no sum can be accepted openly: with on_non_additive="mean_of_means" each micro-batch runs the step of its
own size, literals included, and the update gets the mean over micro-batches of what is a float, the sum of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from alpa_lite.additive import check_additive, refuse_effects, refuse_feedback
from alpa_lite.ahead import Ahead, computed_ahead
from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.garbage import rare_collection
from alpa_lite.graph.equations import Equation
from alpa_lite.graph.ir import Graph
from alpa_lite.graph.phases import (
    StepGraph,
    assign_phases,
    batch_dims,
    batch_position,
    body_scopes,
    check_same_structure,
    effects_before,
    local_iotas,
    loop_ops,
    loop_without_batch,
    merge_literals,
    require_same_position,
    with_own_bodies,
)
from alpa_lite.graph.verify import verify
from alpa_lite.one_sample import (
    batch_of_one,
    extrapolated,
    full_in_parts,
    in_parts,
    likely_in_parts,
    over_samples,
    program_of,
    seen_in_parts,
    traces_alike,
)
from alpa_lite.rules.batch_flow import follow_batch
from alpa_lite.stacks import PartedProgram
from alpa_lite.trace import Traced

OnNonAdditive = Literal["refuse", "mean_of_means"]
"""What to do with a step that is no sum over its samples, when it is to be cut into micro-batches."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step at a number of micro-batches: its graph, the equations of its ops, captured arrays, and what is computed
    ahead of it."""

    step: StepGraph
    equations: tuple[Equation, ...]
    constants: tuple[Any, ...]
    ahead: Ahead | None = None

    def inputs(self, arguments: Sequence[Any]) -> list[Any]:
        """All that the graph takes, from the flat arguments of a call."""
        given = [*arguments, *self.constants]
        return [*given, *self.ahead(given)] if self.ahead is not None else given


@rare_collection()
def split_step(
    traced: Traced,
    num_microbatches: int,
    *,
    loop_parts: int = 0,
    on_non_additive: OnNonAdditive = "refuse",
    likely: bool = False,
) -> TracedStep:
    """The step cut into phases for `num_microbatches`.

    Loops over layers are cut into about `loop_parts` loops, with what they scan; 0 keeps them as they are. `likely`:
    the step need not be traced at micro-batches of another size if it was at some (`likely_in_parts`).

    Raises `BatchError` when the batch is unknown or not divided, `NonAdditiveError` when micro-batches would change
    the meaning of the step, unless `on_non_additive` accepts that.
    """
    if num_microbatches != 1:
        sizes: tuple[int, ...] = (_microbatch_size(traced, num_microbatches),)
    else:
        sizes = () if traced.batch_size is None else _probe_sizes(traced.batch_size)
    problem, averages = traced.batch_problem, num_microbatches > 1 and on_non_additive == "mean_of_means"
    for size in sizes:
        try:
            full, other = _at_two_sizes(traced, size, loop_parts, likely=likely)
            batch, pairs = _batch_dims(full, other, allow_pairs=num_microbatches == 1 or averages)
        except Exception as error:
            if num_microbatches > 1:
                raise _as_trace_error(error, traced, size) from error
            problem = f"The batch was lost: {error}"
        else:
            verify(full.program.graph)
            if pairs and num_microbatches > 1:
                return _cut(traced, full, other, batch, num_microbatches, loop_parts, averaged=True)
            return _with_batch(traced, full, other, batch, num_microbatches, loop_parts, averages)
    return _at_one_size(traced, full_in_parts(traced, loop_parts, frozenset()), loop_parts, problem)


def _at_two_sizes(traced: Traced, size: int, loop_parts: int, *, likely: bool) -> tuple[PartedProgram, PartedProgram]:
    """The programs at the full batch and at another size, which are the same program."""
    known, batch = seen_in_parts(traced, loop_parts), traced.require_batch()
    if likely and size > 1 and (other := likely_in_parts(traced, loop_parts, size)) is not None:
        return known[batch], other
    if size == 1 and not traces_alike(traced, size):
        loops = over_samples(traced, loop_parts)
        program = extrapolated(traced, loop_parts)[size]
    else:
        loops = over_samples(traced, loop_parts, (batch, size))
        program = program_of(traced, traced.at_batch_size(size), loop_parts, loops)
    full, other = full_in_parts(traced, loop_parts, loops), in_parts(traced, program, loop_parts)
    check_same_structure(full.program.graph, other.program.graph)
    if size > 1:
        known |= {batch: full, size: other}
    return full, other


def _at_one_size(traced: Traced, full: PartedProgram, loop_parts: int, problem: str) -> TracedStep:
    """The step when it cannot be seen at another batch size: what is known of its batch is where it flows."""
    # The batch may enter a body that several loops share in another way in each.
    graph = with_own_bodies(verify(full.program.graph))
    full = replace(full, program=replace(full.program, graph=graph))
    leaves = dict(enumerate(traced.batch_leaves))
    known: dict[Graph, dict[int, int | None]] = {}
    if traced.batch_size == 1:
        try:
            known, problem = batch_of_one(traced, full, loop_parts), ""
        except Exception as error:  # the user's function may raise anything at another size
            problem = f"{problem} {error}"
    batch, bodies = follow_batch(graph, [leaves.get(part.leaf) for part in full.input_parts], known)
    loop = loop_ops(graph, batch)[0]
    if not known:
        # The batch may be lost from sight before the loss: JAX's marks tell how far the loop goes.
        loop |= loop_without_batch(graph)
    step = StepGraph(
        graph=graph,
        full_shapes=tuple(v.shape for v in graph.values),
        batch_dims=batch,
        phases=assign_phases(graph, loop | effects_before(graph, loop), batch),
        num_microbatches=1,
        batch_size=traced.batch_size,
        bodies=bodies,
        batch_problem=problem,
        input_parts=full.input_parts,
        output_parts=full.output_parts,
        aliases=_aliases(traced, full),
        loop_parts=loop_parts,
    )
    return TracedStep(step=step, equations=full.program.equations, constants=full.program.constants)


def _aliases(traced: Traced, parted: PartedProgram) -> dict[int, int]:
    """Graph output value → the graph input value that it replaces, part by part; what passes through has none."""
    graph = parted.program.graph
    inputs = {(part.leaf, part.rows): v for v, part in zip(graph.inputs, parted.input_parts, strict=True)}
    pairs = {
        v: inputs.get((traced.aliases.get(part.leaf, -1), part.rows))
        for v, part in zip(graph.outputs, parted.output_parts, strict=True)
        if graph.producer[v] is not None
    }
    return {out: into for out, into in pairs.items() if into is not None}


def _with_batch(
    traced: Traced,
    full: PartedProgram,
    other: PartedProgram,
    batch: tuple[int | None, ...],
    num_microbatches: int,
    loop_parts: int,
    averages: bool,
) -> TracedStep:
    """`averages`: where the step is no sum over its samples the mean over micro-batches is taken, instead of raising
    `NonAdditiveError`."""
    rest = computed_ahead(full, other, batch, traced.batch_leaves)
    try:
        if rest is None:
            return _cut(traced, full, other, batch, num_microbatches, loop_parts)
        left, _ = _batch_dims(rest.full, rest.other, allow_pairs=num_microbatches == 1)
        return _cut(traced, rest.full, rest.other, left, num_microbatches, loop_parts, ahead=rest.ahead)
    except NonAdditiveError:
        if not averages:
            raise
    # What is averaged has the sums of its own micro-batch: nothing is computed ahead for it.
    return _cut(traced, full, other, batch, num_microbatches, loop_parts, averaged=True)


def _batch_dims(full: PartedProgram, other: PartedProgram, *, allow_pairs: bool) -> tuple[tuple[int | None, ...], bool]:
    """The dim of each value that holds the batch, and whether some hold pairs of samples, if that is allowed."""
    graphs = full.program.graph, other.program.graph
    try:
        return batch_dims(*graphs), False
    except NonAdditiveError:
        if not allow_pairs:
            raise
        return batch_dims(*graphs, allow_pairs=True), True


def _cut(
    traced: Traced,
    full: PartedProgram,
    other: PartedProgram,
    batch: tuple[int | None, ...],
    num_microbatches: int,
    loop_parts: int,
    *,
    ahead: Ahead | None = None,
    averaged: bool = False,
) -> TracedStep:
    """`averaged`: results are means over micro-batches; otherwise `NonAdditiveError` is raised where the step is no sum
    over its samples."""
    whole, small = full.program.graph, other.program.graph
    loop, feedbacks = loop_ops(whole, batch)
    iotas = frozenset[int]()
    early = effects_before(whole, loop)
    if num_microbatches > 1:
        refuse_effects(whole, loop | early)
        require_same_position(whole, batch, batch_position(whole, batch))
        if not averaged:
            iotas = local_iotas(whole, batch)
            refuse_feedback(feedbacks)
            check_additive(whole, small, batch, loop, iotas)
    chosen = other if num_microbatches > 1 else full
    graph = chosen.program.graph if averaged else merge_literals(chosen.program.graph, whole, at_another_size=small)
    step = StepGraph(
        graph=graph,
        full_shapes=tuple(v.shape for v in whole.values),
        batch_dims=batch,
        phases=assign_phases(graph, loop | early, batch),
        num_microbatches=num_microbatches,
        batch_size=traced.batch_size,
        bodies=body_scopes(graph, whole, small, allow_pairs=num_microbatches == 1 or averaged),
        local_iotas=iotas,
        input_parts=full.input_parts,
        output_parts=full.output_parts,
        aliases=_aliases(traced, full),
        loop_parts=loop_parts,
        averaged=averaged,
    )
    return TracedStep(
        step=step,
        equations=chosen.program.equations,
        constants=full.program.constants,
        ahead=ahead,
    )


def _microbatch_size(traced: Traced, num_microbatches: int) -> int:
    size = traced.require_batch()
    if num_microbatches < 1 or size % num_microbatches:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise BatchError(
            f"num_microbatches={num_microbatches} does not divide the batch of {size} samples. "
            f"Choose one of {divisors if len(divisors) <= 24 else divisors[:24] + ['…']}."
        )
    return size // num_microbatches


def _probe_sizes(size: int) -> tuple[int, ...]:
    """Other batch sizes at which to see what follows the batch; JAX may choose other algorithms at some of them."""
    smaller = [size // p for p in range(2, size) if size % p == 0]
    return tuple(dict.fromkeys((*smaller[:2], 2 * size, 3 * size, *smaller[2:3])))


def _as_trace_error(error: Exception, traced: Traced, size: int) -> Exception:
    if isinstance(error, (TraceError, NonAdditiveError)):
        return error
    return TraceError(
        f"{traced.name} cannot be traced at a micro-batch of {size} samples instead of {traced.batch_size}: "
        f"{type(error).__name__}: {error}. Micro-batching needs a step that works at any batch size; "
        "use num_microbatches=1, or name the batch arguments in batch_argnums if others were taken for it."
    )
