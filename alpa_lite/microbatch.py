"""From a traced step to a `StepGraph` at a number of micro-batches, refusing steps that are no sum over samples.

    full batch trace ─┐
                      ├─ same ops? ─ batch dims ─ loop / update ─ additive? ─▶ StepGraph (+ equations)
    micro-batch trace ┘

The rules of the primitives say where the batch is kept (PASS) and where it is summed (REDUCTION): see check_additive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.garbage import rare_collection
from alpa_lite.graph.equations import Equation
from alpa_lite.graph.ir import Graph, Op
from alpa_lite.graph.kept import kept
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
    reduced_results,
    require_same_position,
    with_own_bodies,
)
from alpa_lite.graph.verify import verify
from alpa_lite.graph.wiring import Wiring, wiring_of
from alpa_lite.one_sample import (
    batch_of_one,
    extrapolated,
    full_in_parts,
    in_parts,
    over_samples,
    program_of,
    traces_alike,
)
from alpa_lite.rules import FactorKind, Rule
from alpa_lite.rules.batch_flow import follow_batch
from alpa_lite.rules.graph_facts import is_zero, rule_of_op
from alpa_lite.stacks import PartedProgram
from alpa_lite.trace import Traced


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step at a number of micro-batches: its graph, the equations of its ops, and captured arrays."""

    step: StepGraph
    equations: tuple[Equation, ...]
    constants: tuple[Any, ...]


@rare_collection()
def split_step(traced: Traced, num_microbatches: int, *, loop_parts: int = 0) -> TracedStep:
    """The step cut into phases for `num_microbatches`.

    Loops over layers are cut into at least `loop_parts` loops, with what they scan; 0 keeps them as they are.

    Raises `BatchError` when the batch is unknown or not divided, `NonAdditiveError` when micro-batches would change
    the meaning of the step.
    """
    if num_microbatches != 1:
        sizes: tuple[int, ...] = (_microbatch_size(traced, num_microbatches),)
    else:
        sizes = () if traced.batch_size is None else _probe_sizes(traced.batch_size)
    problem = traced.batch_problem
    for size in sizes:
        try:
            full, other = _at_two_sizes(traced, size, loop_parts)
            batch = batch_dims(full.program.graph, other.program.graph, allow_pairs=num_microbatches == 1)
        except Exception as error:
            if num_microbatches > 1:
                raise _as_trace_error(error, traced, size) from error
            problem = f"The batch was lost: {error}"
        else:
            verify(full.program.graph)
            return _with_batch(traced, full, other, batch, num_microbatches, loop_parts)
    return _at_one_size(traced, full_in_parts(traced, loop_parts, frozenset()), loop_parts, problem)


def _at_two_sizes(traced: Traced, size: int, loop_parts: int) -> tuple[PartedProgram, PartedProgram]:
    """The programs at the full batch and at another size, which are the same program."""
    if size == 1 and not traces_alike(traced, size):
        loops = over_samples(traced, loop_parts)
        program = extrapolated(traced, loop_parts)[size]
    else:
        loops = over_samples(traced, loop_parts, (traced.require_batch(), size))
        program = program_of(traced, traced.at_batch_size(size), loop_parts, loops)
    full, other = full_in_parts(traced, loop_parts, loops), in_parts(traced, program, loop_parts)
    check_same_structure(full.program.graph, other.program.graph)
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
) -> TracedStep:
    whole, small = full.program.graph, other.program.graph
    loop, feedbacks = loop_ops(whole, batch)
    iotas = frozenset[int]()
    early = effects_before(whole, loop)
    if num_microbatches > 1:
        _refuse_effects(whole, loop | early)
        _refuse_feedback(feedbacks)
        require_same_position(whole, batch, batch_position(whole, batch))
        iotas = local_iotas(whole, batch)
        check_additive(whole, small, batch, loop, iotas)
    chosen = other if num_microbatches > 1 else full
    graph = merge_literals(chosen.program.graph, whole, at_another_size=small)
    step = StepGraph(
        graph=graph,
        full_shapes=tuple(v.shape for v in whole.values),
        batch_dims=batch,
        phases=assign_phases(graph, loop | early, batch),
        num_microbatches=num_microbatches,
        batch_size=traced.batch_size,
        bodies=body_scopes(graph, whole, small, allow_pairs=num_microbatches == 1),
        local_iotas=iotas,
        input_parts=full.input_parts,
        output_parts=full.output_parts,
        aliases=_aliases(traced, full),
        loop_parts=loop_parts,
    )
    return TracedStep(step=step, equations=chosen.program.equations, constants=full.program.constants)


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


