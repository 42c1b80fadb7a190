"""What a step computes again in its backward pass as it is written (`jax.checkpoint`), in the words of trainers.

    full         at least a quarter of the FLOPs of forward products with weights
    selective    other products, such as the scores of attention, or at least half of what is not a product
    none         less than that: a derivative of its own computes a few elementwise values again

A quarter, since not even full recomputation computes most products again: the last one of a layer is not needed by its
backward pass, and what stands outside of layers is stored. A policy that stores some of these products and recomputes
others counts as full: it needs no more memory in that way than the step does.

What a fused attention kernel computes again inside is no decision of the step, and not counted.
"""

from __future__ import annotations

from collections import defaultdict

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import batch_dims_of, forward_ops
from alpa_lite.rules.fusion import on_chip
from alpa_lite.rules.op_info import free_values, rule_of_op
from alpa_lite.step.model_flops import executed_ops
from alpa_lite.step.recomputation import Remat


@memoized
def written_recomputation(step: StepGraph, fused_attention: bool = False) -> Remat:
    """Return the policy that the recomputation of a step amounts to; `fused_attention`: see `Backend`."""
    forward_graphs = {graph for graph, _ in forward_ops(step)} - {step.graph}
    forward, again = defaultdict[str, float](float), defaultdict[str, float](float)
    for graph, op, runs, is_again in executed_ops(step):
        is_forward = graph in forward_graphs or (graph is step.graph and step.phases[op.id] is Phase.FORWARD)
        if not (is_again or is_forward) or (fused_attention and _is_in_kernel(graph, op)):
            continue
        kind = _kind(step, graph, op)
        # The work of products is their FLOPs, that of others the elements that they write.
        made = sum(graph.values[result].num_elements for result in op.results if result not in free_values(graph))
        size = made if kind == "elementwise" else rule_of_op(graph, op.id).flops
        (again if is_again else forward)[kind] += runs * size
    if again["weights"] and 4 * again["weights"] >= forward["weights"]:
        return Remat.FULL
    elementwise = again["elementwise"] and 2 * again["elementwise"] >= forward["elementwise"]
    return Remat.SELECTIVE if again["products"] or again["weights"] or elementwise else Remat.NONE


def _kind(step: StepGraph, graph: Graph, op: Op) -> str:
    if rule_of_op(graph, op.id).work_kind == "elementwise":
        return "elementwise"
    batch_dims = batch_dims_of(step, graph)
    weights = (v for v in graph.operands(op) if batch_dims[v.id] is None and v.is_float and v.rank > 1)
    return "weights" if any(weights) else "products"


def _is_in_kernel(graph: Graph, op: Op) -> bool:
    found = on_chip(graph)
    return op.id in found.products or any(result in found.values for result in op.results)
