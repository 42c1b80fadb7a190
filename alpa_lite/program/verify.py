"""The invariants of graphs. A violation is a defect of alpa_lite, reported by the pass that introduced it."""

from __future__ import annotations

from alpa_lite.errors import VerificationError
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.wiring import wiring_of


def verify(graph: Graph) -> Graph:
    """Return the graph unchanged, or raise `VerificationError` if it is not well formed.

    Ids must be dense and in order. Every value must have exactly one origin (an input, a literal or one op) and be
    defined before it is read. Each body of control flow must have as many inputs and outputs as its wiring.
    """
    for numbered, what in ((graph.values, "value"), (graph.ops, "op")):
        for position, item in enumerate(numbered):
            if item.id != position:
                raise VerificationError(f"The {what} at position {position} has the number {item.id}.")
    verified = set[Graph]()
    known = set(graph.inputs) | {v.id for v in graph.values if v.literal is not None}
    for op in graph.ops:
        unmade = [str(graph.values[v]) for v in op.operands if v not in known]
        if unmade:
            raise VerificationError(f"op {op.id} ({op.primitive}, {op.source}) reads {unmade} before they are made.")
        twice = [str(graph.values[r]) for r in op.results if r in known]
        if twice:
            raise VerificationError(f"op {op.id} ({op.primitive}, {op.source}) makes {twice}, which exist already.")
        known.update(op.results)
        _verify_bodies(op, verified)
    missing = [str(graph.values[v]) for v in graph.outputs if v not in known]
    if missing:
        raise VerificationError(f"The outputs {missing} are never made.")
    return graph


def _verify_bodies(op: Op, verified: set[Graph]) -> None:
    """Verify the bodies of an op and add them to `verified`; bodies in `verified` are skipped.

    Ops may share one body object: without the set, nested shared bodies would be verified exponentially often.
    """
    wiring = wiring_of(op)
    for body, inputs, outputs in zip(op.bodies, wiring.inputs, wiring.outputs, strict=True) if wiring else ():
        if body not in verified:
            verified.add(verify(body))
        if (len(body.inputs), len(body.outputs)) != (len(inputs), len(outputs)):
            raise VerificationError(
                f"A body of the {op.primitive} op {op.id} takes {len(body.inputs)} values and makes "
                f"{len(body.outputs)}, where {len(inputs)} and {len(outputs)} are handed over."
            )