def _refuse_effects(graph: Graph, loop: set[int]) -> None:
    for op in graph.ops:
        if op.id in loop and op.effectful:
            raise NonAdditiveError(
                f"{op.source}: {op.primitive} would be called once per micro-batch, on its samples, instead of once. "
                "Move it to where the loss and the gradients are known, or use num_microbatches=1."
            )


def _refuse_feedback(feedbacks: list[tuple[Op, Op]]) -> None:
    for reduction, reader in feedbacks:
        raise NonAdditiveError(
            f"{reduction.source}: a value that was reduced over the batch ({reduction.primitive}) is used again per "
            f"sample at {reader.source} ({reader.primitive}); batch norm and losses such as sum(loss)/sum(mask) do "
            "this. The step is then no sum over its samples, and micro-batches would change it. Use "
            "num_microbatches=1, or make the statistic independent of the batch (e.g. divide by a constant)."
        )


def check_additive(
    full: Graph, other: Graph, batch: tuple[int | None, ...], loop: set[int], iotas: frozenset[int]
) -> None:
    """Every op of the loop keeps the batch or sums it; anything else is refused with the user's line."""
    positions = _reaches(full, {r for i in iotas for r in full.ops[i].results})
    for op in full.ops:
        if op.id not in loop:
            continue
        wiring = wiring_of(op)
        if wiring is None:
            _check_op(full, op, batch, positions)
        else:
            _check_bodies(full, op, other.ops[op.id], wiring)
            _check_unreduced(full, op, batch, loop)


def _check_op(graph: Graph, op: Op, batch: tuple[int | None, ...], positions: set[int]) -> None:
    rule = rule_of_op(graph, op.id)
    for i, operand in enumerate(op.operands):
        dim = batch[operand]
        if dim is None:
            continue
        for factor in rule.operands[i][dim]:
            kind = rule.kinds[factor]
            adds_up = kind is FactorKind.REDUCTION and rule.reduction == "sum" and not rule.has_halo(factor)
            if kind is not FactorKind.PASS and not adds_up:
                _refuse(graph, op, "mixes the samples of the batch")
        if _is_indexed(op) and i == 0 and op.operands[1] not in positions and not _passes(rule, i, dim):
            _refuse(graph, op, "picks samples of the batch by computed numbers")
    if any(batch[v] is not None for v in op.operands):
        _check_scatter(graph, op, batch)
    elif op.primitive not in _POSITION_SOURCES:
        _check_source(graph, op, batch, rule)


def _is_indexed(op: Op) -> bool:
    return op.primitive == "gather" or op.primitive.startswith("scatter")


def _check_scatter(graph: Graph, op: Op, batch: tuple[int | None, ...]) -> None:
    """What samples are added to must be zero at first, or it would be counted once per micro-batch."""
    sums = any(batch[r] is None for r in op.results)
    if sums and op.primitive.startswith("scatter") and not is_zero(graph, op.operands[0]):
        _refuse(graph, op, "adds samples to a value that is not zero at first")


def _check_source(graph: Graph, op: Op, batch: tuple[int | None, ...], rule: Rule) -> None:
    """An array made as large as the batch must be the same for every sample."""
    for i, result in enumerate(op.results):
        dim = batch[result]
        factors = rule.results[i][dim] if dim is not None else ()
        if any(rule.kinds[f] is not FactorKind.PASS and rule.sizes[f] > 1 for f in factors):
            _refuse(graph, op, "makes an array whose size follows the batch")


_POSITION_SOURCES = frozenset(("iota", "random_bits", "random_split", "broadcast_in_dim", "empty"))


def _passes(rule: Rule, operand: int, dim: int) -> bool:
    return all(rule.kinds[f] is FactorKind.PASS for f in rule.operands[operand][dim])


