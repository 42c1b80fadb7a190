"""The values of a step that are there before its loop begins and that no micro-batch has one of its own of."""

from __future__ import annotations

from alpa_lite.program.memo import kept
from alpa_lite.program.phases import Phase, StepGraph


@kept
def parameters(step: StepGraph) -> frozenset[int]:
    """Arguments without a batch, and what invariant ops make."""
    graph = step.graph
    ready = ((v.id, graph.producer[v.id]) for v in graph.values if step.batch_dims[v.id] is None)
    return frozenset(v for v, producer in ready if producer is None or step.phases[producer] is Phase.INVARIANT)
