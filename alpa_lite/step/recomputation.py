"""Which values a step recomputes in its backward pass, and which ones a layer may be told to recompute.

Values that the step recomputes as it is written: backward ops that compute a forward value again (`originals`). These
are recognised by structure (value numbering): the same primitive with the same parameters on the same operands, where
an `optimization_barrier` is the identity. Names and source lines are ignored.

Values that `rematerialisation` lets a layer recompute follow from a policy (`Remat`). Values that other layers read are
stored in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from enum import StrEnum

from alpa_lite.program.identity import FirstUses, value_numbers
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import rule_of_op


@memoized
def originals(step: StepGraph) -> dict[int, tuple[int, ...]]:
    """Return for each backward value that recomputes forward values the ids of these, in program order."""
    graph, found, before = step.graph, dict[int, tuple[int, ...]](), dict[int, list[int]]()
    numbers = value_numbers(graph, graph.inputs, FirstUses[Hashable]())
    inputs = {numbers[v]: v for v in graph.inputs}
    for op in graph.ops:
        phase = step.phases[op.id]
        for result in op.results if phase is not Phase.UPDATE else ():
            number = numbers[result]
            if phase is not Phase.BACKWARD:
                before.setdefault(number, []).append(result)
            elif number in before:
                found[result] = tuple(before[number])
            # A barrier around an input hands on the input itself.
            elif number in inputs:
                found[result] = (inputs[number],)
    return found


def read_originals_across(step: StepGraph, of_op: Sequence[int | None]) -> StepGraph:
    """Return the step in which recomputed values are read within their own layer only.

    Other layers read the forward values, which the forward pass sent to them anyway. Otherwise stages could deadlock:
    the recomputation runs up the layers while the backward pass runs down, so that a stage could not start its backward
    pass before the stage below it, which in turn waits for it.

    Args:
        step: the step.
        of_op: the layer of each op, None for ops without a layer.
    """
    graph, known = step.graph, originals(step)

    def layer_of(value: int) -> int:
        producer = graph.producer[value]
        layer = of_op[producer] if producer is not None else None
        return -1 if layer is None else layer

    def source(value: int, here: int) -> int:
        if value not in known or not 0 <= layer_of(value) < here:
            return value
        # Of several equal values, that of the nearest layer.
        return max((v for v in known[value] if layer_of(v) <= here), key=layer_of, default=value)

    ops: list[Op] = []
    for op in graph.ops:
        here = of_op[op.id]
        if step.phases[op.id] is Phase.BACKWARD and here is not None:
            operands = tuple(source(v, here) for v in op.operands)
            ops.append(op if operands == op.operands else replace(op, operands=operands))
        else:
            ops.append(op)
    # The same object, so that the tables that are cached on it remain in use.
    if all(a is b for a, b in zip(ops, graph.ops, strict=True)):
        return step
    rewired = Graph(values=graph.values, ops=tuple(ops), inputs=graph.inputs, outputs=graph.outputs)
    return replace(step, graph=rewired)


class Remat(StrEnum):
    """The values that the backward pass of a layer recomputes, and where it stores the others.

    NONE        nothing: the step as it is written
    SELECTIVE   all but results of contractions with weights (those of attention have few FLOPs and large results)
    FULL        everything: the layer stores only its inputs
    OFFLOAD     as SELECTIVE; what is stored waits for the backward pass in the memory of the host
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    OFFLOAD = "offload"

    @property
    def recomputed(self) -> Remat:
        """The policy that recomputes the same values and stores all others on the device."""
        return Remat.SELECTIVE if self is Remat.OFFLOAD else self


RECOMPUTING = (Remat.NONE, Remat.SELECTIVE, Remat.FULL)
"""The policies that use no memory of the host."""


def keeps_results(policy: Remat, graph: Graph, op: Op, batch_dims: Sequence[int | None]) -> bool:
    """Return whether a layer stores the results of a forward op instead of recomputing them."""
    if op.effectful:
        return True
    if policy is not Remat.SELECTIVE:
        return policy is Remat.NONE
    if op.bodies:
        # The results of a loop or branch are stored or recomputed as a whole.
        return any(_is_contraction(body, inner) for outer in op.bodies for body, inner in outer.walk())
    weights = (v for v in graph.operands(op) if batch_dims[v.id] is None and v.is_float and v.rank > 1)
    return _is_contraction(graph, op) and any(weights)


def _is_contraction(graph: Graph, op: Op) -> bool:
    return not op.bodies and rule_of_op(graph, op.id).work_kind != "elementwise"
