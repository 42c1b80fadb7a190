"""What the rules say of a whole graph: the rule of each op, which ops are alike, which values cost nothing to move."""

from __future__ import annotations

from functools import lru_cache

from alpa_lite.graph.ir import Graph
from alpa_lite.rules import Rule, rule_of, view_of


@lru_cache(maxsize=100_000)
def rule_of_op(graph: Graph, op_id: int) -> Rule:
    """The rule of an op; cached per graph."""
    return rule_of(view_of(graph, graph.ops[op_id]))


@lru_cache(maxsize=200_000)
def op_class(graph: Graph, op_id: int) -> tuple[object, ...]:
    """Equal for ops that do the same to the same shapes: everything that a rule may look at."""
    op = graph.ops[op_id]
    operands = tuple((v.shape, v.dtype, v.literal) for v in graph.operands(op))
    results = tuple((v.shape, v.dtype) for v in graph.results(op))
    bodies = tuple(id(body) for body in op.bodies)
    return (op.primitive, operands, results, repr(sorted(op.params.items(), key=lambda p: p[0])), bodies)


@lru_cache(maxsize=64)
def free_values(graph: Graph) -> frozenset[int]:
    """Values that depend on scalars alone: literals of any op whose operands are scalars or free themselves."""
    free: set[int] = set()
    for op in graph.ops:
        if op.bodies or rule_of_op(graph, op.id).opaque or rule_of_op(graph, op.id).work_kind != "elementwise":
            continue
        ranked = [v for v in op.operands if graph.values[v].rank > 0]
        if all(v in free for v in ranked) and all(graph.values[r].rank > 0 for r in op.results):
            free.update(op.results)
    return frozenset(free)
