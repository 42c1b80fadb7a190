"""Find out what the first trip of a loop computes before the loop begins, where XLA:GPU takes that trip out.

Where gradients are reduce-scattered in the trips of a loop, XLA lets those of one trip run beside the kernels of the
next one (collective pipelining), for which it takes a trip out of the loop of the backward pass. What that trip
computes again from saved values waits for no gradient: it runs as soon as the forward pass is over, and lies beside
the logits until the trip reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alpa_lite.program.ir import Op, wiring_of

if TYPE_CHECKING:
    from alpa_lite.intra_op.stored_values import StoredValues


def early_values(body: StoredValues, loop: Op, there: Sequence[int]) -> dict[int, int]:
    """Return from when on values of the body of a loop are in memory that its first trip computes early.

    They are those that a kernel writes, and that what waits for the gradient reads, which is what one trip passes to
    the next. `there`: when each operand of the loop is in memory.
    """
    wiring, graph = wiring_of(loop), body.graph
    if loop.primitive != "scan" or wiring is None:
        return {}
    carried = frozenset(wiring.carried.values())
    times = {v: there[i] for v, i in zip(graph.inputs, wiring.inputs[0], strict=True) if i not in carried}
    for op in graph.ops:
        given = [v for v in op.operands if graph.values[v].literal is None]
        if all(v in times for v in given):
            times.update(dict.fromkeys(op.results, max([times[v] for v in given], default=0)))
    read = set[int]()
    for op in reversed(graph.ops):
        # What is not written is computed again by the kernels that read it.
        if any(r not in times or (r in read and r not in body.written) for r in op.results):
            read.update(op.operands)
    return {r: times[r] for op in graph.ops for r in op.results if r in times and r in read and r in body.written}
