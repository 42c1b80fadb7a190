"""Count the FLOPs of a step by dtype: those that its results need, without what its backward pass computes again.

    needed  =  sum over ops of  runs · FLOPs,  but for recomputed ops                                   `needed_flops`

Model FLOPs utilisation is defined by these (Chowdhery et al., "PaLM", 2022, appendix B), hardware FLOPs utilisation by
those that devices execute. Recomputed ops are found by structure, as `step.recomputation` finds them; in loops over
layers, where a trip of the backward loop repeats ops of the forward trip to which it belongs, by the same comparison
of the two bodies (`_repeated_ops`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from alpa_lite.program.identity import FirstUses, value_numbers
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.step.recomputation import originals


@memoized
def needed_flops(step: StepGraph) -> Mapping[str, float]:
    """Return the FLOPs of one step at the full batch, by the dtype of the operands."""
    found: dict[str, float] = {}
    for graph, op, runs, is_again in executed_ops(step):
        flops = 0.0 if is_again else rule_of_op(graph, op.id).flops
        if flops:
            floats = (value.dtype for value in graph.operands(op) if value.is_float)
            dtype = next(floats, "float32")
            found[dtype] = found.get(dtype, 0.0) + runs * flops
    return found


class ExecutedOp(NamedTuple):
    """An op without a body: its graph, how often it runs in a step, and whether it computes a forward value again."""

    graph: Graph
    op: Op
    runs: float
    is_again: bool


def executed_ops(step: StepGraph) -> Iterator[ExecutedOp]:
    """Yield the ops of a step, those of its loops and branches included."""
    again, repeated = originals(step), _repeated_ops(step)

    def inside(graph: Graph, op: Op, runs: float, is_again: bool) -> Iterator[ExecutedOp]:
        wiring = wiring_of(op)
        if wiring is None:
            yield ExecutedOp(graph, op, runs, is_again)
            return
        for body in op.bodies:
            for inner in body.ops:
                inner_again = is_again or inner.id in repeated.get(body, ())
                yield from inside(body, inner, runs * wiring.trips, inner_again)

    for op in step.graph.ops:
        is_again = bool(op.results) and all(result in again for result in op.results)
        yield from inside(step.graph, op, step.runs_of(op), is_again)


def _repeated_ops(step: StepGraph) -> dict[Graph, set[int]]:
    """Return for each body of a backward loop its ops that repeat those of the forward loop whose rows it reads."""
    found: dict[Graph, set[int]] = {}
    forward = {op.id: op for op in step.graph.ops if _is_loop(step, op, Phase.FORWARD)}
    for op in step.graph.ops:
        if not _is_loop(step, op, Phase.BACKWARD):
            continue
        producers = [step.graph.producer[v] for v in op.operands]
        for loop in dict.fromkeys(p for p in producers if p in forward):
            assert loop is not None
            found.setdefault(op.bodies[0], set()).update(_shared_ops(forward[loop], op))
    return found


def _is_loop(step: StepGraph, op: Op, phase: Phase) -> bool:
    return op.primitive == "scan" and step.phases[op.id] is phase


def _shared_ops(forward: Op, backward: Op) -> set[int]:
    """Return the ops of the backward body that compute what a trip of the forward body has computed."""
    names = FirstUses[Hashable]()
    first, second = forward.bodies[0], backward.bodies[0]
    wiring = wiring_of(forward)
    assert wiring is not None
    numbers = value_numbers(first, _keys(forward), names)
    made = {numbers[result] for op in first.ops for result in op.results}
    # A row of what the forward loop stacked is the value that its body returned.
    rows = {forward.results[r]: numbers[first.outputs[r]] for r in wiring.stacked}
    for operand, key in zip(backward.operands, _keys(backward), strict=True):
        if operand in rows and key[0] == "row":
            names["input", key] = rows[operand]
    again = value_numbers(second, _keys(backward), names)
    return {op.id for op in second.ops if op.results and all(again[result] in made for result in op.results)}


def _keys(loop: Op) -> list[tuple[str, int]]:
    """Return a key of each input of the body of a loop: equal keys stand for equal arrays in corresponding trips."""
    wiring = wiring_of(loop)
    assert wiring is not None
    carried = set(wiring.carried.values())
    return [
        # A carried value is another one in each loop.
        (f"carry of {loop.id}", i) if i in carried else ("row" if i in wiring.scanned else "whole", operand)
        for i, operand in enumerate(loop.operands)
    ]
