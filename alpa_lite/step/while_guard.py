"""Loops that go on until no sample does: what `vmap` makes of a `while` with a predicate per sample."""

from __future__ import annotations

from collections.abc import Sequence

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.wiring import wiring_of


def same_while_guard(op: Op) -> bool:
    """Whether further trips of a `while` change nothing for samples whose predicate is false.

    Its condition is `any(p(carry))` with a predicate p per sample. Each value that the body carries on is
    `select(p(carry), old, new)`, with the same p: once p is false for a sample, its values stay as they are, and so
    does p. A trip more than the sample needs is the identity on it.
    """
    wiring = wiring_of(op)
    if op.primitive != "while" or wiring is None:
        return False
    condition, body = op.bodies
    names: dict[object, int] = {}
    carried = set(wiring.carried.values())
    # Both bodies may take one value in as a constant each.
    operands = [("carried", i) if i in carried else ("constant", v) for i, v in enumerate(op.operands)]
    numbers = [
        _numbered(graph, [operands[i] for i in inputs], names)
        for graph, inputs in zip((condition, body), wiring.inputs, strict=True)
    ]
    any_of = condition.producer[condition.outputs[0]]
    if any_of is None or condition.ops[any_of].primitive != "reduce_or":
        return False
    guard = numbers[0][condition.ops[any_of].operands[0]]
    return all(_kept(body, numbers[1], v, r, guard) for r, v in enumerate(body.outputs))


def _kept(body: Graph, numbers: dict[int, int], output: int, result: int, guard: int) -> bool:
    """Whether an output of the body is what came in wherever the guard is false."""
    came_in = body.inputs[len(body.inputs) - len(body.outputs) + result]
    if output == came_in:
        return True
    producer = body.producer[output]
    if producer is None or body.ops[producer].primitive != "select_n":
        return False
    which, old, _ = body.ops[producer].operands
    return old == came_in and _guards(body, numbers, which, guard)


def _guards(body: Graph, numbers: dict[int, int], which: int, guard: int) -> bool:
    """Whether a predicate is the guard, repeated along further dims."""
    while numbers[which] != guard:
        producer = body.producer[which]
        if producer is None or body.ops[producer].primitive not in ("broadcast_in_dim", "reshape"):
            return False
        which = body.ops[producer].operands[0]
    return True


def _numbered(graph: Graph, inputs: Sequence[object], names: dict[object, int]) -> dict[int, int]:
    """A number for each value: equal for values that are computed alike from the same operands of the loop.

    `inputs`: what stands for each input; `names`: the numbers so far, which both bodies share.
    """

    def name(made: object) -> int:
        return names.setdefault(made, len(names))

    numbers = {v: name(operand) for v, operand in zip(graph.inputs, inputs, strict=True)}
    literals = (v for v in graph.values if v.literal is not None)
    numbers |= {v.id: name(("literal", repr(v.literal), v.dtype)) for v in literals}
    for op in graph.ops:
        # Bodies are not looked into: an op with one is like no other.
        apart = (graph, op.id) if op.bodies else None
        made = (op.primitive, repr(sorted(op.params.items())), tuple(numbers[v] for v in op.operands), apart)
        numbers.update({r: name((made, i)) for i, r in enumerate(op.results)})
    return numbers
