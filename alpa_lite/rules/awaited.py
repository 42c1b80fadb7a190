"""What is waited for where a program must not compute something ahead of its time.

A recomputation reads what was there since the forward pass, so that a compiler could run all of them when the backward
pass begins. So could the first trip of a loop of the backward pass, which XLA:GPU takes out of loops whose trips run
collectives. And what the update alone reads, gradients of weights and the loss, could be made at the end of the
backward pass, for which what the recomputations made, and the logits, stay in memory. So programs are tied:

    recomputation n     starts after the latest result of the backward pass before it,
                        and after what was made before recomputation n - 1 and nothing has read since
    loop                starts after the latest result of the backward pass before it,
                        and after all that was made before it and nothing has read since          (awaited_values)

What was made since recomputation n - 1 is not waited for, so that its collectives overlap with recomputation n. A loop
is as long as many of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa_lite.program.ir import TO_DEVICE, Graph, Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_ops

HANDS_BACK = frozenset(("optimization_barrier", TO_DEVICE))
"""Primitives by which values of the forward pass come to ops of the backward pass that recompute others."""


def awaited_result(graph: Graph, op: Op) -> int | None:
    """Return the position of the result of an op that other values can be made to wait for; None without one.

    It is the first one of floating-point numbers that has elements (`lower.local_machine.once_there`). Free ops run
    when a reader needs them, so that there is nothing to wait for.
    """
    return next((i for i, v in enumerate(op.results) if _can_be_awaited(graph, op, v)), None)


def _can_be_awaited(graph: Graph, op: Op, result: int) -> bool:
    value = graph.values[result]
    return op.id not in free_ops(graph) and value.is_float and value.num_elements > 0 and not value.on_host


def waiting_operands(step: StepGraph, op: Op) -> Sequence[int]:
    """Return the numbers of the operands of an op that it hands back, and so may wait for others; none for most ops.

    They are values of the forward pass and of the batch, and those that other ops hand back to a loop.
    """
    loops = step.phases[op.id] is Phase.BACKWARD and op.primitive == "scan"
    if not loops and op.primitive not in HANDS_BACK:
        return ()
    graph, found = step.graph, list[int]()
    for i, v in enumerate(op.operands):
        producer = graph.producer[v]
        if producer is None:
            waits = step.batch_dims[v] is not None
        else:
            handed_on = loops and graph.ops[producer].primitive in HANDS_BACK
            waits = handed_on or step.phases[producer] is not Phase.BACKWARD
        found += [i] if waits else []
    return found


def awaited_values(step: StepGraph, ops: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return for ops of a program that hand values back, and for loops, the values that they wait for.

    See the module docstring. `ops`: those of the program, in order. The latest result comes first.
    """
    graph, found = step.graph, dict[int, tuple[int, ...]]()
    unread = dict[int, int]()  # value → number of recomputations before it was made
    latest, number, has_result = -1, 0, False
    for op_id in ops:
        op, phase = graph.ops[op_id], step.phases[op_id]
        # The update stands between ops of the backward pass, but runs after them.
        if phase is Phase.UPDATE:
            continue
        if latest >= 0 and waiting_operands(step, op):
            number, has_result = number + has_result, False
            older = [v for v, made in unread.items() if (op.bodies or made < number - 1) and v != latest]
            found[op_id] = latest, *older
            for value in older:
                del unread[value]
        for value in op.operands:
            unread.pop(value, None)
        # A barrier only names a saved value anew: who waits for it would keep that in memory.
        made = () if op.primitive in HANDS_BACK else _awaited_results(step, op)
        unread.update(dict.fromkeys(made, number))
        if phase is Phase.BACKWARD and made:
            latest, has_result = made[0], True
    return found


def _awaited_results(step: StepGraph, op: Op) -> Sequence[int]:
    """Return the results of an op that recomputations may have to wait for: of the forward pass, what is not saved."""
    graph, phases = step.graph, step.phases
    made = [v for v in op.results if _can_be_awaited(graph, op, v)]
    if phases[op.id] is Phase.BACKWARD:
        return made[:1] if op.bodies else made  # all results of a loop are there at once
    only = phases[op.id] is Phase.FORWARD
    return [v for v in made if only and all(phases[c] is Phase.UPDATE for c in graph.consumers[v])]
