"""Split a traced step into micro-batches as a `StepGraph`, refusing steps that are no sum over their samples.

    full batch trace ──────────┐
                               ├─ proof (step.additivity) ─ merged program ─ loop / update ─▶ StepGraph (+ equations)
    program of a micro-batch ──┘

The merged program has the ops that touch the batch at the size of a micro-batch, and all others as in the full batch.

The user may accept a step that is no sum: with on_non_additive="mean_of_means" each micro-batch runs the step of its
own size, literals included, and the update receives the mean over micro-batches of floats, and the sum of counts.
The same holds for the micro-batches of asynchronous pipelines, each group of which is a batch with an update of its own
(`updated_every`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite._jax import Array
from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.program.collector import rare_collection
from alpa_lite.program.equations import Equation, GraphWithEquations
from alpa_lite.program.ir import Graph
from alpa_lite.program.passes import PassDriver
from alpa_lite.program.phases import (
    Combination,
    LoopResults,
    Phase,
    StepBatch,
    StepGraph,
    assign_phases,
    batch_dims,
    body_scopes,
    effects_before,
    loop_ops,
    loop_without_batch,
    trains_in_bodies,
    with_differentiated,
    with_own_bodies,
    without_gaps,
)
from alpa_lite.rules.dims import follow_batch
from alpa_lite.step.additivity import Proof, prove
from alpa_lite.step.merged_sizes import bodies_apart, merge
from alpa_lite.step.relations import Refusal, Relation, RelationKind
from alpa_lite.step.transfer_functions import FOLLOWING
from alpa_lite.trace.passes.code_motion import HoistValues, Precomputed, TwoSizes, inputs_of_data
from alpa_lite.trace.passes.own_state import OwnState
from alpa_lite.trace.passes.split_stacked import PartedProgram, SplitAnalysis
from alpa_lite.trace.step_programs import SizedPrograms
from alpa_lite.trace.trace import Traced

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
        split: by what the stacked arrays of the full batch were split; None if they are whole.
    """

    step: StepGraph
    equations: tuple[Equation, ...]
    constants: tuple[Array, ...]
    precomputed: Precomputed | None = None
    runs: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    split: SplitAnalysis | None = None

    @property
    def graph(self) -> Graph:
        """The graph of the step."""
        return self.step.graph

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
    library = _library(array)
    return library.swapaxes(library.reshape(array, cut), dim, dim + 1).reshape(shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrograms:
    """A traced step at any number of micro-batches, with loops over layers in any number of parts; each is made once.

    Attributes:
        traced: the traced step.
        on_non_additive: what to do if micro-batches would change the meaning of the step.
        driver: runs the passes.
        around: `around()` is the context in which a step is made.
        update_every: number of micro-batches that one update follows; 0: all those of the step.
    """

    traced: Traced
    on_non_additive: OnNonAdditive = "refuse"
    driver: PassDriver = field(default_factory=PassDriver)
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    update_every: int = 0
    # By number of micro-batches, number of loop parts, and micro-batches per update.
    _steps: dict[tuple[int, int, int], TracedStep] = field(default_factory=dict[tuple[int, int, int], TracedStep])
    _programs: dict[int, SizedPrograms] = field(default_factory=dict[int, SizedPrograms])

    def at(self, num_microbatches: int, loop_parts: int = 0) -> StepGraph:
        """Return the step with its phases; see `with_equations`."""
        return self.with_equations(num_microbatches, loop_parts).step

    def pinned(self) -> StepPrograms:
        """Return the steps in which the shardings of the user's code are demands."""
        # With demands the jaxpr has further equations, so that no step of this trace can be reused.
        return replace(self, traced=self.traced.pinned(), _steps={}, _programs={})

    def updated_every(self, num_microbatches: int) -> StepPrograms:
        """Return the steps whose weights are updated after so many micro-batches each; 0: after all of them."""
        return replace(self, update_every=num_microbatches)

    def with_equations(self, num_microbatches: int, loop_parts: int = 0) -> TracedStep:
        """Return the step with its phases for `num_microbatches` micro-batches.

        Args:
            num_microbatches: number of micro-batches; must divide the batch size.
            loop_parts: about how many loops to make of each scan over layers, with the arrays that it scans; 0 leaves
                them whole.

        Raises:
            BatchError: the batch is unknown, or its size is not divisible.
            NonAdditiveError: micro-batches would change the meaning of the step.
            TraceError: the step cannot be traced at the size of a micro-batch.
        """
        sized = self.sized(loop_parts)
        key = (num_microbatches, sized.loop_parts, self.update_every)
        if key not in self._steps:
            with _jax.no_mesh(), self.around(), rare_collection():
                self._steps[key] = self._split(num_microbatches, sized)
        return self._steps[key]

    def _split(self, num_microbatches: int, sized: SizedPrograms) -> TracedStep:
        traced = self.traced
        if num_microbatches == 1:
            try:
                return _cut(sized, sized.shown(), 1)
            except BatchError:
                return _at_one_size(sized, traced.batch.problem)
            except TraceError as error:
                return _at_one_size(sized, f"The batch was lost: {error}")
        size = _microbatch_size(traced, num_microbatches)
        if self.update_every:
            # Nothing is added up over the whole batch, so that nothing has to be proven.
            pair = self.driver.run(sized.with_own_numbers(size), (OwnState(replaced=traced.aliases),))
            alone = _cut(sized, pair, num_microbatches)
            # Without gradients there is nothing to update.
            if Phase.BACKWARD in alone.step.phases:
                return _updated_often(alone, self.update_every)
        try:
            return _proven(sized, size, num_microbatches)
        except NonAdditiveError:
            if self.on_non_additive == "refuse":
                raise
        # The mean of what micro-batches give by themselves: with the numbers that the code computes at their size.
        return _cut(sized, sized.with_own_numbers(size), num_microbatches)

    def sized(self, loop_parts: int) -> SizedPrograms:
        """Return the programs at all batch sizes, with loops over layers in so many parts.

        A step has the same programs at any number of parts if it has no such loops and no stacked arrays, or if the
        trips of its loops are steps of training rather than layers.
        """
        if loop_parts not in self._programs:
            made = SizedPrograms(traced=self.traced, loop_parts=loop_parts, driver=self.driver)
            if loop_parts and (not made.has_parts or trains_in_bodies(self.sized(0).full().graph)):
                made = self.sized(0)
            self._programs[loop_parts] = made
        return self._programs[loop_parts]


def _updated_often(alone: TracedStep, update_every: int) -> TracedStep:
    """Return the step with an update for every so many micro-batches.

    Raises:
        BatchError: these do not divide the micro-batches.
    """
    step, count = alone.step, alone.step.num_microbatches
    if count % update_every:
        raise BatchError(
            f"num_microbatches={count} was asked for, with an update of the weights for every {update_every} of them. "
            f"Use a multiple of {update_every}."
        )
    return replace(alone, step=replace(step, num_updates=count // update_every))


def _at_one_size(sized: SizedPrograms, problem: str) -> TracedStep:
    """Return the step as one micro-batch when no other batch size can be traced.

    The batch dims then come from propagation through the ops (`follow_batch`) instead of a comparison of shapes.
    """
    traced, full = sized.traced, sized.full()
    # Loops that share a body may have the batch in different dims of it, so each gets its own copy.
    graph = with_own_bodies(full.graph)
    full = replace(full, program=replace(full.program, graph=graph))
    leaves = dict(enumerate(traced.batch.dims))
    batch_of_values: dict[Graph, dict[int, int | None]] = {}
    if traced.batch.size == 1:
        try:
            batch_of_values, problem = sized.batch_of_one(full), ""
        except TraceError as error:
            problem = f"{problem} {error}"
    batch, bodies = follow_batch(graph, [leaves.get(part.leaf) for part in full.input_parts], batch_of_values)
    loop = loop_ops(graph, batch)
    if not batch_of_values:
        # Propagation may lose the batch dim before the loss; the name stacks of the backward pass show where the loop
        # ends.
        loop |= loop_without_batch(graph)
    return _step(
        sized,
        full,
        program=full.program,
        loop=loop | effects_before(graph, loop),
        batch_dims=batch,
        num_microbatches=1,
        bodies=bodies,
        batch=StepBatch(size=traced.batch.size, problem=problem),
    )


def _step(
    sized: SizedPrograms, full: PartedProgram, *, program: GraphWithEquations, loop: set[int], **more: Any
) -> TracedStep:
    """Return the step with its phases.

    Args:
        sized: the programs of the step.
        full: the program at the full batch.
        program: the program at the size of a micro-batch.
        loop: ids of the ops that run once per micro-batch.
        more: other fields of the step.
    """
    graph, batch = program.graph, more["batch_dims"]
    if more["num_microbatches"] == 1:
        # Of several micro-batches it is proven that the loop reads nothing that follows from its own sums.
        loop = without_gaps(graph, loop)

    def made() -> TracedStep:
        step = StepGraph(
            graph=graph,
            full_shapes=tuple(v.shape for v in full.graph.values),
            phases=assign_phases(graph, loop, batch, forward_only=trains_in_bodies(graph)),
            input_parts=full.input_parts,
            output_parts=full.output_parts,
            aliases=_aliases(sized.traced, full),
            loop_parts=sized.loop_parts,
            **more,
        )
        return TracedStep(step=step, equations=program.equations, constants=program.constants, split=full.split)

    return sized.driver.made("assign phases", made)


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


def _proven(sized: SizedPrograms, size: int, num_microbatches: int) -> TracedStep:
    """Return the step in micro-batches of `size` samples that are proven to add up to the full batch.

    Raises:
        NonAdditiveError: they do not, with the reason.
    """
    first: Refusal | None = None
    for pair in sized.at_two_sizes(size):
        _refuse_effects(pair)
        exact = _exact(sized, pair, num_microbatches, {})
        refusals = exact.proof.refusals
        if not refusals:
            return _cut_exactly(sized, exact, num_microbatches)
        for cut in sorted({r.cut for r in refusals} - {1}):
            # The step divides its batch into runs itself; it may be exact if each micro-batch takes rows of every run.
            runs = {leaf: cut for leaf, dim in enumerate(sized.traced.batch.dims) if dim is not None}
            again = _exact(sized, pair, num_microbatches, runs)
            if not again.proof.refusals:
                return _cut_exactly(sized, again, num_microbatches)
        first = first or refusals[0]
        # Where the code of the user depends on its batch size, another pair may show the full batch's program.
        if not any(r.text in FOLLOWING for r in refusals):
            break
    assert first is not None, "there is a pair, or `at_two_sizes` raises"
    raise NonAdditiveError(_sentence(first))


@dataclass(frozen=True, kw_only=True)
class _Exact:
    """A step at two sizes without its hoisted part, and what was proven of it.

    Attributes:
        pair: the programs at the full batch and at the size of a micro-batch.
        proof: the proof.
        runs: argument leaf → number of runs of samples along its batch dim.
    """

    pair: TwoSizes
    proof: Proof
    runs: Mapping[int, int]


def _exact(sized: SizedPrograms, pair: TwoSizes, num_microbatches: int, runs: Mapping[int, int]) -> _Exact:
    """Prove as much as possible, hoisting sums of data as needed; `runs`: argument leaf → number of runs of samples."""
    dims = sized.traced.batch.dims
    while True:
        full = pair.full
        cut = {
            v: runs[part.leaf] for v, part in zip(pair.graph.inputs, full.input_parts, strict=True) if part.leaf in runs
        }
        # Values are hoisted once: without inputs of data, the next proof hoists nothing and ends the loop.
        data = inputs_of_data(pair.graph, full.input_parts, dims) if pair.precomputed is None else frozenset[int]()
        found = prove(full.program, pair.other.program, num_microbatches, of_data=data, runs=cut)
        if not found.hoisted or found.refusals:
            return _Exact(pair=pair, proof=found, runs=runs)
        first = len(dims) + len(full.program.constants)
        pair = sized.driver.run(pair, (HoistValues(values=tuple(found.hoisted), first_leaf=first),))


def _cut_exactly(sized: SizedPrograms, exact: _Exact, num_microbatches: int) -> TracedStep:
    """Return the step in micro-batches whose proof succeeded."""
    full, other, proof, traced = exact.pair.full, exact.pair.other, exact.proof, sized.traced
    whole, small = full.graph, other.graph
    merged = sized.driver.made("merge sizes", lambda: merge(full.program, other.program, proof.marks))
    batch = batch_dims(whole, small)
    loop = loop_ops(whole, batch)
    made = _step(
        sized,
        full,
        program=merged,
        loop=loop,
        batch_dims=batch,
        num_microbatches=num_microbatches,
        batch=StepBatch(size=traced.batch.size),
        bodies=body_scopes(merged.graph, whole, small),
        loop_results=LoopResults(
            combined={r: c for i in loop for r in whole.ops[i].results if (c := _combined(proof.relations[r]))},
            runs={
                v: proof.relations[v].blocks or 1 for v in whole.outputs if proof.relations[v].blocks not in (None, 1)
            },
        ),
    )
    runs = {leaf: (traced.batch.dims[leaf] or 0, count) for leaf, count in exact.runs.items()}
    return replace(made, precomputed=exact.pair.precomputed, runs=runs)


def _combined(relation: Relation) -> Combination | None:
    """Return how a value without batch dim is combined over micro-batches; None if it is summed."""
    return {
        RelationKind.INVARIANT: Combination.SAME,
        RelationKind.MAX: Combination.MAX,
        RelationKind.MIN: Combination.MIN,
    }.get(relation.kind)


def _refuse_effects(pair: TwoSizes) -> None:
    """Raise `NonAdditiveError` if an op with an effect would run once per micro-batch."""
    graph = pair.graph
    if not any(op.effectful for op in graph.ops):
        return
    loop = loop_ops(graph, batch_dims(graph, pair.other.graph))
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


def _cut(sized: SizedPrograms, pair: TwoSizes, num_microbatches: int) -> TracedStep:
    """Return the step as one micro-batch, or as micro-batches whose results are averaged."""
    full, whole, small = pair.full, pair.full.graph, pair.other.graph
    batch = batch_dims(whole, small)
    loop = loop_ops(whole, batch)
    averaged = num_microbatches > 1
    if averaged:
        _refuse_effects(pair)
        # A micro-batch has its own loss, which is averaged, rather than the loss of the averages.
        loop = with_differentiated(whole, loop)
    # An averaged micro-batch runs the step of its own size, with its literals; a single one is the full batch.
    chosen = _repeated(pair, batch, num_microbatches) if averaged else bodies_apart(full.program, pair.other.program)
    return _step(
        sized,
        full,
        program=chosen,
        loop=loop | effects_before(whole, loop),
        batch_dims=batch,
        num_microbatches=num_microbatches,
        batch=StepBatch(size=sized.traced.batch.size),
        bodies=body_scopes(chosen.graph, whole, small),
        loop_results=LoopResults(averaged=averaged),
    )


def _repeated(pair: TwoSizes, batch: Sequence[int | None], num_microbatches: int) -> GraphWithEquations:
    """Return the program of a micro-batch, whose captured arrays are those of each micro-batch, one after another."""
    program = pair.other.program
    first = len(program.graph.inputs) - len(program.constants)
    constants = [
        array if dim is None else _library(array).concatenate([array] * num_microbatches, axis=dim)
        for array, dim in zip(program.constants, (batch[v] for v in program.graph.inputs[first:]), strict=True)
    ]
    return replace(program, constants=tuple(constants))


def _library(array: Array) -> Any:
    """Return the library of an array: arrays of JAX have a sharding, arrays of NumPy stay on the host."""
    return jnp if hasattr(array, "sharding") else np


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
