"""A lower bound on the memory of a stage, before its strategies are known: most stages that do not fit are told by it.

    at its peak a device holds at least                                                              `least_peak_bytes`
        max over times t of the bytes of all values that are alive at t, divided by the number n of devices

Proof: the problem of a stage counts each of these values as one device's block of it, for the time of its life
(`usages`). A spec splits each dim over axes of its own, so that a block is no smaller than an n-th of the value. What
is left out here, gradients that are summed and copies, only adds to the peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from alpa_lite.intra_op.liveness import LiveSpan
from alpa_lite.intra_op.one_trip_loops import Path, body_at
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.intra_op.usages import stage_lives
from alpa_lite.program.ir import Value, is_one_trip_loop
from alpa_lite.rules.fusion import is_folded
from alpa_lite.rules.op_info import free_values


def least_peak_bytes(view: StageView, catalogue: Catalogue, in_flight: int) -> float:
    """Return the least bytes per device that any choice for a stage takes at its peak.

    `in_flight`: the number of micro-batches whose saved values are held then.
    """
    lives, graph = stage_lives(view, catalogue), view.graph
    curve = np.zeros(lives.end + 1)

    def add(value: Value, span: LiveSpan, copies: float = 1.0) -> None:
        # What lies in the memory of the host takes none of the device's.
        if not value.on_host:
            size = copies * value.bytes
            curve[span.start] += size
            curve[min(span.end, lives.end)] -= size

    for v in view.external:
        if graph.producer[v] is None and view.step.batch_dims[v] is None:
            add(graph.values[v], LiveSpan(0, lives.end))
    sums = frozenset(_written_of_sums(view))
    for life in lives.lives:
        body = body_at(graph, life.path)
        # What every device computes for itself is not stored.
        if (life.path, life.value) not in sums and life.value not in free_values(body):
            add(body.values[life.value], LiveSpan(life.start, life.end))
            if life.saved:
                add(body.values[life.value], LiveSpan(0, lives.loop_end), in_flight - 1.0)
    return float(np.cumsum(curve).max(initial=0.0)) / prod(catalogue.sizes.values())


def _written_of_sums(view: StageView) -> Iterator[tuple[Path, int]]:
    """Yield the values that a loop sums over micro-batches, and what ops write of them, each with its body.

    Others may rename it, or be loops of one trip, which XLA removes.
    """
    for crossing in view.crossing:
        path: Path = ()
        value = crossing
        while True:
            yield path, value
            graph = body_at(view.graph, path)
            op = None if (producer := graph.producer[value]) is None else graph.ops[producer]
            if op is None:
                break
            if op.bodies and is_one_trip_loop(op):
                path, value = (*path, (op.id, 0)), op.bodies[0].outputs[op.results.index(value)]
            elif len(op.operands) == 1 and is_folded(graph, op):
                (value,) = op.operands
            else:
                break
