"""Whether a step is a sum over its samples, so that it can be computed micro-batch by micro-batch.

The rules of the primitives tell where the batch is kept (PASS) and where it is summed (REDUCTION). Inside the loop each
op must do one or the other (`check_additive`), and what was summed must not be used again per sample
(`refuse_feedback`).
"""

from __future__ import annotations

from alpa_lite.errors import NonAdditiveError
from alpa_lite.graph.ir import Graph, Op
from alpa_lite.graph.kept import kept
from alpa_lite.graph.phases import batch_dims, reduced_results
from alpa_lite.graph.wiring import Wiring, wiring_of
from alpa_lite.rules import FactorKind, Rule
from alpa_lite.rules.graph_facts import is_zero, rule_of_op

ACCEPT = 'accept the mean of what the micro-batches give by themselves, with on_non_additive="mean_of_means"'


def refuse_effects(graph: Graph, loop: set[int]) -> None:
    """An op with an effect must not run once per micro-batch."""
    for op in graph.ops:
        if op.id in loop and op.effectful:
            raise NonAdditiveError(
                f"{op.source}: {op.primitive} would be called once per micro-batch, on its samples, instead of once. "
                "Move it to where the loss and the gradients are known, or use num_microbatches=1."
            )


def refuse_feedback(feedbacks: list[tuple[Op, Op]]) -> None:
    """What was reduced over the batch must not be used per sample; pairs of a reduction and its reader."""
    for reduction, reader in feedbacks:
        raise NonAdditiveError(
            f"{reduction.source}: a value that was reduced over the batch ({reduction.primitive}) is used again per "
            f"sample at {reader.source} ({reader.primitive}); batch norm does this, and a loss over a denominator that "
            "parameters decide. The step is then no sum over its samples, and micro-batches would change it. Use "
            f"num_microbatches=1, make the statistic independent of the batch (e.g. divide by a constant), or {ACCEPT}."
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
        if i == 0 and _writes_along(op, dim, batch, positions):
            _refuse(graph, op, "writes to samples of the batch by their numbers")
    if any(batch[v] is not None for v in op.operands):
        _check_scatter(graph, op, batch)
    elif op.primitive not in _POSITION_SOURCES:
        _check_source(graph, op, batch, rule)


def _writes_along(op: Op, dim: int, batch: tuple[int | None, ...], positions: set[int]) -> bool:
    """Whether an op writes to some samples by their numbers: blocks of an array on devices know theirs, but each
    micro-batch would have them."""
    if op.primitive == "dynamic_update_slice":
        return batch[op.operands[1]] != dim
    if not op.primitive.startswith("scatter") or op.operands[1] in positions:
        return False
    return dim in op.params["dimension_numbers"]["scatter_dims_to_operand_dims"]


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
        f"would change it. Use num_microbatches=1, rewrite this line per sample, or {ACCEPT}."
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
