"""The part of a stage's backward pass that no other stage waits for: mostly the gradients of its weights.

    input part     backward ops from which a value of another stage's loop descends
    weight part    the other backward ops of the stage                                       (`weight_gradient_ops`)

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR'24), section 2, for any graph: the data flow decides.
"""

from __future__ import annotations

from collections.abc import Iterable

from alpa_lite.program.phases import Phase, StepGraph


def weight_gradient_ops(step: StepGraph, ops: Iterable[int]) -> frozenset[int]:
    """Of the ops of a stage, by number, the backward ones that nothing in the loop of another stage waits for."""
    graph, phases = step.graph, step.phases
    mine = sorted(o for o in ops if phases[o] is Phase.BACKWARD)
    awaited, here = set[int](), frozenset(mine)
    for op_id in reversed(mine):
        readers = (c for r in graph.ops[op_id].results for c in graph.consumers[r])
        if any(c in awaited or (c not in here and phases[c].in_loop) for c in readers):
            awaited.add(op_id)
    return here - awaited