def _refuse(graph: Graph, op: Op, what: str) -> None:
    shapes = ", ".join(str(list(v.shape)) for v in graph.operands(op))
    raise NonAdditiveError(
        f"{op.source}: {op.primitive} of {shapes} {what}, so the step is no sum over its samples and micro-batches "
        "would change it. Use num_microbatches=1, or rewrite this line per sample."
    )


def _reaches(graph: Graph, start: set[int]) -> set[int]:
    reached = set(start)
    for op in graph.ops:
        if any(v in reached for v in op.operands):
            reached.update(op.results)
    return reached


def _check_bodies(graph: Graph, op: Op, other: Op, wiring: Wiring) -> None:
    """Control flow whose bodies sum over the batch: carried sums start from zero and stay linear to the end."""
    summed: set[int] = set()  # numbers of the carried operands that turn into sums
    while True:
        made = _made_of_sums(op, other, wiring, summed, all_known=False)
        new = {wiring.carried[r] for body in made for r in body if r in wiring.carried} - summed
        if not new:
            break
        summed |= new
    # A predicate made from sums is refused on the way: comparing is not linear.
    made = _made_of_sums(op, other, wiring, summed, all_known=True)
    for body, outputs, own in zip(op.bodies, wiring.outputs, made, strict=True):
        # A gradient is zero where the other branch was taken; anything else would be counted once per micro-batch.
        unlike = {r for sums in made for r in sums} - wiring.carried.keys() - own
        if any(r in unlike and not is_zero(body, v) for v, r in zip(body.outputs, outputs, strict=True)):
            _refuse(graph, op, "sums over the batch in one branch and makes something else in another")
    if not all(is_zero(graph, op.operands[i]) for i in summed):
        _refuse(graph, op, "adds sums over the batch to a carried value that is not zero at first")


def _made_of_sums(op: Op, other: Op, wiring: Wiring, summed: set[int], *, all_known: bool) -> list[set[int]]:
    """Per body the results that are sums over the batch, when the operands `summed` are."""
    found: list[set[int]] = []
    for body, small, inputs, outputs in zip(op.bodies, other.bodies, wiring.inputs, wiring.outputs, strict=True):
        entering = frozenset(v for v, i in zip(body.inputs, inputs, strict=True) if i in summed)
        sums = _sums_in_body(body, small, entering, all_known=all_known)
        found.append({r for v, r in zip(body.outputs, outputs, strict=True) if r is not None and v in sums})
    return found


def _check_unreduced(graph: Graph, op: Op, batch: tuple[int | None, ...], loop: set[int]) -> None:
    """What a loop or branch makes without the batch is the same for each micro-batch: it must not be summed up."""
    same = set(op.results) - set(reduced_results(op, batch)) - {r for r in op.results if batch[r] is not None}
    for r in same:
        if r in graph.outputs or any(c not in loop for c in graph.consumers[r]):
            _refuse(graph, op, "also makes a value that does not depend on the batch and is used after the loop")


@kept
def _sums_in_body(body: Graph, small: Graph, entering: frozenset[int], *, all_known: bool) -> frozenset[int]:
    """Values of a body that are sums over the batch, given those that enter as such.

    What is not linear in sums is refused once `all_known`: an accumulator may turn out to be a sum only later.
    """
    batch, sums = batch_dims(body, small), set(entering)
    for op in body.ops:
        partial = [i for i, v in enumerate(op.operands) if v in sums]
        if any(batch[v] is not None for v in (*op.operands, *op.results)):
            if partial:
                _refuse(body, op, "uses a sum over the batch again per sample")
            wiring = wiring_of(op)
            if wiring is None:
                _check_op(body, op, batch, set())
            else:
                _check_bodies(body, op, small.ops[op.id], wiring)
            if any(batch[v] is not None for v in op.operands):
                sums.update(reduced_results(op, batch))
        elif partial:
            groups = rule_of_op(body, op.id).linear
            zeros = {i for i, v in enumerate(op.operands) if is_zero(body, v)}
            if all_known and not any(set(partial) <= set(g) and set(g) <= set(partial) | zeros for g in groups):
                _refuse(body, op, "is not linear in a sum over the batch")
            sums.update(op.results)
    return frozenset(sums)
