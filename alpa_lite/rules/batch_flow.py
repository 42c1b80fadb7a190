"""Batch dims by factor rules, for steps that run at one batch size only.

A step that hard-codes or inspects its batch size cannot be traced at another size to see which dims depend on it
(`program.phases.batch_dims`). The batch is then followed from the arguments through every factor that passes, into and
out of the bodies of control flow. In a reshape, a batch of one sample shares no factor with any result dim; it is
assigned to the dim of size 1 with the same number of elements before it. The result is a heuristic: a missed dim is
only not split along the batch, and micro-batches are never formed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from alpa_lite.program.ir import Graph, Op, Value, Wiring, wiring_of
from alpa_lite.program.phases import BodyScope
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.rules.registry import FactorKind, Rule

Dims = tuple[int | None, ...]
Known = Mapping[Graph, Mapping[int, int | None]]
"""Per graph or body the values whose batch dim, or that they have none, is known."""


def follow_batch(
    graph: Graph, inputs: Sequence[int | None], known: Known | None = None
) -> tuple[Dims, dict[Graph, BodyScope]]:
    """Return the batch dim of each value (or None), and the scope of every body, given those of the graph inputs."""
    # Dims that the caller knows for certain take precedence over those that are followed here.
    known = known or {}
    given = known.get(graph, {})
    found: list[int | None] = [None] * len(graph.values)
    bodies: dict[Graph, BodyScope] = {}
    for v, dim in zip(graph.inputs, inputs, strict=True):
        found[v] = given.get(v, dim)
    for op in graph.ops:
        wiring = wiring_of(op)
        operands = [found[v] for v in op.operands]
        if wiring is None:
            results = _through(graph, op, operands)
        else:
            results = _around(op, wiring, operands, bodies, known)
        for r, dim in zip(op.results, results, strict=True):
            found[r] = given.get(r, dim)
    return tuple(found), bodies


def _through(graph: Graph, op: Op, operands: Sequence[int | None]) -> list[int | None]:
    if op.primitive == "reshape" and operands[0] is not None and graph.values[op.operands[0]].shape[operands[0]] == 1:
        return [_same_place(graph.values[op.operands[0]], operands[0], graph.values[op.results[0]])]
    rule = rule_of_op(graph, op.id)
    carried = {
        _major(rule, dims[dim]) for dims, dim in zip(rule.operands, operands, strict=True) if dims and dim is not None
    }
    passed = {f for f in carried if f is not None and rule.kinds[f] is FactorKind.PASS}
    return [next((d for d, f in enumerate(dims) if _major(rule, f) in passed), None) for dims in rule.results]


def _same_place(operand: Value, dim: int, result: Value) -> int | None:
    """The dim of size 1 with as many elements in front as there are in front of a dim of size 1."""
    before = prod(operand.shape[:dim])
    places = (d for d, n in enumerate(result.shape) if n == 1 and prod(result.shape[:d]) == before)
    return next(places, None)


def _major(rule: Rule, factors: tuple[int, ...]) -> int | None:
    """The factor that a split of a dim would split; that of a dim of size 1 is its only one."""
    return next((f for f in factors if rule.sizes[f] > 1), factors[0] if factors else None)


def _around(
    op: Op, wiring: Wiring, operands: Sequence[int | None], bodies: dict[Graph, BodyScope], known: Known
) -> list[int | None]:
    """Through the bodies until what they carry from trip to trip has the batch where it came in with it."""
    inside = [_slice(dim) if i in wiring.scanned else dim for i, dim in enumerate(operands)]
    while True:
        results: list[int | None] = [None] * len(op.results)
        for body, inputs, outputs in zip(op.bodies, wiring.inputs, wiring.outputs, strict=True):
            dims, inner = follow_batch(body, [inside[i] for i in inputs], known)
            bodies.update(inner)
            bodies[body] = BodyScope(full_shapes=tuple(v.shape for v in body.values), batch_dims=dims)
            for v, r in zip(body.outputs, outputs, strict=True):
                if r is not None and dims[v] is not None and results[r] is None:
                    results[r] = dims[v]
        # What a body returns with a batch is what its next trip reads: the bodies are followed again with it.
        entered = {i: results[r] for r, i in wiring.carried.items() if inside[i] is None and results[r] is not None}
        if not entered:
            return [dim + 1 if dim is not None and r in wiring.stacked else dim for r, dim in enumerate(results)]
        for i, dim in entered.items():
            inside[i] = dim


def _slice(dim: int | None) -> int | None:
    """The dim of a slice of the leading dim; a batch that is scanned over is gone."""
    return None if not dim else dim - 1
